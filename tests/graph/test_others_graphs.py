"""Two shapes of tree search that LangGraph's users know, in our own words.

*Tree of thoughts*: every candidate of the beam is expanded by a `Send`, all are scored, the best
few stay, until one is good enough or the tree is deep enough. *Language agent tree search*: a
leaf is chosen by its upper confidence bound, several continuations are sampled, judged, and
their worth is told to the nodes above; leaves are come back to, and nothing is ever pruned.

Each is run over one cache and over none (a fresh engine for every call): the same answers, and
no byte left when a run is over.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import LLMResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Send

from sidequest_langchain.graph import attach, branch, prune
from tests.graph.conftest import BYTES_PER_TOKEN, Tiny
from tests.graph.graphs import Log, check_events, on

MakeChat = Callable[..., Tiny]
SAMPLED = {"temperature": 1.0}


class Caller:
    """Calls a model: one that keeps its cache, or a new one each time."""

    def __init__(self, make: Callable[[], Tiny], *, is_cold: bool) -> None:
        self._make = make
        self.model = None if is_cold else make()
        self.reused: list[tuple[int, int]] = []
        """Of each prompt: its tokens, and those that were read from the cache."""

    def generate(self, prompts: Sequence[Sequence[BaseMessage]], **settings: Any) -> LLMResult:
        model = self.model or self._make()
        result = model.generate([list(prompt) for prompt in prompts], **settings)
        for generations in result.generations:
            usages: list[Any] = [one.message.usage_metadata for one in generations]  # type: ignore[union-attr]
            # Of several samples, all but the first one read the first one's prompt.
            read = min(usage["input_token_details"]["cache_read"] for usage in usages)
            self.reused.append((usages[0]["input_tokens"], read))
        if self.model is None:
            model.engine.close()
        return result

    def sample(self, prompt: Sequence[BaseMessage], n: int) -> list[str]:
        """Several answers. Seeded by the prompt: what runs beside it must not matter."""
        (answers,) = self.generate([prompt], n=n, seed=number(prompt), **SAMPLED).generations
        return [answer.text for answer in answers]

    def answer_all(self, prompts: Sequence[Sequence[BaseMessage]]) -> list[str]:
        """One greedy answer to each, as one batch."""
        if self.model is not None:
            return [reply.text for reply in self.model.batch([list(p) for p in prompts])]
        return [self.generate([prompt]).generations[0][0].text for prompt in prompts]

    @property
    def n_bytes(self) -> int:
        return 0 if self.model is None else self.model.n_bytes


def number(what: Any) -> int:
    """A number that a text always gives."""
    texts = [m.text for m in what] if isinstance(what, (list, tuple)) else [str(what)]
    return zlib.crc32("|".join(texts).encode())


_WITHOUT: dict[str, Any] = {}


def without_a_cache(name: str, run: Callable[[Caller], Any], make: MakeChat) -> Any:
    """What a run gives over a fresh engine for every call; it is run once."""
    if name not in _WITHOUT:
        cold = Caller(lambda: make(max_tokens=5), is_cold=True)
        _WITHOUT[name] = run(cold)
        assert all(read == 0 for _, read in cold.reused)
    return _WITHOUT[name]


# -- tree of thoughts --------------------------------------------------------------------


class Candidate(TypedDict):
    id: str
    parent: str | None
    thoughts: tuple[str, ...]
    score: float


def or_clear(old: list[Candidate], new: Any) -> list[Candidate]:
    """Candidates add up, until the list is cleared."""
    return [] if new == "clear" else [*old, *new]


class Thinking(TypedDict, total=False):
    problem: str
    candidates: Annotated[list[Candidate], or_clear]
    scored: Annotated[list[Candidate], or_clear]
    beam: list[Candidate]
    depth: int
    seed: Candidate | None


def thinker(caller: Caller, *, beam_size: int, is_async: bool, **compiled: Any) -> Any:
    """Expand, score, prune, and expand again."""

    def prompt(problem: str, thoughts: Sequence[str]) -> list[BaseMessage]:
        said = [(AIMessage(text), HumanMessage("then?")) for text in thoughts]
        rules = SystemMessage("Plan the trip from Paris to Rome")
        return [rules, HumanMessage(problem), *itertools.chain(*said)]

    def expand(state: Thinking) -> Any:
        seed = state.get("seed")
        thoughts = seed["thoughts"] if seed else ()
        parent = seed["id"] if seed else None
        with branch(f"{parent or 'root'} expanded", parent=parent):
            texts = caller.sample(prompt(state["problem"], thoughts), 3)
        found = []
        for i, text in enumerate(texts):
            name = f"{parent or ''}{i}"
            candidate = Candidate(id=name, parent=parent, thoughts=(*thoughts, text), score=0.0)
            # Each goes on from what it is about to be judged by: that is its branch.
            with branch(name, parent=f"{parent or 'root'} expanded"):
                caller.generate([prompt(state["problem"], candidate["thoughts"])])
            found.append(candidate)
        return {"candidates": found}

    async def aexpand(state: Thinking) -> Any:
        return await asyncio.to_thread(expand, state)

    def score(state: Thinking) -> Any:
        asked = [[*prompt(state["problem"], c["thoughts"]), HumanMessage("score")]
                 for c in state["candidates"]]  # fmt: skip
        with branch("scores"):
            verdicts = caller.answer_all(asked)
        scored = [
            {**c, "score": number((HumanMessage(v), HumanMessage(c["id"]))) % 1000 / 1000}
            for c, v in zip(state["candidates"], verdicts, strict=True)
        ]
        return {"scored": scored, "candidates": "clear"}

    def select(state: Thinking) -> Any:
        best = sorted(state["scored"], key=lambda c: (-c["score"], c["id"]))[:beam_size]
        tried = {n: None for c in state["scored"] for n in itertools.accumulate(c["id"])}
        line = {n for c in best for n in itertools.accumulate(c["id"])}
        prune(*[name for name in tried if name not in line], "scores")
        return {"beam": best, "scored": "clear", "depth": state["depth"] + 1}

    def go_on(state: Thinking) -> Any:
        if state["depth"] >= 3 or state["beam"][0]["score"] > 0.995:
            return "__end__"
        return [Send("expand", {**state, "seed": candidate}) for candidate in state["beam"]]

    builder = StateGraph(Thinking)
    builder.add_node("expand", aexpand if is_async else expand)
    builder.add_node("score", score)
    builder.add_node("select", select)
    builder.add_edge(START, "expand")
    builder.add_edge("expand", "score")
    builder.add_edge("score", "select")
    builder.add_conditional_edges("select", go_on, ["expand", "__end__"])
    return builder.compile(**compiled)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_on_a_thread", [False, True])
def test_a_beam_of_thoughts_is_the_same_without_a_cache(
    is_async: bool, is_on_a_thread: bool, tiny_chat: MakeChat
) -> None:
    log = Log()

    def run(app: Any, n: int) -> Any:
        config = on(f"t{n}") if is_on_a_thread else {}
        given = {"problem": f"{n + 2} days", "depth": 0}
        if app is not attached:
            return app.invoke(given)
        return asyncio.run(app.ainvoke(given, config)) if is_async else app.invoke(given, config)

    warm = Caller(lambda: tiny_chat(max_tokens=5), is_cold=False)
    saver = InMemorySaver() if is_on_a_thread else None
    graph = thinker(warm, beam_size=2, is_async=is_async, checkpointer=saver)
    assert warm.model is not None
    attached = attach(graph, warm.model, on_event=log, strict=True)
    for n in range(2):
        found = run(attached, n)
        assert found["depth"] == 3
        assert {len(c["thoughts"]) for c in found["beam"]} == {3}
        if is_on_a_thread:
            # Of all that was thought, the beam is left, and what it stands on.
            labels = [lb for i in warm.model.kv.segments(f"t{n}") for lb in i.labels]
            line = {c["id"][:k] for c in found["beam"] for k in range(1, 4)}
            left = {lb.branch for lb in labels}
            assert left == line | {f"{name[:-1] or 'root'} expanded" for name in line}
            warm.model.kv.clear(f"t{n}")
        assert warm.n_bytes == 0
        if n == 0:
            first = found
    bare = lambda cold: run(thinker(cold, beam_size=2, is_async=False), 0)  # noqa: E731
    assert without_a_cache("thoughts", bare, tiny_chat) == first
    n_read, n_asked = (sum(part) for part in zip(*[(r, p) for p, r in warm.reused], strict=True))
    assert n_read > 0.6 * n_asked
    check_events(log.events)


# -- language agent tree search ----------------------------------------------------------


class Leaf(TypedDict):
    id: str
    parent: str | None
    texts: tuple[str, ...]
    """What was done and observed on the way to it."""
    value: float
    visits: int
    note: str


class Searching(TypedDict, total=False):
    problem: str
    nodes: dict[str, Leaf]
    chosen: list[str]


def bound(nodes: dict[str, Leaf], leaf: Leaf) -> float:
    """The upper confidence bound: worth, and how little is known of it."""
    parent = nodes[str(leaf["parent"])]
    return leaf["value"] / leaf["visits"] + math.sqrt(
        2 * math.log(max(2, parent["visits"])) / leaf["visits"]
    )


def searcher(caller: Caller, *, n: int, n_rounds: int, **compiled: Any) -> Any:
    """Choose a leaf, sample what could come next, judge it, and tell the nodes above."""

    def prompt(problem: str, leaf: Leaf) -> list[BaseMessage]:
        said = [HumanMessage(t) if i % 2 else AIMessage(t) for i, t in enumerate(leaf["texts"])]
        return [SystemMessage("Plan the trip"), HumanMessage(problem), *said]

    def choose(nodes: dict[str, Leaf]) -> Leaf:
        at = nodes["root"]
        while children := [leaf for leaf in nodes.values() if leaf["parent"] == at["id"]]:
            at = max(children, key=lambda leaf: (bound(nodes, leaf), leaf["id"]))
        return at

    def expand(state: Searching) -> Any:
        nodes = {name: Leaf(**leaf) for name, leaf in state["nodes"].items()}
        at = choose(nodes)
        with branch(at["id"]):
            actions = caller.sample(prompt(state["problem"], at), n)
        new = []
        for i, action in enumerate(actions):
            observed = f"Observation: {number(action) % 97}"
            name = f"{at['id']}.{i}"
            texts = (*at["texts"], action, observed)
            new.append(Leaf(id=name, parent=at["id"], texts=texts, value=0.0, visits=0, note=""))
        with branch("reflections"):
            asked = [[*prompt(state["problem"], leaf), HumanMessage("score")] for leaf in new]
            notes = caller.answer_all(asked)
        for leaf, note in zip(new, notes, strict=True):
            leaf["note"] = note
            nodes[leaf["id"]] = leaf
            worth = number(note) % 100 / 100
            above: str | None = leaf["id"]
            while above is not None:
                nodes[above]["value"] += worth
                nodes[above]["visits"] += 1
                above = nodes[above]["parent"]
        return {"nodes": nodes, "chosen": [*state["chosen"], at["id"]]}

    def go_on(state: Searching) -> str:
        return "__end__" if len(state["chosen"]) >= n_rounds else "expand"

    builder = StateGraph(Searching)
    builder.add_node("expand", expand)
    builder.add_edge(START, "expand")
    builder.add_conditional_edges("expand", go_on, ["expand", "__end__"])
    return builder.compile(**compiled)


def start(n: int) -> Searching:
    root = Leaf(id="root", parent=None, texts=(), value=0.0, visits=0, note="")
    return {"problem": f"{n + 2} days", "nodes": {"root": root}, "chosen": []}


@pytest.mark.parametrize("is_on_a_thread", [False, True])
def test_a_search_that_comes_back_to_leaves_is_the_same_without_a_cache(
    is_on_a_thread: bool, tiny_chat: MakeChat
) -> None:
    log = Log()
    warm = Caller(lambda: tiny_chat(max_tokens=5), is_cold=False)
    assert warm.model is not None
    app = attach(searcher(warm, n=5, n_rounds=6), warm.model, on_event=log, strict=True)
    for n in range(2):
        n_calls = len(warm.reused)
        found = app.invoke(start(n), on(f"t{n}") if is_on_a_thread else {})
        # It did come back: a leaf was chosen that another round had left behind.
        chosen = found["chosen"]
        assert any(not later.startswith(earlier) for earlier, later in itertools.pairwise(chosen))
        # Of a leaf that is come back to, the way there is still at hand.
        assert all(read > n_asked / 2 for n_asked, read in warm.reused[n_calls + 1 :])
        if is_on_a_thread:
            assert warm.n_bytes > 0
            assert {lb.branch for i in warm.model.kv.segments(f"t{n}") for lb in i.labels} == {
                *chosen, "reflections"
            }  # fmt: skip
            n_bytes, n_tokens = warm.n_bytes, warm.model.kv.usage().n_tokens
            assert n_bytes == BYTES_PER_TOKEN * n_tokens
            warm.model.kv.clear(f"t{n}")
        assert warm.n_bytes == 0
        if n == 0:
            first = found
    bare = lambda cold: searcher(cold, n=5, n_rounds=6).invoke(start(0))  # noqa: E731
    assert without_a_cache("search", bare, tiny_chat) == first
    check_events(log.events)
