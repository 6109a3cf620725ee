"""What is right: plain transformers on the full ids, with no cache and no reuse (R0).

It must not know this package: it takes the same model object, used the ordinary way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def greedy(
    model: PreTrainedModel, ids: Sequence[int], n: int, *, ignore_eos: bool = False
) -> list[int]:
    """Up to `n` greedy tokens after `ids` by `model.generate`, every step from scratch.

    The end-of-turn token ends the answer and is left out of it, as in
    `GenerationResult.token_ids`; with `ignore_eos` it is a token like any other.
    """
    config = copy.deepcopy(model.generation_config)
    eos = set() if ignore_eos else _eos_ids(model)
    config.update(do_sample=False, use_cache=False, max_new_tokens=n, max_length=None)
    # `None` would be filled in again from the model's own; no token has this id.
    config.eos_token_id = sorted(eos) or [model.config.vocab_size]
    config.temperature = config.top_p = config.top_k = None
    prompt = torch.tensor([list(ids)], device=model.device)
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config
        )
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer[:-1] if answer and answer[-1] in eos else answer


def logits(
    model: PreTrainedModel, ids: Sequence[int], *, positions: Sequence[int] | None = None
) -> Tensor:
    """fp32 logits of a fresh forward over `ids`, `[S, V]`; causal also over gaps in `positions`."""
    batch = torch.tensor([list(ids)], device=model.device)
    where = list(positions) if positions is not None else list(range(len(ids)))
    # The mask of ones keeps transformers from reading a gap in the positions as a border
    # between packed sequences.
    given: dict[str, Any] = {
        "input_ids": batch,
        "attention_mask": torch.ones_like(batch),
        "position_ids": torch.tensor([where], device=model.device),
        "use_cache": False,
    }
    with torch.no_grad():
        return model(**given).logits[0].float()


def least_margin(model: PreTrainedModel, ids: Sequence[int], answer: Sequence[int]) -> float:
    """Smallest distance of the best from the second-best logit on the way through `answer`.

    A test that compares token ids wants more than 1e-3 here, else rounding decides it.
    """
    full = [*ids, *answer]
    best = logits(model, full)[len(ids) - 1 : len(full) - 1].topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


def storage_bytes(*objects: Any) -> int:
    """Bytes of the distinct tensor storages reachable from `objects` (BYTES).

    Follows containers, `__dict__` and `__slots__`; never `numel`, since a small view keeps
    its whole storage alive.
    """
    storages: dict[int, int] = {}
    for tensor in _tensors(list(objects), set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def _eos_ids(model: PreTrainedModel) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(eos) if isinstance(eos, list) else {int(eos)}


def _tensors(pending: list[Any], seen: set[int]) -> Iterator[Tensor]:
    keep_alive = []  # ids are unique only among objects that live
    while pending:
        obj = pending.pop()
        if id(obj) in seen or isinstance(obj, (str, bytes, int, float, type)):
            continue
        seen.add(id(obj))
        keep_alive.append(obj)
        if isinstance(obj, Tensor):
            yield obj
        elif isinstance(obj, dict):
            pending.extend([*obj.keys(), *obj.values()])
        elif isinstance(obj, (list, tuple, set, frozenset)):
            pending.extend(obj)
        elif type(obj).__module__.startswith(("sidequest_langchain", "tests")):
            pending.extend(getattr(obj, "__dict__", {}).values())
            for base in type(obj).__mro__:
                slots = base.__dict__.get("__slots__", ())
                names = (slots,) if isinstance(slots, str) else slots
                pending.extend(getattr(obj, name) for name in names if hasattr(obj, name))
