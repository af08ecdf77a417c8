import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from jaxrl_llm import report
from jaxrl_llm.types import UserError

ACC = "val-core/arithmetic/acc/mean@1"
RL_LINE = {
    "critic/rewards/mean": 0.5,
    "actor/entropy": 1.0,
    "actor/ppo_kl": 0.01,
    "response_length/mean": 3.5,
    "actor/grad_norm": 2.0,
    "actor/pg_clipfrac": 0.1,
    "actor/lr": 1e-6,
    "actor/loss": 0.0,
    "timing_s/step": 2.0,
    "perf/total_num_tokens": 1000.0,
}
PNG = b"\x89PNG\r\n\x1a\n"


def write(folder, lines, rest=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    return folder


def rl(folder, steps=4, **changes):
    lines = [{"step": step, **RL_LINE, **changes} for step in range(1, steps + 1)]
    lines[1][ACC], lines[3][ACC] = 0.75, 0.5
    return write(folder, [{"step": 0, ACC: 0.25}, *lines])


def drawn(axes):
    return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.get_lines()]


def printed(histories):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.table(histories))
    return capture.get().splitlines()


def test_a_metric_has_the_steps_at_which_it_was_logged(tmp_path):
    history = report.read(rl(tmp_path / "mine"))
    assert (history.name, history.steps) == ("mine", 4)
    steps, values = history.get(ACC)
    assert steps.tolist() == [0, 2, 4]
    assert values.tolist() == [0.25, 0.75, 0.5]
    assert history.get("actor/entropy")[0].tolist() == [1, 2, 3, 4]
    assert history.get("nothing")[0].size == 0


def test_a_half_line_at_the_end_is_left_out_and_a_whole_one_is_not(tmp_path):
    lines = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]
    assert report.read(write(tmp_path / "half", lines, '{"step": 3, "a": 3.')).get("a")[1].tolist() == [1.0, 2.0]
    whole = report.read(write(tmp_path / "whole", lines, '{"step": 3, "a": 3.0}'))
    assert whole.get("a")[1].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "bad", ['{"step": 2, "a', "[1]", '{"a": 1.0}', '{"step": 2, "a": "high"}', '{"step": 2, "a": null}']
)
def test_an_unreadable_line_elsewhere_is_an_error_with_its_number(tmp_path, bad):
    folder = write(tmp_path, [{"step": 1, "a": 1.0}], f'{bad}\n{{"step": 3, "a": 3.0}}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: expected a JSON object with a step and numbers"):
        report.read(folder)


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        report.read(tmp_path / "missing")
    with pytest.raises(UserError, match="a run writes it at its first step"):
        report.read(tmp_path)
    with pytest.raises(UserError, match="holds no step yet"):
        report.read(write(tmp_path / "runs" / "a", []))
    with pytest.raises(UserError, match=r"runs in it: .*runs/a"):
        report.read(tmp_path / "runs")


def test_folders_of_one_name_are_told_apart_by_their_parents(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert report.names(folders) == ["a/run", "b/run"]
    assert report.names(folders[:1]) == ["run"]
    with pytest.raises(UserError, match="given twice"):
        report.names([tmp_path / "a", tmp_path / "b" / ".." / "a"])


def test_default_panels_follow_what_the_runs_have(tmp_path):
    usual = "critic/rewards/mean actor/entropy actor/ppo_kl response_length/mean actor/grad_norm actor/pg_clipfrac"
    plain = report.read(rl(tmp_path / "plain"))
    assert report.panels([plain]) == [[ACC], *([metric] for metric in usual.split())]
    with_reference = report.read(rl(tmp_path / "reference", **{"actor/kl_loss": 0.1}))
    assert ["actor/kl_loss"] in report.panels([with_reference])
    assert ["actor/ppo_kl"] not in report.panels([with_reference])
    assert {"actor/kl_loss", "actor/ppo_kl"} < {m for group in report.panels([plain, with_reference]) for m in group}
    line = {"actor/loss": 2.0, "actor/grad_norm": 1.0, "actor/lr": 1e-3, "response_length/mean": 3.0}
    sft = report.read(write(tmp_path / "sft", [{"step": 1, **line, ACC: 0.5, "val-core/b/acc/mean@1": 0.1}]))
    assert report.panels([sft]) == [[ACC, "val-core/b/acc/mean@1"], ["actor/loss"], ["actor/grad_norm"], ["actor/lr"]]


def test_patterns_choose_metrics_and_evaluations_share_a_panel(tmp_path):
    history = report.read(rl(tmp_path, **{"val-core/b/acc/mean@1": 0.1}))
    groups = report.panels([history], ["actor/[gl]*", "val-core/*", "actor/lr"])
    assert groups == [["actor/grad_norm"], ["actor/loss"], ["actor/lr"], [ACC, "val-core/b/acc/mean@1"]]
    with pytest.raises(UserError, match="no run has a metric 'actor/entropie'; nearest: actor/entropy"):
        report.panels([history], ["actor/entropie"])


def test_smoothing_is_a_centred_mean_over_what_is_finite():
    values = np.array([1.0, 2.0, np.nan, 4.0, 9.0])
    np.testing.assert_allclose(report.smooth(values, 3), [1.5, 1.5, np.nan, 6.5, 6.5])
    np.testing.assert_allclose(report.smooth(values, 99), [4.0, 4.0, np.nan, 4.0, 4.0])
    np.testing.assert_array_equal(report.smooth(values, 1), values)
    assert report.smooth(np.zeros(0), 5).size == 0


def test_curves_are_the_values_with_gaps_where_they_are_not_finite(tmp_path):
    lines = [{"step": i, "actor/loss": value} for i, value in enumerate([1.0, "nan", 3.0, "inf", "-inf", 6.0])]
    history = report.read(write(tmp_path, lines))
    (axes,) = report.figure([history], [["actor/loss"]]).axes
    ((x, y),) = drawn(axes)
    assert x == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(y, [1.0, np.nan, 3.0, np.nan, np.nan, 6.0])


def test_a_point_between_two_gaps_is_marked_in_a_long_curve(tmp_path):
    values = [1.0] * 50
    values[20] = values[22] = "nan"
    history = report.read(write(tmp_path, [{"step": i, "actor/loss": value} for i, value in enumerate(values)]))
    (axes,) = report.figure([history], [["actor/loss"]]).axes
    assert np.flatnonzero(axes.get_lines()[0].get_markevery()).tolist() == [21]


def test_raw_values_stay_faint_behind_the_smoothed_ones_but_not_of_evaluations(tmp_path):
    histories = [report.read(rl(tmp_path / name, steps=9)) for name in ("a", "b")]
    evaluation, entropy = report.figure(histories, [[ACC], ["actor/entropy"]], width=3).axes
    assert len(drawn(evaluation)) == 2
    assert [line.get_alpha() for line in entropy.get_lines()] == [0.25, None, 0.25, None]


def test_a_run_has_one_colour_everywhere_and_its_name_in_the_legend(tmp_path):
    histories = [report.read(rl(tmp_path / name)) for name in ("first", "_second$5$")]
    fig = report.figure(histories, report.panels(histories))
    colors = {tuple(line.get_color() for line in axes.get_lines()) for axes in fig.axes}
    assert len(colors) == 1
    assert len(set(colors.pop())) == 2
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == ["first", r"_second\$5\$"]


def test_one_run_has_a_colour_for_each_evaluation_metric(tmp_path):
    history = report.read(rl(tmp_path, **{"val-core/b/acc/mean@1": 0.1}))
    fig = report.figure([history], report.panels([history], ["val-core/*"]))
    assert len({line.get_color() for line in fig.axes[0].get_lines()}) == 2
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == ["arithmetic/acc/mean@1", "b/acc/mean@1"]
    assert not fig.legends


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 3), (6, 3), (7, 4), (8, 4), (9, 3)])
def test_panels_leave_few_places_empty(tmp_path, count, columns):
    history = report.read(write(tmp_path, [{"step": 1, **{f"m/{i}": 1.0 for i in range(count)}}]))
    fig = report.figure([history], report.panels([history], ["m/*"]))
    assert len(fig.axes) == count
    assert fig.axes[0].get_subplotspec().get_gridspec().ncols == columns


