"""A chat model that answers the planner's questions by rule, and a real engine over random weights.

The rules see the question only, as a model would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.examples.tree_of_thoughts.prompts import read_city
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

Choose = Callable[[tuple[str, ...], Sequence[str]], Sequence[str]]


def first_option(route: tuple[str, ...], options: Sequence[str]) -> Sequence[str]:
    return options[:1]


def overlap(days: Sequence[int], date: Sequence[int]) -> float:
    """The right answer, as a probability of yes."""
    return 0.9 if set(days) & set(date) else 0.1


class ScriptedModel(BaseChatModel):
    """Answers by rule; its replies carry usage and log-probabilities as ours do."""

    choose: Choose = first_option
    """From the route so far and the options, the cities that its samples name, in turn."""
    overlap: Callable[[Sequence[int], Sequence[int]], float] = overlap
    plan: str = "Plan: nowhere"
    calls: list[list[BaseMessage]] = []  # noqa: RUF012  (pydantic copies it)
    n_replies: int = 0

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **given: Any
    ) -> ChatResult:
        self.calls.append(messages)
        question = str(messages[-1].content)
        logprobs: dict[str, Any] = {}
        if question.startswith("Stay:"):
            days, date = (numbers(part) for part in question.split("Date:"))
            yes = self.overlap(days, date)
            logprobs = {"logprobs": {"content": [{"top_logprobs": alternatives(yes)}]}}
            replies = ["yes" if yes > 0.5 else "no"]
        elif "Choose one:" in question:
            options = question.split("Choose one: ")[1].split(".")[0].split(", ")
            named = list(self.choose(route_of(messages), options))
            replies = [named[i % len(named)] for i in range(given.get("n", 1))]
        else:
            replies = ["OK" if "Reply OK" in question else self.plan]
        n_in = sum(len(str(m.content).split()) for m in messages)
        return ChatResult(
            generations=[
                ChatGeneration(
                    message=AIMessage(
                        content=reply,
                        id=self.new_id(),
                        usage_metadata={
                            "input_tokens": n_in,
                            "output_tokens": 1,
                            "total_tokens": n_in + 1,
                            "input_token_details": {"cache_read": n_in // 2},
                        },
                        response_metadata=logprobs,
                    )
                )
                for reply in replies
            ]
        )

    def new_id(self) -> str:
        self.n_replies += 1
        return f"reply-{self.n_replies}"


def alternatives(yes: float) -> list[dict[str, Any]]:
    return [
        {"token": "yes", "logprob": math.log(yes)},
        {"token": "no", "logprob": math.log(1 - yes)},
    ]


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def route_of(messages: Sequence[BaseMessage]) -> tuple[str, ...]:
    """The cities that the conversation has chosen so far."""
    route: list[str] = []
    for asked, reply in pairwise(messages):
        if "Choose one:" in str(asked.content) and isinstance(reply, AIMessage):
            options = str(asked.content).split("Choose one: ")[1].split(".")[0].split(", ")
            route.append(read_city(str(reply.content), options) or options[0])
    return tuple(route)


def tiny_chat(**settings: Any) -> SideQuestChatModel:
    """Our chat model over a tiny random llama with room for a planner's prompts."""
    model = tiny_model("llama", max_position_embeddings=8192)
    return SideQuestChatModel.from_model(model, byte_tokenizer(), name="tiny", **settings)
