"""The floors hold: imports go down only, and each third party has its rooms.

Each rule is a function from sources to complaints, and is first shown a text it must refuse.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.source import (
    Sources,
    calls,
    cycle,
    imports,
    own,
    package_sources,
    room_of,
)

PACKAGE = Path(__file__).parents[1] / "src" / "sidequest_langchain"

# Rooms of one floor, left to right: a room may import those to its left, no other way round.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors", "kinds", "config", "labels"),
    ("kv",),
    ("policy",),
    ("models", "engine"),
    ("chat",),
    ("graph", "observe", "evaluation", "serve"),
    ("examples", "cli", "__main__"),
    ("__init__",),
)
RANK = {
    room: (floor, place) for floor, rooms in enumerate(FLOORS) for place, room in enumerate(rooms)
}

ABOVE_ENGINE = {"chat", "graph", "observe", "evaluation", "serve", "cli"}
THIRD_PARTIES: dict[str, set[str]] = {
    "torch": {"kv", "policy", "models", "engine", *ABOVE_ENGINE},
    "transformers": {"models", "engine"},
    "accelerate": {"models", "engine"},
    "gguf": {"models"},
    "llguidance": {"engine"},
    "numpy": {"policy", "engine", "models"},
    "safetensors": {"models", "policy"},
    "huggingface_hub": {"models"},
    "filelock": {"kv", "models"},
    "packaging": {"models"},
    "platformdirs": {"models"},
    "jinja2": {"engine"},
    "langchain": {"graph"},
    "langchain_core": ABOVE_ENGINE,
    "pydantic": ABOVE_ENGINE,
    "typing_extensions": {"chat", "graph"},
    "langgraph": {"graph", "observe", "serve", "cli"},
    "rich": {"models", "observe", "evaluation", "cli"},
}
"""Which rooms may import what; a name that is not here may be imported nowhere."""

HANDS_ON = {
    "asking",
    "cycle",
    "deciding",
    "executor",
    "foreseeing",
    "gathering",
    "guard",
    "joining",
    "last_logits",
    "limits",
    "looks",
    "manager",
    "monitor",
    "notes",
    "probabilities",
    "receipting",
    "recording",
    "returning",
}
"""Modules of the policy room that touch tensors or the tree; the others see facts."""

MAX_LINES = 300
UNSAFE = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"torch.load", "eval", "exec"}


def upward(sources: Sources) -> list[str]:
    """Imports that do not go down, and rooms that no floor names."""
    found = []
    for module, targets in imports(sources).items():
        room = room_of(module)
        if room not in RANK:
            found.append(f"{module}: the room {room} is on no floor")
            continue
        for target in sorted(own(targets)):
            there = room_of(target)
            if there != room and RANK.get(there, (99, 0)) > RANK[room]:
                found.append(f"{module} imports {target}, which is above it")
    return found


def cycles(sources: Sources) -> list[str]:
    """A cycle among the modules, drawn."""
    found = cycle({module: own(targets) for module, targets in imports(sources).items()})
    return [" -> ".join(found)] if found else []


def strangers(sources: Sources) -> list[str]:
    """Third parties in rooms that may not know them."""
    found = []
    for module, targets in imports(sources).items():
        for target in sorted(targets - own(targets) - sys.stdlib_module_names - UNSAFE):
            if room_of(module) not in THIRD_PARTIES.get(target, set()):
                found.append(f"{module} imports {target}")
    return found


def prints(sources: Sources) -> list[str]:
    """Prints outside of the command line."""
    return [
        f"{module} prints"
        for module, text in sources.items()
        if room_of(module) not in ("cli", "__main__") and "print" in calls(text)
    ]


def unsafe(sources: Sources) -> list[str]:
    """What would run code found in a file."""
    imported = [
        f"{module} imports {name}"
        for module, targets in imports(sources).items()
        for name in sorted(targets & UNSAFE)
    ]
    called = [
        f"{module} calls {name}"
        for module, text in sources.items()
        for name in sorted(UNSAFE_CALLS.intersection(calls(text)))
    ]
    return imported + called


def too_long(sources: Sources) -> list[str]:
    """Files that ask to be split."""
    return [
        f"{module} has {n_lines} lines"
        for module, text in sources.items()
        if (n_lines := len(text.splitlines())) > MAX_LINES
    ]


def tensors_in_decisions(sources: Sources) -> list[str]:
    """Tensors, or the tree, where only facts may be seen: whatever decides."""
    found = []
    for module, targets in imports(sources).items():
        room, _, name = module.removeprefix(f"{PACKAGE.name}.").partition(".")
        if room == "policy" and name not in HANDS_ON:
            found += [
                f"{module} imports {target}"
                for target in sorted(targets)
                if target == "torch" or room_of(target) == "kv"
            ]
    return found


ALL_RULES = (upward, cycles, strangers, tensors_in_decisions, prints, unsafe, too_long)
RULES = {rule.__name__: rule for rule in ALL_RULES}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: str) -> None:
    sources = package_sources(PACKAGE)
    assert f"{PACKAGE.name}.errors" in sources
    assert RULES[rule](sources) == []


REFUSED = {
    "up, at the top": (upward, {"kv.tree": "from sidequest_langchain.engine import core"}),
    "up, deferred": (upward, {"engine.core": "def f():\n    import sidequest_langchain.graph"}),
    "up, for types only": (
        upward,
        {"config": "if TYPE_CHECKING:\n    from sidequest_langchain.kv.tree import Tree"},
    ),
    "up, relative": (upward, {"kv.tree": "from ..chat import model"}),
    "up, by a function": (
        upward,
        {"kv.tree": "import_module('sidequest_langchain.chat.model')"},
    ),
    "up, within a floor": (
        upward,
        {"models.loading": "from sidequest_langchain.engine.engine import Engine"},
    ),
    "the public face, from inside": (
        upward,
        {"graph.attach": "from sidequest_langchain import SideQuestChatModel"},
    ),
    "an unknown room": (upward, {"utils.things": ""}),
    "a cycle within a room": (
        cycles,
        {
            "kv.a": "from sidequest_langchain.kv import b",
            "kv.b": "def f():\n    from sidequest_langchain.kv.a import x",
        },
    ),
    "a long cycle": (
        cycles,
        {
            "kv.a": "import sidequest_langchain.kv.b",
            "kv.b": "from sidequest_langchain.kv.c import x",
            "kv.c": "from .a import x",
        },
    ),
    "transformers in chat": (strangers, {"chat.model": "from transformers import AutoModel"}),
    "transformers, for types": (
        strangers,
        {"kv.tree": "if TYPE_CHECKING:\n    import transformers.modeling_utils as m"},
    ),
    "torch on floor 0": (strangers, {"errors": "import torch"}),
    "torch in a policy": (tensors_in_decisions, {"policy.lru": "from torch import Tensor"}),
    "the tree in a policy": (
        tensors_in_decisions,
        {"policy.lru": "from sidequest_langchain.kv.tree import SegmentTree"},
    ),
    "langgraph in chat": (strangers, {"chat.step": "def f():\n    import langgraph.config"}),
    "langchain in the engine": (strangers, {"engine.core": "from langchain_core import load"}),
    "something new": (strangers, {"cli": "import pandas"}),
    "print": (prints, {"kv.tree": "def f():\n    print('x')"}),
    "pickle": (unsafe, {"models.loading": "import pickle"}),
    "torch.load": (unsafe, {"models.loading": "import torch\ntorch.load('x')"}),
    "eval": (unsafe, {"chat.tools": "eval('1')"}),
    "a long file": (too_long, {"kv.tree": "x = 1\n" * (MAX_LINES + 1)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rule_refuses(name: str) -> None:
    rule, texts = REFUSED[name]
    assert rule({f"sidequest_langchain.{module}": text for module, text in texts.items()})


ALLOWED: Sources = {
    "sidequest_langchain": "from sidequest_langchain.chat.model import SideQuestChatModel",
    "sidequest_langchain.kv.tree": "import torch\nfrom sidequest_langchain.labels import StepLabel",
    "sidequest_langchain.engine.core": "from sidequest_langchain.kv.tree import Tree\nimport json",
    "sidequest_langchain.cli": "print('x')\nfrom sidequest_langchain.engine import core",
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_allows_what_is_right(rule: str) -> None:
    assert RULES[rule](ALLOWED) == []
