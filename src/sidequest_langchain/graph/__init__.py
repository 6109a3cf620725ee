"""LangGraph on top of the cache: whose segments they are, and when they go.

It must not know the engine's insides.
"""

from __future__ import annotations

from sidequest_langchain.graph.attach import attach, handler_of, session
from sidequest_langchain.graph.backtracking import abacktrack, backtrack
from sidequest_langchain.graph.branching import branch
from sidequest_langchain.graph.events import KVEvent
from sidequest_langchain.graph.handler import SideQuestCallbackHandler
from sidequest_langchain.graph.pruning import PruneReceipt, akeep_only, aprune, keep_only, prune
from sidequest_langchain.graph.saver import SideQuestSaver
from sidequest_langchain.graph.saver_kv import CheckpointKV
from sidequest_langchain.graph.steps import StepRef, current_step

__all__ = [
    "CheckpointKV",
    "KVEvent",
    "PruneReceipt",
    "SideQuestCallbackHandler",
    "SideQuestSaver",
    "StepRef",
    "abacktrack",
    "akeep_only",
    "aprune",
    "attach",
    "backtrack",
    "branch",
    "current_step",
    "handler_of",
    "keep_only",
    "prune",
    "session",
]
