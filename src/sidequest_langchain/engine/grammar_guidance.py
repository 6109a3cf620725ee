"""Holds a sample's tokens to a grammar with llguidance: vocabulary, matcher, mask.

It must not know the engine's requests, nor how grammars are written down.

Paper: Koo et al., arXiv:2407.08103 (token masks from byte-level automata). llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import GrammarError

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_EIGHT = np.ascontiguousarray(_BITS).view(np.uint64)[:, 0]
"""Eight bits of a mask as eight bytes, each 0 or 1."""

_LISTING = re.compile(r"\s*\d+ \|")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")


class Vocabulary:
    """A model's tokens as bytes, and the buffers of masks over them.

    Making one takes about a second; memory: the bytes of the vocabulary, a few times over. The
    buffers are for one thread, the engine's.
    """

    def __init__(self, tokenizer: ChatTokenizer, n_ids: int, eos_ids: Sequence[int]) -> None:
        """Read the vocabulary.

        Args:
            tokenizer: Says what a token spells.
            n_ids: Width of the model's logits; ids beyond the tokenizer's are never allowed.
            eos_ids: Tokens that end a turn.
        """
        eos = [token_id for token_id in eos_ids if token_id < n_ids]
        spelled: Any = _Spelled(tokenizer, n_ids, eos[0] if eos else None)
        self.tokens = LLTokenizer(spelled, eos_token=eos or None)
        # One more id than the model has, where nothing ends its turn.
        self._bits = np.zeros((self.tokens.vocab_size + 31) // 32 * 4, dtype=np.uint8)
        self._bytes = np.zeros(len(self._bits), dtype=np.uint64)
        self.allowed = torch.from_numpy(self._bytes.view(np.bool_))[:n_ids]
        """Where the last mask that was read allows a token, `[V]`."""
        self._row: Tensor | None = None

    def read(self, matcher: LLMatcher) -> None:
        """Let a matcher write its mask; `has` and `allowed` are of this one from now on."""
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)

    def has(self, token_id: int) -> bool:
        """Whether the mask allows a token."""
        return bool(self._bits[token_id >> 3] >> (token_id & 7) & 1)

    def spread(self) -> Tensor:
        """The mask, a byte a token, `[V]` bool on the CPU; overwritten by the next one."""
        np.take(_EIGHT, self._bits, out=self._bytes)
        return self.allowed

    def best(self, logits: Tensor) -> int:
        """The largest of the allowed logits; they are not changed."""
        if self._row is None or self._row.device != logits.device:
            self._row = torch.empty_like(logits)
            self._nothing = torch.full((), -torch.inf, device=logits.device)
        allowed = self.spread().to(logits.device)
        return int(torch.where(allowed, logits, self._nothing, out=self._row).argmax())


class _Spelled:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: ChatTokenizer, n_ids: int, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = [_bytes_of(tokenizer, token_id) for token_id in range(n_ids)]
        self.special_token_ids: list[int] = []

    def __call__(self, text: str) -> list[int]:
        """The ids of text in the middle of a text, none of them special."""
        tokenizer = self._tokenizer
        found = tokenizer.encode(text, follows_text=True)
        if any(map(tokenizer.is_special, found)):
            return tokenizer.encode(text, control_tokens=False, follows_text=True)
        return found


def _bytes_of(tokenizer: ChatTokenizer, token_id: int) -> bytes:
    """What a token spells; after a byte that is in no text if it is special, or spells nothing."""
    spelled = b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
    return spelled or b"\xff<[%d]>" % token_id


class GuidedConstraint(Constraint):
    """Holds one sample to a grammar."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher

    def copy(self) -> GuidedConstraint:
        """The same grammar at the same place, for another sample."""
        return GuidedConstraint(self._vocabulary, self._matcher.deep_copy())

    def mask(self, logits: Tensor) -> Tensor:
        """Set the logits of forbidden tokens to -inf, in place.

        Raises:
            GrammarError: The matcher broke down.
        """
        self._read()
        allowed = self._vocabulary.spread().to(logits.device)
        return logits.masked_fill_(~allowed, -torch.inf)

    def best(self, logits: Tensor, best_id: int) -> int:
        """The most likely token that is allowed: most often the most likely one of all.

        Raises:
            GrammarError: The matcher broke down.
        """
        self._read()
        vocabulary = self._vocabulary
        return best_id if vocabulary.has(best_id) else vocabulary.best(logits)

    def accept(self, token_id: int) -> None:
        """Move on.

        Raises:
            GrammarError: The token is not allowed here.
        """
        if not self._matcher.consume_token(token_id):
            self._fail()

    @property
    def is_done(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()

    def forced(self) -> Sequence[int]:
        """The tokens that spell what the grammar leaves no choice in."""
        return () if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def n_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens could follow."""
        return self._matcher.validate_tokens(list(token_ids))

    def _read(self) -> None:
        self._vocabulary.read(self._matcher)
        if self._matcher.is_error():
            self._fail()

    def _fail(self) -> None:
        msg = (
            "the grammar broke down in the middle of the answer: "
            f"{_plain(self._matcher.get_error())}; simplify it"
        )
        raise GrammarError(msg)


def begun(vocabulary: Vocabulary, lark: str) -> GuidedConstraint:
    """A constraint at the beginning of a text.

    Args:
        vocabulary: The model's; its buffers are shared by all samples of an engine.
        lark: The grammar.

    Raises:
        GrammarError: The library cannot express the grammar, or no text fits it.
    """
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(vocabulary.tokens, lark, log_level=0, limits=limits)
    reason = matcher.get_error() or _dead_end(matcher.deep_copy())
    if reason:
        msg = (
            f"the grammar cannot be expressed: {_plain(reason)}; change it, or let the model "
            "answer freely and check what it says"
        )
        raise GrammarError(msg)
    return GuidedConstraint(vocabulary, matcher)


def _dead_end(matcher: LLMatcher) -> str:
    """Why no text can begin as the grammar has it; empty where one can. Moves the matcher."""
    matcher.consume_tokens(matcher.compute_ff_tokens())
    if not matcher.is_stopped():
        matcher.compute_bitmask()
    return "no text that comes to an end fits it" if matcher.is_error() else ""


def _plain(reason: str) -> str:
    """What went wrong, without the place in a text that the user never saw."""
    told = []
    for line in reason.strip().splitlines():
        if _LISTING.match(line):
            break
        told.append(_PLACE.sub("", line.strip()))
    return " ".join(told)
