"""The advantage and the loss that a config names, as the learner calls them: constants bound, and tried once.

A function of the user's own is traced here on arrays without values, so that what it does wrong is told, with its file
and line, before any model is read. The trial also tells what an advantage function reads of the batch, and so what a
run has to have: a critic, a reward model, greedy answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import ADVANTAGES, Advantages, Experience
from jaxrl_llm.algorithms.policy_losses import LOSS_AGGREGATION, POLICY_LOSSES, WHOLE_BATCH_LOSSES, PolicyLoss
from jaxrl_llm.plugins import describe, nearest, resolve, signature
from jaxrl_llm.types import UserError

# Of the arrays in the trial: all different, so that a function that mixes them up does not fit by chance.
_ROWS, _TOKENS, _SEQUENCES, _COMPONENTS = 2, 5, 7, 3


class BoundAdvantage(NamedTuple):
    """An advantage function with its constants."""

    function: partial[Advantages]
    reads: frozenset[str]  # the fields of Experience that it looks at

    def __call__(self, experience: Experience) -> Advantages:
        """See algorithms/advantages.py."""
        return self.function(experience)


class BoundLoss(NamedTuple):
    """A policy loss with its constants, and what it asks of its caller."""

    name: str
    function: partial[PolicyLoss]
    optional: frozenset[str]  # those of is_weights and key that it takes
    aggregation: str | None  # where that is part of the method
    whole_batch: bool  # it compares all tokens of the mini-batch

    def __call__(
        self,
        logprobs: jax.Array,
        old_logprobs: jax.Array,
        advantages: jax.Array,
        mask: jax.Array,
        *,
        sequence_ids: jax.Array,
        num_sequences: int,
        is_weights: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> PolicyLoss:
        """See algorithms/policy_losses.py; the token losses are multiplied by the importance weights, if there are
        any. `key` is needed by losses that choose at random only."""
        given = {"is_weights": is_weights, "key": key}
        loss = self.function(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            sequence_ids=sequence_ids,
            num_sequences=num_sequences,
            **{name: value for name, value in given.items() if name in self.optional},
        )
        if is_weights is None or "is_weights" in self.optional:
            return loss
        weighted = jnp.where(mask.astype(bool), loss.token_loss * is_weights, 0)
        return loss._replace(token_loss=weighted.astype(loss.token_loss.dtype))


def of_config(algorithm: Mapping[str, Any]) -> tuple[BoundLoss, BoundAdvantage]:
    """The loss and the advantage that a config's algorithm section names, bound to its keys.

    Raises UserError as `loss` and `advantage` do, and for an own constant that neither takes.
    """
    own = dict(algorithm["constants"])
    constants = {**{key: value for key, value in algorithm.items() if key != "constants"}, **own}
    bound = loss(algorithm["loss"], constants), advantage(algorithm["advantage"], constants)
    taken = {name for part in bound for name in inspect.signature(part.function).parameters}
    for name in own:
        if name not in taken:
            raise UserError(
                f"config.algorithm.constants.{name} is no argument of config.algorithm.loss={algorithm['loss']!r} or "
                f"of config.algorithm.advantage={algorithm['advantage']!r}{nearest(name, taken)}"
            )
    return bound


def advantage(spec: str, constants: Mapping[str, Any]) -> BoundAdvantage:
    """The advantage function that `spec` means, bound to those of `constants` that it names.

    Raises UserError if there is none, if it takes other arguments than algorithms/advantages.py says, fails, or returns
    anything but Advantages of one floating-point number a token.
    """
    what = f"config.algorithm.advantage={spec!r}"
    function = resolve(ADVANTAGES, spec, "config.algorithm.advantage")
    bound = _bind(function, what, constants, ("experience",))
    shape, read = (_ROWS, _TOKENS), set()
    per_token = ("token_rewards", "old_logprobs", "values", "sum_pi_squared", "is_weights", "process_rewards")
    arrays: dict[str, Any] = {
        "rewards": _floats(_SEQUENCES),
        "group_ids": _integers(_SEQUENCES),
        "valid": _flags(_SEQUENCES),
        "sequence_ids": _integers(*shape),
        "mask": _flags(*shape),
        **dict.fromkeys(per_token, _floats(*shape)),
        "baseline_rewards": _floats(_SEQUENCES),
        "components": _floats(_SEQUENCES, _COMPONENTS),
        "component_weights": _floats(_COMPONENTS),
    }
    in_order = [arrays[name] for name in Experience._fields]
    returned = _tried(lambda *fields: bound(_watched(read)(*fields)), in_order, what, function)
    if not isinstance(returned, Advantages):
        raise UserError(
            f"{what} must return a jaxrl_llm.algorithms.advantages.Advantages(advantages, returns), got "
            f"{_kind(returned)}"
        )
    for name, value in returned._asdict().items():
        per_token = f"as {name} one floating-point number a token"
        _expect_floats(value, shape, what, per_token, "the shape of experience.mask")
    return BoundAdvantage(bound, frozenset(read))


def _watched(read: set[str]) -> type[Experience]:
    """An Experience that notes which of its fields are looked at."""

    class Watched(Experience):
        def __getattribute__(self, name: str) -> Any:
            if name in Experience._fields:
                read.add(name)
            return super().__getattribute__(name)

    return Watched


def loss(spec: str, constants: Mapping[str, Any]) -> BoundLoss:
    """The loss that `spec` means, bound to those of `constants` that it names.

    Raises UserError if there is none, if it takes other arguments than algorithms/policy_losses.py says, fails, has no
    gradient, or returns anything but a PolicyLoss of one floating-point number a token and metrics as (sum, count).
    """
    what = f"config.algorithm.loss={spec!r}"
    function = resolve(POLICY_LOSSES, spec, "config.algorithm.loss")
    optional = frozenset({"is_weights", "key"} & set(signature(function, what).parameters))
    keywords = ("sequence_ids", "num_sequences", *sorted(optional))
    bound = BoundLoss(
        spec,
        _bind(function, what, constants, ("logprobs", "old_logprobs", "advantages", "mask"), keywords),
        optional,
        LOSS_AGGREGATION.get(spec),
        spec in WHOLE_BATCH_LOSSES,
    )
    shape = (_ROWS, _TOKENS)

    def called(logprobs: jax.Array, *arrays: jax.Array) -> Any:
        old, advantages, mask, ids, weights = arrays
        given = {"sequence_ids": ids, "num_sequences": _SEQUENCES, "is_weights": weights, "key": jax.random.key(0)}
        return bound.function(logprobs, old, advantages, mask, **{name: given[name] for name in keywords})

    arrays = (*[_floats(*shape)] * 3, _flags(*shape), _integers(*shape), _floats(*shape))
    returned = _tried(called, arrays, what, function)
    if not isinstance(returned, PolicyLoss):
        raise UserError(
            f"{what} must return a jaxrl_llm.algorithms.policy_losses.PolicyLoss(token_loss, metrics), got "
            f"{_kind(returned)}"
        )
    per_token = "as token_loss one floating-point number a token"
    _expect_floats(returned.token_loss, shape, what, per_token, "the shape of logprobs")
    _check_metrics(returned.metrics, what)
    _tried(
        jax.value_and_grad(lambda *given: called(*given).token_loss.sum()), arrays, f"the gradient of {what}", function
    )
    return bound


def _bind(
    function: Callable[..., Any],
    what: str,
    constants: Mapping[str, Any],
    positional: Sequence[str],
    keywords: Sequence[str] = (),
) -> partial[Any]:
    """Gives a function those constants that it names; UserError unless the arguments that it will be called with are
    then all that it takes."""
    takes = signature(function, what)
    named = {k: v for k, v in constants.items() if k in takes.parameters}
    try:
        takes.bind(*positional, **dict.fromkeys(keywords), **named)
    except TypeError as error:
        expected = ", ".join((*positional, *keywords))
        name = getattr(function, "__name__", what)
        raise UserError(
            f"{what}: {name} is called with {expected} and those keys of config.algorithm that it names, which "
            f"its signature {name}{takes} does not take: {error}"
        ) from error
    return partial(function, **named)


def _tried(call: Callable[..., Any], arrays: Sequence[Any], what: str, function: Callable[..., Any]) -> Any:
    """What the call returns for arrays of these shapes and types, as shapes and types."""
    try:
        return jax.eval_shape(call, *arrays)
    except Exception as error:  # the function is the user's
        code = getattr(inspect.unwrap(function), "__code__", None)
        told = describe(error, code and code.co_filename)
        if isinstance(error, jax.errors.JAXTypeError):  # it goes on about the tracing of this file
            message, place = told.splitlines()[0], told[told.rindex("(") :]
            told = (
                f"{message} {place}; under jax.jit arrays have shapes but no values: use jax.numpy instead of numpy, "
                "and jnp.where instead of if"
            )
        raise UserError(f"{what} fails: {told}") from error


def _expect_floats(value: Any, shape: tuple[int, ...], what: str, expected: str, like: str) -> None:
    fits = isinstance(value, jax.ShapeDtypeStruct) and jnp.issubdtype(value.dtype, jnp.floating)
    if not fits or value.shape != shape:
        raise UserError(f"{what} must return {expected}, {list(shape)} here ({like}); got {_kind(value)}")


def _check_metrics(metrics: Any, what: str) -> None:
    if not isinstance(metrics, Mapping):
        raise UserError(f"{what} must return its metrics as a dict from names to (sum, count), got {_kind(metrics)}")
    for name, pair in metrics.items():
        scalars = (
            isinstance(pair, (tuple, list)) and len(pair) == 2 and all(getattr(x, "shape", None) == () for x in pair)
        )
        if not isinstance(name, str) or not scalars:
            raise UserError(
                f"{what}: the metric {name!r} must be a pair of numbers (sum over tokens, number of tokens), got "
                f"{_kind(pair)}"
            )


def _kind(value: Any) -> str:
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype} {list(value.shape)}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.80}"


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _flags(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)
