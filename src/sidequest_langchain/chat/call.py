"""One call of the chat model, ready to run; it must not know how it came about."""

from __future__ import annotations

from dataclasses import dataclass

from sidequest_langchain.chat.answer import Answer
from sidequest_langchain.chat.dialect import Plan
from sidequest_langchain.chat.managed import ManagedActs
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, ready to run: a request for each sample."""

    engine: Engine
    requests: tuple[GenerationRequest, ...]
    managed: ManagedActs
    """What the managed cache does from now on."""
    plan: Plan
    """How the answers are read."""

    def answer_to(self, request: GenerationRequest) -> Answer:
        """The answer to one of the requests, to be read."""
        return Answer(self.plan, request.label.call_id)
