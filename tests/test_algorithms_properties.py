"""What must hold for any batch: the order of its sequences, the names of its groups, how it is packed, padded and cut,
and what lies where nothing may be read, change nothing; and what follows from the mathematics."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms import segments
from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, token_weights
from jaxrl_llm.algorithms.correction import correct
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS, kl_penalty
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES, WHOLE_BATCH_LOSSES, PolicyLoss
from jaxrl_llm.algorithms.value_losses import clipped
from jaxrl_llm.models.logprobs import exact_kl

SEQUENCES, VOCABULARY = 12, 5
any_batch = settings(max_examples=15, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
orders = st.permutations(range(SEQUENCES)).map(np.array)
modes = st.sampled_from(AGGREGATIONS)
POISONS = [np.nan, np.inf, -np.inf, 1e30]


def close(found, expected):
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=2e-5, atol=2e-6), found, expected)


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def rows(tree, order):
    return jax.tree.map(lambda x: x[order], tree)


def taken(tree, batch, layout):
    return jax.tree.map(lambda x: np.concatenate(ragged.taken(x, batch, layout)), tree)


def filled(tree, values, seed=0):
    """With any of the values where nothing may be read."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.where(np.isnan(x), random.choice(values, x.shape), x).astype(x.dtype), tree)


