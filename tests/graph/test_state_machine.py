"""Random lives of threads on a real engine, against a model that recomputes from text.

The graph expands a thought into branches, scores them, may ask back, keeps one and gives the
others up. Turns, forks, failures, cancellations, pauses, resumes, replays, releases and
deletions come in any order. Beside it a model without segments: it holds each answer to plain
transformers, and knows from what the nodes themselves noted which calls' paths must be there.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, RetryPolicy, Send, interrupt

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.graph import SideQuestSaver, attach, backtrack, branch, keep_only, prune
from sidequest_langchain.graph.book import RunBook
from sidequest_langchain.graph.branches import BranchLedger
from sidequest_langchain.graph.retention import Retention
from sidequest_langchain.kv.radix import RadixTree
from sidequest_langchain.labels import PathSelector
from tests.graph.conftest import Tiny
from tests.graph.graphs import Log, check_events, on
from tests.graph.witness import Call, Witness
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

FAST = RetryPolicy(max_attempts=3, initial_interval=0.0, jitter=False, retry_on=ConnectionError)
THREADS = st.sampled_from(["t", "t", "u"])
TEXTS = st.sampled_from(["Plan", "then Rome", "then Oslo", "Now"])
WHICH = st.integers(0, 7)
"""Which of those there are, counted round."""


def one_or_none(old: list[Any], new: list[Any] | None) -> list[Any]:
    """What was found since it was last taken."""
    return [] if new is None else [*old, *new]


class Thought(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    found: Annotated[list[Any], one_or_none]
    parent: str | None


class Expansion(TypedDict):
    messages: list[AnyMessage]
    parent: str | None
    i: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the nodes of the next run are to do."""

    text: str = "Plan"
    n: int = 1
    failing: Literal["expand", "select"] = "expand"
    n_failures: int = 0
    """Of the first branch or of the choice: in so many attempts; three are all there are."""
    is_asking: bool = False
    way: Literal["prune", "keep_only", "backtrack", "nothing"] = "prune"
    kept: int = 0
    stuck: frozenset[int] = frozenset()
    """Branches that never end: they wait after their call, or generate without end."""
    is_stuck_within: bool = False


@dataclass
class Attempt:
    """What a node noted of one run of its body."""

    thread_id: str
    checkpoint_ns: str
    branch: str | None = None
    parent: str | None = None
    calls: list[Call] = field(default_factory=list)
    outcome: str = "begun"
    pruned: tuple[str, tuple[str, ...], str | None] | None = None
    """The way, and the branches it names."""


