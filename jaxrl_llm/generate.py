"""Shows what a policy says: `python -m jaxrl_llm.generate --run runs/NAME "PROMPT"`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from rich.console import Console

    from jaxrl_llm.arguments import Parser
    from jaxrl_llm.config import Config
    from jaxrl_llm.policy import Source
    from jaxrl_llm.rollout.engine import Listener, Sampling
    from jaxrl_llm.rollout.jax_engine import JaxEngine
    from jaxrl_llm.types import Prompt, Rollout

USAGE = """usage: python -m jaxrl_llm.generate (--run RUN_DIR [--step N] | --model FOLDER)
                                    ("PROMPT" ... | --file FILE | --chat) [options]

Lets a policy continue prompts, or talks with it.

  python -m jaxrl_llm.generate --model jaxrl_llm/assets/arithmetic_base "12+7="
  python -m jaxrl_llm.generate --run runs/quickstart --n 4 "12+7=" "50+49="
  python -m jaxrl_llm.generate --model FOLDER --chat --system "You are brief."
  python -m jaxrl_llm.generate --model FOLDER --file questions.txt --temperature 0 --out answers.jsonl

which policy
  --run RUN_DIR         a run folder
  --step N              its checkpoint (default: the newest)
  --model FOLDER        a Hugging Face folder, or its name on the hub
what it is asked
  "PROMPT" ...          one or several texts, in quotes. Where the tokenizer has a chat template, a text becomes a
                        user's message. After -- a text may begin with a minus sign
  --file FILE           one prompt a line; or, if it ends with .jsonl, one object a line with "prompt": a text or a list
                        of messages
  --chat                a conversation, one message a line. /new begins another one, /quit or the end of the input ends
  --system TEXT         an instruction before every prompt
  --plain               does not use the chat template
how it answers
  --n N                 samples a prompt (default: 1)
  --temperature T       0 is greedy (default: 0.7)
  --top_p P             among the likeliest tokens that together have this probability (default: 1, all)
  --top_k K             among the K likeliest tokens (default: 0, all)
  --max_tokens N        of a response (default: 256, or fewer where the model has not so many left)
  --stop TEXT           ends a response before this text (repeatable)
  --seed N              the same seed gives the same answers (default: 0)
  --config.KEY=VALUE    changes a key, such as --config.rollout.dtype=bfloat16; see configs/base.py
