"""The LangChain chat model on top of the engine. It must not know LangGraph."""

from __future__ import annotations
