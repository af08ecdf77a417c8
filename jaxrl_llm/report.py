"""Draws the curves of runs, side by side: `python -m jaxrl_llm.report runs/A runs/B --out curves.png`."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

USAGE = """usage: python -m jaxrl_llm.report RUN_DIR [RUN_DIR ...] [--out curves.png] [--metrics A,B,...] [--smooth K]
                                [--title TEXT] [--csv FILE] [--debug]

Draws the metrics of one or several runs, finished or not, into one picture and prints a table of their evaluations.

  --out FILE     the picture: .png, .pdf or .svg (curves.png)
  --metrics A,B  metrics to draw, names or patterns such as 'timing_s/*' (evaluation, reward, entropy, KL, response
                 length, gradient norm, clipped fraction; of SFT runs evaluation, loss, gradient norm, learning rate)
  --smooth K     a mean over K steps on top of the faint values; evaluations stay as they are (1: none)
  --title TEXT   above the picture (the name of the run, if there is one run)
  --csv FILE     the values drawn as a table: run, step, a column a metric"""

EVALUATION = "val-core/"
REWARD = "critic/rewards/mean"
KL = ("actor/kl_loss", "actor/ppo_kl")  # from the reference; where there is none, of the updates
RL = (REWARD, "actor/entropy", *KL, "response_length/mean", "actor/grad_norm", "actor/pg_clipfrac")
SFT = ("actor/loss", "actor/grad_norm", "actor/lr")
ORDER = dict.fromkeys((REWARD, "actor/loss", *RL, *SFT))

FORMATS = (".png", ".pdf", ".svg")
PANEL_INCHES = (3.3, 2.35)
FEW = 25  # points: each is marked
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")  # Okabe and Ito, for all eyes
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 8.5,
    "axes.edgecolor": "0.4",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "xtick.color": "0.25",
    "ytick.color": "0.25",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 200,
}
UNITS = {
    "actor/entropy": "nats",
    "actor/kl_loss": "nats",
    "actor/ppo_kl": "nats",
    "actor/pg_clipfrac": "fraction of tokens",
    "response_length/": "tokens",
    "prompt_length/": "tokens",
    "perf/total_num_tokens": "tokens",
    "perf/throughput": "tokens / s / device",
    "timing_s/": "seconds",
}


@dataclass(frozen=True)
class History:
    """What a run has written: by metric, int64 [N] steps at which it was logged and float64 [N] values."""

    name: str
    steps: int  # the last step
    series: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def get(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric; empty if the run has none."""
        return self.series.get(metric, (np.zeros(0, np.int64), np.zeros(0)))


def read(folder: Path, name: str | None = None) -> History:
    """Reads a run's metrics.jsonl. A half line at the end, still being written, is left out.

    UserError for a folder that is no run's, a file without a step, and a line that is not one of metrics.
    """
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise UserError(f"run {folder}: there is no such folder")
    if not path.is_file():
        inside = sorted(str(p.parent) for p in folder.glob("*/metrics.jsonl"))
        hint = f"; runs in it: {', '.join(inside)}" if inside else "; a run writes it at its first step"
        raise UserError(f"run {folder} has no metrics.jsonl{hint}")
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(line))
        except (ValueError, TypeError) as error:
            if number == len(lines):  # no line break follows: it is being written, or it is the empty rest
                break
            shown = line[:60].decode(errors="replace")
            raise UserError(
                f"{path}, line {number}: expected a JSON object with a step and numbers, got {shown!r} ({error}); "
                "take the line out"
            ) from error
    if not rows:
        raise UserError(f"{path} holds no step yet; a run writes one at its first evaluation or step")
    columns: dict[str, list[tuple[int, float]]] = {}
    for step, values in rows:
        for metric, value in values.items():
            columns.setdefault(metric, []).append((step, value))
    series = {
        metric: (np.array([s for s, _ in points]), np.array([v for _, v in points]))
        for metric, points in columns.items()
    }
    return History(name or folder.resolve().name, max(step for step, _ in rows), series)


def _row(line: bytes) -> tuple[int, dict[str, float]]:
    """Step and values of a line; ValueError or TypeError if it is not one."""
    row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise TypeError("no step")
    return row.pop("step"), {metric: float(value) for metric, value in row.items()}


