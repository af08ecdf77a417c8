"""A real model: SmolLM2-135M-Instruct against log-probabilities and continuations computed by transformers."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data import chat
from jaxrl_llm.learner.trainable import param_shardings
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.decoder import build
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.rollout.engine import Request, Sampling
from jaxrl_llm.rollout.jax_engine import JaxEngine
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.types import Prompt

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def golden():
    file = np.load(ROOT / "tests/golden/smollm2.npz")
    return [{name: file[f"{name}_{i}"] for name in ("prompt", "sequence", "next_logprobs", "stable")} for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: that in SMOLLM2, or one made by the project's script (a download of 93 MB)."""
    if "SMOLLM2" in os.environ:
        return Path(os.environ["SMOLLM2"])
    path = tmp_path_factory.mktemp("models") / "smollm2"
    subprocess.run([sys.executable, ROOT / "scripts/fetch_smollm2.py", path], check=True)
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    model = build(huggingface.decoder_config(huggingface.read_config(folder)))
    mesh = make_mesh({}, jax.devices()[:1])
    return model, mesh, huggingface.load(folder, model, param_shardings(model, mesh))


def test_log_probabilities_are_those_of_transformers(loaded, golden):
    model, _, params = loaded
    T = max(len(g["sequence"]) for g in golden)
    ids = np.zeros((6, T), np.int32)
    segments = np.zeros((6, T), np.int32)
    for row, segment, g in zip(ids, segments, golden, strict=True):
        row[: len(g["sequence"])] = g["sequence"]
        segment[: len(g["sequence"])] = 1
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), ids.shape)

    @jax.jit
    def logprobs(params):
        module = model.bind(params)
        hidden = module.hidden(jnp.array(ids), jnp.array(positions), jnp.array(segments))
        return token_logprobs(
            hidden,
            module.head_matrix(),
            jnp.array(ids),
            jnp.array(segments),
            vocab_size=model.config.vocab_size,
            temperature=1.0,
            chunk=16,
            entropy=False,
        )[0]

    got = np.asarray(logprobs(params))
    for i, g in enumerate(golden):
        expected = g["next_logprobs"]
        np.testing.assert_allclose(got[i, 1 : len(expected) + 1], expected, atol=1e-3)


def test_greedy_continuations_are_those_of_transformers(loaded, golden, folder):
    model, mesh, params = loaded
    engine = JaxEngine(
        model,
        mesh,
        eos_ids=(),
        decode_text=chat.load_tokenizer(str(folder)).decode,
        max_prompt_length=64,
        max_response_length=64,
        slots=6,
        prefill_batch=6,
        steps_per_dispatch=16,
    )
    engine.load(params, 0, int(checksum(params)))
    requests = [
        Request(Prompt(i, i, g["prompt"].astype(np.int32), "", "golden"), 0, 0, int(g["stable"]))
        for i, g in enumerate(golden)
    ]
    for rollout, g in zip(engine.generate(requests, Sampling(temperature=0.0)), golden, strict=True):
        n = len(g["prompt"]) + int(g["stable"])
        np.testing.assert_array_equal(rollout.token_ids, g["sequence"][:n])


def test_it_answers(loaded, folder, golden):
    tokenizer = chat.load_tokenizer(str(folder))
    assert "Paris" in tokenizer.decode(golden[0]["sequence"])
    assert tokenizer("The capital of France is").input_ids == golden[0]["prompt"].tolist()