PLAIN = (("normalize_by_std", False),)
# The degree of the advantage in the scale of the rewards.
DEGREES = {(name, ()): 0 for name in ("grpo", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline")}
DEGREES |= {(name, ()): 1 for name in ("rloo", "opo", "gpg")}
DEGREES |= {("grpo", PLAIN): 1, ("grpo_passk", PLAIN): 1, ("gdpo", PLAIN): 0}


@functools.cache
def advantage(name, constants=()):
    return jax.jit(functools.partial(ADVANTAGES[name], **dict(constants)))


def experienced(seed):
    groups = np.random.default_rng(seed).integers(0, SEQUENCES // 2, SEQUENCES)
    return ragged.batch(seed)._replace(group_ids=groups.astype(np.int32))


@pytest.mark.parametrize("name", ADVANTAGES)
@any_batch
@given(seed=seeds, order=orders, names=orders)
def test_advantages_move_with_their_sequences_whatever_the_groups_are_called(name, seed, order, names):
    batch = experienced(seed)
    renamed = batch._replace(group_ids=names[batch.group_ids].astype(np.int32))
    still = advantage(name)(ragged.experience(batch, "padded"))
    close(advantage(name)(ragged.experience(renamed.reordered(order), "padded")), rows(still, order))


@pytest.mark.parametrize("name", ADVANTAGES)
@any_batch
@given(seed=seeds, layout=st.sampled_from(["packed", "one row"]))
def test_neither_packing_nor_what_may_not_be_read_changes_an_advantage(name, seed, layout):
    batch = experienced(seed)
    padded, other = (ragged.experience(batch, layout) for layout in ("padded", layout))
    expected = advantage(name)(filled(padded, [0]))
    assert np.abs(expected.advantages).max() > 0.1
    np.testing.assert_array_equal(expected.advantages[~np.asarray(padded.mask)], 0)
    equal(advantage(name)(filled(padded, POISONS, seed)), expected)
    close(taken(advantage(name)(filled(other, POISONS, seed)), batch, layout), taken(expected, batch, "padded"))


def scored(seed):
    """Three groups, and scores of rewards and components that float32 adds up exactly and that are never 0."""
    random = np.random.default_rng(seed)
    groups = random.permutation(np.repeat(np.arange(3), 4)).astype(np.int32)
    return ragged.batch(seed)._replace(group_ids=groups), random.integers(-3, 4, (SEQUENCES, 3)) + 0.5


def advantages_of(name, constants, batch, scores):
    scores = np.where(batch.valid[:, None], scores, np.nan)
    batch = batch._replace(rewards=scores[:, 0], components=scores[:, 1:])
    return np.asarray(advantage(name, constants)(ragged.experience(batch, "padded")).advantages)


@pytest.mark.parametrize(("name", "constants"), [*DEGREES, ("prime", ())])
@any_batch
@given(seed=seeds, shifts=st.lists(st.integers(-100, 100), min_size=9, max_size=9))
def test_what_all_samples_of_a_prompt_get_more_changes_no_advantage(name, constants, seed, shifts):
    batch, scores = scored(seed)
    shifted = scores + np.reshape(shifts, (3, 3))[batch.group_ids]
    equal(advantages_of(name, constants, batch, shifted), advantages_of(name, constants, batch, scores))


@pytest.mark.parametrize(("name", "constants"), DEGREES)
@any_batch
@given(seed=seeds, exponent=st.integers(-2, 6))
def test_the_scale_of_rewards_is_nothing_where_a_deviation_divides(name, constants, seed, exponent):
    batch, scores = scored(seed)
    expected = advantages_of(name, constants, batch, scores) * 2.0 ** (exponent * DEGREES[name, constants])
    close(advantages_of(name, constants, batch, scores * 2.0**exponent), expected)


def divergence(logprobs, reference, _, mask, *, sequence_ids, num_sequences, estimator):
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    return PolicyLoss(kl_penalty(logprobs, reference, estimator, mask=valid), {})


DIVERGENCES = {f"kl {name}": functools.partial(divergence, estimator=name) for name in KL_ESTIMATORS}
LOSSES = POLICY_LOSSES | {"value": clipped} | DIVERGENCES
CONSTANTS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5, "value_clip": 0.2, "dro_beta": 0.5}
CONSTANTS |= {"tau_pos": 1.0, "tau_neg": 1.05, "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.5}
CONSTANTS |= {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}  # all candidates, without chance


def learned(seed):
    """Tokens of a policy that has moved, under masks of any kind, sequences without a token among them."""
    random = np.random.default_rng(seed)
    batch = ragged.batch(seed)
    masks = [random.random(mask.size) < random.choice([0.0, 0.5, 1.0]) for mask in batch.masks]

    def drawn(distribution):
        return [np.where(mask, distribution(mask.size), np.nan) for mask in masks]

    old = drawn(lambda size: -random.standard_exponential(size))
    tokens = {
        "new": [np.minimum(x + random.normal(0, 0.3, x.size), 0) for x in old],
        "old": old,
        "target": drawn(random.standard_normal),
        "is_weights": drawn(lambda size: random.lognormal(0, 0.3, size)),
    }
    return batch._replace(masks=masks, tokens=tokens)


weigh = jax.jit(
    functools.partial(token_weights, num_sequences=SEQUENCES, length_norm=7.0, batch_sequences=SEQUENCES),
    static_argnames="mode",
)


def inputs(batch, layout, mode):
    tokens, mask, ids = ragged.laid_out(batch, layout)
    return tokens, mask, ids, weigh(mode, mask, ids, sequence_weights=1 + batch.group_ids)


@functools.cache
def program(name):
    function = LOSSES[name]
    named = inspect.signature(function).parameters

    def run(tokens, mask, ids, weights, constants):
        """What there is of each token, and what adds up."""
        offered = {"key": jax.random.key(0), "is_weights": tokens["is_weights"]} | constants
        given = {key: value for key, value in offered.items() if key in named}

        def total(new):
            arrays = new, tokens["old"], tokens["target"], mask
            loss = function(*arrays, sequence_ids=ids, num_sequences=SEQUENCES, **given)
            return jnp.sum(weights * loss.token_loss), loss

        (value, loss), gradient = jax.value_and_grad(total, has_aux=True)(tokens["new"])
        return (loss.token_loss, gradient, weights), (value, loss.metrics)

    return jax.jit(run)


def result(name, arrays, **constants):
    return program(name)(*arrays, CONSTANTS | constants)


@pytest.mark.parametrize("name", LOSSES)
@any_batch
@given(seed=seeds, order=orders, mode=modes)
def test_losses_and_weights_move_with_their_sequences(name, seed, order, mode):
    batch = learned(seed)
    tokens, sums = result(name, inputs(batch, "padded", mode))
    close(result(name, inputs(batch.reordered(order), "padded", mode)), (rows(tokens, order), sums))


@pytest.mark.parametrize("name", LOSSES)
@any_batch
@given(seed=seeds, mode=modes)
def test_neither_packing_nor_what_may_not_be_read_changes_a_loss(name, seed, mode):
    batch = learned(seed)
    padded, packed = (inputs(batch, layout, mode) for layout in ("padded", "packed"))
    tokens, sums = result(name, filled(padded, [0]), clip_cov_ratio=0.1)
    equal(result(name, filled(padded, POISONS, seed), clip_cov_ratio=0.1), (tokens, sums))
    other, other_sums = result(name, filled(packed, POISONS, seed), clip_cov_ratio=0.1)
    close((taken(other, batch, "packed"), other_sums), (taken(tokens, batch, "padded"), sums))


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - WHOLE_BATCH_LOSSES))
@any_batch
@given(seed=seeds, order=orders, mode=modes)
def test_micro_batches_add_up(name, seed, order, mode):
    whole = inputs(learned(seed), "padded", mode)
    tokens, sums = result(name, whole)
    parts, part_sums = zip(*(result(name, rows(whole, cut)) for cut in order.reshape(3, 4)), strict=True)
    close(jax.tree.map(lambda *x: np.concatenate(x), *parts), rows(tokens, order))
    close(jax.tree.map(lambda *x: sum(x), *part_sums), sums)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - {"sft"}))