where to
  --out FILE.jsonl      writes the answers to a file too
  --debug               shows the whole traceback of errors"""

DEFAULT_MAX_TOKENS = 256
CHAT_ROOM = 256  # tokens of conversation that the first cache has room for


def run(argv: list[str]) -> None:
    """Generates by these arguments."""
    from jaxrl_llm import config as configs

    given = configs.split(argv)
    parser = _parser()
    args = parser.read(given.rest)
    _check(parser, args, given.recipe)

    from rich.console import Console

    from jaxrl_llm import output, policy
    from jaxrl_llm.models import huggingface
    from jaxrl_llm.rollout.engine import Sampling

    c = policy.config_of(args.run, args.model, None, given.overrides)
    source = policy.model_source(c)
    limit = huggingface.decoder_config(source.hf).max_position
    prompts = [] if args.chat else _prompts(args, source.tokenizer)
    longest = max((len(p.token_ids) for p in prompts), default=limit // 2)
    max_tokens = args.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, limit - longest))
    if args.chat:
        policy.check_length(1, max_tokens, limit, "the shortest prompt")
    for prompt in prompts:
        policy.check_length(len(prompt.token_ids), max_tokens, limit, f"prompt {prompt.uid + 1}")
    sampling = Sampling(
        n=args.n,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        max_tokens=max_tokens,
        stop=tuple(args.stop),
        seed=args.seed,
    )
    if args.out:
        output.prepare_folder(args.out.absolute().parent, "--out")
    console = Console(soft_wrap=True, highlight=False)
    speaker = Speaker(c, source, sampling, limit=limit, trained=args.run is not None, step=args.step)
    if args.chat:
        rollouts = chat(speaker, args.system, plain=args.plain)
    elif len(prompts) == 1 and args.n == 1:
        rollouts = [stream(speaker, prompts[0])]
    else:
        with output.progress(Console(stderr=True), len(prompts) * args.n) as listener:
            rollouts = speaker.answer(prompts, listener)
        _show(console, rollouts, args.n)
    if args.out:
        output.write_json_lines(args.out, [_line(r) for r in rollouts])
        console.out(f"written to {args.out}")


def _parser() -> Parser:
    from pathlib import Path

    from jaxrl_llm import arguments

    parser = arguments.Parser("generate")
    arguments.add_policy(parser)
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--system")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--n", type=arguments.at_least(1), default=1)
    parser.add_argument("--temperature", type=arguments.temperature, default=0.7)
    parser.add_argument("--top_p", type=arguments.probability, default=1.0)
    parser.add_argument("--top_k", type=arguments.at_least(0), default=0)
    parser.add_argument("--max_tokens", type=arguments.at_least(1))
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--seed", type=arguments.at_least(0), default=0)
    parser.add_argument("--out", type=Path)
    return parser


def _check(parser: Parser, args: argparse.Namespace, recipe: str | None) -> None:
    """Ends the command where the arguments contradict each other."""
    from jaxrl_llm import arguments

    arguments.check_policy(parser, args, None)
    if recipe is not None:
        parser.error("--config is not needed here: the policy and the options say everything")
    if sum((bool(args.prompts), args.file is not None, args.chat)) != 1:
        parser.error('expected one of "PROMPT", --file FILE and --chat')
    if not all(prompt.strip() for prompt in args.prompts):
        parser.error("the prompt is empty")
    if args.n > 1 and args.chat:
        parser.error(f"--chat takes one answer at a time: leave --n {args.n} out")
    if args.n > 1 and args.temperature == 0:
        parser.error(
            f"{args.n} samples of a prompt would all be the same at temperature 0: "
            "give --n 1 or a --temperature above 0"
        )
    if "" in args.stop:
        parser.error("--stop is empty, which every response contains")


class Speaker:
    """A policy that answers: its weights, and an engine that is made anew when a prompt needs a longer cache."""

    def __init__(
        self, c: Config, source: Source, sampling: Sampling, *, limit: int, trained: bool, step: int | None = None
    ):
        """`c` says dtype and sizes of the engine; `limit`: tokens that the model was made for."""
        from jaxrl_llm import policy

        c.data.max_prompt_length, c.data.max_response_length = 1, sampling.max_tokens
        self._config, self.source, self.sampling, self.limit = c, source, sampling, limit
        mesh = policy.any_mesh(policy.decoder(c, source, c.rollout.dtype))
        self._weights = policy.weights(c, source, mesh, trained=trained, step=step)
        self._engine: JaxEngine | None = None
        self._room = 0

    def answer(self, prompts: Sequence[Prompt], listener: Listener | None = None, *, room: int = 0) -> list[Rollout]:
        """n rollouts a prompt; the cache gets room for prompts of `room` tokens, or more where it needs it."""
        requests = self.sampling.requests(prompts)
        longest = max(len(p.token_ids) for p in prompts)
        return self._engine_for(max(longest, room), len(requests)).generate(requests, self.sampling, listener)

    def _engine_for(self, length: int, requests: int) -> JaxEngine:
        if self._engine is None or self._room < length:
            from jaxrl_llm import assemble

            c, w = self._config, self._weights
            # Twice as long each time, so that a long conversation compiles few engines.
            self._room = min(max(length, 2 * self._room), self.limit - self.sampling.max_tokens)
            c.data.max_prompt_length = self._room
            if self._engine is not None:
                self._engine.close()  # its cache makes room for the longer one
            c.rollout.slots = min(c.rollout.slots, requests)
            if requests == 1:
                c.rollout.steps_per_dispatch = 4  # so that text comes word by word
            self._engine = assemble.engine(c, self.source, w.model, w.mesh)
            self._engine.load(w.params, w.step, w.checksum)
        return self._engine

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, as the engine decodes it."""
        return self.source.tokenizer.decode(token_ids, skip_special_tokens=True)


def stream(speaker: Speaker, prompt: Prompt, *, room: int = 0) -> Rollout:
    """One answer, on the terminal while it comes."""
    from jaxrl_llm.output import TextStream

    text = TextStream(speaker.decode, _write, speaker.sampling.stop)
    (rollout,) = speaker.answer([prompt], text, room=room)
    text.finish(rollout.text)
    _write("\n")
    _tell_cut(rollout)
    return rollout