class Lives(RuleBasedStateMachine):
    """Threads of one graph, and beside them the calls whose paths must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Tiny.from_model(
            tiny_model("llama"), byte_tokenizer(), max_tokens=4, cache=CacheConfig()
        )
        self.witness, self.log = Witness(self.model), Log()
        self.saver = SideQuestSaver(InMemorySaver(), self.model)
        self.apps = {
            is_async: attach(self.graph(is_async), self.model, on_event=self.log, strict=True)
            for is_async in (False, True)
        }
        self.plan = Plan()
        self.attempts: list[Attempt] = []
        self.claims: dict[str, Call] = {}
        """By call: what must be resident."""
        self.opened: dict[str, dict[str, str | None]] = {"t": {}, "u": {}}
        """By thread: the branches that were opened and not pruned, with their parents."""
        self.waits: dict[str, str] = {}
        """By thread: `asked` or `failed` or `stuck`, if its last run did not end."""

    # -- the graph -------------------------------------------------------------------------

    def graph(self, is_async: bool) -> Any:
        builder = StateGraph(Thought)
        builder.add_node("expand", self.aexpand if is_async else self.expand, retry_policy=FAST)
        builder.add_node(
            "select",
            self.aselect if is_async else self.select,
            retry_policy=FAST,
            destinations=("__end__",),
        )
        builder.add_conditional_edges(START, self.sends, ["expand"])
        builder.add_edge("expand", "select")
        return builder.compile(checkpointer=self.saver)

    def sends(self, state: Thought) -> list[Send]:
        parent = state.get("parent")
        return [
            Send("expand", Expansion(messages=state["messages"], parent=parent, i=i))
            for i in range(self.plan.n)
        ]

    def begin(self, **facts: Any) -> Attempt:
        config = get_config()
        attempt = Attempt(
            thread_id=config["configurable"]["thread_id"],
            checkpoint_ns=config["metadata"]["langgraph_checkpoint_ns"],
            **facts,
        )
        self.attempts.append(attempt)
        return attempt

    def n_before(self, attempt: Attempt) -> int:
        same = [a for a in self.attempts if a.checkpoint_ns == attempt.checkpoint_ns]
        return len(same) - 1

    def took(self, attempt: Attempt, reply: Any) -> None:
        attempt.calls += [call for call in self.witness.calls if call.reply is reply]

    def thought(self, state: Expansion) -> tuple[Attempt, list[AnyMessage]]:
        name = f"{len(state['messages'])}.{state['i']}"
        attempt = self.begin(branch=name, parent=state["parent"])
        asked = HumanMessage(
            f"{self.plan.text} {state['i'] % 2}", id=f"{name} {len(self.attempts)}"
        )
        return attempt, [*state["messages"], asked]

    def end(self, attempt: Attempt, node: str, i: int = 0) -> None:
        """A body has done its work: it fails now, if it is to."""
        is_failing = node == self.plan.failing and i == 0
        if is_failing and self.n_before(attempt) < self.plan.n_failures:
            attempt.outcome = "failed"
            raise ConnectionError
        attempt.outcome = "ok"

    def expand(self, state: Expansion) -> Thought:
        attempt, messages = self.thought(state)
        with branch(str(attempt.branch), parent=attempt.parent):
            reply = self.witness.ask(messages)
        self.took(attempt, reply)
        self.end(attempt, "expand", state["i"])
        return {"found": [(attempt.branch, messages[-1], reply)]}

    async def aexpand(self, state: Expansion) -> Thought:
        attempt, messages = self.thought(state)
        is_stuck = state["i"] in self.plan.stuck
        if is_stuck:
            attempt.outcome = "stuck"
        with branch(str(attempt.branch), parent=attempt.parent):
            if is_stuck and self.plan.is_stuck_within:
                await self.model.bind(max_tokens=900).ainvoke(messages)
            else:
                self.took(attempt, reply := await self.witness.aask(messages))
        if is_stuck:
            await asyncio.Event().wait()
        self.end(attempt, "expand", state["i"])
        return {"found": [(attempt.branch, messages[-1], reply)]}

    def select(self, state: Thought) -> Any:
        attempt = self.begin()
        scored = "".join(reply.text for _, _, reply in sorted(state["found"], key=str))
        self.took(attempt, self.witness.ask([SystemMessage("score"), HumanMessage(scored[:12])]))
        return self.choose(attempt, state)

    async def aselect(self, state: Thought) -> Any:
        attempt = self.begin()
        scored = "".join(reply.text for _, _, reply in sorted(state["found"], key=str))
        reply = await self.witness.aask([SystemMessage("score"), HumanMessage(scored[:12])])
        self.took(attempt, reply)
        return self.choose(attempt, state)

    def choose(self, attempt: Attempt, state: Thought) -> Any:
        found = sorted(state["found"], key=lambda one: str(one[0]))
        name, asked, reply = found[self.plan.kept % len(found)]
        update: Any = {"messages": [asked, reply], "found": None, "parent": name}
        others = tuple(dict.fromkeys(other for other, _, _ in found if other != name))
        way = self.plan.way
        attempt.pruned = (way, others, name)
        answer: Any = update
        if way == "prune":
            prune(*others)
        elif way == "keep_only":
            keep_only(name)
        elif way == "backtrack":
            answer = backtrack(prune=others, update=update)
        if self.plan.is_asking:
            attempt.outcome = "asked"
            interrupt("ok?")
        self.end(attempt, "select")
        return answer

    # -- the model -------------------------------------------------------------------------

    def account(self, n_attempts: int) -> None:
        """What the attempts left that came after the first so many."""
        unfinished: set[str] = set()
        for attempt in self.attempts[n_attempts:]:
            ns = attempt.checkpoint_ns
            if attempt.branch is not None:
                opened = self.opened[attempt.thread_id]
                opened[attempt.branch] = attempt.parent or opened.get(attempt.branch)
            if attempt.outcome == "ok":
                self.forget(lambda call, ns=ns: call.checkpoint_ns == ns)
                unfinished.discard(ns)
            elif attempt.outcome != "asked":
                unfinished.add(ns)
            self.claims |= {str(call.reply.id): call for call in attempt.calls}
            if attempt.outcome == "ok" and attempt.pruned is not None:
                self.give_up(attempt)
        self.forget(lambda call: call.checkpoint_ns in unfinished)

    def give_up(self, attempt: Attempt) -> None:
        assert attempt.pruned is not None
        way, names, kept = attempt.pruned
        opened = self.opened[attempt.thread_id]
        if way == "nothing":
            return
        if way == "keep_only":
            line = [kept]
            while (above := opened.get(line[-1])) is not None and above not in line:
                line.append(above)
            names = tuple(b for b, p in opened.items() if p == opened.get(kept) and b not in line)
        lost, grown = set(names), True
        while grown:
            below = {b for b, above in opened.items() if above in lost}
            grown = not below <= lost
            lost |= below
        for name in lost:
            opened.pop(name, None)
        self.forget(lambda call: call.thread_id == attempt.thread_id and call.branch in lost)

    def forget(self, is_gone: Callable[[Call], bool]) -> None:
        self.claims = {k: call for k, call in self.claims.items() if not is_gone(call)}

    def branches(self, thread: str) -> list[str]:
        return sorted({str(c.branch) for c in self.claims.values() if c.thread_id == thread})

    # -- acts ------------------------------------------------------------------------------

    def run(self, given: Any, config: Any, plan: Plan, *, is_async: bool) -> None:
        """Run the graph, and account for what it did."""
        if plan.failing == "expand" and plan.n_failures == 3:
            plan = replace(plan, n=1)  # it would depend on the hour which siblings are cut short
        self.plan, n_attempts = plan, len(self.attempts)
        thread: str = config["configurable"]["thread_id"]
        self.waits.pop(thread, None)
        app = self.apps[is_async]
        try:
            if is_async:
                asyncio.run(app.ainvoke(given, config))
            else:
                app.invoke(given, config)
        except ConnectionError:
            self.waits[thread] = "failed"
        made = self.attempts[n_attempts:]
        if any(a.outcome == "asked" for a in made):
            self.waits[thread] = "asked"
        assert (self.waits.get(thread) == "failed") == any(
            [a.outcome for a in made if a.checkpoint_ns == ns][-1] == "failed"
            for ns in {a.checkpoint_ns for a in made}
        )
        self.account(n_attempts)

    def turn(self, text: str) -> Any:
        return {"messages": [HumanMessage(text)], "found": None}

    PLANS = st.builds(
        Plan,
        text=TEXTS,
        n=st.sampled_from([1, 2, 2, 3]),
        failing=st.sampled_from(["expand", "select"]),
        n_failures=st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
        is_asking=st.sampled_from([False, False, False, True]),
        way=st.sampled_from(["prune", "keep_only", "backtrack", "nothing"]),
        kept=WHICH,
    )

    @rule(thread=THREADS, text=TEXTS, plan=PLANS, is_async=st.booleans())
    def go_on(self, thread, text, plan, is_async):
        self.run(self.turn(text), on(thread), plan, is_async=is_async)

    @precondition(lambda self: self.waits)
    @rule(which=WHICH, plan=PLANS, is_async=st.booleans())
    def resume(self, which, plan, is_async):
        thread = sorted(self.waits)[which % len(self.waits)]
        given = Command(resume="yes") if self.waits[thread] == "asked" else None
        if self.waits[thread] == "asked":
            plan = replace(plan, is_asking=False)
        self.run(given, on(thread), plan, is_async=is_async)

    @precondition(lambda self: self.claims)
    @rule(
        thread=THREADS, text=TEXTS, plan=PLANS, stuck=st.sets(st.integers(0, 2), min_size=1),
        is_within=st.booleans(),
    )  # fmt: skip
    def cancel(self, thread, text, plan, stuck, is_within):
        n = max(stuck) + 1
        self.plan = replace(
            plan, n=n, n_failures=0, stuck=frozenset(stuck), is_stuck_within=is_within
        )
        n_attempts = len(self.attempts)
        asyncio.run(self.cancelled(thread, text, n - len(stuck)))
        self.account(n_attempts)
        self.waits[thread] = "stuck"

    async def cancelled(self, thread: str, text: str, n_done: int) -> None:
        """Run, and cancel it when whatever is not stuck has ended."""
        n_calls, n_begun = len(self.witness.calls), self.model.kv.serial
        n_ends = len(self.log.outcomes())
        running = asyncio.create_task(self.apps[True].ainvoke(self.turn(text), on(thread)))
        n_waiting = 0 if self.plan.is_stuck_within else self.plan.n - n_done
        async with asyncio.timeout(20):
            while (
                self.log.outcomes()[n_ends:].count(("expand", "ok")) < n_done
                or len(self.witness.calls) < n_calls + n_done + n_waiting
                or self.model.kv.serial < n_begun + self.plan.n
            ):
                if running.done():
                    await running
                await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(20):
            while self.model.engine._core.call(self.is_running).result():
                await asyncio.sleep(0.001)

    def is_running(self) -> bool:
        return any(path.is_running for path in self.model.engine._core.tree.paths.values())

    @rule(thread=THREADS, text=TEXTS, plan=PLANS, which=WHICH, is_async=st.booleans())
    def fork(self, thread, text, plan, which, is_async):
        """Another turn from a checkpoint at which a turn had ended."""
        states = [s for s in self.apps[False].get_state_history(on(thread)) if not s.next]
        if states:
            config = states[which % len(states)].config
            self.run(self.turn(text), config, plan, is_async=is_async)

    @rule(thread=THREADS, plan=PLANS, which=WHICH, is_async=st.booleans())
    def replay(self, thread, plan, which, is_async):
        """A choice is made again, and may be another one."""
        history = self.apps[False].get_state_history(on(thread))
        states = [s for s in history if s.next == ("select",)]
        if states:
            self.run(None, states[which % len(states)].config, plan, is_async=is_async)

    @precondition(lambda self: len(self.claims) > 3)
    @rule(thread=THREADS, kept=WHICH, is_async=st.booleans())
    def change_the_mind(self, thread, kept, is_async):
        """The first choice is made again: what was built on the branch it gives up goes too."""
        history = self.apps[False].get_state_history(on(thread))
        states = [s for s in history if s.next == ("select",) and len(s.values["found"]) > 1]
        if states:
            plan = Plan(way="prune", kept=kept)
            self.run(None, states[-1].config, plan, is_async=is_async)

    @precondition(lambda self: self.claims)
    @rule(thread=THREADS, which=WHICH)
    def release(self, thread, which):
        names = self.branches(thread)
        if names:
            name = names[which % len(names)]
            mine = [c for c in self.claims.values() if (c.thread_id, c.branch) == (thread, name)]
            receipt = self.model.kv.release(name, thread_id=thread)
            assert receipt.n_paths == len(mine)
            self.forget(lambda call: call in mine)

    @precondition(lambda self: len(self.claims) > 5)
    @rule(thread=THREADS)
    def delete(self, thread):
        """The saver frees what the thread held, and its branches are forgotten."""
        self.saver.delete_thread(thread)
        self.opened[thread] = {}
        self.forget(lambda call: call.thread_id == thread)
        self.waits.pop(thread, None)

    @rule(thread=THREADS)
    def save_and_restore(self, thread):
        """What was saved comes back as it was, and what still is there is shared."""
        mine = {k: call for k, call in self.claims.items() if call.thread_id == thread}
        if not mine:
            return
        n_bytes = self.model.n_bytes
        with tempfile.TemporaryDirectory() as folder:
            saved = self.model.kv.save(thread, Path(folder))
            self.model.kv.load(Path(folder), thread)
            self.witness.check(self.claims.values())
            self.model.kv.clear(thread)
            self.witness.check([c for c in self.claims.values() if c.thread_id != thread])
            loaded = self.model.kv.load(Path(folder), thread)
        assert self.model.n_bytes == n_bytes
        heads = {call.row[: n + 1] for call in mine.values() for n in range(len(call.row))}
        assert saved.n_tokens == loaded.n_tokens == len(heads)

    # -- what must hold --------------------------------------------------------------------

    @invariant()
    def just_what_somebody_wants_is_there(self):
        self.witness.check(self.claims.values())

    def teardown(self):
        check_events(self.log.events)
        for thread in ("t", "u"):
            self.model.kv.clear(thread)
        self.witness.check([])
        self.model.engine.close()


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=14,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# -- the machine finds faults --------------------------------------------------------------


def match_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """The reused prefix is longer than what is equal."""
    match = RadixTree.match

    def mutant(self: RadixTree, scope: str, ids: Any) -> Any:
        found, n = match(self, scope, ids)
        if found is not None and n < min(found.end, len(ids)):
            n += 1
        return found, n

    patch.setattr(RadixTree, "match", mutant)


def keep_abandoned_attempts(patch: pytest.MonkeyPatch) -> None:
    """What a failed or interrupted attempt left stays."""
    patch.setattr(Retention, "after_step", lambda self, step: [])


def commit_at_once(patch: pytest.MonkeyPatch) -> None:
    """A prune takes effect although its node fails or pauses."""
    stage = RunBook.stage
    patch.setattr(RunBook, "stage", lambda self, *args: stage(self, *args) and False)


def forget_descendants(patch: pytest.MonkeyPatch) -> None:
    """A prune leaves what was declared below."""
    patch.setattr(BranchLedger, "descendants", lambda self, branches: ())


def release_in_every_thread(patch: pytest.MonkeyPatch) -> None:
    """A name names the branches of other threads too."""
    selects = PathSelector.selects

    def mutant(self: PathSelector, label: Any, serial: int) -> bool:
        return selects(replace(self, thread_id=None) if self.path_id else self, label, serial)

    patch.setattr(PathSelector, "selects", mutant)


@pytest.mark.parametrize(
    "mutate",
    [
        match_one_too_many,
        keep_abandoned_attempts,
        commit_at_once,
        forget_descendants,
        release_in_every_thread,
    ],
)
def test_a_broken_cache_does_not_live_long(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    quick = settings(
        TestLives.settings,
        max_examples=60,
        phases=[Phase.generate],
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Lives, settings=quick)
