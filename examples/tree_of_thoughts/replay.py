"""The same calls again with nothing released: what the run would have held without it.

Measured, not computed: the recorded prompts and replies are fed to the same engine on a thread
of their own, in the recorded rounds, with no graph attached, so that nothing is given up. A
reply that was finished is appended to its prompt and one more token is asked for, which stores
the very tokens that generating it had stored, without decoding them anew; the ids are those
that were generated, since the message keeps its id. A reply that was cut at its longest keeps
its last token, which its own run never fed: one row too many for each of those.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage

from sidequest_langchain import SideQuestChatModel

from .asking import CallRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What was held with nothing released."""

    peak_bytes: int
    """The most at once, running calls included."""
    final_bytes: int
    """At the end."""


def replay_without_release(
    model: SideQuestChatModel,
    records: Sequence[CallRecord],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Kept:
    """Feed the calls of a run again and measure; the cache is left as it was found.

    Args:
        model: The model of the run.
        records: Its calls.
        on_progress: Told after each round how many of the calls are done, and of how many.
    """
    thread_id = f"replay-{uuid.uuid4().hex}"
    before_bytes = model.kv.usage().n_bytes
    model.kv.reset_peak()
    n_done = 0
    try:
        for _, calls in groupby(sorted(records, key=_round), key=_round):
            prompts: list[LanguageModelInput] = [stored_messages(record) for record in calls]
            model.batch(prompts, {"configurable": {"thread_id": thread_id}}, max_tokens=1)
            n_done += len(prompts)
            on_progress(n_done, len(records))
        usage = model.kv.usage()
    finally:
        model.kv.clear(thread_id)
    return Kept(
        peak_bytes=usage.peak_resident_bytes - before_bytes,
        final_bytes=usage.n_bytes - before_bytes,
    )


def stored_messages(record: CallRecord) -> list[BaseMessage]:
    """The messages whose tokens a call left in the cache.

    A reply of one token, or an empty one, left nothing: the last token sampled is never fed.
    """
    if record.settings.get("max_tokens") == 1 or not record.reply.content:
        return [*record.messages]
    return [*record.messages, record.reply]


def _round(record: CallRecord) -> int:
    return record.n_round
