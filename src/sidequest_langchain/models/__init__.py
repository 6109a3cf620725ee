"""Models on this machine: the catalogue, how their files get here, how they are loaded.

`loading` holds what needs torch and transformers; nothing else here imports them. It must not
know the engine, LangChain or a graph.
"""

from sidequest_langchain.models.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueEntry
from sidequest_langchain.models.pulling import installed, pull, verify
from sidequest_langchain.models.reference import ensure

__all__ = [
    "CATALOGUE",
    "DEFAULT_MODEL",
    "CatalogueEntry",
    "ensure",
    "installed",
    "pull",
    "verify",
]
