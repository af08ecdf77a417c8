"""Writes a run's policy as a Hugging Face folder: `python -m jaxrl_llm.export --run runs/NAME --out DIR`."""

from __future__ import annotations

import sys

USAGE = """usage: python -m jaxrl_llm.export --run RUN_DIR --out DIR [options]

Writes the policy of a run as a Hugging Face folder, which transformers and vLLM load: config, generation config,
tokenizer, safetensors.

  python -m jaxrl_llm.export --run runs/quickstart --out exported
  python -m jaxrl_llm.export --run runs/quickstart --out exported --step 160 --dtype float32

  --run RUN_DIR         the run folder
  --out DIR             the folder to write
  --step N              the checkpoint (default: the newest)
  --dtype DTYPE         float32, bfloat16 or float16 (default: that of the model the run started from)
  --max_shard_gb GB     size of a weights file (default: 5)
  --debug               shows the whole traceback of errors"""


def run(argv: list[str]) -> None:
    """Exports by these arguments."""
    from pathlib import Path

    from jaxrl_llm import arguments

    parser = arguments.Parser("export")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step", type=arguments.at_least(1))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max_shard_gb", type=float, default=5.0)
    args = parser.read(argv)

    from jaxrl_llm import policy, resume
    from jaxrl_llm.learner.trainable import param_shardings
    from jaxrl_llm.models import huggingface

    c = resume.load_run(args.run)
    c.run_dir = str(args.run)
    source = policy.model_source(c)
    model = policy.decoder(c, source, c.model.dtype)
    params, step = policy.trained_params(c, args.step, model, param_shardings(model, policy.any_mesh(model)))
    huggingface.save(
        args.out.absolute(),
        params,
        source.hf,
        model.config,
        generation=source.generation,
        tokenizer_folder=source.tokenizer_folder,
        dtype=args.dtype or source.hf.get("dtype") or source.hf.get("torch_dtype") or "bfloat16",
        max_shard_bytes=int(args.max_shard_gb * 2**30),
    )
    print(f"step {step} of {args.run} written to {args.out}")


def main() -> None:
    """Entry point."""
    from jaxrl_llm.cli import command

    command(run, sys.argv[1:], USAGE)


if __name__ == "__main__":
    main()