def test_the_table_has_first_last_and_best_with_their_steps(tmp_path):
    empty = report.read(write(tmp_path / "other", [{"step": 7, "actor/loss": 1.0}]))
    heading, mine, other = printed([report.read(rl(tmp_path / "mine")), empty])
    assert heading.split() == ["run", "metric", "first", "last", "best", "steps", "s/step", "tokens"]
    assert mine.split("  ")[0] == "mine"
    assert [part.strip() for part in mine.split("  ") if part][1:] == [
        "arithmetic/acc/mean@1", "0.2500 @ 0", "0.5000 @ 4", "0.7500 @ 2", "4", "2.00", "4,000",
    ]  # fmt: skip
    assert [part.strip() for part in other.split("  ") if part.strip()] == [
        "other", "no evaluation", "-", "-", "-", "7", "-", "-",
    ]  # fmt: skip


def test_the_command_writes_picture_values_and_table(tmp_path, capsys):
    folders = [str(rl(tmp_path / "a")), str(rl(tmp_path / "b"))]
    out, values = tmp_path / "new" / "curves.png", tmp_path / "values.csv"
    report.run([*folders, "--out", str(out), "--csv", str(values), "--metrics", f"{ACC}, actor/lr", "--smooth", "2"])
    assert out.read_bytes().startswith(PNG)
    assert [path.name for path in out.parent.iterdir()] == ["curves.png"]
    rows = list(csv.reader(values.open()))
    assert rows[:3] == [["run", "step", ACC, "actor/lr"], ["a", "0", "0.25", ""], ["a", "1", "", "1e-06"]]
    assert len(rows) == 1 + 2 * 5
    shown = capsys.readouterr().out
    assert "0.7500 @ 2" in shown
    assert shown.rstrip().endswith(f"curves: {out}  values: {values}")


def test_mistakes_leave_no_file(tmp_path, capsys):
    folder = str(rl(tmp_path / "a"))
    for argv, text in [
        (["--out", str(tmp_path / "curves.bmp")], "expected a name that ends in .png, .pdf, .svg"),
        (["--smooth", "0"], "--smooth 0: expected a number of steps of at least 1"),
        (["--out", str(tmp_path / "a" / "metrics.jsonl" / "c.png")], "cannot write"),
    ]:
        with pytest.raises(UserError, match=text):
            report.run([folder, *argv])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def command(*argv):
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.report", *argv], capture_output=True, text=True, check=False
    )


def test_the_command_line_has_help_and_short_errors(tmp_path):
    assert command("--help").stdout.strip() == report.USAGE
    done = command(str(tmp_path / "missing"))
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: run {tmp_path / 'missing'}: there is no such folder"