def chat(speaker: Speaker, system: str | None, *, plain: bool) -> list[Rollout]:
    """A conversation over the terminal until /quit or the end of the input; returns the answers."""
    messages: list[dict[str, str]] = []
    rollouts: list[Rollout] = []
    asks = sys.stdin.isatty()
    if asks:
        _write("/new begins another conversation, /quit ends\n")
    while True:
        if asks:
            _write("> ")
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return rollouts
        if line.strip() == "/new":
            messages = []
        elif line.strip():
            messages.append({"role": "user", "content": line.strip()})
            prompt = _prompt(speaker.source.tokenizer, messages, system, plain=plain, uid=len(rollouts))
            if len(prompt.token_ids) + speaker.sampling.max_tokens > speaker.limit:
                messages.pop()
                _write(_full(len(prompt.token_ids), speaker))
                continue
            rollouts.append(stream(speaker, prompt, room=min(CHAT_ROOM, speaker.limit - speaker.sampling.max_tokens)))
            messages.append({"role": "assistant", "content": rollouts[-1].text})


def _full(tokens: int, speaker: Speaker) -> str:
    return (
        f"[the conversation would have {tokens} tokens and the answer up to {speaker.sampling.max_tokens}, but the "
        f"model was made for {speaker.limit} in all: ask something shorter, or begin another conversation with /new]\n"
    )


def _prompts(args: argparse.Namespace, tokenizer: Any) -> list[Prompt]:
    contents = list(_read(args.file)) if args.file else [("the prompt", text) for text in args.prompts]
    return [
        _prompt(tokenizer, content, args.system, plain=args.plain, uid=i, place=place)
        for i, (place, content) in enumerate(contents)
    ]


def _read(file: Path) -> list[tuple[str, Any]]:
    """Pairs (place for errors, text or messages) of a file of prompts."""
    from jaxrl_llm.data import sources
    from jaxrl_llm.types import UserError

    if not file.is_file():
        raise UserError(f"--file {file} does not exist")
    if file.suffix == ".jsonl":
        rows = [(f"{file}, line {number}", row) for number, row in sources.json_lines(file)]
        for place, row in rows:
            if not row.get("prompt"):
                raise UserError(
                    f'{place}: expected "prompt" with a text or a list of messages; it has {", ".join(row)}'
                )
        prompts = [(place, row["prompt"]) for place, row in rows]
    else:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise UserError(f"--file {file} is not UTF-8 text: {error}") from error
        prompts = [(f"{file}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise UserError(f"--file {file} holds no prompts: expected one a line")
    return prompts


def _prompt(
    tokenizer: Any, content: Any, system: str | None, *, plain: bool, uid: int, place: str = "the message"
) -> Prompt:
    from jaxrl_llm.data.chat import render
    from jaxrl_llm.types import Prompt, UserError

    style = "plain" if plain or not tokenizer.chat_template else "chat"
    messages = [{"role": "user", "content": content}] if style == "chat" and isinstance(content, str) else content
    text, ids = render(tokenizer, messages, system, prompt_style=style, place=place)
    if not len(ids):
        raise UserError(f"{place} has no tokens: the tokenizer knows none of the characters of {text[:60]!r}")
    return Prompt(uid=uid, row=uid, token_ids=ids, text=text, data_source="generate")


def _show(console: Console, rollouts: Sequence[Rollout], n: int) -> None:
    """Prompts and their answers, one after the other."""
    several = len(rollouts) > n
    for r in rollouts:
        if several and r.sample == 0:
            console.rule(f"prompt {r.prompt.uid + 1} of {len(rollouts) // n}")
            console.out(r.prompt.text)
            console.out("")
        if n > 1:
            console.print(f"[dim]sample {r.sample + 1} of {n}[/]")
        console.out(r.text)
        _tell_cut(r)


def _tell_cut(rollout: Rollout) -> None:
    if rollout.stop_reason == "length":
        print(f"[cut after --max_tokens {rollout.response_length}]", file=sys.stderr, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _line(r: Rollout) -> dict[str, Any]:
    return {
        "prompt": r.prompt.text,
        "sample": r.sample,
        "response": r.text,
        "stop_reason": r.stop_reason,
        "response_length": r.response_length,
    }


def main() -> None:
    """Entry point."""
    from jaxrl_llm.cli import command

    command(run, sys.argv[1:], USAGE)


if __name__ == "__main__":
    main()
