"""The settings of a cache: one frozen object that names everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from sidequest_langchain.config import toml
from sidequest_langchain.config.checks import (
    Settings,
    as_path,
    changed,
    check_count,
    check_flag,
    check_number,
)
from sidequest_langchain.config.parts import Guard, Protection, Schedule, Tiers
from sidequest_langchain.config.presets import PRESETS
from sidequest_langchain.errors import ConfigError

Isolation = Literal["thread", "tenant", "shared"]
Retain = Literal["run", "thread"]
S = TypeVar("S", bound=Settings)

COUNTS = {
    "budget_tokens": 1,
    "budget_bytes": 1,
    "prefill_chunk": 1,
    "prompt_lookup": 0,
    "max_running": 1,
}
PARTS: dict[str, type[Settings]] = {
    "protection": Protection,
    "schedule": Schedule,
    "tiers": Tiers,
    "guard": Guard,
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheConfig(Settings):
    """What may stay resident, for how long, at what precision, and who may share it.

    Without a `policy` all of it is exact: above a budget, only what is idle is released.

    Raises:
        ConfigError: A value is out of range, or contradicts another.
    """

    budget_tokens: int | None = None
    """Rows that may stay resident, at whatever precision; `None` is no limit in tokens. It bounds
    what a token costs: packing rows does not help to keep it, which a budget in bytes does."""
    budget_bytes: int | None = None
    """Bytes that may stay resident, counted at the storage; `None` is no limit in bytes.
    Above a budget the least recently used segments are released, never one that a running
    generation reads: without a policy, the running requests themselves may exceed it."""
    budget_share: float | None = None
    """Share of the device's memory. Of several budgets each holds."""
    retain: Retain | None = None
    """`"run"` releases a graph run's segments when it ends (unless it was interrupted),
    `"thread"` keeps them until they are released; `None` is `"thread"` where the run has a
    `thread_id`, and `"run"` where it has none."""
    isolation: Isolation = "thread"
    """Who may reuse whose prefix: calls of the same `thread_id`; of the same `tenant`
    (`configurable={"sidequest_tenant": ...}`); or everyone (`"shared"`)."""
    prefill_chunk: int | None = None
    """Tokens of one prompt fed per engine step; `None` chooses by device, and where a budget is
    managed no more than about an eighth of it, since a chunk may exceed it for a step."""
    prompt_lookup: int | None = None
    """Most tokens of an answer guessed ahead in a step, from where its last words occurred
    before. Exact: the model checks every guess in the same pass. 0 never guesses; `None` guesses
    where a pass over a few tokens costs about as much as one over one: with int8 weights on a
    CPU, and on accelerators."""
    max_running: int = 64
    """Requests that may decode at the same time; others wait in order."""
    policy: str | Callable[[Any], Sequence[Any]] | None = None
    """Decides what goes: a name (`"staged"` is ours) or an object that is called with the facts.
    `None` manages nothing."""
    compress_first: bool = False
    """Whether the policy's rows are packed where that is enough, before any is evicted."""
    trigger: float = 0.8
    """Share of the budget above which a cycle gives bytes back..."""
    target: float = 0.7
    """...down to this share, so that the next cycles have nothing to do."""
    interval: int | Literal["adaptive"] = 16
    """Steps between two cycles, each a token of every running call; `"adaptive"` waits longer while
    nothing has to be done, and less the faster the cache grows."""
    protection: Protection = Protection()  # noqa: RUF009 - frozen
    schedule: Schedule | None = None
    """Keep less the longer a sequence is."""
    tiers: Tiers = Tiers()  # noqa: RUF009 - frozen
    guard: Guard = Guard()  # noqa: RUF009 - frozen
    observe: bool = False
    """Everything is monitored and logged, nothing is changed."""
    eviction: Literal["shared", "per_head"] = "shared"
    """Whether all KV heads keep the same tokens, or each as many of its own."""
    mask_only: bool = False
    """Evicted rows are hidden, not removed: frees nothing, for finding faults."""
    observed_layers: int | tuple[int, ...] = 4
    """Layers whose attention is looked at: so many, evenly spread, or these."""
    predictor: Path | str = "auto"
    """What guesses the attention that a token will get: `"auto"` is the learned predictor that
    comes with the package for this model, and the moving average of attention where there is none;
    `"none"` is always the average; a path is weights of `sidequest fit-importance`."""
    receipts_file: Path | str | None = None
    """JSON lines, one for each act."""

    @classmethod
    def preset(
        cls, name: Literal["conservative", "balanced", "aggressive"], **settings: Any
    ) -> CacheConfig:
        """Settings to begin with; `settings` replace some of them. A budget is needed.

        Raises:
            ConfigError: There is no such preset, or the settings contradict each other.
        """
        if name not in PRESETS:
            msg = f"there is no preset {name!r}; presets are {', '.join(map(repr, PRESETS))}"
            raise ConfigError(msg)
        return _made(cls, PRESETS[name] | settings, f"the preset {name!r}")

    @classmethod
    def from_toml(cls, source: Path | str) -> CacheConfig:
        """Settings from a TOML file, or from TOML text; groups are tables, as `[protection]`.

        `preset = "balanced"` begins with a preset; a group that is given replaces all of its.

        Raises:
            ConfigError: The file cannot be read, is no TOML, or holds settings that are refused.
        """
        tables = toml.read(source)
        given = {name: _read(name, value) for name, value in tables.items()}
        preset = given.pop("preset", None)
        return _made(cls, given, "the TOML") if preset is None else cls.preset(preset, **given)

    @property
    def is_managed(self) -> bool:
        """Whether something is managed, or observed: if not, all of it is exact."""
        return self.observe or self.policy not in (None, "none")

    def to_toml(self) -> str:
        """What differs from the defaults, as TOML text.

        Raises:
            ConfigError: The policy is an object.
        """
        tables: dict[str, Any] = {}
        for name, value in changed(self).items():
            tables[name] = changed(value) if isinstance(value, Settings) else value
        return toml.write(tables)

    def __post_init__(self) -> None:
        for name, least in COUNTS.items():
            value = getattr(self, name)
            if value is not None or name == "max_running":
                check_count(name, value, least=least)
        if self.isolation not in ("thread", "tenant", "shared"):
            msg = f"isolation is 'thread', 'tenant' or 'shared', found {self.isolation!r}"
            raise ConfigError(msg)
        if self.retain not in (None, "run", "thread"):
            msg = f"retain is 'run', 'thread' or None, found {self.retain!r}"
            raise ConfigError(msg)
        self._check_management()
        self._check_contradictions()

    def _check_management(self) -> None:
        if self.budget_share is not None:
            check_number("budget_share", self.budget_share, above=0.0, most=1.0)
        check_number("trigger", self.trigger, above=0.0, most=1.0)
        check_number("target", self.target, above=0.0, most=1.0)
        interval: object = self.interval
        if isinstance(interval, str) and interval != "adaptive":
            msg = f"interval is a number of tokens or 'adaptive', found {interval!r}"
            raise ConfigError(msg)
        if interval != "adaptive":
            check_count("interval", interval)
        for name in ("compress_first", "observe", "mask_only"):
            check_flag(name, getattr(self, name))
        for name, kind in PARTS.items():
            part = getattr(self, name)
            if not isinstance(part, kind) and not (name == "schedule" and part is None):
                msg = f"{name} must be a {kind.__name__}(...), found {part!r}"
                raise ConfigError(msg)
        if self.eviction not in ("shared", "per_head"):
            msg = f"eviction is 'shared' or 'per_head', found {self.eviction!r}"
            raise ConfigError(msg)
        layers: Any = self.observed_layers
        if isinstance(layers, (tuple, list)):
            for layer in layers:
                check_count("a layer of observed_layers", layer, least=0)
            object.__setattr__(self, "observed_layers", tuple(sorted(set(layers))))
        if not isinstance(layers, (tuple, list)) or not layers:
            check_count("observed_layers", layers or 0)
        object.__setattr__(self, "receipts_file", as_path("receipts_file", self.receipts_file))
        if self.predictor not in ("auto", "none"):
            # As it was given, so that the message names it; no setting at all is no path.
            given: object = self.predictor
            object.__setattr__(
                self, "predictor", as_path("predictor", "" if given is None else given)
            )
        _check_policy(self.policy)

    def _is_set(self, name: str) -> bool:
        return not self.observe and getattr(self, name) != PARTS[name]()

    def _check_contradictions(self) -> None:
        is_managed = self.policy not in (None, "none")
        budgets = (self.budget_tokens, self.budget_bytes, self.budget_share)
        has_limit = self.schedule is not None and self.schedule.has_limit
        floor = self.protection.n_sink + self.protection.recent_window
        rules = {
            "policy is set, but nothing says how much may stay: give budget_tokens, budget_bytes, "
            "budget_share or a schedule that keeps less with length": (
                is_managed and all(b is None for b in budgets) and not has_limit
            ),
            "schedule is set, but no policy follows it: give policy='staged' or another": (
                self.schedule is not None and not is_managed
            ),
            "compress_first is set, but there is no policy: give policy='h2o' or another": (
                self.compress_first and not is_managed
            ),
            "tiers are set, but without a policy nothing goes there, and nothing can be recalled: "
            "give policy='staged' or another": self.policy is None and self._is_set("tiers"),
            "guard is set, but without a policy there is nothing for it to look at: give "
            "policy='staged' or another": self.policy is None and self._is_set("guard"),
            f"target ({self.target}) must be less than trigger ({self.trigger}): a cycle begins "
            "above the one and ends at the other": self.target >= self.trigger,
            "eviction='per_head' excludes packed rows, since heads then differ in their rows: give "
            "tiers=Tiers(int8=False, int4=False)": (
                self.eviction == "per_head" and is_managed and (self.tiers.int8 or self.tiers.int4)
            ),
            "compress_first packs rows, which frees bytes and no rows: give budget_bytes or "
            "budget_share beside budget_tokens, or instead of it": (
                self.compress_first
                and self.budget_bytes is None
                and self.budget_share is None
                and not has_limit
            ),
            "compress_first needs tiers that pack: give tiers=Tiers(int8=True)": (
                self.compress_first and not (self.tiers.int8 or self.tiers.int4)
            ),
            "mask_only hides rows for all heads: give eviction='shared'": (
                self.mask_only and self.eviction == "per_head"
            ),
            f"budget_tokens is {self.budget_tokens}, but n_sink and recent_window alone protect "
            f"{floor} tokens: give a larger budget or protection=Protection(recent_window=...)": (
                is_managed and self.budget_tokens is not None and floor >= self.budget_tokens
            ),
        }
        for msg, is_broken in rules.items():
            if is_broken:
                raise ConfigError(msg)


def _check_policy(policy: object) -> None:
    if policy is None or (isinstance(policy, str) and policy):
        return
    if isinstance(policy, type) or not callable(policy):
        msg = f"policy must be a name or an object called with the facts, found {policy!r}"
        raise ConfigError(msg)
    try:
        hash(policy)
    except TypeError:
        msg = (
            f"the policy {policy!r} has no hash, and settings tell engines apart by it: make it a "
            "function or a frozen dataclass"
        )
        raise ConfigError(msg) from None


def _read(name: str, value: Any) -> Any:
    """A value of TOML as the setting wants it: tables become groups, arrays tuples."""
    if name in PARTS and isinstance(value, Mapping):
        return _made(PARTS[name], {k: _tuples(v) for k, v in value.items()}, f"[{name}]")
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _made(kind: type[S], given: Mapping[str, Any], where: str) -> S:
    known = [field.name for field in fields(cast(Any, kind))]
    for name in given:
        if name not in known:
            match = get_close_matches(name, known, n=1)
            hint = f"did you mean {match[0]!r}?" if match else f"settings are {', '.join(known)}"
            msg = f"{where} has an unknown setting {name!r}; {hint}"
            raise ConfigError(msg)
    return kind(**given)
