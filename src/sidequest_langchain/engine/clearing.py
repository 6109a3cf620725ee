"""Clearing results of tools in the cache: their rows leave, what follows them stays. Lossy.

A request that asks for it (`GenerationRequest.clearing`) is resolved right before it begins, in
the engine's thread: against what is resident, against who else reads it. It must not know messages.

    resident, as computed     system  call  result  answer  call  result  answer
    this request's ids        system  call  ......  answer  call  result  answer  question
                                            cleared: no rows, no new prefill behind
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.engine.request import Clearing, ClearingReport, ToolResultSpan
from sidequest_langchain.engine.sequence import Sequence as Served
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.kv.allocator import return_to_system
from sidequest_langchain.kv.clearing import ClearedId, Line, seen_offsets
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy.receipting import MOST_TEXT, name_of
from sidequest_langchain.policy.receipts import ActReceipt, Outcome, ReceiptLog, runs_of

logger = logging.getLogger(__name__)

POLICY = "clearing"
"""What receipts call it: no policy asked, the conversation did."""
NOT_RESIDENT = (
    "the conversation is not in the cache as it was computed up to the cleared results; what "
    "follows them is computed again, without their text"
)


@dataclass(slots=True)
class _Plan:
    """What one request's clearing comes to."""

    work: dict[Segment, list[int]] = field(default_factory=dict)
    """Offsets to clear, by segment."""
    names: dict[Segment, list[str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    n_rows: int = 0
    freed_bytes: int = 0


class Clearer:
    """Clears for one engine. All but `log` is for the engine's thread."""

    def __init__(
        self, core: EngineCore, tokenizer: ChatTokenizer, *, is_hidden: bool = False
    ) -> None:
        """Make it.

        Args:
            core: Whose cache.
            tokenizer: For the words in receipts.
            is_hidden: Whether rows shall only be hidden, and stay.
        """
        self._core, self._tokenizer, self._is_hidden = core, tokenizer, is_hidden
        self.log = ReceiptLog() if core.manager is None else core.manager.log
        """Receipts of what was cleared; those of the managed cache, if there is one."""
        self._wants: dict[int, frozenset[tuple[int, int]]] = {}
        """By the serials of paths: what their conversations asked to clear."""

    def resolve(self, sequence: Served) -> None:
        """Clear what a request asks for, as far as all who read it agree.

        Agree do earlier calls of the same conversation, and idle paths of the same thread that
        asked for the same. Where anybody else reads a result, a call runs on it or it is pinned,
        it stays, and the request reads it whole. If the prompt is not resident up to the last
        result, `Clearing.instead` is served. Then the request's ids name what is cleared.

        Raises:
            BudgetExceeded: There is no room for what has to come back from a slower tier.
        """
        request = sequence.request
        clearing = request.clearing
        if clearing is None:
            return
        line = self._resident(request.scope, request.prompt_ids, clearing)
        if line.n_tokens < clearing.runs[-1].last:
            clearing.on_instead()
            sequence.serve(clearing.instead)
            sequence.clearing = ClearingReport(is_reused=False, why=NOT_RESIDENT)
            return
        self._note_wish(sequence, clearing)
        plan = self._planned(sequence, clearing, line)
        for segment in plan.work:
            self._clear(segment, plan)
        return_to_system(plan.freed_bytes)
        names = dict.fromkeys(_name(run) for run in clearing.runs)
        sequence.clearing = ClearingReport(
            is_reused=True,
            n_rows=plan.n_rows,
            freed_bytes=plan.freed_bytes,
            cleared=tuple(name for name in names if name not in plan.kept),
            kept=tuple(plan.kept.items()),
        )
        ids = (*line.ids(), *request.prompt_ids[line.n_tokens :])
        sequence.serve(replace(request, prompt_ids=ids))

    def _resident(self, scope: str, ids: Sequence[int], clearing: Clearing) -> Line:
        """Where a prompt is resident, once what idled in a slower tier came back or was let go."""
        tree = self._core.tree
        runs = [(run.first, run.last) for run in clearing.runs]
        line = tree.match_cleared(scope, ids, runs)
        if self._core.manager is not None and line.n_tokens >= runs[-1][1]:
            self._core.manager.prepare(scope, line.ids())
            line = tree.match_cleared(scope, ids, runs)
        return line

    def _note_wish(self, sequence: Served, clearing: Clearing) -> None:
        paths = self._core.tree.paths
        self._wants = {at: wants for at, wants in self._wants.items() if at in paths}
        if sequence.serial is not None:
            self._wants[sequence.serial] = frozenset((r.first, r.last) for r in clearing.runs)

    def _planned(self, sequence: Served, clearing: Clearing, line: Line) -> _Plan:
        plan = _Plan()
        seen: dict[Segment, set[int]] = {}
        for run in clearing.runs:
            parts = []
            for segment, offsets in line.within(run.first, run.last):
                if segment not in seen:
                    seen[segment] = seen_offsets(segment)
                todo = [at for at in offsets if self._is_to_do(segment, at, seen[segment])]
                if todo:
                    parts.append((segment, todo))
            why = self._why_kept(sequence, clearing, line, run, parts) if parts else ""
            if why:
                if any(_is_whole(segment, todo) for segment, todo in parts):
                    plan.kept.setdefault(_name(run), why)
                    self._tell(parts[0][0], parts[0][1], [_name(run)], "refused", why)
                continue
            for segment, todo in parts:
                plan.work.setdefault(segment, []).extend(todo)
                plan.names.setdefault(segment, []).append(_name(run))
        return plan

    def _is_to_do(self, segment: Segment, at: int, seen: set[int]) -> bool:
        if not isinstance(segment.token_ids[at], ClearedId):
            return True
        manager = self._core.manager  # rows that were called back stay for a while
        return at in seen and (manager is None or manager.may_change(segment))

    def _why_kept(
        self,
        sequence: Served,
        clearing: Clearing,
        line: Line,
        run: ToolResultSpan,
        parts: Sequence[tuple[Segment, Sequence[int]]],
    ) -> str:
        """Why a run's rows have to stay; `""` if nothing speaks against it."""
        tree = self._core.tree
        paths, is_pinned = tree.readers_from(parts[0][0], run.first)
        if is_pinned:
            return "it is pinned"
        mine = set(line.segments)
        if line.n_tokens < line.segments[-1].end:  # paths that end there go on otherwise
            mine.discard(line.segments[-1])
        thread_id = sequence.request.label.thread_id
        for path in paths:
            if path.is_running:
                return "a call that runs reads it"
            agrees = path.label.thread_id == thread_id and (
                path.tip in mine
                or path.label.call_id in clearing.history
                or (run.first, run.last) in self._wants.get(path.serial, ())
            )
            if not agrees:
                return f"path {path.label.path_id!r} reads it and has not cleared it"
        if any(segment.kept_by_head is not None for segment, _ in parts):
            return "its heads keep rows of their own"
        if any(segment.is_open for segment, _ in parts):
            return "a call that runs computed it"
        if any(tree.has_cleared_twin(segment, todo) for segment, todo in parts):
            return "another path has it cleared already"
        return ""

    def _clear(self, segment: Segment, plan: _Plan) -> None:
        """Clear what is planned of one segment, with a receipt; what fails leaves it as it was."""
        offsets, names = sorted(plan.work[segment]), plan.names[segment]
        seen = seen_offsets(segment)
        going = [at for at in offsets if at in seen]  # others went before, by a policy
        text = self._text(segment, going)
        try:
            done = self._core.tree.clear(segment, offsets, is_hidden=self._is_hidden)
        except (MemoryError, RuntimeError, ValueError) as error:  # torch's own is a RuntimeError
            logger.debug("results could not be cleared", exc_info=True)
            why = f"{type(error).__name__}: {error}"
            plan.kept |= dict.fromkeys(names, why)
            self._tell(segment, going, names, "failed", why)
            return
        plan.n_rows += done.n_rows
        plan.freed_bytes += done.freed_bytes
        if going:
            more = "a copy is kept" if done.is_copied else ""
            self._tell(segment, going, names, "done", more, freed_bytes=done.freed_bytes, text=text)

    def _tell(
        self,
        segment: Segment,
        offsets: Sequence[int],
        names: Sequence[str],
        outcome: Outcome,
        more: str,
        *,
        freed_bytes: int = 0,
        text: str = "",
    ) -> None:
        reason = f"cleared: {', '.join(dict.fromkeys(names))}"
        self.log.add(
            [
                ActReceipt(
                    verb="hide" if self._is_hidden else "evict",
                    outcome=outcome,
                    policy=POLICY,
                    reason=f"{reason}; {more}" if more else reason,
                    segment_id=segment.segment_id,
                    path=name_of(segment),
                    n_rows=len(offsets),
                    bits=None,
                    freed_bytes=freed_bytes,
                    mass=0.0,
                    kl=None,
                    kl_reason="you asked for this act: no guard weighs it",
                    is_forced=False,
                    exact=False,
                    step=self._core.counters.n_steps,
                    runs=runs_of([segment.start + at for at in offsets]),
                    text=text,
                )
            ]
        )

    def _text(self, segment: Segment, offsets: Sequence[int]) -> str:
        ids = segment.token_ids
        text = " … ".join(self._decoded(ids[a : b + 1]).strip() for a, b in runs_of(offsets))
        return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " …"

    def _decoded(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special=False)


def _is_whole(segment: Segment, offsets: Sequence[int]) -> bool:
    """Whether any of these tokens is not cleared yet."""
    return any(not isinstance(segment.token_ids[at], ClearedId) for at in offsets)


def _name(run: ToolResultSpan) -> str:
    return run.tool_call_id or f"{run.first}..{run.last}"
