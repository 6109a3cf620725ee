"""Writes texts under a grammar without an engine, and says what an engine must write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.grammar import (
    FreeText,
    Grammar,
    Grammars,
    Repeat,
    Schema,
    Text,
    Then,
)
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from tests.support import oracle
from tests.support.tiny import END_ID
from tests.support.tok import VOCAB_SIZE, byte_tokenizer, metaspace_tokenizer

TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte": byte_tokenizer,
    "byte-special": functools.partial(byte_tokenizer, special_tags=True),
    "metaspace": metaspace_tokenizer,
    "metaspace-special": functools.partial(metaspace_tokenizer, special_tags=True),
}

ARGUMENTS = Schema.of(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["Paris", "Rome", "城市"]},
            "value": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "value"],
        "additionalProperties": False,
    }
)
CALL = Then((Text("<tool_call>\n"), ARGUMENTS, Text("\n</tool_call>")))
AUTO = Then((FreeText(("<tool_call>",)), Repeat(CALL, at_most=2, separator="\n")))


@dataclass(frozen=True)
class Tools:
    """A tokenizer and the grammars over it."""

    tokenizer: ChatTokenizer
    grammars: Grammars
    n_ids: int = VOCAB_SIZE

    def begin(self, grammar: Grammar) -> Constraint:
        return self.grammars.constraint(grammar)


@functools.cache
def tools(name: str) -> Tools:
    tokenizer = ChatTokenizer(TOKENIZERS[name]())
    return Tools(tokenizer, Grammars(tokenizer, VOCAB_SIZE, [END_ID]))


ENDS = (b'"', b"}", b"]")


def bias(tokenizer: ChatTokenizer, n_ids: int, by: float, liked: Sequence[bytes] = ENDS) -> Tensor:
    """What lets a random text come to its end: the end and some tokens are likelier, `[V]`."""
    is_liked = [tokenizer.token_bytes(i) in liked or i == END_ID for i in range(n_ids)]
    return by * torch.tensor(is_liked, dtype=torch.float32)


def walk(
    kit: Tools, grammar: Grammar, seed: int, by: float = 4.0, liked: Sequence[bytes] = ENDS
) -> str | None:
    """A random text under a grammar; `None` if it did not end."""
    generator = torch.Generator().manual_seed(seed)
    constraint, closing = kit.begin(grammar), bias(kit.tokenizer, kit.n_ids, by, liked)
    token_ids: list[int] = []
    while len(token_ids) < 400:
        noise = torch.rand(kit.n_ids, generator=generator)
        logits = closing - torch.log(-torch.log(noise))
        chosen = constraint.best(logits, int(logits.argmax()))
        assert chosen == int(constraint.mask(logits.clone()).argmax())
        constraint.accept(chosen)
        if chosen == END_ID:
            return kit.tokenizer.decode(token_ids)
        token_ids.append(chosen)
        if constraint.is_done:
            return kit.tokenizer.decode(token_ids)
    return None


def allows(kit: Tools, grammar: Grammar, token_ids: Sequence[int], end: int = END_ID) -> bool:
    """Whether these tokens, and then the end, are a text under the grammar."""
    constraint = kit.begin(grammar)
    for token_id in [*token_ids, end]:
        if token_id == end and constraint.is_done:
            return True
        if constraint.mask(torch.zeros(kit.n_ids))[token_id] != 0:
            return False
        constraint.accept(token_id)
    return True


def right_tokens(engine: Engine, grammar: Grammar, prompt: Sequence[int], n: int) -> list[int]:
    """What greedy decoding with plain transformers writes, one masked token after another."""
    model: PreTrainedModel = engine._core.adapter.model
    constraint = engine.grammars.constraint(grammar)
    found: list[int] = []
    while len(found) < n and not constraint.is_done:
        logits = oracle.logits(model, [*prompt, *found])[-1]
        chosen = int(constraint.mask(logits).argmax())
        if chosen in engine.eos_ids:
            break
        constraint.accept(chosen)
        found.append(chosen)
    return found


def let_end(engine: Engine, by: float = 6.0) -> Any:
    """Let a random model close what it opened: its logits are lifted there. Returns the hook."""
    lift = bias(engine.tokenizer, engine.vocab_size, by)

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        output.logits = output.logits + lift
        return output

    return engine._core.adapter.model.register_forward_hook(hook)
