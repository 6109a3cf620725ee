"""Puts int8 weights in the place of a CPU model's dense ones, if they pass a check here and now.

It must not know where a model came from, and leaves a model that fails the check as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sidequest_langchain.kv.allocator import return_to_system
from sidequest_langchain.models.int8 import Int8Group, Int8Linear, Int8Product, quantise_rows
from sidequest_langchain.models.slicing import ZERO

MOST_KL = 0.02
"""Largest mean divergence (nats a token) of the check. It reads a couple of hundred tokens, over
which the mean varies; over 2,000 tokens of text the catalogue's models stay below 0.01."""

PROBE = """\
The harbour town of Lindholm has 4,312 inhabitants and one bakery. On Mondays the ferry leaves at
07:45; therefore the baker starts at four. "We sell 120 loaves a day," she says, "and so we need
38 kg of flour." If the ferry is late, what should she do? First, she could bake fewer loaves.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

{"city": "Lindholm", "open": true, "price": 3.5}
"""
"""What the check reads: prose, numbers, code and JSON."""

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that read the same input."""

_AFTER_ATTENTION = frozenset({"o_proj", "gate_proj", "up_proj", "down_proj"})
"""Layers that come after their block's attention, by the names that transformers gives them."""

_LEFT_DENSE = frozenset({"gate", "router", "score"})
"""Small layers that choose between experts: a rounding there changes which weights are read."""


class QuantisationError(Exception):
    """The model cannot be served with int8 weights here; it is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """What was done to a model."""

    n_layers: int
    n_bytes: int
    """Of the int8 weights and their scales."""
    kl: float
    """Mean divergence from the dense model over the probe, nats a token."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Layers of one parent that become one product."""

    parent: nn.Module
    names: tuple[str, ...]
    is_after_attention: bool
    """They stand behind the last attention of the model."""

    def layers(self) -> list[nn.Linear]:
        return [self.parent.get_submodule(name) for name in self.names]  # type: ignore[misc]


@torch.no_grad()
def quantise_weights(
    model: PreTrainedModel, probe_ids: Sequence[int], *, most_kl: float = MOST_KL
) -> Quantised:
    """Replace the linear layers of a dense fp32 CPU model by int8 ones. Lossy; in place.

    Args:
        model: The model; other threads must not run it meanwhile.
        probe_ids: The token ids of `PROBE`.
        most_kl: Largest mean divergence allowed over them, nats a token.

    Raises:
        QuantisationError: torch lacks the kernel, the kernel is wrong on this processor,
            or the model says something else with int8 weights.
    """
    places = list(_places(model))
    if not places:
        msg = "it has no linear layers that could be int8"
        raise QuantisationError(msg)
    objection = _check_kernel()
    if objection is not None:
        raise QuantisationError(objection)
    # Learned positions end with the context: a short one is probed as far as it goes.
    n_most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    ids = torch.tensor([list(probe_ids)[:n_most]])
    expected = _log_probabilities(model, ids)
    dense = [(place, place.layers()) for place in places]
    n_bytes = 0
    try:
        for place, layers in dense:
            product = Int8Product([lin.weight for lin in layers], [lin.bias for lin in layers])
            n_bytes += product.n_bytes
            group = Int8Group(product, is_after_attention=place.is_after_attention)
            for index, name in enumerate(place.names):
                setattr(place.parent, name, Int8Linear(group, index))
        kl = _divergence(expected, _log_probabilities(model, ids))
        if not kl <= most_kl:
            msg = f"its words change: divergence {kl:.3g} nats a token, allowed {most_kl}"
            raise QuantisationError(msg)
    except BaseException:
        for place, layers in dense:
            for name, layer in zip(place.names, layers, strict=True):
                setattr(place.parent, name, layer)
        raise
    n_layers = sum(len(layers) for _, layers in dense)
    dense.clear()
    for parameter in model.parameters():
        # One tensor left of a mapped file would keep all of the file's pages resident.
        parameter.data = parameter.data.clone()
    return_to_system(4 * n_bytes)
    return Quantised(n_layers=n_layers, n_bytes=n_bytes, kl=kl)


def _places(model: nn.Module) -> Iterator[_Place]:
    last = _last_block(model)
    for path, parent in model.named_modules():
        is_last = last is not None and f"{path}.".startswith(last)
        names = [
            name
            for name, child in parent.named_children()
            if type(child) is nn.Linear and name not in _LEFT_DENSE
        ]
        together = [t for t in _TOGETHER if set(t) <= set(names)]
        alone = [(name,) for name in names if not any(name in t for t in together)]
        for group in (*together, *alone):
            yield _Place(parent, group, is_last and _AFTER_ATTENTION.issuperset(group))


def _last_block(model: nn.Module) -> str | None:
    """Where the last of the model's blocks stands, such as `model.layers.23.`."""
    blocks = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and path.endswith("layers") and len(module)
    ]
    # Several lists of blocks (towers): which runs last is not for us to guess.
    return f"{blocks[0][0]}.{len(blocks[0][1]) - 1}." if len(blocks) == 1 else None


def _log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)


def _divergence(expected: Tensor, got: Tensor) -> float:
    """Mean over tokens of KL(expected || got), nats."""
    return float((expected.exp() * (expected - got)).sum(-1).mean())


@functools.cache
def _check_kernel() -> str | None:
    """What speaks against the kernel here: it is compared with whole numbers."""
    n, k = 512, 2048
    weight = torch.sin(torch.arange(float(n * k))).view(n, k)
    weight[:2] = torch.tensor([[1.0], [-1.0]])  # the largest codes: their sums saturate first
    x = torch.cat((torch.ones(1, k), -torch.ones(1, k), 1e3 * weight[2:8].flip(1)))
    try:
        product = Int8Product([weight], [None])
        got = product(x).double()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"this build of torch has no int8 product for this processor ({first})"
    codes, scales = quantise_rows(weight)
    parts, worth = product.slicing.split(x)
    steps = product.slicing.join(parts.double() - ZERO)
    expected = (steps @ codes.double().T) * scales * worth
    least = 1e-6 * float(expected.abs().max())
    if not torch.allclose(got, expected, rtol=1e-5, atol=least):
        return "the int8 product of this build of torch is not exact on this processor"
    return None
