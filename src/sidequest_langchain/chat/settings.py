"""What one call may set: names, kinds and ranges, checked before anything is computed.

It must not know messages or the engine's state.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from sidequest_langchain.chat.forms import AnswerForm, form_of
from sidequest_langchain.chat.tools import Choosing, Described, chosen, described
from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.engine.request import SamplingParams
from sidequest_langchain.errors import RequestError

_KINDS: dict[str, tuple[type, str, bool]] = {
    "temperature": (Real, "a number", False),
    "top_p": (Real, "a number", False),
    "n": (Integral, "a whole number", False),
    "exact": (bool, "True or False", False),
    "schema_in_prompt": (bool, "True or False", False),
    "on_edit": (str, "'recompute' or 'reuse'", False),
    "logprobs": (bool, "True or False", False),
    "max_tokens": (Integral, "a whole number", True),
    "top_k": (Integral, "a whole number", True),
    "seed": (Integral, "a whole number", True),
    "top_logprobs": (Integral, "a whole number", True),
    "parallel_tool_calls": (bool, "True or False", True),
}
"""Settings that a call may change: kind, its name, whether `None` is a value of its own."""

_OTHERS = frozenset(
    {
        "choice",
        "constraint",
        "ls_structured_output_format",
        "model",
        "regex",
        "response_format",
        "stream",
        "streaming",
        "tool_choice",
        "tools",
    }
)
"""Other names a call may use. LangChain passes `stream` on, and `ls_structured_output_format` for
its tracers."""

_SAID_OTHERWISE = {
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "model_id": "model",
    "model_name": "model",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
"""Names that other packages give to our settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """One call's settings."""

    sampling: SamplingParams
    """Of the first sample."""
    n: int
    exact: bool
    is_reusing_edits: bool
    """Whether results of tools that were cleared leave the cache alone, and not the prompt."""
    tools: tuple[Described, ...]
    choosing: Choosing
    """Whether tools may, must or may not be called."""
    parallel_tool_calls: bool | None
    """Whether an answer may call several tools; `None` is up to how calls come about."""
    form: AnswerForm | None
    """What the text must be, where no tool is called."""
    told: str | None
    """That form in words for the model; `None`: it is not told."""
    constraint: Constraint | Callable[[], Constraint] | None

    @property
    def tools_told(self) -> tuple[Described, ...]:
        """The tools that the model is told of: none if it may call none."""
        return self.tools if self.choosing.mode != "none" else ()

    @property
    def is_held(self) -> bool:
        """Whether the answer is held to a grammar."""
        return self.form is not None or self.choosing.mode == "required"

    def sampling_of(self, sample: int) -> SamplingParams:
        """Settings of sample number `sample`: each has a seed of its own, the first the given."""
        seed = self.sampling.seed
        if seed is None or sample == 0:
            return self.sampling
        digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
        return replace(self.sampling, seed=int.from_bytes(digest) >> 1)

    def new_constraint(self) -> Constraint | None:
        """A constraint for one sample: a fresh one, if a factory was given."""
        if self.constraint is None or isinstance(self.constraint, Constraint):
            return self.constraint
        return self.constraint()


def settings_for(
    defaults: Mapping[str, Any], stop: Sequence[str] | None, given: Mapping[str, Any]
) -> CallSettings:
    """Settings of a call: what it gives, over the model's own.

    Args:
        defaults: The model's own settings, `stop` and `model` among them.
        stop: Stop strings of the call; those of the model end the answer, too.
        given: The call's keyword arguments.

    Raises:
        RequestError: A name is unknown, or a value is of the wrong kind or out of range.
    """
    given = with_old_names(given, RequestError)
    _check_names(given)
    _check_model(defaults["model"], given.get("model"))
    values = dict(defaults)
    for name, (kind, kind_name, has_none) in _KINDS.items():
        value = given.get(name)
        if value is not None or (has_none and name in given):
            values[name] = _checked(name, value, kind, kind_name)
    if values["n"] < 1:
        msg = f"n must be at least 1, found {values['n']}"
        raise RequestError(msg)
    constraint = given.get("constraint")
    if values["n"] > 1 and isinstance(constraint, Constraint):
        msg = "one constraint serves one sample; with n > 1 give a function that makes one"
        raise RequestError(msg)
    tools = described(given.get("tools"))
    choosing = chosen(given.get("tool_choice"), tools)
    form = form_of(given)
    _check_one_form(form, choosing, constraint)
    return CallSettings(
        sampling=_sampling(values, [*as_stops(defaults["stop"]), *as_stops(stop)]),
        n=values["n"],
        exact=values["exact"],
        is_reusing_edits=_is_reusing(values) and not values["exact"],
        tools=tools,
        choosing=choosing,
        parallel_tool_calls=values.get("parallel_tool_calls"),
        form=form,
        told=_told(form, choosing, tools) if values.get("schema_in_prompt", True) else None,
        constraint=constraint,
    )


