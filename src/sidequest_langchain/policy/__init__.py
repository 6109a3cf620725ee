"""The managed cache: facts about the tree, decisions over them, and the hand that acts.

The names here are for writing policies; see `register_policy`.
"""

from __future__ import annotations

from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.acts import Act, Archive, Compress, Evict, EvictByHead, Release
from sidequest_langchain.policy.facts import CacheFacts, Need, Policy, SegmentFacts
from sidequest_langchain.policy.registry import policy_names, register_policy
from sidequest_langchain.policy.selection import Draft

__all__ = [
    "Act",
    "Archive",
    "CacheFacts",
    "Compress",
    "Draft",
    "Evict",
    "EvictByHead",
    "Need",
    "Policy",
    "Release",
    "SegmentFacts",
    "TokenKind",
    "policy_names",
    "register_policy",
]
