"""Grammars that answers can be held to, and one model's constraints made of them.

It must not know the engine, nor the library that does it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.engine.grammar_guidance import GuidedConstraint, Vocabulary, begun
from sidequest_langchain.engine.grammar_lark import lark_of
from sidequest_langchain.engine.grammar_parts import (
    Choice,
    FreeText,
    Grammar,
    OneOf,
    Pattern,
    Repeat,
    Schema,
    Text,
    Then,
)
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import GrammarError

__all__ = [
    "Choice",
    "FreeText",
    "Grammar",
    "Grammars",
    "OneOf",
    "Pattern",
    "Repeat",
    "Schema",
    "Text",
    "Then",
]

N_KEPT = 64
"""Grammars kept compiled."""


class Grammars:
    """Makes constraints for one model; safe to use from many threads.

    The vocabulary is read when the first grammar is asked for, which takes about a second; the
    grammars used last are kept compiled.
    """

    def __init__(self, tokenizer: ChatTokenizer, n_ids: int, eos_ids: Iterable[int]) -> None:
        """Prepare nothing yet.

        Args:
            tokenizer: The model's.
            n_ids: Width of its logits.
            eos_ids: Tokens that end its turn.
        """
        self._tokenizer = tokenizer
        self._n_ids = n_ids
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._special: dict[str, int] = {}
        self._first = ""
        """What the first token must bring along because decoding takes it off."""
        self._kept: OrderedDict[Grammar, GuidedConstraint] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar, so that its first use is quick.

        Raises:
            GrammarError: It cannot be expressed; the message names what cannot.
        """
        with self._lock:
            self._begun(grammar)

    def constraint(self, grammar: Grammar) -> Constraint:
        """A constraint for one sample.

        Raises:
            GrammarError: It cannot be expressed; the message names what cannot.
        """
        with self._lock:
            return self._begun(grammar).copy()

    def _begun(self, grammar: Grammar) -> GuidedConstraint:
        """A grammar's constraint at the beginning, to be copied; the lock is held."""
        found = self._kept.get(grammar)
        if found is None:
            found = self._compiled(grammar)
            self._kept[grammar] = found
        self._kept.move_to_end(grammar)
        while len(self._kept) > N_KEPT:
            self._kept.popitem(last=False)
        return found

    def _compiled(self, grammar: Grammar) -> GuidedConstraint:
        if self._vocabulary is None:
            self._read_tokenizer()
            self._vocabulary = Vocabulary(self._tokenizer, self._n_ids, self._eos_ids)
        try:
            lark = lark_of(grammar, self._special, first=self._first)
        except RecursionError:
            msg = "the grammar is nested too deeply; make it flatter"
            raise GrammarError(msg) from None
        return begun(self._vocabulary, lark)

    def _read_tokenizer(self) -> None:
        tokenizer = self._tokenizer
        for text in tokenizer.special_tokens:
            token_ids = tokenizer.encode(text)
            if len(token_ids) == 1 and tokenizer.is_special(token_ids[0]):
                self._special[text] = token_ids[0]
        # Some decoders strip the space that a text's first word begins with.
        spaced = tokenizer.decode(tokenizer.encode(" x", follows_text=True))
        self._first = "" if spaced.startswith(" ") else " "
