"""The LangChain chat model on top of the engine. It must not know LangGraph."""

from __future__ import annotations

from sidequest_langchain.chat.model import SideQuestChatModel

__all__ = ["SideQuestChatModel"]