@any_batch
@given(seed=seeds, mode=modes)
def test_where_nothing_has_moved_the_gradient_is_the_policy_gradient(name, seed, mode):
    tokens, mask, ids, weights = inputs(learned(seed), "padded", mode)
    tokens |= {"old": tokens["new"], "is_weights": np.ones_like(tokens["new"])}
    if name == "geo_mean":  # it means the advantages of a sequence
        tokens["target"] = np.float32(ids % 5 - 2)
    (_, gradient, _), _ = result(name, (tokens, mask, ids, weights), clip_cov_lb=5.0)
    close(gradient, np.where(weights > 0, -weights * tokens["target"], 0))


CORRECTIONS = {
    "token": {"rollout_is_threshold": 1.2, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"},
    "sequence": {"rollout_is_threshold": "0.5_2", "rollout_rs": "seq_sum_k1,seq_max_k3", "rollout_rs_threshold": 1.5},
}


@functools.cache
def corrector(level):
    given = {"rollout_is": level, "rollout_is_batch_normalize": True} | CORRECTIONS[level]

    def run(tokens, mask, ids):
        found = correct(tokens["new"], tokens["old"], mask, sequence_ids=ids, num_sequences=SEQUENCES, **given)
        return (found.weights, found.mask), found.metrics

    return jax.jit(run)


@pytest.mark.parametrize("level", CORRECTIONS)
@any_batch
@given(seed=seeds, order=orders)
def test_neither_order_nor_packing_nor_what_may_not_be_read_changes_a_correction(level, seed, order):
    batch, run = learned(seed), corrector(level)
    padded, packed = (ragged.laid_out(batch, layout) for layout in ("padded", "packed"))
    tokens, metrics = run(*filled(padded, [0]))
    equal(run(*filled(padded, POISONS, seed)), (tokens, metrics))
    close(run(*ragged.laid_out(batch.reordered(order), "padded")), (rows(tokens, order), metrics))
    other, other_metrics = run(*filled(packed, POISONS, seed))
    close((taken(other, batch, "packed"), other_metrics), (taken(tokens, batch, "padded"), metrics))


# Near enough that k3 is not clamped.
logits = st.lists(st.floats(-0.75, 0.75, width=32), min_size=VOCABULARY, max_size=VOCABULARY).map(np.array)


@functools.cache
def expectation(estimator):
    """Over tokens drawn from the policy, as a loss sees it: the draw has no gradient."""

    def expected(policy, reference):
        logprobs, reference_logprobs = jax.nn.log_softmax(policy), jax.nn.log_softmax(reference)
        return jax.lax.stop_gradient(jnp.exp(logprobs)) @ kl_penalty(logprobs, reference_logprobs, estimator)

    def exact(policy, reference):
        hidden, other = (jnp.tile(x, (1, 2, 1)) for x in (policy, reference))
        head, one = jnp.eye(VOCABULARY), jnp.ones((1, 2), jnp.int32)
        return exact_kl(hidden, head, other, head, one, vocab_size=VOCABULARY, temperature=1.0, chunk=2)[0, 1]

    return jax.jit(jax.value_and_grad(exact if estimator == "exact" else expected))


@any_batch
@given(policy=logits, reference=logits)
def test_estimators_have_in_expectation_the_divergence_or_its_gradient(policy, reference):
    p, q = (np.exp(x) / np.exp(x).sum() for x in (policy, reference))
    difference = np.log(p / q)
    kl = np.sum(p * difference)
    gradient = p * (difference - kl)
    expected = {
        "k1": (kl, 0 * p),
        "k2": (np.sum(p * difference**2) / 2, gradient),
        "k3": (kl, p - q),  # the gradient of KL(reference || policy)
        **dict.fromkeys(("k1+", "k3+", "exact"), (kl, gradient)),
    }
    for name, pair in expected.items():
        close(expectation(name)(policy, reference), pair)
