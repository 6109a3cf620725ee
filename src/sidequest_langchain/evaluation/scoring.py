"""How answers are scored: by the words in them, whatever stands around."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sidequest_langchain.evaluation.sample import Scorer


def words_in(text: str) -> list[str]:
    """Words and numbers of a text, in lower case, in order."""
    return re.findall(r"[^\W_]+", text.lower())


def names(expected: str, rivals: Sequence[str] = ()) -> Scorer:
    """1 if the answer holds the words of `expected` in a row, and no word of `rivals` before it.

    An answer that lists everything it has read is not right.
    """
    wanted, others = words_in(expected), {word.lower() for word in rivals}

    def score(text: str) -> float:
        found = words_in(text)
        for at in range(len(found) - len(wanted) + 1):
            if found[at : at + len(wanted)] == wanted:
                return 1.0
            if found[at] in others:
                return 0.0
        return 0.0

    return score


def lists(expected: Sequence[str], pool: Sequence[str]) -> Scorer:
    """The share of `expected` among the first so many words of `pool` that the answer holds."""
    wanted, known = {word.lower() for word in expected}, {word.lower() for word in pool}

    def score(text: str) -> float:
        named = [word for word in dict.fromkeys(words_in(text)) if word in known]
        return len(wanted.intersection(named[: len(wanted)])) / len(wanted)

    return score


def obeys(*, begins: str = "", ends: str = "") -> Scorer:
    """Half for each instruction: the answer begins with a word, the answer ends with another."""

    def score(text: str) -> float:
        found = words_in(text)
        rules = [found[:1] == words_in(begins), found[-1:] == words_in(ends)]
        return sum(rules) / len(rules)

    return score
