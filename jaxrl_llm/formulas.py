"""The advantage and the loss that a config names, as the learner calls them: constants bound, and tried once.

A function of the user's own is traced here on arrays without values, so that what it does wrong is told, with its file
and line, before any model is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from jaxrl_llm.plugins import describe, resolve, signature
from jaxrl_llm.types import UserError

# Of the arrays in the trial: all different, so that a function that mixes them up does not fit by chance.
_ROWS, _TOKENS, _SEQUENCES, _GROUPS = 2, 5, 7, 3


def advantage(spec: str, constants: Mapping[str, Any]) -> Callable[..., jax.Array]:
    """The advantage function that `spec` means, bound to those of `constants` that it names.

    Raises UserError if there is none, if it takes other arguments than algorithms/advantages.py says, fails, or returns
    anything but one floating-point number a sequence.
    """
    what = f"config.algorithm.advantage={spec!r}"
    function = resolve(ADVANTAGES, spec, "config.algorithm.advantage")
    bound = _bind(function, what, constants, ("rewards", "group_ids", "valid", "num_groups"))
    returned = _tried(
        lambda *arrays: bound(*arrays, _GROUPS),
        (_floats(_SEQUENCES), _integers(_SEQUENCES), _flags(_SEQUENCES)),
        what,
        function,
    )
    _expect_floats(returned, (_SEQUENCES,), what, "one floating-point number a sequence", "the shape of rewards")
    return bound


def loss(spec: str, constants: Mapping[str, Any]) -> Callable[..., PolicyLoss]:
    """The loss that `spec` means, bound to those of `constants` that it names.

    Raises UserError if there is none, if it takes other arguments than algorithms/policy_losses.py says, fails, has no
    gradient, or returns anything but a PolicyLoss of one floating-point number a token and metrics as (sum, count).
    """
    what = f"config.algorithm.loss={spec!r}"
    function = resolve(POLICY_LOSSES, spec, "config.algorithm.loss")
    keywords = ("sequence_ids", "num_sequences")
    bound = _bind(function, what, constants, ("logprobs", "old_logprobs", "advantages", "mask"), keywords)
    shape = (_ROWS, _TOKENS)

    def called(logprobs: jax.Array, old: jax.Array, advantages: jax.Array, mask: jax.Array, ids: jax.Array) -> Any:
        return bound(logprobs, old, advantages, mask, sequence_ids=ids, num_sequences=_SEQUENCES)

    arrays = (_floats(*shape), _floats(*shape), _floats(*shape), _flags(*shape), _integers(*shape))
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
) -> Callable[..., Any]:
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
