"""Random acts in random order against a model that knows no segments.

The model: what each path claims, as plain tokens. What must be resident is the union of the heads
of all claims and pins: nothing less (a live path would read garbage), nothing more (a leak).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.segment import Path, Segment, n_common
from sidequest_langchain.labels import PathSelector, StepLabel
from tests.kv.growing import (
    TOKEN_BYTES,
    Grove,
    check_rows,
    resident_heads,
    storage_bytes,
    tokens_to,
)

TEXT = st.text("ab", max_size=5)
PROMPTS = st.text("ab", min_size=1, max_size=9)
SCOPES = st.sampled_from(["s", "s", "s", "z"])
LABELS = st.builds(
    dict,
    thread_id=st.sampled_from([None, "t", "u"]),
    checkpoint_ns=st.sampled_from([None, "a:1", "ab:1", "a:1|b:1"]),
    branch=st.sampled_from([None, None, "x", "y"]),
)
SELECTORS = st.builds(
    PathSelector,
    path_id=st.sampled_from([None, "x", "y", "1", "a:1", "a:1|b:1", "c0", "c1", "c2", "c5"]),
    thread_id=st.sampled_from([None, None, None, "t"]),
    at_ns=st.sampled_from([None, None, None, "a:1"]),
    n_serial_below=st.sampled_from([None, None, 2, 5]),
)
WHICH = st.integers(0, 9)
"""Which of the paths or pins there are, counted round."""


@dataclass
class Claim:
    """What the model knows of a path."""

    path: Path
    scope: str
    tokens: list[int]
    is_running: bool = True
    is_released: bool = False

    @property
    def label(self) -> StepLabel:
        return self.path.label


@dataclass
class Pinned:
    """A pin: it keeps the tokens of its path, or what that path stood on when it failed."""

    segment: Segment
    scope: str
    tokens: list[int]


class TreeMachine(RuleBasedStateMachine):
    """A tree, and beside it the claims."""

    def __init__(self) -> None:
        super().__init__()
        self.grove = Grove()
        self.tree = self.grove.tree
        self.claims: list[Claim] = []
        self.pins: list[Pinned] = []
        self.n_swept_bytes = 0

    # -- the model -------------------------------------------------------------------------

    @property
    def running(self) -> list[Claim]:
        return [c for c in self.claims if c.is_running]

    def is_held(self, claim: Claim) -> bool:
        return claim.is_running or any(p.segment is claim.path.tip for p in self.pins)

    def needed(self, *, held_only: bool = False) -> set[tuple[str, tuple[int, ...]]]:
        """(scope, tokens up to it) of every row that somebody needs."""
        ends = [(c.scope, tuple(c.tokens)) for c in self.claims if not held_only or self.is_held(c)]
        ends += [(pin.scope, tuple(pin.tokens)) for pin in self.pins]
        return {(scope, t[:n]) for scope, t in ends for n in range(1, len(t) + 1)}

    def drop_idle(self, is_let_go: Callable[[Claim], bool] = lambda claim: False) -> None:
        """Forget claims that were let go or are down to no token, but for those still held."""
        self.claims = [c for c in self.claims if self.is_held(c) or (c.tokens and not is_let_go(c))]

    # -- acts ------------------------------------------------------------------------------

    @rule(scope=SCOPES, prompt=PROMPTS, label=LABELS, superseded=st.sets(WHICH, max_size=2))
    def begin(self, scope, prompt, label, superseded):
        wanted = [ord(letter) for letter in prompt]
        heads = self.needed()
        longest = max(
            n for n in range(len(wanted) + 1) if not n or (scope, tuple(wanted[:n])) in heads
        )
        assert self.tree.match(scope, wanted)[1] == longest
        path = self.grove.begin(prompt, f"c{self.tree.serial % 10}", scope, **label)
        assert path.n_reused == longest
        self.claims.append(Claim(path, scope, wanted[:longest]))
        if superseded:
            self.supersede(self.claims[-1], {f"c{i}" for i in superseded})

    def supersede(self, new: Claim, call_ids: set[str]) -> None:
        for old in self.claims:
            if old.label.call_id not in call_ids or self.is_held(old):
                continue
            common = n_common(old.tokens, new.tokens) if old.scope == new.scope else 0
            lineage = old.path.tip.path()
            pinned = [len(pin.tokens) for pin in self.pins if pin.segment in lineage]
            old.tokens = old.tokens[: max(common, *pinned, 0)]
        self.drop_idle()
        self.tree.supersede(new.path, call_ids)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, text=TEXT, at_once=st.booleans())
    def extend(self, which, text, at_once):
        claim = self.running[which % len(self.running)]
        self.grove.feed(claim.path, text, at_once=at_once)
        claim.tokens.extend(map(ord, text))

    @precondition(lambda self: self.running)
    @rule(which=WHICH, n=st.integers(1, 5))
    def reserve_in_vain(self, which, n):
        self.tree.reserve(self.running[which % len(self.running)].path, n)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, n=st.integers(0, 4))
    def crop(self, which, n):
        claim = self.running[which % len(self.running)]
        n_rows = min(n, claim.path.tip.n_rows)
        del claim.tokens[claim.path.tip.start + n_rows :]
        self.tree.crop(claim.path, n_rows)

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def commit(self, which):
        claim = self.running[which % len(self.running)]
        self.tree.commit(claim.path)
        claim.is_running = False
        self.drop_idle(lambda c: c is claim and c.is_released)

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def discard(self, which):
        claim = self.running[which % len(self.running)]
        del claim.tokens[claim.path.tip.start :]
        self.claims.remove(claim)
        self.tree.discard(claim.path)

    @rule(selector=SELECTORS)
    def release(self, selector):
        chosen = [c for c in self.claims if selector.selects(c.label, c.path.serial)]
        held = [c for c in chosen if self.is_held(c)]
        n_bytes, n_tokens = self.tree.n_bytes, self.tree.n_tokens
        predicted = self.tree.predict_release(selector)
        receipt = self.tree.release(selector, reason="test")
        assert predicted == replace(receipt, reason="prediction")
        assert receipt.freed_bytes == n_bytes - self.tree.n_bytes
        assert receipt.freed_tokens == n_tokens - self.tree.n_tokens
        assert (receipt.n_paths, receipt.n_deferred) == (len(chosen), len(held))
        for claim in chosen:
            claim.is_released = True
        self.drop_idle(lambda c: c in chosen)

    @precondition(lambda self: self.claims)
    @rule(which=WHICH)
    def pin(self, which):
        claim = self.claims[which % len(self.claims)]
        # The list is the claim's own while it runs: the pin follows its path.
        tokens = claim.tokens if claim.is_running else list(claim.tokens)
        self.pins.append(Pinned(self.tree.pin(claim.path), claim.scope, tokens))

    @precondition(lambda self: self.pins)
    @rule(which=WHICH)
    def unpin(self, which):
        segment = self.pins.pop(which % len(self.pins)).segment
        on_it = [c for c in self.claims if c.path.tip is segment]
        self.tree.unpin(segment)
        self.drop_idle(lambda c: c in on_it and c.is_released)

    @rule(n_tokens=st.integers(0, 20))
    def sweep(self, n_tokens):
        n_bytes, held = self.tree.n_bytes, self.needed(held_only=True)
        # Before the sweep: a path that it moves back may come to stand on a pinned segment.
        idle = [c for c in self.claims if not self.is_held(c)]
        freed = self.tree.sweep(lambda: self.tree.n_tokens > n_tokens)
        assert freed == n_bytes - self.tree.n_bytes
        self.n_swept_bytes += freed
        assert self.tree.n_tokens <= n_tokens or resident_heads(self.tree) == held
        for claim in idle:
            stays = claim.path.serial in self.tree.paths
            left = list(tokens_to(claim.path.tip)) if stays else []
            assert left == claim.tokens[: len(left)]
            claim.tokens = left
        self.drop_idle()

    # -- what always holds -----------------------------------------------------------------

    @invariant()
    def the_books_balance(self):
        check_integrity(self.tree)
        tensors = [t for s in self.tree.segments() for t in (*s.keys, *s.values)]
        assert self.tree.n_bytes == storage_bytes(tensors) <= self.tree.peak_bytes
        told = sum(r.freed_bytes for r in self.grove.receipts)
        assert self.tree.n_released_bytes == told + self.n_swept_bytes

    @invariant()
    def the_paths_are_those_of_the_model(self):
        assert list(self.tree.paths.values()) == [c.path for c in self.claims]
        for claim in self.claims:
            assert list(tokens_to(claim.path.tip)) == claim.tokens
            assert claim.path.is_running == claim.path.tip.is_open == claim.is_running

    @invariant()
    def just_what_somebody_needs_is_resident(self):
        assert resident_heads(self.tree) == self.needed()

    @invariant()
    def every_row_is_the_one_its_tokens_ask_for(self):
        check_rows(self.grove)

    @invariant()
    def nothing_is_stored_twice_once_it_is_closed(self):
        first = [
            (id(s.parent), s.token_ids[0])
            for s in self.tree.segments()
            if s.n_rows and not s.is_open
        ]
        assert len(first) == len(set(first))
        if not self.running:
            assert self.tree.n_bytes == len(self.needed()) * TOKEN_BYTES

    def teardown(self):
        for pin in self.pins:
            self.tree.unpin(pin.segment)
        for claim in self.running:
            self.tree.commit(claim.path)
        self.tree.release(PathSelector(), reason="test")
        assert (self.tree.n_bytes, self.tree.n_tokens, self.tree.paths) == (0, 0, {})
        assert not list(self.tree.segments())


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
