import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verl_golden import (
    BATCHES,
    NUM_SEQUENCES,
    assert_close,
    cases,
    layouts,
    precision,
    programs,
)

from jaxrl_llm.algorithms import aggregation
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES, sft, vanilla

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def weighted_vanilla(logprobs, old, advantages, mask, ids, weights, clip):
    """Loss and metrics as a training step makes them."""
    loss = vanilla(logprobs, old, advantages, mask, sequence_ids=ids, num_sequences=NUM_SEQUENCES, **clip)
    return jnp.sum(weights * loss.token_loss), loss.metrics


eager = (jax.value_and_grad(weighted_vanilla, has_aux=True), aggregation.token_weights)
compiled_programs = (
    jax.jit(eager[0]),
    jax.jit(aggregation.token_weights, static_argnames=("mode", "num_sequences")),
)


@programs
@layouts
@pytest.mark.parametrize("case", cases("policy_loss", "vanilla"))
def test_vanilla_agrees_with_verl(case, layout, compiled, dtype):
    batch = BATCHES[case["batch"]]
    rows, width = batch["mask"].shape
    tokens = layout(batch)
    mode = case["aggregation"]
    gradient_of, weights_of = compiled_programs if compiled else eager
    with precision(dtype):
        mask, ids = jnp.asarray(tokens.mask), jnp.asarray(tokens.sequence_ids)
        inputs = [
            jnp.asarray(tokens.place(x, dtype)) for x in (batch["logprobs"], batch["old_logprobs"], case["advantages"])
        ]
        weights = weights_of(mode, mask, ids, num_sequences=NUM_SEQUENCES, length_norm=width)
        if mode == "seq-mean-token-mean":
            # verl divides by n + 1e-8, where 1e-9 is asked for here.
            lengths = np.append(batch["mask"].sum(1), np.zeros(NUM_SEQUENCES + 1 - rows))
            weights = weights * (lengths / (lengths + 1e-8)).astype(dtype)[ids]
        if case["use_is_weights"]:
            weights = jnp.where(mask, weights * tokens.place(batch["is_weights"], dtype), 0)
        clip = {name: case["params"][name] for name in CLIP}
        (loss, metrics), gradient = gradient_of(*inputs, mask, ids, weights, clip)
    assert_close(loss, case["loss"], dtype)
    assert_close(tokens.take(gradient), case["grad_logprobs"], dtype)
    assert metrics.keys() == {f"actor/{name}" for name in case["metrics"]}
    for name, expected in case["metrics"].items():
        total, count = map(np.asarray, metrics[f"actor/{name}"])
        assert count == batch["mask"].sum()
        assert_close(total / (count + 1e-8), expected, dtype)


compiled_vanilla = jax.jit(vanilla, static_argnames="num_sequences")


def one_row(ratios, advantages):
    ratios = np.array(ratios, np.float32)
    return compiled_vanilla(
        np.log(ratios),
        np.zeros_like(ratios),
        np.array(advantages, np.float32),
        np.ones(ratios.shape, bool),
        sequence_ids=np.zeros(ratios.shape, np.int32),
        num_sequences=1,
        **CLIP,
    )


def test_vanilla_clips_each_sign_of_advantage_on_its_own_side():
    loss = one_row([5.0, 5, 0.5, 0.5, 2, 1.1], [-1.0, 1, 1, -1, -1, 2])
    np.testing.assert_allclose(loss.token_loss, [3.0, -1.2, -0.5, 0.8, 2.0, -2.2], rtol=1e-6)
    metrics = {name: float(total / count) for name, (total, count) in loss.metrics.items()}
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 6)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 6)
    assert metrics["actor/ppo_kl"] == pytest.approx(-np.log([5, 5, 0.5, 0.5, 2, 1.1]).mean(), rel=1e-6)


@jax.value_and_grad
def total_vanilla(logprobs, advantages, clip):
    loss = vanilla(
        logprobs,
        jnp.zeros(logprobs.shape),
        advantages,
        jnp.ones(logprobs.shape),
        sequence_ids=jnp.zeros(logprobs.shape, jnp.int32),
        num_sequences=1,
        **clip,
    )
    return loss.token_loss.sum()


