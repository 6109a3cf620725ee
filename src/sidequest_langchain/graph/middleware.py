"""An agent's middleware: results of tools leave the cache when they leave the conversation.

For `langchain.agents.create_agent`; the only module that imports `langchain`, which is an extra.
It must not know how an engine clears.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.utils import count_tokens_approximately

from sidequest_langchain.chat.messages import reply_id
from sidequest_langchain.chat.step import current_label
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph.attached import WRAPPED, lifecycle_of
from sidequest_langchain.graph.conversations import Conversations, Place
from sidequest_langchain.graph.middleware_edits import ClearingRule, as_text_only
from sidequest_langchain.labels import PathSelector

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    _MSG = (
        "SideQuestMiddleware is for agents of the package langchain, which is not installed; "
        "pip install 'sidequest-langchain[agents]'"
    )
    raise ImportError(_MSG) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """One model call: what is sent, and what goes once it is answered."""

    request: ModelRequest[Any]
    served: Any
    """The model of this package whose cache it is; `None` if there is none."""
    place: Place
    replaced: tuple[str, ...]
    """Model calls whose replies a summary replaced."""


class SideQuestMiddleware(AgentMiddleware[Any, Any, Any]):
    """Clears old or large results of tools, and gives back what a summary replaced.

    Place it last in `middleware=[...]`: there it sees the messages as the model will. It costs no
    superstep, works in synchronous and asynchronous agents, and leaves other models alone.

    What a clearing does to the answers, `on_edit` says:

    * `"recompute"`, exact: the text is replaced, and what follows it is computed again. This is
      what LangChain alone does; the old rows are released.
    * `"reuse"`, lossy: the rows leave the cache, and what follows stays as it was computed.
      Where that cannot be, it is as with `"recompute"`; `response_metadata["sidequest"]
      ["clearing"]` of the answer tells which it was.

    Example:
        >>> agent = create_agent(model, tools, middleware=[
        ...     ContextEditingMiddleware(), SideQuestMiddleware(on_edit="reuse"),
        ... ])
    """

    def __init__(
        self,
        model: object = None,
        *,
        on_edit: Literal["recompute", "reuse"] = "recompute",
        keep: int = 3,
        trigger_tokens: int | None = None,
        max_result_tokens: int | None = None,
        clear_cleared_by_others: bool = True,
        release_on_end: bool | None = None,
        exclude_tools: Sequence[str] = (),
    ) -> None:
        """Make one; it may serve several agents.

        Args:
            model: The `SideQuestChatModel` whose cache it is; by default the one that is called.
            on_edit: What becomes of what follows a cleared result.
            keep: The newest results, which `trigger_tokens` does not clear.
            trigger_tokens: Tokens of a conversation above which all results but the newest `keep`
                are cleared; `None` clears none by age.
            max_result_tokens: Tokens of a result above which it is cleared once an answer follows
                it, whatever its age; `None` clears none by size.
            clear_cleared_by_others: Whether `on_edit="reuse"` is for results, too, that others
                cleared, such as `ContextEditingMiddleware`.
            release_on_end: Whether an agent's KV goes when it has answered without calling a
                tool; `None` is as `CacheConfig(retain="run")` says.
            exclude_tools: Names of tools whose results are never cleared here.

        Raises:
            ConfigError: `model` is no model of this package, or a number is out of range.
        """
        super().__init__()
        if on_edit not in ("recompute", "reuse"):
            msg = f"on_edit must be 'recompute' or 'reuse', found {on_edit!r}"
            raise ConfigError(msg)
        for name, value, least in (
            ("keep", keep, 0),
            ("trigger_tokens", trigger_tokens, 1),
            ("max_result_tokens", max_result_tokens, 1),
        ):
            if value is None and name != "keep":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                msg = f"{name} must be a whole number of at least {least}, found {value!r}"
                raise ConfigError(msg)
        if isinstance(exclude_tools, str):
            msg = f"exclude_tools must be a list of names, found the string {exclude_tools!r}"
            raise ConfigError(msg)
        if model is not None:
            lifecycle_of(model)  # refuses what has no cache
        self.tools = []
        self._served = None if model is None else _served(model)
        self._on_edit = on_edit
        self._rule = ClearingRule(
            keep=keep,
            trigger_tokens=trigger_tokens,
            max_result_tokens=max_result_tokens,
            exclude_tools=frozenset(exclude_tools),
        )
        self._is_for_others = clear_cleared_by_others
        self._release_on_end = release_on_end
        self._conversations = Conversations()

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        """Clear, call the model, and give back what is over."""
        plan = self._planned(request)
        response = handler(plan.request)
        self._after(plan, response)
        return response

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """Clear, call the model, and give back what is over."""
        if self._rule.is_on:  # counting tokens may load the model
            plan = await asyncio.to_thread(self._planned, request)
        else:
            plan = self._planned(request)
        response = await handler(plan.request)
        self._after(plan, response)
        return response

    # -- inside --------------------------------------------------------------------------

    def _planned(self, request: ModelRequest[Any]) -> _Plan:
        called = _served(request.model)
        served = self._served if self._served is not None else called
        label = current_label("")
        nodes = (label.checkpoint_ns or "").split("|")
        place = Place(label.thread_id, tuple(node.partition(":")[0] for node in nodes))
        replaced = self._conversations.replaced(place, _held(request))
        return _Plan(
            request=self._edited(request, called),
            served=served,
            place=place,
            replaced=replaced,
        )

    def _edited(self, request: ModelRequest[Any], called: Any) -> ModelRequest[Any]:
        messages: list[BaseMessage] = list(request.messages)
        if not self._is_for_others:
            messages = as_text_only(messages)
        if self._rule.is_on:
            counting = request.model if called is None else called
            system = [] if request.system_message is None else [request.system_message]
            tools = request.tools

            def n_tokens(found: Sequence[BaseMessage]) -> int:
                if called is None:
                    return count_tokens_approximately([*system, *found])
                return int(counting.get_num_tokens_from_messages([*system, *found], tools))

            def n_tokens_of(message: ToolMessage) -> int:
                if called is None:
                    return count_tokens_approximately([message])
                return len(counting.get_token_ids(message.text))

            messages = self._rule.apply(messages, n_tokens=n_tokens, n_tokens_of=n_tokens_of)
        settings = dict(request.model_settings)
        if called is not None:
            settings.setdefault("on_edit", self._on_edit)
        return request.override(messages=messages, model_settings=settings)  # type: ignore[arg-type]

    def _after(self, plan: _Plan, response: ModelResponse[Any]) -> None:
        """The call went well: what its prompt no longer holds goes; at the end, all of it."""
        answers = [m for m in response.result if isinstance(m, AIMessage)]
        held = _held(plan.request)
        self._conversations.hold(plan.place, [*held, *answers])
        _release(plan, plan.replaced, "replaced in the conversation")
        is_over = bool(answers) and not any(m.tool_calls or m.invalid_tool_calls for m in answers)
        if is_over and self._should_release(plan.served):
            replies = [m for m in [*held, *answers] if isinstance(m, AIMessage)]
            _release(plan, map(reply_id, replies), "agent ended")

    def _should_release(self, served: Any) -> bool:
        if self._release_on_end is not None:
            return self._release_on_end
        return served is not None and served.cache_config.retain == "run"


def _served(model: object) -> Any:
    """The model of this package that is behind a runnable; `None` if there is none."""
    found: Any = model
    while found is not None and not hasattr(found, "engines"):
        found = next((getattr(found, name) for name in WRAPPED if hasattr(found, name)), None)
    return found if hasattr(found, "cache_config") else None


def _held(request: ModelRequest[Any]) -> list[BaseMessage]:
    """The conversation as it is in the state: what others edit for one call comes back."""
    return list(request.state.get("messages") or request.messages)


def _release(plan: _Plan, call_ids: Iterable[str | None], reason: str) -> None:
    """Give back what these calls made and nobody else needs; does not wait."""
    if plan.served is None:
        return
    for call_id in dict.fromkeys(call_ids):
        for engine in plan.served.engines.live() if call_id else ():
            selector = PathSelector(path_id=call_id, thread_id=plan.place.thread_id)
            engine.kv.post_release(selector, reason=reason, name=call_id)
