"""The transformers seam, inner half: the attention function that models call while we run them.

Outside of our step the model behaves as it did before: both functions hand on to the
implementation it was loaded with. It must not know requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sidequest_langchain.errors import UnsupportedModelError
from sidequest_langchain.kv.step_plan import StepPlan
from sidequest_langchain.kv.tree_attention import Features, attend

PREFIX = "sidequest_over_"

NEUTRAL = frozenset(
    {
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keyword arguments that do not change what attention computes."""

_KNOWN = NEUTRAL | {"scaling", "sliding_window", "softcap", "s_aux", "attention_mask"}


@dataclass(slots=True)
class Probe:
    """Stands in for a step while the model is examined: records every call, computes nothing."""

    layers: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """(layer_idx, K, V) of every call, in order."""


ACTIVE: ContextVar[StepPlan | Probe | None] = ContextVar("sidequest_step", default=None)
"""The step being run in this thread; `None` outside of our steps."""

AttentionFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]


def register_over(implementation: str) -> str:
    """Register our attention over a model's own implementation.

    Args:
        implementation: The implementation to hand on to outside of a step, such as `"sdpa"`.

    Returns:
        The name to set as the model's attention implementation.
    """
    name = PREFIX + implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _over(implementation))
        AttentionMaskInterface.register(name, _mask_over(implementation))
    return name


def _over(implementation: str) -> AttentionFunction:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        step = ACTIVE.get()
        if isinstance(step, StepPlan):
            return _tree(step, module, query, key, value, kwargs), None
        if step is not None:
            read_features(module, query, kwargs)
            step.layers.append((_layer_of(module), key, value))
        return _own(implementation, module)(module, query, key, value, *args, **kwargs)

    return attention


def _mask_over(implementation: str) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        if isinstance(ACTIVE.get(), StepPlan):
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](*args, **kwargs)

    return mask


def _own(implementation: str, module: nn.Module) -> AttentionFunction:
    if implementation == "eager":  # each modeling file has its own, registered nowhere
        eager: AttentionFunction = sys.modules[type(module).__module__].eager_attention_forward
        return eager
    found: AttentionFunction = ALL_ATTENTION_FUNCTIONS[implementation]
    return found


def _layer_of(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        msg = (
            f"{type(module).__name__} does not say which layer it is (layer_idx), so its K/V "
            "cannot be stored; this architecture is not supported"
        )
        raise UnsupportedModelError(msg)
    return layer


def _tree(
    plan: StepPlan,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
) -> Tensor:
    features = read_features(module, query, kwargs)
    return attend(plan, _layer_of(module), query[0], key[0], value[0], features).unsqueeze(0)


def read_features(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> Features:
    """What a layer asks of attention, from the arguments its model hands over.

    Raises:
        UnsupportedModelError: It asks for something that tree attention does not compute.
    """
    if getattr(module, "is_causal", True) is False:
        msg = f"{type(module).__name__} is not causal; its K/V cannot be reused by prefix"
        raise UnsupportedModelError(msg)
    strange = [name for name in kwargs if name not in _KNOWN and kwargs[name] is not None]
    if strange:
        msg = (
            f"{type(module).__name__} hands {', '.join(sorted(strange))} to its attention, which "
            "tree attention does not compute; this architecture is not supported"
        )
        raise UnsupportedModelError(msg)
    scaling = kwargs.get("scaling")
    return Features(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
