"""The transformers seam, outer half: one causal model as a function from a step to logits.

It must not know requests, sampling or labels.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sidequest_langchain.engine.architecture import (
    check_architecture,
    context_length,
    n_layers,
)
from sidequest_langchain.engine.attention_hook import ACTIVE, PREFIX, Probe, register_over
from sidequest_langchain.errors import UnsupportedModelError
from sidequest_langchain.kv.layout import KVLayout, LayerShape
from sidequest_langchain.kv.parts import Part
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.step_plan import Row, StepPlan, Watcher, on_device
from sidequest_langchain.models.int8 import Int8Linear, only_wanted

logger = logging.getLogger(__name__)

_N_ADAPTERS: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
"""Adapters open over each model: several engines may run one model, each over its own tree."""


class ModelAdapter:
    """A loaded model, run over a segment tree.

    The model is not modified but for the name of its attention implementation; outside of
    `forward` it computes what it did before, and `close` restores the name.

    Raises:
        UnsupportedModelError: See `check_architecture`; or a layer bypasses the attention
            interface.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_architecture(model)
        self.model = model
        model.train(mode=False)
        self.context_length = context_length(model.config)
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        self.vocab_size = embedding.shape[0]
        self.device = _input_device(model)
        self._own_attention = (model.config._attn_implementation or "eager").removeprefix(PREFIX)
        # An index tensor must lie where the last layer runs, which a dispatched model hides.
        is_spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        takes_index = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._keeps_logits = takes_index and not is_spread
        _N_ADAPTERS[model] = _N_ADAPTERS.get(model, 0) + 1
        model.set_attn_implementation(register_over(self._own_attention))
        try:
            self.layout = self._probe()
        except BaseException:
            self.close()
            raise

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a turn, by the model's configuration."""
        found: set[int] = set()
        for config in (self.model.config, self.model.generation_config):
            ids = getattr(config, "eos_token_id", None)
            found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
        return frozenset(found)

    @property
    def reads_ahead_cheaply(self) -> bool:
        """Whether a pass over a few tokens takes about as long as one over one token.

        Dense weights on a CPU are read faster for one token than for two.
        """
        is_int8 = any(isinstance(module, Int8Linear) for module in self.model.modules())
        return is_int8 or self.device.type != "cpu"

    @torch.no_grad()
    def forward(
        self,
        rows: Sequence[Row],
        ids: Sequence[int],
        wanted: Sequence[int] | None = None,
        *,
        watcher: Watcher | None = None,
        overlay: Mapping[Segment, Sequence[Part]] | None = None,
    ) -> Tensor:
        """Run one packed forward pass.

        Writes the new K/V of stored rows behind the tips' rows (room must be reserved) and
        counts nothing: whoever calls extends the tips when the pass went well.

        Args:
            rows: The rows of the batch, in order.
            ids: Their new tokens, one row after another, `[T]`.
            wanted: Indices of the packed tokens after which logits are needed; `None` is the
                last token of every row.
            watcher: Told of what attention sees.
            overlay: Parts to read instead of a segment's own: a what-if.

        Returns:
            fp32 logits, `[len(wanted), V]`.
        """
        plan = StepPlan(rows, watcher=watcher, overlay=overlay)
        last = plan.last_tokens() if wanted is None else list(wanted)
        if self.model.training:
            # Its owner trained it meanwhile: with dropout on, K/V would be noise that stays.
            logger.warning("%s was in training mode; put back to eval", type(self.model).__name__)
            self.model.train(mode=False)
        token = ACTIVE.set(plan)
        try:
            # A mask that our attention ignores: without one the model looks for packed sequences
            # in the positions, layer type by layer type, and waits for the answer.
            mask = torch.zeros(1, 1, 1, 1, device=self.device)
            with only_wanted(len(ids), last):
                return self._logits(ids, plan.positions(), last, attention_mask=mask)
        finally:
            ACTIVE.reset(token)

    @torch.no_grad()
    def plain_logits(self, ids: Sequence[int]) -> Tensor:
        """fp32 logits of the last token by the model as it is, without our attention, `[V]`."""
        return self._logits(ids, list(range(len(ids))), [len(ids) - 1])[0]

    def close(self) -> None:
        """Give the model its own attention implementation back, with its last adapter gone."""
        _N_ADAPTERS[self.model] -= 1
        if _N_ADAPTERS[self.model] == 0:
            self.model.set_attn_implementation(self._own_attention)

    def _logits(
        self, ids: Sequence[int], positions: list[int], last: list[int], **kwargs: Tensor
    ) -> Tensor:
        given = on_device(self.device, torch.tensor([*ids, *positions, *last], dtype=torch.long))
        tokens, places, wanted = torch.split(given, [len(ids), len(ids), len(last)])
        if self._keeps_logits:
            kwargs["logits_to_keep"] = wanted
        # Whoever makes the engine may have it on: K/V is of the model's own dtype.
        with torch.autocast(self.device.type, enabled=False):
            out = self.model(
                input_ids=tokens[None], position_ids=places[None], use_cache=False, **kwargs
            )
        logits: Tensor = out.logits[0]
        if not self._keeps_logits:
            logits = logits[wanted.to(logits.device)]
        return logits.float()

    def _probe(self) -> KVLayout:
        """Learn every layer's K/V shape from one short plain pass."""
        probe = Probe()
        token = ACTIVE.set(probe)
        try:
            self.plain_logits([token % self.vocab_size for token in (1, 2, 3)])
        finally:
            ACTIVE.reset(token)
        seen = [layer for layer, _, _ in probe.layers]
        expected = n_layers(self.model.config)
        if sorted(seen) != list(range(expected)):
            name = type(self.model).__name__
            msg = (
                f"{name} cannot be served over a segment tree: {len(set(seen))} of its "
                f"{expected} layers call the attention interface of transformers once per pass; "
                "layers that bypass or share it keep state that the tree cannot see"
            )
            raise UnsupportedModelError(msg)
        return tuple(_shape(k, v) for _, k, v in sorted(probe.layers, key=lambda call: call[0]))


def _input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids must lie: with the embedding, or where its offloaded weights will run."""
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    if not weight.is_meta:
        return weight.device
    return torch.device(getattr(getattr(embedding, "_hf_hook", None), "execution_device", "cpu"))


def _shape(k: Tensor, v: Tensor) -> LayerShape:
    return LayerShape(
        n_kv_heads=k.shape[1],
        key_dim=k.shape[3],
        value_dim=v.shape[3],
        dtype=k.dtype,
        device=k.device,
    )
