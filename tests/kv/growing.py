"""Trees with K/V that can be recognised: letters are tokens, and a row says where it belongs.

Every row is a pure function of the tokens up to it, as in a real model, so that a row of another
branch, position, layer or head shows. It knows torch and `kv` only.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from sidequest_langchain.kv.layout import KVLayout, LayerShape
from sidequest_langchain.kv.receipts import ReleaseReceipt
from sidequest_langchain.kv.segment import Path, Segment
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.labels import PathSelector, StepLabel

CPU = torch.device("cpu")
LAYOUT: KVLayout = (
    LayerShape(n_kv_heads=2, key_dim=3, value_dim=2, dtype=torch.float32, device=CPU),
    LayerShape(n_kv_heads=1, key_dim=2, value_dim=4, dtype=torch.float64, device=CPU),
)
"""Two layers that differ in heads, dims and dtype: 2 * 5 * 4 + 6 * 8 bytes per token."""
TOKEN_BYTES = 88


def bytes_of(n_tokens: int) -> int:
    """Bytes of K and V of so many tokens."""
    return n_tokens * TOKEN_BYTES


def ids(text: str) -> list[int]:
    """Token ids of a text: one a letter."""
    return [ord(letter) for letter in text]


@functools.cache
def rows_of(tokens: tuple[int, ...], first: int, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of `tokens[first:]` in one layer, `[H, S, D]`.

    A key holds its position and layer, a value the tokens up to it; both their head.
    """
    code, codes = 1, []
    for token in tokens:
        code = (code * 31 + token) % 65_521
        codes.append(code)
    shape = LAYOUT[layer]
    n = len(tokens) - first
    heads = torch.arange(shape.n_kv_heads).view(-1, 1, 1) * 100_000
    position = torch.arange(first, len(tokens)).view(1, -1, 1) + layer * 1000
    code_rows = torch.tensor(codes[first:]).view(1, n, 1) + layer
    k = (heads + position).expand(-1, -1, shape.key_dim)
    v = (heads + code_rows).expand(-1, -1, shape.value_dim)
    return k.to(shape.dtype), v.to(shape.dtype)


def tokens_to(segment: Segment) -> tuple[int, ...]:
    """The tokens from position 0 to the end of a segment."""
    return tuple(token for part in segment.path() for token in part.token_ids)


@dataclass
class Grove:
    """A tree, and what a model would do to it."""

    tree: SegmentTree = field(default_factory=lambda: SegmentTree(LAYOUT))
    rows_of: Callable[[tuple[int, ...], int, int], tuple[Tensor, Tensor]] = rows_of
    receipts: list[ReleaseReceipt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree.on_release = self.receipts.append

    def begin(self, prompt: str, call: str = "", scope: str = "s", **label: object) -> Path:
        """Start a path; nothing is fed yet."""
        call_id = call or f"call-{self.tree.serial}"
        return self.tree.begin(scope, ids(prompt), StepLabel(call_id=call_id, **label))

    def feed(self, path: Path, text: str, *, at_once: bool = True) -> None:
        """Write rows as a forward pass would, in one chunk or token by token."""
        if not at_once:
            for letter in text:
                self.feed(path, letter)
            return
        tip = path.tip
        tokens = tokens_to(tip) + tuple(ids(text))
        self.tree.reserve(path, len(text))
        for layer in range(len(self.tree.layout)):
            k, v = self.rows_of(tokens, tip.end, layer)
            tip.keys[layer][:, tip.n_rows : tip.n_rows + len(text)] = k
            tip.values[layer][:, tip.n_rows : tip.n_rows + len(text)] = v
        self.tree.extend(path, ids(text))

    def run(self, prompt: str, call: str = "", scope: str = "s", **label: object) -> Path:
        """A whole call: feeds what is not resident of `prompt`, then ends well."""
        path = self.begin(prompt, call, scope, **label)
        self.feed(path, prompt[path.n_reused :])
        self.tree.commit(path)
        return path

    def release(self, path_id: str, **selector: object) -> ReleaseReceipt:
        """Release by name."""
        chosen = PathSelector(path_id=path_id, **selector)
        return self.tree.release(chosen, reason="test")

    def drawing(self, scope: str = "s") -> str:
        """The tree as text: `ab(c de*)` is a trunk with two children; `*` is an open tip."""
        tops = [s for s in self.tree.segments() if s.start == 0 and s.parent.parent is None]
        return " ".join(sorted(_draw(s) for s in tops if s.scope == scope))


def _draw(segment: Segment) -> str:
    text = "".join(map(chr, segment.token_ids)) + "*" * segment.is_open
    below = " ".join(sorted(_draw(child) for child in segment.children))
    return f"{text}({below})" if below else text


def text_of(path: Path) -> str:
    """The letters up to a path's tip."""
    return "".join(map(chr, tokens_to(path.tip)))


def check_rows(grove: Grove) -> None:
    """Every resident row is the one its tokens ask for, in every layer; packed ones nearly."""
    for segment in grove.tree.segments():
        tokens = tokens_to(segment)
        for layer in range(len(grove.tree.layout)):
            rows = grove.rows_of(tokens, segment.start, layer)
            where = (segment.segment_id, layer, "".join(map(chr, tokens)))
            dense = [t[:, : segment.n_rows] for t in (segment.keys[layer], segment.values[layer])]
            for held, asked in zip(dense, rows, strict=True):
                assert torch.equal(held, stored_of(segment, asked, layer, held)), where
            for block in segment.packed:
                for held, asked in zip(block.load(layer), rows, strict=True):
                    near(held, asked[:, list(block.offsets)], asked, block.bits)


def near(held: Tensor, asked: Tensor, whole: Tensor, bits: int) -> None:
    """Whether rows differ by no more than their precision asks for."""
    assert held.dtype == asked.dtype
    most = (whole.max() - whole.min()).item() / (2**bits - 2) + 1e-3 * whole.abs().max().item()
    assert (held.double() - asked.double()).abs().max() <= most


def stored_of(segment: Segment, rows: Tensor, layer: int, held: Tensor) -> Tensor:
    """Those of all rows of a segment, `[H, S, D]`, that its storage should hold; padding as is."""
    if segment.kept_by_head is not None:
        keep = segment.kept_by_head[layer]
        padded = torch.cat([rows, torch.full_like(rows[:, :1], float("nan"))], 1)
        wanted = padded.gather(1, keep.unsqueeze(-1).expand(-1, -1, rows.shape[2]))
        return torch.where(wanted.isnan(), held, wanted)
    return rows if segment.kept is None else rows[:, list(segment.kept)]


def resident_heads(tree: SegmentTree) -> set[tuple[str, tuple[int, ...]]]:
    """(scope, tokens up to it) of every resident row."""
    heads = set()
    for segment in tree.segments():
        tokens = tokens_to(segment)
        heads |= {(segment.scope, tokens[:n]) for n in range(segment.start + 1, len(tokens) + 1)}
    return heads


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    storages.pop(0, None)
    return sum(storages.values())


def reachable_bytes(*objects: object) -> int:
    """Bytes of all storages that `objects` keep alive, found by the garbage collector's eyes."""
    seen: dict[int, object] = {}
    tensors, pending = [], list(objects)
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType)) or callable(thing):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            tensors.append(thing)
        else:
            pending.extend(gc.get_referents(thing))
    return storage_bytes(tensors)
