"""A witness of every model call in a graph: what it must answer, and what it must leave.

It knows plain transformers and text, no tree: the answer to each prompt comes from the oracle,
and the map of segments that must result from a set of calls is worked out from their tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.config import get_config

from sidequest_langchain.chat.step import BRANCH
from tests.graph.conftest import BYTES_PER_TOKEN, Tiny


@dataclass(frozen=True, slots=True)
class Call:
    """One model call that ended well, and where it was made."""

    reply: AIMessage
    row: tuple[int, ...]
    """The tokens whose K/V it leaves: its prompt and what was fed of its answer."""
    n_prompt: int
    n_reused: int
    thread_id: str | None
    checkpoint_ns: str | None
    node: str | None
    step: int | None
    branch: str | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes around it, outermost first."""
        parts = (self.checkpoint_ns or "").split("|")
        return tuple(part.rsplit(":", 1)[0] for part in parts if not part.isdigit())


class Witness:
    """Calls a model for the nodes of a graph, and holds each answer to the oracle."""

    def __init__(self, model: Tiny) -> None:
        self.model = model
        self.calls: list[Call] = []
        """Those that ended well, in the order they ended."""
        self._lock = threading.Lock()

    def ask(self, messages: Sequence[BaseMessage]) -> AIMessage:
        """Call the model here."""
        prompt = self.model.prompt_ids(messages)
        return self._take(prompt, messages, self.model.invoke(messages))

    async def aask(self, messages: Sequence[BaseMessage]) -> AIMessage:
        """The same, asynchronously."""
        prompt = self.model.prompt_ids(messages)
        return self._take(prompt, messages, await self.model.ainvoke(messages))

    def _take(self, prompt: list[int], messages: Sequence[BaseMessage], reply: Any) -> AIMessage:
        assert isinstance(reply, AIMessage)
        answer = self.model.answered(reply)
        if not self.model.temperature:
            assert answer == self.model.expected(messages)
        metadata = _metadata()
        thread_id = metadata.get("thread_id")
        # The token that was sampled last is nowhere fed; one that ends an answer is not stored.
        n_fed = len(answer) - (len(answer) == self.model.max_tokens)
        usage: Any = reply.usage_metadata
        call = Call(
            reply=reply,
            row=(*prompt, *answer[:n_fed]),
            n_prompt=len(prompt),
            n_reused=usage["input_token_details"]["cache_read"],
            thread_id=None if thread_id is None else str(thread_id),
            checkpoint_ns=metadata.get("langgraph_checkpoint_ns"),
            node=metadata.get("langgraph_node"),
            step=metadata.get("langgraph_step"),
            branch=(BRANCH.get() or (None,))[0],
        )
        with self._lock:
            self.calls.append(call)
        return reply

    def at(self, *nodes: str) -> list[Call]:
        """The calls made in a node, told by the names of the nodes around it."""
        return [call for call in self.calls if call.nodes == nodes]

    # -- what must be there --------------------------------------------------------------

    def check(self, kept: Iterable[Call]) -> None:
        """The map is that of `kept`: whose paths, of which tokens, sharing what, no byte more."""
        wanted = {str(call.reply.id): call for call in kept}
        paths = self._paths()
        assert set(paths) == set(wanted)
        for call_id, call in wanted.items():
            label, chain = paths[call_id]
            for name in ("thread_id", "checkpoint_ns", "node", "step", "branch"):
                assert getattr(label, name) == getattr(call, name)
            assert tuple(token for _, tokens in chain for token in tokens) == call.row
        for one_id, one in wanted.items():
            for other_id, other in wanted.items():
                both = set(paths[one_id][1]) & set(paths[other_id][1])
                is_one_scope = one.thread_id == other.thread_id
                n_shared = n_common(one.row, other.row) if is_one_scope else 0
                assert sum(len(tokens) for _, tokens in both) == n_shared
        heads = {
            (call.thread_id, call.row[: n + 1])
            for call in wanted.values()
            for n in range(len(call.row))
        }
        assert self.model.n_bytes == BYTES_PER_TOKEN * len(heads)
        assert self.model.kv.usage().n_paths == len(wanted)

    def _paths(self) -> dict[str, tuple[Any, list[tuple[int, tuple[int, ...]]]]]:
        """By call: the label, and the segments from the root to its tip, with their tokens."""
        core = self.model.engine._core

        def look() -> dict[str, tuple[Any, list[tuple[int, tuple[int, ...]]]]]:
            return {
                path.label.call_id: (
                    path.label,
                    [(s.segment_id, tuple(s.token_ids)) for s in path.tip.path() if s.token_ids],
                )
                for path in core.tree.paths.values()
            }

        found: dict[str, tuple[Any, list[tuple[int, tuple[int, ...]]]]] = core.call(look).result(30)
        # What the public map says is the same.
        infos = {info.segment_id: info for info in self.model.kv.segments()}
        for call_id, (_, chain) in found.items():
            tip = infos[chain[-1][0]]
            assert call_id in {label.call_id for label in tip.labels}
            line = [tip.segment_id]
            while (parent := infos[line[-1]].parent_id) is not None:
                line.append(parent)
            assert line[::-1] == [segment_id for segment_id, _ in chain]
        return found


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two rows have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), shorter)


def _metadata() -> dict[str, Any]:
    try:
        config = get_config()
    except RuntimeError:
        return {}
    found = dict(config.get("metadata") or {})
    found["thread_id"] = (config.get("configurable") or {}).get("thread_id")
    return found