def with_old_names(given: Mapping[str, Any], error: type[Exception]) -> dict[str, Any]:
    """`given` with `max_new_tokens`, the other name of `max_tokens`, in its place."""
    if "max_new_tokens" not in given:
        return dict(given)
    if "max_tokens" in given:
        msg = "max_tokens and max_new_tokens are the same setting; give one"
        raise error(msg)
    renamed = dict(given)
    renamed["max_tokens"] = renamed.pop("max_new_tokens")
    return renamed


def as_stops(stop: object) -> tuple[str, ...]:
    """Stop strings given as one, several or none.

    Raises:
        RequestError: It is something else.
    """
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence | Set):
        msg = f"stop must be a string or a list of strings, found {stop!r}"
        raise RequestError(msg)
    return tuple(stop)


def near_match(name: str, known: Iterable[str], *, cutoff: float) -> str | None:
    """The known name that `name` was probably meant to be."""
    if name in _SAID_OTHERWISE:
        return _SAID_OTHERWISE[name]
    return next(iter(difflib.get_close_matches(name, [*known], n=1, cutoff=cutoff)), None)


def _check_names(given: Mapping[str, Any]) -> None:
    known = [*_KINDS, "stop", "max_new_tokens", *_OTHERS]
    for name, value in given.items():
        # None is how callers say that they set nothing.
        if name in known or (value is None and name not in _SAID_OTHERWISE):
            continue
        match = near_match(name, known, cutoff=0.6)
        hint = f"did you mean {match!r}?" if match else f"known are {', '.join(sorted(known))}"
        msg = f"a model call got an unknown argument {name!r}; {hint}"
        raise RequestError(msg)


def _check_model(ours: str, asked: object) -> None:
    if asked is not None and asked != ours:
        msg = (
            f"model={asked!r} was asked of a chat model that serves {ours!r}; one object serves "
            "one model: make another SideQuestChatModel"
        )
        raise RequestError(msg)


def _told(form: AnswerForm | None, choosing: Choosing, tools: Sequence[Described]) -> str | None:
    if form is None or choosing.mode == "required":
        return None
    return form.told(may_call=bool(tools) and choosing.mode == "auto")


def _check_one_form(form: AnswerForm | None, choosing: Choosing, constraint: object | None) -> None:
    if constraint is None or (form is None and choosing.mode != "required"):
        return
    other = "a form of the answer" if choosing.mode != "required" else "a call that is forced"
    msg = f"one answer cannot follow both a constraint and {other}; give one of them"
    raise RequestError(msg)


def _checked(name: str, value: Any, kind: type, kind_name: str) -> Any:
    is_bool = isinstance(value, bool)
    if value is None or (isinstance(value, kind) and (kind is bool or not is_bool)):
        return value
    msg = f"{name} must be {kind_name}, found {value!r}"
    raise RequestError(msg)


def _is_reusing(values: Mapping[str, Any]) -> bool:
    if values["on_edit"] not in ("recompute", "reuse"):
        msg = f"on_edit must be 'recompute' or 'reuse', found {values['on_edit']!r}"
        raise RequestError(msg)
    return bool(values["on_edit"] == "reuse")


def _sampling(values: Mapping[str, Any], stops: Sequence[str]) -> SamplingParams:
    seed = values["seed"]
    if seed is not None and not -(2**63) <= seed < 2**63:
        msg = f"seed must fit into 64 bits, found {seed}"
        raise RequestError(msg)
    n_top = values["top_logprobs"]
    if n_top is not None and not values["logprobs"]:
        msg = f"top_logprobs={n_top} is given, but logprobs is off; pass logprobs=True with it"
        raise RequestError(msg)
    if n_top is None and values["logprobs"]:
        n_top = 0
    return SamplingParams(
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=values["top_k"],
        seed=seed,
        max_tokens=values["max_tokens"],
        stop=tuple(dict.fromkeys(stops)),
        top_logprobs=n_top,
    )
