"""Policies by name, and those of the user. Ten lines make one.

For example:

    import numpy as np
    from sidequest_langchain.kinds import TokenKind
    from sidequest_langchain.policy.registry import register_policy
    from sidequest_langchain.policy.selection import Draft

    @register_policy("thoughts_first")
    def thoughts_first(facts):
        draft = Draft(facts)
        keep = {s.segment_id: s.kinds != TokenKind.THOUGHT for s in facts.segments}
        draft.evict(keep, reason="a thought")
        return draft.acts()

Then `CacheConfig(policy="thoughts_first", budget_tokens=2048)`; `policy=thoughts_first` does
without a name. The draft keeps to what is protected and stops when enough is freed. A function
may read `importance`; an object with a `name` and `needs` may ask for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.policy.acts import Act
from sidequest_langchain.policy.baselines import (
    H2O,
    LRU,
    RKV,
    TOVA,
    Average,
    Nothing,
    Random,
    SnapKV,
    Window,
)
from sidequest_langchain.policy.facts import CacheFacts, Policy
from sidequest_langchain.policy.staged import EvictStaged, Staged
from sidequest_langchain.policy.wrapping import CompressFirst, PerHead, Plain

Decides = Callable[[CacheFacts], Sequence[Act]]
D = TypeVar("D", bound=Decides)

_POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Nothing(),
        LRU(),
        Window(),
        H2O(),
        SnapKV(),
        TOVA(),
        RKV(),
        Random(),
        Average(),
        EvictStaged(),
        Staged(),
    )
}


def policy_names() -> tuple[str, ...]:
    """The names that `CacheConfig(policy=...)` knows, the built-in ones first."""
    return tuple(_POLICIES)


def register_policy(name: str) -> Callable[[D], D]:
    """Give a policy, or a function from facts to acts, a name; it is returned as it is.

    Raises:
        ConfigError: Another policy has the name.
    """

    def register(policy: D) -> D:
        made = _as_policy(policy, name)
        before = _POLICIES.get(name)
        if before is not None and _is_redefined(before, made):  # a notebook's cell run again
            _POLICIES[name] = made
        elif _POLICIES.setdefault(name, made) != made:
            msg = f"there is a policy named {name!r} already; choose another name"
            raise ConfigError(msg)
        return policy

    return register


def policy_for(
    policy: str | Decides | None, *, compress_first: bool = False, per_head: bool = False
) -> Policy:
    """The policy that settings name.

    Args:
        policy: A name, a policy, a function from facts to acts; `None` never acts.
        compress_first: Pack rows before it acts.
        per_head: Let each KV head keep its own rows.

    Raises:
        ConfigError: No policy has the name.
    """
    found = _named(policy) if isinstance(policy, str) else _as_policy(policy or Nothing())
    if compress_first:
        found = CompressFirst(found)
    return PerHead(found) if per_head else found


def _is_redefined(before: Any, now: Any) -> bool:
    """Whether both come from one definition, made twice."""
    old, new = getattr(before, "function", before), getattr(now, "function", now)
    names = [(getattr(o, "__module__", None), getattr(o, "__qualname__", None)) for o in (old, new)]
    return names[0] == names[1] and names[0][1] is not None


def _named(name: str) -> Policy:
    if name in _POLICIES:
        return _POLICIES[name]
    match = get_close_matches(name, _POLICIES, n=1)
    hint = f"did you mean {match[0]!r}? " if match else ""
    known = ", ".join(_POLICIES)
    msg = f"there is no policy {name!r}; {hint}known are {known}, or give register_policy yours"
    raise ConfigError(msg)


def _as_policy(policy: Any, name: str = "") -> Policy:
    if isinstance(getattr(policy, "name", None), str) and hasattr(policy, "needs"):
        made: Policy = policy
        return made
    return Plain(policy, name)
