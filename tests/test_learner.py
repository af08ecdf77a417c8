import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import AGGREGATIONS
from jaxrl_llm.data.packing import PackSpec, pack
from jaxrl_llm.learner.trainable import add
from jaxrl_llm.metrics import finish
from jaxrl_llm.types import TrainBatch
from tests.builders import make_learner, make_objective, make_scored, mesh


def spec(rows, *, packing=False, sequences=8, minis=1, length=24):
    return PackSpec(minis, sequences, rows, (length,), packing)


def prepared(learner, scored, pack_spec):
    """A batch whose old log-probabilities differ from the policy's, so that ratios and clips matter."""
    batch, _ = learner.prepare(learner.place(pack(scored, pack_spec)))
    shift = 0.3 * jnp.sin(jnp.arange(64.0))[batch.sequences.token_ids]
    return batch._replace(old_logprobs=batch.old_logprobs + shift)


def unprepared(learner, scored, pack_spec):
    """The same without compiling a forward pass: the sampler's log-probabilities stand for old and reference ones."""
    batch = learner.place(pack(scored, pack_spec))
    sequence = jnp.append(jnp.sin(1.0 + jnp.arange(batch.group_ids.shape[0])), 0.0)
    advantages = jnp.where(batch.action_mask, sequence[batch.sequence_ids], 0.0)
    return TrainBatch(batch, batch.sampler_logprobs, batch.sampler_logprobs - 0.1, advantages, batch.action_mask)


def gradients(on, pack_spec, scored, **objective):
    learner = make_learner(on, make_objective(**objective))
    grads, metrics = learner.gradients(unprepared(learner, scored, pack_spec))
    return jax.device_get(grads), finish(metrics)


def assert_same(actual, expected, rtol=1e-5):
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale), actual, expected)


LAYOUTS = {
    "micro-batches of 1": lambda: (mesh(), spec(1)),
    "micro-batches of 2": lambda: (mesh(), spec(2)),
    "micro-batches of 4": lambda: (mesh(), spec(4)),
    "wider padding": lambda: (mesh(), spec(8, length=40)),
    "packed": lambda: (mesh(), spec(2, packing=True, length=48)),
    "fsdp 2": lambda: (mesh(2, fsdp=2), spec(4)),
    "tensor 4": lambda: (mesh(4, tensor=4), spec(4)),
    "fsdp 8": lambda: (mesh(8, fsdp=8), spec(8)),
    "context 2": lambda: (mesh(2, context=2), spec(4)),
    "data 2, fsdp 2, tensor 2, packed": lambda: (
        mesh(8, data=2, fsdp=2, tensor=2),
        spec(4, packing=True, length=48),
    ),
}
# All of them for the mode that looks at most; the two that differ most for the others, unless slow tests run.
FAST = [("seq-mean-token-mean", layout) for layout in LAYOUTS] + [
    (mode, layout)
    for mode in AGGREGATIONS
    for layout in ("micro-batches of 1", "data 2, fsdp 2, tensor 2, packed")
    if mode != "seq-mean-token-mean"
]
SLOW = [(mode, layout) for mode in AGGREGATIONS for layout in LAYOUTS if (mode, layout) not in FAST]


@pytest.fixture(scope="module")
def in_one_piece():
    """Gradients and metrics of the whole mini-batch in one padded micro-batch on one device, by mode."""

    @functools.cache
    def compute(mode):
        return gradients(mesh(), spec(8), make_scored(failed=(3,)), aggregation=mode, **TERMS)

    return compute


TERMS = {"kl_coef": 0.1, "entropy_coef": 0.01}


@pytest.mark.parametrize(("mode", "layout"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_gradients_do_not_depend_on_micro_batches_devices_packing_or_padding(mode, layout, in_one_piece):
    expected, metrics = in_one_piece(mode)
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(expected)) > 1e-3
    got, its_metrics = gradients(*LAYOUTS[layout](), make_scored(failed=(3,)), aggregation=mode, **TERMS)
    assert_same(got, expected)
    for name, value in metrics.items():
        assert its_metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 8}])
