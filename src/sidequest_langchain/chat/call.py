"""One call of the chat model, ready to run; it must not know how it came about."""

from __future__ import annotations

from dataclasses import dataclass

from sidequest_langchain.chat.answer import FIRST_BESIDE_BLOCKS, Answer
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
    has_numbered_blocks: bool = False
    """Whether LangChain numbers the blocks of streamed content (`output_version="v1"`)."""

    def answer_to(self, request: GenerationRequest) -> Answer:
        """The answer to one of the requests, to be read."""
        first = FIRST_BESIDE_BLOCKS if self.has_numbered_blocks else 0
        return Answer(self.plan, request.label.call_id, first_index=first)