def names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents as tell them apart. UserError if two are the same folder."""
    paths = [folder.resolve() for folder in folders]
    twice = {str(folder) for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1}
    if twice:
        raise UserError(f"run {', '.join(sorted(twice))} is given twice; name each run once")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        shown = [str(Path(*path.parts[-depth:])) for path in paths]
        if len(set(shown)) == len(shown):
            break
    return shown


def panels(histories: Sequence[History], patterns: Sequence[str] = ()) -> list[list[str]]:
    """The metrics of each panel: one, except that evaluation metrics share the first place they have.

    Without patterns, those of RL or SFT, by what each run has. UserError for a pattern that matches no metric.
    """
    known = sorted({metric for history in histories for metric in history.series})
    if patterns:
        wanted = [metric for pattern in patterns for metric in _matching(pattern, known)]
    else:
        usual = [metric for history in histories for metric in _usual(history)]
        order = [*(metric for metric in known if metric.startswith(EVALUATION)), *ORDER]
        wanted = [metric for metric in order if metric in usual]
    if not wanted:
        raise UserError(f"nothing to draw by default; choose with --metrics among {', '.join(known)}")
    groups: dict[str, list[str]] = {}
    for metric in dict.fromkeys(wanted):
        groups.setdefault(EVALUATION if metric.startswith(EVALUATION) else metric, []).append(metric)
    return list(groups.values())


def _usual(history: History) -> list[str]:
    evaluations = [metric for metric in history.series if metric.startswith(EVALUATION)]
    if REWARD not in history.series:
        return evaluations + [metric for metric in SFT if metric in history.series]
    skipped = KL[1] if KL[0] in history.series else KL[0]
    return evaluations + [metric for metric in RL if metric in history.series and metric != skipped]


def _matching(pattern: str, known: Sequence[str]) -> list[str]:
    found = [metric for metric in known if metric == pattern or fnmatchcase(metric, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.0)
        raise UserError(f"--metrics: no run has a metric {pattern!r}; nearest: {', '.join(near)}")
    return found


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over `width` points, float64 [N]; fewer at the ends. What is not finite is in no mean and stays a
    gap."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    window, part = np.ones(width), slice(width // 2, width // 2 + len(values))
    sums = np.convolve(np.where(finite, values, 0.0), window)[part]
    counts = np.convolve(finite, window)[part]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=finite)


def figure(histories: Sequence[History], groups: Sequence[Sequence[str]], *, width: int = 1, title: str = "") -> Figure:
    """The picture: a panel a group of metrics, a colour a run (with one run: a colour a metric).

    `width` is that of the smoothing. Evaluation metrics are drawn with markers and never smoothed.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    columns = _columns(len(groups))
    rows = -(-len(groups) // columns)
    colors = COLORS if len(histories) <= len(COLORS) else matplotlib.colormaps["turbo"](_spaced(len(histories)))
    shown = [_plain(history.name) for history in histories] if len(histories) > 1 else []
    inches = PANEL_INCHES[0] * columns
    across = max(1, int(inches / (0.5 + 0.075 * max(map(len, shown), default=0))))  # legend entries in a line
    height = PANEL_INCHES[1] * rows + 0.2 * -(-len(shown) // across) + 0.25 * bool(title)
    last = max(history.steps for history in histories)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(inches, height), layout=ConstrainedLayoutEngine(w_pad=0.07, h_pad=0.07))
        for i, metrics in enumerate(groups):
            axes = fig.add_subplot(rows, columns, i + 1)
            _panel(axes, histories, metrics, colors, width)
            axes.set_xlim(-0.02 * last, 1.02 * last)
            if i + columns >= len(groups):
                axes.set_xlabel("step")
        if title:
            fig.suptitle(_plain(title), fontsize=10, fontweight="bold")
        if shown:
            lines = [Line2D([], [], color=colors[i], linewidth=2) for i in range(len(shown))]
            fig.legend(lines, shown, loc="outside lower center", ncols=min(across, len(shown)))
    return fig


def _columns(count: int) -> int:
    """Three or four panels in a row, whichever leaves fewer places empty."""
    return count if count < 4 else min((3, 4), key=lambda columns: -count % columns)


def _spaced(count: int) -> np.ndarray:
    return np.linspace(0.05, 0.95, count)  # the ends of the colour map are nearly black


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # else what stands between two dollars is set as mathematics


def _panel(axes: Axes, histories: Sequence[History], metrics: Sequence[str], colors: Any, width: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    evaluation, several = metrics[0].startswith("val-"), len(histories) > 1
    keys = []
    for m, metric in enumerate(metrics):
        dash, marker = DASHES[m % len(DASHES)], MARKERS[m % len(MARKERS)]
        keys.append(Line2D([], [], color="0.3" if several else COLORS[m % len(COLORS)], ls=dash, marker=marker, ms=3))
        for h, history in enumerate(histories):
            steps, values = history.get(metric)
            values = np.where(np.isfinite(values), values, np.nan)
            color = colors[h] if several else COLORS[m % len(COLORS)]
            if width > 1 and not evaluation:
                axes.plot(steps, values, color=color, lw=0.7, alpha=0.25)
                values = smooth(values, width)
            marked = _marked(values, evaluation)
            axes.plot(steps, values, color=color, ls=dash, lw=1.3, marker=marker, ms=3, markevery=marked)
    name = metrics[0] if len(metrics) == 1 else EVALUATION + "*"
    # y keeps the titles of a row on one line, where the power of ten at the axis would push some up: it goes right.
    axes.set_title(_plain(name), loc="left", y=1.0, fontsize=min(8.5, 8.5 * 46 / len(name)))
    axes.yaxis.set_offset_position("right")
    axes.set_ylabel(next((unit for known, unit in UNITS.items() if metrics[0].startswith(known)), ""))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    if len(metrics) > 1:
        shown = [_plain(metric.removeprefix(EVALUATION)) for metric in metrics]
        box = {"frameon": True, "edgecolor": "none", "framealpha": 0.8}
        axes.legend(keys, shown, fontsize=6.5, ncols=1 + len(metrics) // 7, loc="best", **box)


def _marked(values: np.ndarray, evaluation: bool) -> list[bool]:
    """Which points get a marker: of a long curve only those between two gaps, where a line shows nothing."""
    finite = np.pad(np.isfinite(values), 1)
    lonely = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    return [True] * len(values) if evaluation or len(values) <= FEW else lonely.tolist()


def table(histories: Sequence[History]) -> Table:
    """Evaluations (first, last, best value, each with its step) and what each run has done."""
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False)
    out.add_column("run", overflow="fold")
    out.add_column("metric", overflow="fold")
    for heading in ("first", "last", "best", "steps", "s/step", "tokens"):
        out.add_column(heading, justify="right", no_wrap=True)
    for history in histories:
        seconds, tokens = (_finite(history.get(name)[1]) for name in ("timing_s/step", "perf/total_num_tokens"))
        done = [
            f"{history.steps:,}",
            f"{seconds.mean():.2f}" if len(seconds) else "-",
            f"{tokens.sum():,.0f}" if len(tokens) else "-",
        ]
        metrics = sorted(metric for metric in history.series if metric.startswith(EVALUATION))
        for i, metric in enumerate(metrics):
            row = [metric.removeprefix(EVALUATION), *_summary(*history.get(metric))]
            out.add_row(*([history.name, *row, *done] if not i else ["", *row, "", "", ""]))
        if not metrics:
            out.add_row(history.name, "no evaluation", "-", "-", "-", *done)
    return out


def _summary(steps: np.ndarray, values: np.ndarray) -> list[str]:
    """First, last and best (highest, of equals the earliest) value with their steps."""
    best = int(np.argmax(np.where(np.isfinite(values), values, -np.inf)))
    return [f"{values[i]:.4f} @ {steps[i]:,}" for i in (0, len(values) - 1, best)]


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def write_csv(path: Path, histories: Sequence[History], metrics: Sequence[str]) -> None:
    """Run, step, a column a metric; empty where the run did not log it at that step."""
    import csv

    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", *metrics])
        for history in histories:
            columns = [dict(zip(*(a.tolist() for a in history.get(metric)), strict=True)) for metric in metrics]
            for step in sorted(set().union(*columns)):
                writer.writerow([history.name, step, *(column.get(step, "") for column in columns)])


def run(argv: list[str]) -> None:
    """Reports by these arguments."""
    from jaxrl_llm.arguments import Parser
    from jaxrl_llm.output import whole

    parser = Parser("report")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    parser.add_argument("--metrics", default="")
    parser.add_argument("--smooth", type=int, default=1)
    parser.add_argument("--title")
    parser.add_argument("--csv", type=Path)
    args = parser.read(argv)
    if args.out.suffix.lower() not in FORMATS:
        raise UserError(f"--out {args.out}: expected a name that ends in {', '.join(FORMATS)}")
    if args.smooth < 1:
        raise UserError(f"--smooth {args.smooth}: expected a number of steps of at least 1 (1: no smoothing)")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError("drawing needs matplotlib: pip install -e '.[report]'") from error
    from rich.console import Console

    histories = [read(folder, name) for folder, name in zip(args.runs, names(args.runs), strict=True)]
    groups = panels(histories, [part.strip() for part in args.metrics.split(",") if part.strip()])
    title = args.title if args.title is not None else histories[0].name if len(histories) == 1 else ""
    with whole(args.out) as path:
        figure(histories, groups, width=args.smooth, title=title).savefig(path)
    if args.csv:
        with whole(args.csv) as path:
            write_csv(path, histories, [metric for metrics in groups for metric in metrics])
    console = Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table(histories))
    console.print(f"curves: {args.out}" + (f"  values: {args.csv}" if args.csv else ""), soft_wrap=True)


def main() -> None:
    """Entry point."""
    from jaxrl_llm.cli import command

    command(run, sys.argv[1:], USAGE)


if __name__ == "__main__":
    main()
