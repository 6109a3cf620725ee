"""Reads source text as a graph of modules; runs none of it.

Every import counts: deferred into a function, under `TYPE_CHECKING`, or by `import_module`
with a literal name. It must not know which imports are allowed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = "sidequest_langchain"
Sources = Mapping[str, str]
"""Module name to its text: `{"sidequest_langchain.kv.tree": "..."}`."""


def package_sources(folder: Path) -> dict[str, str]:
    """All modules of the package at `folder`, a package under the name of its `__init__`."""
    sources = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [ROOT, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def imports(sources: Sources) -> dict[str, set[str]]:
    """Module to what it imports: own modules by full name, others by top-level name."""
    return {name: set(_targets(name, ast.parse(text), sources)) for name, text in sources.items()}


def own(targets: set[str]) -> set[str]:
    """Those of `targets` that are modules of the package."""
    return {t for t in targets if t == ROOT or t.startswith(f"{ROOT}.")}


def room_of(module: str) -> str:
    """First name below the package: `kv`, `errors`; `__init__` for the package itself."""
    _, _, below = module.partition(".")
    return below.partition(".")[0] or "__init__"


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """One cycle among the modules, first module repeated at its end; empty if there is none."""
    done: set[str] = set()
    trail: list[str] = []

    def walk(module: str) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done or module not in graph:
            return []
        trail.append(module)
        for target in sorted(graph[module]):
            found = walk(target)
            if found:
                return found
        trail.pop()
        done.add(module)
        return []

    for module in sorted(graph):
        found = walk(module)
        if found:
            return found
    return []


def calls(text: str) -> Iterator[str]:
    """Dotted names of the functions called: `print`, `torch.load`, `self.close`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            yield ast.unparse(node.func)


def _targets(module: str, tree: ast.Module, sources: Sources) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _named(alias.name, sources)
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node, is_package=_has_children(module, sources))
            for alias in node.names:
                child = f"{base}.{alias.name}"
                yield from _named(child if child in sources else base, sources)
        elif isinstance(node, ast.Call):
            yield from _by_function(node, sources)


def _has_children(module: str, sources: Sources) -> bool:
    return any(name.startswith(f"{module}.") for name in sources)


def _base(module: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    up = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*up, node.module] if node.module else up)


def _by_function(node: ast.Call, sources: Sources) -> Iterator[str]:
    if ast.unparse(node.func) not in ("import_module", "importlib.import_module", "__import__"):
        return
    if node.args and isinstance(node.args[0], ast.Constant):
        yield from _named(str(node.args[0].value), sources)


def _named(name: str, sources: Sources) -> Iterator[str]:
    if name == ROOT or name.startswith(f"{ROOT}."):
        yield name
    else:
        yield name.partition(".")[0]
