"""From a name in the configuration to a reward function that can be called: `gsm8k`, `my_rewards.py:fn`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.plugins import absolute, nearest, resolve, signature
from jaxrl_llm.rewards.functions import REWARDS
from jaxrl_llm.types import UserError

SAMPLE_FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt_str", "response_length")


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with the arguments that the configuration fixed for it."""

    name: str  # names the component, if the function returns a number
    spec: str  # what `load` takes to find it again, from any working directory
    function: Callable[..., Any]
    fields: tuple[str, ...]  # those of SAMPLE_FIELDS that it is called with
    kwargs: Mapping[str, Any]

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        """`sample` has all of SAMPLE_FIELDS; the result is whatever the function returns, unchecked."""
        return self.function(**{field: sample[field] for field in self.fields}, **self.kwargs)


def load(spec: str, kwargs: Mapping[str, Any] = {}) -> RewardFunction:
    """The built-in function named `spec`, or the function of a file, if it is `path/to/file.py:function`.

    A path is relative to the working directory. A file is imported once a process. `kwargs` are arguments
    given at every call. Raises UserError if there is no such file or function, the file fails to import, the
    function requires an argument that nobody gives or does not know one of `kwargs`.
    """
    function = resolve(REWARDS, spec, "reward function")
    name = spec.rpartition(":")[2]
    if not isinstance(kwargs, Mapping):
        raise UserError(
            f"kwargs of reward function {spec!r} must be a section, such as "
            f"config.reward.kwargs.{name}.ARGUMENT=VALUE; got {kwargs!r}"
        )
    return RewardFunction(name, absolute(spec), function, _fields(spec, function, kwargs), dict(kwargs))


def _fields(spec: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of SAMPLE_FIELDS to call the function with; refuses what could never be called."""
    parameters = signature(function, f"reward function {spec!r}").parameters.values()
    by_keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for parameter in parameters:
        given = parameter.name in by_keyword and (parameter.name in SAMPLE_FIELDS or parameter.name in kwargs)
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not given and not is_variadic:
            raise UserError(
                f"reward function {spec!r} requires the parameter {parameter.name!r}, which nobody gives. By "
                f"keyword it can have {', '.join(SAMPLE_FIELDS)}; give others a default or a value in the "
                f"function's kwargs."
            )
    own = [name for name in by_keyword if name not in SAMPLE_FIELDS]
    for key in kwargs:
        if key in SAMPLE_FIELDS or (key not in own and not takes_all):
            raise UserError(
                f"kwargs of reward function {spec!r}: {key!r} cannot be set{nearest(key, own)}. "
                f"Its own parameters are: {', '.join(own) or 'none'}."
            )
    return tuple(field for field in SAMPLE_FIELDS if takes_all or field in by_keyword)
