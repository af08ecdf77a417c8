"""Engines with the golden tiny models, and what is asserted of their rollouts."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import huggingface
from jaxrl_llm.models.decoder import build
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.rollout.engine import Sampling
from jaxrl_llm.rollout.jax_engine import JaxEngine
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.sharding.rules import INFERENCE, tree_shardings
from jaxrl_llm.types import Prompt

FOLDER = Path(__file__).parent / "golden" / "hf"
FAMILIES = (
    "qwen2_tied",
    "qwen2_untied",
    "qwen3",
    "llama3_rope_scaling",
    "llama_tied_bias",
    "mistral_sliding",
)
VOCAB = 160
GREEDY = Sampling(temperature=0.0)
RANDOM = Sampling(temperature=1.0)


@cache
def model_of(name):
    return build(huggingface.decoder_config(huggingface.read_config(FOLDER / name)))


@cache
def golden(name):
    """Three prompts of 20, 13 and 7 tokens, and the 16 most likely tokens after each."""
    arrays = np.load(FOLDER / name / "golden.npz")
    rows = zip(arrays["input_ids"], arrays["lengths"], strict=True)
    return [make_prompt(ids[:n], uid) for uid, (ids, n) in enumerate(rows)], arrays["greedy"].tolist()


def spell(ids, without=()):
    return "".join(f"{i:03d}," for i in ids if i not in without)


def make_prompt(ids, uid=0):
    return Prompt(uid, uid, np.array(ids, np.int32), spell(ids), "test")


def random_prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [make_prompt(rng.integers(0, VOCAB, n), uid) for uid, n in enumerate(lengths)]


def params_of(name, mesh):
    model = model_of(name)
    return huggingface.load(FOLDER / name, model, tree_shardings(model.abstract, model.dims, INFERENCE, mesh))


def make_engine(
    name="qwen2_tied",
    mesh=None,
    *,
    eos=(),
    slots=4,
    prefill_batch=2,
    prompt=20,
    response=12,
    steps=5,
    load=True,
):
    mesh = mesh or make_mesh({}, jax.devices()[:1])
    engine = JaxEngine(
        model_of(name),
        mesh,
        eos_ids=eos,
        decode_text=partial(spell, without=eos),
        max_prompt_length=prompt,
        max_response_length=response,
        slots=slots,
        prefill_batch=prefill_batch,
        steps_per_dispatch=steps,
    )
    if load:
        params = params_of(name, mesh)
        engine.load(params, 3, int(checksum(params)))
    return engine


@cache
def shared_engine():
    """qwen2_tied with four slots of 32 tokens, no end id, five steps a dispatch; compiled once."""
    return make_engine()


def count_calls(engine, monkeypatch):
    """What the two costly programs are called with: (ids, lengths) a prefill, the view a dispatch."""
    seen = {"prefill": [], "dispatch": []}
    prefill, dispatch = engine.programs.prefill, engine.programs.dispatch

    def count_prefill(params, ids, lengths):
        seen["prefill"].append((ids, lengths))
        return prefill(params, ids, lengths)

    def count_dispatch(*args, view, filtered):
        seen["dispatch"].append(view)
        return dispatch(*args, view=view, filtered=filtered)

    monkeypatch.setattr(engine.programs, "prefill", count_prefill)
    monkeypatch.setattr(engine.programs, "dispatch", count_dispatch)
    return seen


def response(rollout):
    return rollout.token_ids[rollout.action_mask].tolist()


def answers(rollouts):
    return {(r.prompt.uid, r.sample): (response(r), r.stop_reason, r.text) for r in rollouts}


def assert_well_formed(rollout, version=3):
    before, n = len(rollout.prompt.token_ids), len(rollout.token_ids)
    np.testing.assert_array_equal(rollout.token_ids[:before], rollout.prompt.token_ids)
    assert rollout.action_mask.tolist() == [False] * before + [True] * (n - before)
    assert rollout.versions.tolist() == [-1] * before + [version] * (n - before)
    assert rollout.logprobs.shape == (n,)
    assert (rollout.logprobs[:before] == 0).all()
    assert (rollout.logprobs[before:] < 0).all()
    dtypes = [a.dtype for a in (rollout.token_ids, rollout.action_mask, rollout.logprobs, rollout.versions)]
    assert dtypes == [np.int32, bool, np.float32, np.int32]


@cache
def learner(name):
    """All log-probabilities of padded rows, by a forward pass over whole sequences."""
    model = model_of(name)

    @jax.jit
    def logprobs(params, ids, segments, temperature):
        module = model.bind(params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden = module.hidden(ids, positions, segments)
        return token_logprobs(
            hidden,
            module.head_matrix(),
            ids,
            segments,
            vocab_size=VOCAB,
            temperature=temperature,
            chunk=16,
            entropy=False,
        )[0]

    return logprobs


def assert_learner_agrees(name, params, rollouts, temperature):
    ids, segments = np.zeros((2, 9, 40), np.int32)
    for i, r in enumerate(rollouts):
        ids[i, : len(r.token_ids)], segments[i, : len(r.token_ids)] = r.token_ids, 1
    expected = np.asarray(learner(name)(params, ids, segments, temperature))
    for row, r in zip(expected, rollouts, strict=False):
        mask = r.action_mask
        np.testing.assert_allclose(r.logprobs[mask], row[: len(mask)][mask], atol=1e-4)
