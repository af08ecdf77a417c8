"""What must hold for any batch; more of advantages stands in test_algorithms_advantages.py."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, token_weights
from jaxrl_llm.algorithms.correction import correct
from jaxrl_llm.algorithms.experience import Experience
from jaxrl_llm.algorithms.kl import kl_penalty
from jaxrl_llm.algorithms.policy_losses import LOSS_AGGREGATION, POLICY_LOSSES, WHOLE_BATCH_LOSSES
from jaxrl_llm.algorithms.value_losses import clipped
from jaxrl_llm.models.logprobs import exact_kl, kl_divergence

SEQUENCES, WIDTH, VOCABULARY = 6, 5, 5
CONSTANTS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_ratio": 1.0,  # all candidates: nothing is left to chance
    "clip_cov_lb": 0.1,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.3,
    "ppo_kl_coef": 0.5,
    "dro_beta": 0.5,
    "value_clip": 0.2,
}
CORRECTION = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.5,
    "rollout_rs": "seq_mean_k1,token_k3",
    "rollout_rs_threshold": "0.7_1.4,0.5",
}
LOSSES = {**{name: function for name, function in POLICY_LOSSES.items() if name != "sft"}, "value": clipped}
each_loss = pytest.mark.parametrize("name", LOSSES)
any_batch = settings(max_examples=15, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def batch(seed):
    """Arrays [S, W] with masks of any kind, sequences without a token among them."""
    rng = np.random.default_rng(seed)
    shape = (SEQUENCES, WIDTH)
    old = -rng.exponential(1.0, shape)
    mask = rng.random(shape) < rng.choice([0.0, 0.5, 1.0], (SEQUENCES, 1), p=[0.2, 0.4, 0.4])
    mask[0, 0] = True
    logprobs = np.minimum(old + rng.normal(0, 0.3, shape), 0)
    arrays = (logprobs, old, rng.normal(size=shape), mask, np.exp(rng.normal(0, 0.3, shape)))
    return [array.astype(bool if array.dtype == bool else np.float32) for array in arrays]


ROWS = np.repeat(np.arange(SEQUENCES), WIDTH).reshape(SEQUENCES, WIDTH).astype(np.int32)


def loss_of(name, logprobs, old, advantages, mask, importance, ids):
    function = LOSSES[name]
    offered = {"key": jax.random.key(0), "is_weights": importance} | CONSTANTS
    taken = {key: value for key, value in offered.items() if key in inspect.signature(function).parameters}
    return function(logprobs, old, advantages, mask, sequence_ids=ids, num_sequences=SEQUENCES, **taken)


@functools.cache
def program(name):
    """Token losses, metrics, and the gradient with these weights."""

    def total(logprobs, old, advantages, mask, importance, ids, weights):
        loss = loss_of(name, logprobs, old, advantages, mask, importance, ids)
        return jnp.sum(weights * jnp.where(mask & (ids < SEQUENCES), loss.token_loss, 0)), loss

    def run(*arrays):
        (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(*arrays)
        return loss.token_loss, gradient, loss.metrics

    return jax.jit(run)


@functools.cache
def weights_program(mode):
    call = functools.partial(token_weights, mode, num_sequences=SEQUENCES, length_norm=7.0, batch_sequences=SEQUENCES)
    return jax.jit(lambda mask, ids: call(mask, ids))


def mode_of(name):
    return LOSS_AGGREGATION.get(name, "token-mean")


def packed(array, fill):
    """[S, W] as rows of two sequences with padding between, poisoned where nothing may be read."""
    out = np.full((SEQUENCES // 2, 2 * WIDTH + 3), fill, array.dtype)
    out[:, 1 : 1 + WIDTH], out[:, -WIDTH:] = array[::2], array[1::2]
    return out


def unpacked(array):
    array = np.asarray(array)
    out = np.empty((SEQUENCES, WIDTH), array.dtype)
    out[::2], out[1::2] = array[:, 1 : 1 + WIDTH], array[:, -WIDTH:]
    return out


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), actual, expected)


@each_loss
@any_batch
@given(seed=seeds, order=st.permutations(range(SEQUENCES)))
def test_the_result_moves_with_the_sequences(name, seed, order):
    arrays, order = batch(seed), np.array(order)
    weights = weights_program(mode_of(name))(arrays[3], ROWS)
    token_loss, gradient, metrics = program(name)(*arrays, ROWS, weights)
    moved = program(name)(*(array[order] for array in arrays), ROWS, weights[order])
    close(moved, (token_loss[order], gradient[order], metrics))


@each_loss
@any_batch
@given(seed=seeds)
def test_packing_and_what_lies_outside_the_mask_change_nothing(name, seed):
    arrays = batch(seed)
    weights = np.asarray(weights_program(mode_of(name))(arrays[3], ROWS))
    expected = program(name)(*arrays, ROWS, weights)
    poisoned = [array if array.dtype == bool else np.where(arrays[3], array, np.nan) for array in arrays]
    rows = [packed(array, True if array.dtype == bool else np.nan) for array in poisoned]
    token_loss, gradient, metrics = program(name)(*rows, packed(ROWS, SEQUENCES), packed(weights, 0))
    close((unpacked(token_loss), unpacked(gradient), metrics), expected)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - WHOLE_BATCH_LOSSES))
@any_batch
@given(seed=seeds, cut=st.integers(1, SEQUENCES - 1))
def test_micro_batches_add_up(name, seed, cut):
    arrays = batch(seed)
    weights = weights_program(mode_of(name))(arrays[3], ROWS)
    whole = program(name)(*arrays, ROWS, weights)

    def part(rows):
        masked = [array if array.dtype != bool else array & rows[:, None] for array in arrays]
        return program(name)(*masked, ROWS, jnp.where(rows[:, None], weights, 0))

    first = np.arange(SEQUENCES) < cut
    close(jax.tree.map(jnp.add, part(first), part(~first)), whole)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - {"sft"}))
@any_batch
@given(seed=seeds)
def test_where_nothing_has_moved_the_gradient_is_the_policy_gradient(name, seed):
    logprobs, _, advantages, mask, _ = batch(seed)
    advantages = np.repeat(advantages[:, :1], WIDTH, axis=1)  # one a sequence, as sequence losses expect
    if name == "clip_cov":
        logprobs = np.full_like(logprobs, -1.0)  # no covariance: no token is chosen
    ones = np.ones_like(logprobs)
    weights = weights_program(mode_of(name))(mask, ROWS)
    _, gradient, _ = program(name)(logprobs, logprobs, advantages, mask, ones, ROWS, weights)
    close(gradient, np.where(mask, -advantages * weights, 0))


@pytest.mark.parametrize("mode", AGGREGATIONS)
@any_batch
@given(seed=seeds, order=st.permutations(range(SEQUENCES)))
def test_weights_move_with_their_sequences_and_do_not_know_the_layout(mode, seed, order):
    mask, order = batch(seed)[3], np.array(order)
    weights = weights_program(mode)(mask, ROWS)
    close(weights_program(mode)(mask[order], ROWS), weights[order])
    close(unpacked(weights_program(mode)(packed(mask, True), packed(ROWS, SEQUENCES))), weights)


@functools.cache
def correction_program():
    return jax.jit(lambda *arrays: correct(*arrays[:3], sequence_ids=arrays[3], num_sequences=SEQUENCES, **CORRECTION))


@any_batch
@given(seed=seeds, order=st.permutations(range(SEQUENCES)))
def test_a_correction_moves_with_its_sequences_and_does_not_know_the_layout(seed, order):
    logprobs, old, _, mask, _ = batch(seed)
    order, run = np.array(order), correction_program()
    weights, kept, metrics = run(logprobs, old, mask, ROWS)
    moved = run(logprobs[order], old[order], mask[order], ROWS)
    close((moved.weights, moved.mask, moved.metrics), (weights[order], kept[order], metrics))
    rows = [packed(np.where(mask, array, np.nan), np.nan) for array in (logprobs, old)]
    other = run(*rows, packed(mask, True), packed(ROWS, SEQUENCES))
    close((unpacked(other.weights), unpacked(other.mask)), (weights, kept))


GROUPS = np.array([0, 0, 0, 1, 1, 1], np.int32)
# `gpg` has the number of samples without a reward in it, which a shift changes.
SHIFTED = ("grpo", "grpo_passk", "gdpo", "rloo", "opo", "reinforce_plus_plus_baseline")


@functools.cache
def advantage_program(name, constants=()):
    return jax.jit(functools.partial(ADVANTAGES[name], **dict(constants)))


def advantages_of(name, rewards, mask, **constants):
    experience = Experience(
        rewards=jnp.asarray(rewards, jnp.float32),
        group_ids=jnp.asarray(GROUPS),
        valid=jnp.ones(SEQUENCES, bool),
        sequence_ids=jnp.asarray(ROWS),
        mask=jnp.asarray(mask),
        token_rewards=jnp.zeros((SEQUENCES, WIDTH)),
        old_logprobs=jnp.zeros((SEQUENCES, WIDTH)),
        components=jnp.stack([jnp.asarray(rewards, jnp.float32), jnp.arange(6.0) ** 2], axis=1),
        component_weights=jnp.array([1.0, 0.5]),
    )
    return np.asarray(advantage_program(name, tuple(constants.items()))(experience).advantages)


@pytest.mark.parametrize("name", SHIFTED)
@any_batch
@given(
    rewards=st.lists(st.integers(-8, 8), min_size=SEQUENCES, max_size=SEQUENCES),
    shifts=st.tuples(st.integers(-50, 50), st.integers(-50, 50)),
    seed=seeds,
)
def test_what_all_samples_of_a_prompt_get_more_changes_no_advantage(name, rewards, shifts, seed):
    mask = batch(seed)[3]
    before = advantages_of(name, np.array(rewards), mask)
    after = advantages_of(name, np.array(rewards) + np.array(shifts)[GROUPS], mask)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@any_batch
@given(rewards=st.lists(st.integers(-8, 8), min_size=SEQUENCES, max_size=SEQUENCES), scale=st.floats(0.5, 50))
def test_the_scale_of_rewards_is_nothing_to_grpo_and_all_to_dr_grpo(rewards, scale):
    mask, rewards = np.ones((SEQUENCES, WIDTH), bool), np.array(rewards, np.float32)
    close(advantages_of("grpo", scale * rewards, mask), advantages_of("grpo", rewards, mask))
    plain = advantages_of("grpo", rewards, mask, normalize_by_std=False)
    scaled = advantages_of("grpo", scale * rewards, mask, normalize_by_std=False)
    np.testing.assert_allclose(scaled, scale * plain, rtol=1e-4, atol=1e-4)


# Near enough that k3 is not clamped.
logits_of = st.lists(st.floats(-0.75, 0.75, width=32), min_size=VOCABULARY, max_size=VOCABULARY)


@any_batch
@given(policy=logits_of, reference=logits_of)
def test_the_expectations_of_kl_estimators_are_the_divergence_and_its_gradient(policy, reference):
    policy, reference = np.array(policy, np.float32), np.array(reference, np.float32)
    p = np.exp(policy) / np.exp(policy).sum()
    exact, gradient = jax.value_and_grad(kl_divergence)(policy, reference)
    np.testing.assert_allclose(exact, np.sum(p * (np.log(p) - jax.nn.log_softmax(reference))), atol=1e-5)

    def expectation(logits, estimator):
        """Over tokens drawn from the policy, as a loss sees it: the draw has no gradient."""
        return jnp.sum(p * kl_penalty(jax.nn.log_softmax(logits), jax.nn.log_softmax(reference), estimator))

    differentiated = jax.value_and_grad(expectation)
    for estimator in ("k1", "k3", "k1+", "k3+"):
        np.testing.assert_allclose(differentiated(policy, estimator)[0], exact, atol=1e-5, err_msg=estimator)
    for estimator in ("k2", "k1+", "k3+"):
        np.testing.assert_allclose(differentiated(policy, estimator)[1], gradient, atol=1e-5, err_msg=estimator)
    np.testing.assert_allclose(differentiated(policy, "k1")[1], 0, atol=1e-6)
    # The whole vocabulary at once, by the learner's function: one token was drawn from these logits.
    hidden, other = (jnp.stack([x, x])[None] for x in (policy, reference))
    settings_of = {"vocab_size": VOCABULARY, "temperature": 1.0, "chunk": 2}
    found = exact_kl(
        hidden, jnp.eye(VOCABULARY), other, jnp.eye(VOCABULARY), jnp.ones((1, 2), jnp.int32), **settings_of
    )
    np.testing.assert_allclose(found, [[0, exact]], atol=1e-5)