def test_vanilla_has_no_gradient_where_a_clip_holds():
    # A ratio too high for A > 0, too low for A < 0, past the dual clip; the last one is inside all of them.
    logprobs = np.log(np.array([1.5, 0.5, 4.0, 1.1], np.float32))
    _, gradient = jax.jit(total_vanilla)(logprobs, np.array([1.0, -1, -1, 1], np.float32), CLIP)
    np.testing.assert_allclose(gradient, [0, 0, 0, -1.1], rtol=1e-6)


def test_vanilla_clamps_the_log_ratio_at_20():
    clip = CLIP | {"clip_ratio_c": 1e12}
    loss, gradient = jax.jit(total_vanilla)(np.array([100.0, 0], np.float32), -np.ones(2, np.float32), clip)
    assert loss == pytest.approx(np.exp(20) + 1, rel=1e-6)
    np.testing.assert_allclose(gradient, [0, 1])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_masked_and_padding_tokens_cannot_poison_loss_or_gradient(name, poison):
    # Token 1 is masked. Token 3 is padding: its mask is not believed.
    mask = jnp.array([1, 0, 1, 1])
    ids = jnp.array([0, 0, 0, 1])
    constants = CLIP if name == "vanilla" else {}
    clean = jnp.array([-1.0, 0, -2, 0])
    poisoned = jnp.array([-1.0, poison, -2, poison])

    def total(logprobs, others):
        loss = POLICY_LOSSES[name](logprobs, others * 0.9, others, mask, sequence_ids=ids, num_sequences=1, **constants)
        return loss.token_loss.sum(), loss

    (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(poisoned, poisoned)
    (_, expected), expected_gradient = jax.value_and_grad(total, has_aux=True)(clean, clean)
    np.testing.assert_array_equal(gradient, expected_gradient)
    np.testing.assert_array_equal(gradient[jnp.array([1, 3])], 0)
    np.testing.assert_array_equal(loss.token_loss, expected.token_loss)
    jax.tree.map(np.testing.assert_array_equal, loss.metrics, expected.metrics)
    assert all(count == 2 for _, count in loss.metrics.values())


def test_metrics_of_micro_batches_add_up_to_those_of_the_whole():
    ratios, advantages = [5.0, 5, 0.5, 0.5, 2, 1.1], [-1.0, 1, 1, -1, -1, 2]
    whole = one_row(ratios, advantages).metrics
    parts = [one_row(ratios[cut], advantages[cut]).metrics for cut in (slice(0, 1), slice(1, 6))]
    for name, (total, count) in whole.items():
        assert sum(part[name][0] for part in parts) == pytest.approx(float(total), rel=1e-6)
        assert sum(part[name][1] for part in parts) == count == 6


def test_bfloat16_logprobs_give_a_float32_loss():
    half = jnp.array([-1.0, -2.0], jnp.bfloat16)
    loss = vanilla(half, half, half, jnp.ones(2), sequence_ids=jnp.zeros(2, jnp.int32), num_sequences=1, **CLIP)
    assert loss.token_loss.dtype == jnp.float32
    assert {part.dtype for part in jax.tree.leaves(loss.metrics)} == {jnp.dtype("float32")}


def test_sft_is_the_mean_negative_log_likelihood_of_the_masked_tokens():
    # The log-prob at a position is that of the token there. Prompt, prompt, two response tokens, padding.
    logprobs = jnp.array([0.0, -10, -1, -2, -20])
    mask = jnp.array([0, 0, 1, 1, 0])
    ids = jnp.array([0, 0, 0, 0, 1])

    def mean(logprobs):
        loss = sft(logprobs, None, None, mask, sequence_ids=ids, num_sequences=1)
        return jnp.sum(aggregation.token_weights("token-mean", mask, ids, 1) * loss.token_loss)

    loss, gradient = jax.value_and_grad(mean)(logprobs)
    assert loss == 1.5
    np.testing.assert_array_equal(gradient, [0, 0, -0.5, -0.5, 0])