def test_updates_do_not_depend_on_the_mesh(axes):
    scored = make_scored(groups=8)
    pack_spec = spec(8, sequences=16)
    size = int(np.prod(list(axes.values())))
    results = []
    for on in (mesh(), mesh(size, **axes)):
        learner = make_learner(on, make_objective())
        for _ in range(2):
            learner.update(prepared(learner, scored, pack_spec))
        results.append(jax.device_get(learner.state))
    assert int(results[1].step) == 2
    # Adam divides by the square root of tiny second moments where gradients are near 0.
    assert_same(results[1].params, results[0].params, rtol=1e-4)


def test_everything_on_the_mesh_is_sharded_like_its_parameter():
    learner = make_learner(mesh(8, fsdp=4, tensor=2), make_objective())
    kernel = learner.state.params["layers"]["q"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 8, 2, 8)
    moments = [x for x in jax.tree.leaves(learner.state.opt_state) if x.shape == kernel.shape]
    assert len(moments) == 2
    assert all(m.sharding == kernel.sharding for m in moments)
    before = jax.tree.map(lambda x: (x.dtype, x.sharding), learner.state)
    learner.update(prepared(learner, make_scored(), spec(4)))
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), learner.state) == before


def test_the_loss_is_the_token_mean_over_the_whole_mini_batch():
    scored = make_scored(failed=(3,))
    learner = make_learner(mesh(), make_objective())
    for rows in (8, 1):
        batch, _ = learner.prepare(learner.place(pack(scored, spec(rows))))
        # On-policy the loss of a token is less its advantage.
        mask = np.asarray(batch.sequences.action_mask)
        assert mask.sum() == sum(s.rollout.response_length for s in scored if s.reward is not None)
        expected = -np.asarray(batch.advantages)[mask].mean()
        assert finish(learner.gradients(batch)[1])["actor/pg_loss"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_every_device_works_on_its_own_rows_only(axes):
    on = mesh(8, **axes)
    learner = make_learner(on, make_objective())
    batch = unprepared(learner, make_scored(groups=16), spec(32, sequences=32))
    lowered = jax.jit(learner.programs.actor.gradients).lower(learner.state.actor, None, batch, 0, jax.random.key(0))
    text = lowered.compile().as_text()
    rows = 32 // (on.shape["data"] * on.shape["fsdp"])
    shapes = re.findall(r"= f32\[([0-9,]+)\]\S* (?:dot|all-reduce)\(", text)
    assert f"{rows * 24},{64 // on.shape['tensor']}" in shapes  # a dot that gives the ffn's activations
    assert not [shape for shape in shapes if shape.startswith(("32,24,", "768,"))]


def test_metrics_of_parts_add_up_to_the_mean_over_all():
    first = {"kl": (jnp.float32(0.1 * 4), jnp.float32(4))}
    second = {"kl": (jnp.float32(0.3 * 4), jnp.float32(4)), "loss": (jnp.float32(0.5), jnp.float32(1))}
    assert finish(add(first, second)) == pytest.approx({"kl": 0.2, "loss": 0.5})


def test_a_failed_sample_has_no_influence():
    scored = make_scored(failed=(2,))
    other = list(scored)
    changed = scored[2].rollout.token_ids[::-1].copy()
    other[2] = type(scored[2])(
        type(scored[2].rollout)(**{**scored[2].rollout.__dict__, "token_ids": changed}), {}, None
    )
    a, _ = gradients(mesh(), spec(8), scored)
    b, _ = gradients(mesh(), spec(8), other)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_batch_without_any_reward_moves_nothing_but_the_optimizer():
    scored = make_scored(failed=tuple(range(8)))
    grads, metrics = gradients(mesh(), spec(8), scored)
    assert all(np.all(g == 0) for g in jax.tree.leaves(grads))
    assert metrics["actor/pg_loss"] == 0


def test_mini_batches_are_separate_updates_and_epochs_repeat_them():
    scored = make_scored(groups=4)
    learner = make_learner(mesh(), make_objective(), epochs=3)
    batch, _ = learner.prepare(learner.place(pack(scored, spec(4, minis=2))))
    metrics = learner.update(batch)
    assert int(learner.state.step) == 6
    assert float(metrics["actor/grad_norm"][1]) == 6
    # The first update is on-policy; later ones are not.
    assert finish(metrics)["actor/ppo_kl"] != 0


def test_the_first_update_is_on_policy():
    learner = make_learner(mesh(), make_objective(temperature=0.7))
    batch, _ = learner.prepare(learner.place(pack(make_scored(), spec(4, packing=True))))
    metrics = finish(learner.update(batch))
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0


def test_reference_is_the_policy_at_the_start():
    learner = make_learner(mesh(), make_objective(kl_coef=0.5))
    scored = make_scored()
    first, _ = learner.prepare(learner.place(pack(scored, spec(8))))
    np.testing.assert_array_equal(first.old_logprobs, first.reference_logprobs)
    learner.update(first)
    second, _ = learner.prepare(learner.place(pack(scored, spec(8))))
    np.testing.assert_array_equal(second.reference_logprobs, first.reference_logprobs)
    assert np.abs(np.asarray(second.old_logprobs - second.reference_logprobs)).max() > 1e-3


def test_nothing_compiles_again_when_lengths_and_rows_change():
    learner = make_learner(mesh(), make_objective())
    pack_spec = spec(2, packing=True, length=48)
    for seed in range(4):
        batch, _ = learner.prepare(learner.place(pack(make_scored(seed=seed, failed=(seed,)), pack_spec)))
        learner.update(batch)
    assert learner.programs.prepare._cache_size() == 1
    assert learner.programs.update._cache_size() == 1


def test_sft_is_the_negative_log_likelihood_of_the_demonstrations():
    learner = make_learner(mesh(), make_objective(loss="sft", advantage=None), learning_rate=3e-2)
    scored = make_scored()
    batch, metrics = learner.prepare(learner.place(pack(scored, spec(4))))
    assert isinstance(batch, TrainBatch)
    assert metrics == {}
    losses = [finish(learner.update(batch))["actor/loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(np.log(64), rel=0.2)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient(remat):
    scored = make_scored()
    plain = make_learner(mesh(), make_objective())
    again = make_learner(mesh(), make_objective(), remat=remat)
    expected, _ = plain.gradients(prepared(plain, scored, spec(8)))
    got, _ = again.gradients(prepared(again, scored, spec(8)))
    assert_same(jax.device_get(got), jax.device_get(expected))


def test_bfloat16_computes_near_float32_over_float32_masters():
    scored = make_scored()
    half = make_learner(mesh(), make_objective(), dtype="bfloat16")
    full = make_learner(mesh(), make_objective())
    expected, _ = full.gradients(prepared(full, scored, spec(8)))
    got, _ = half.gradients(prepared(half, scored, spec(8)))
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(g))]) for g in (got, expected)]
    cosine = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    assert cosine > 0.99


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(poison):
    learner = make_learner(mesh(2, fsdp=2), make_objective())
    good = unprepared(learner, make_scored(), spec(4, minis=2, sequences=8))
    first = (np.arange(2) == 0)[:, None, None, None]  # of two mini-batches
    bad = good._replace(advantages=jnp.where(first & (good.advantages != 0), poison, good.advantages))
    before = jax.device_get(learner.state)
    metrics = finish(learner.update(good._replace(advantages=jnp.full_like(good.advantages, poison))))
    assert metrics["actor/skipped_updates"] == 2
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.state), before)
    metrics = finish(learner.update(bad))
    assert metrics["actor/skipped_updates"] == 1
    assert learner.state.step == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(learner.state)))
    assert finish(learner.update(good))["actor/skipped_updates"] == 0
