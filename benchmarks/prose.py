"""Plain text to fill prompts with: the same everywhere, no two lines alike."""

from __future__ import annotations

_NAMES = (
    "Alder", "Birch", "Cedar", "Dover", "Elmar", "Fjord", "Grove", "Haven", "Inver", "Juno",
    "Kelso", "Linden", "Marlow", "Norden", "Orrin", "Perth", "Quill",
)  # fmt: skip
_GOODS = (
    "apples", "cloth", "honey", "salt", "wool", "tea", "glass", "paper", "clay", "rope", "oil",
    "grain", "copper",
)  # fmt: skip
_ROADS = ("river", "coast", "old wall", "north road", "canal", "forest", "bridge")

TOOLS = (
    "You can call tools by writing one line: stock(warehouse), distance(a, b), price(route), or "
    "report(text). The result of a call is given to you in the next message. Answer with at most "
    "two sentences: what you learned, and which call you make next."
)


def notes(n_lines: int) -> str:
    """Lines about towns, about 25 tokens each."""
    return "\n".join(
        f"{i + 1}. {_name(i)} lies by the {_ROADS[i % 7]}; its market sells {_GOODS[i % 13]} and "
        f"its inn has {3 + i * 7 % 29} rooms."
        for i in range(n_lines)
    )


def tool_result(i: int) -> str:
    """What a tool answers in turn `i`, about 100 tokens, as a message any template can render."""
    rows = "\n".join(
        f"{_name(3 * i + j)} | {_GOODS[(i + j) % 13]} | {(i * 37 + j * 53) % 400} crates | "
        f"{(i * 11 + j * 17) % 90} km"
        for j in range(4)
    )
    tool = ("stock", "distance", "price")[i % 3]
    return f"Result of {tool}({_name(i)}):\ntown | goods | amount | distance\n{rows}\nWhat next?"


def _name(i: int) -> str:
    first, rest = _NAMES[i % len(_NAMES)], i // len(_NAMES)
    return f"{first} {_NAMES[rest % len(_NAMES)]}" if rest else first
