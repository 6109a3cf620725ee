"""Tasks over one long text: needles, keys, variables, common and frequent words.

The text is what a tool said. The first question stands in the prompt that brings it; the others
come when it has been read, and perhaps evicted, without the reader knowing what would be asked. The
ideas are those of RULER, arXiv:2404.06654; every word is ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from sidequest_langchain.evaluation.sample import Ask, Count, Sample, Scorer, Task, filled, spread
from sidequest_langchain.evaluation.scoring import lists, names
from sidequest_langchain.evaluation.words import COLOURS, DOINGS, PEOPLE, THINGS, TOWNS, WEATHER

_SHORT = 16  # tokens of an answer that is one word or number
_SYSTEM = SystemMessage(
    "You read files with the tool `read_file` and answer the user's questions about them, in as "
    "few words as you can."
)


def diary(chance: random.Random) -> Iterator[str]:
    """Lines of noise without end, about 20 tokens each; no number stands in them."""
    while True:
        yield (
            f"In {chance.choice(TOWNS)} there was {chance.choice(WEATHER)}, and "
            f"{chance.choice(PEOPLE)} {chance.choice(DOINGS)}."
        )


def needle(chance: random.Random, n_tokens: int, count: Count) -> Sample:
    """One fact in noise, asked at once, and again after another subject."""
    owner, code = chance.choice(PEOPLE), _code(chance)
    lines = filled(diary(chance), n_tokens, count)
    lines = spread([f"The code of {owner}'s locker is {code}."], lines, chance)
    question = f"What is the code of {owner}'s locker? Answer with the number only."
    rest = Ask(messages=(HumanMessage("Say hello to me, in one word."),), max_tokens=8)
    again = _ask(question, code, names(code))
    return Sample(asks=(_read(lines, question, code, names(code)), rest, again))


def keys(chance: random.Random, n_tokens: int, count: Count) -> Sample:
    """Six facts alike, of which three are asked for, one after the other."""
    owners = chance.sample(PEOPLE, 6)
    codes = {owner: _code(chance) for owner in owners}
    facts = [f"The code of {owner}'s locker is {code}." for owner, code in codes.items()]
    lines = spread(facts, filled(diary(chance), n_tokens - 80, count), chance)
    return _three(lines, [
        (f"What is the code of {owner}'s locker? Answer with the number only.", codes[owner],
         names(codes[owner]))
        for owner in chance.sample(owners, 3)
    ])  # fmt: skip


def variables(chance: random.Random, n_tokens: int, count: Count) -> Sample:
    """Assignments in noise; a name's value is found by following another."""
    letters = chance.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 4)
    values = [_code(chance) for _ in range(2)]
    firsts, seconds = letters[:2], letters[2:]
    facts = [f"VAR_{name} = {value}" for name, value in zip(firsts, values, strict=True)]
    facts += [f"VAR_{b} = VAR_{a}" for a, b in zip(firsts, seconds, strict=True)]
    lines = spread(facts, filled(diary(chance), n_tokens - 50, count), chance)
    asked = list(zip(seconds, values, strict=True))
    chance.shuffle(asked)
    asks = []
    for i, (name, value) in enumerate(asked):
        question = (
            f"In the text VAR_{name} is set to another variable. Which one, and which number is "
            f"that one set to? Answer in the form: VAR_{name} = VAR_? = number"
        )
        score = names(value, [other for other in values if other != value])
        asks.append(
            _ask(question, value, score, 32) if i else _read(lines, question, value, score, 32)
        )
    return Sample(asks=tuple(asks))


def common(chance: random.Random, n_tokens: int, count: Count) -> Sample:
    """Three words that stand in every line of a list, beside another that changes."""
    pool = chance.sample(THINGS, len(THINGS))
    often, once = pool[:3], pool[3:]

    def rows() -> Iterator[str]:
        while True:
            row = [*often, chance.choice(once)]
            chance.shuffle(row)
            yield ", ".join(row)

    lines = filled(rows(), n_tokens, count)
    question = (
        "Three words stand in every line of notes.txt. Which ones? Copy those three words from "
        "the file, and nothing else."
    )
    expected, score = ", ".join(often), lists(often, THINGS)
    rest = Ask(messages=(HumanMessage("Say hello to me, in one word."),), max_tokens=8)
    read = _read(lines, question, expected, score, max_tokens=24)
    return Sample(asks=(read, rest, _ask(question, expected, score, max_tokens=24)))


def frequent(chance: random.Random, n_tokens: int, count: Count) -> Sample:
    """Votes: one colour has about three quarters of them."""
    winner, *others = chance.sample(COLOURS, 4)

    def votes() -> Iterator[str]:
        while True:
            choice = winner if chance.random() < 0.75 else chance.choice(others)
            yield f"{chance.choice(PEOPLE)} of {chance.choice(TOWNS)} votes for {choice}."

    lines = filled(votes(), n_tokens, count)
    question = "Which colour has by far the most votes? Answer with the colour only."
    rest = Ask(messages=(HumanMessage("Say hello to me, in one word."),), max_tokens=8)
    score = names(winner, others)
    return Sample(asks=(_read(lines, question, winner, score), rest, _ask(question, winner, score)))


def _three(lines: Sequence[str], questions: Sequence[tuple[str, str, Scorer]]) -> Sample:
    first, *later = questions
    return Sample(asks=(_read(lines, *first), *(_ask(*question) for question in later)))


def _read(
    lines: Sequence[str], question: str, expected: str, score: Scorer, max_tokens: int = _SHORT
) -> Ask:
    return Ask(
        messages=(*_reading("\n".join(lines)), HumanMessage(question)),
        max_tokens=max_tokens,
        score=score,
        expected=expected,
    )


def _reading(text: str) -> tuple[BaseMessage, ...]:
    """A text as an agent meets it: what a tool said. What users say is protected from eviction."""
    call = {"name": "read_file", "args": {"name": "notes.txt"}, "id": "call00000"}
    return (
        _SYSTEM,
        HumanMessage("Read the file notes.txt. Then I ask you about it."),
        AIMessage("", tool_calls=[call]),
        ToolMessage(text, tool_call_id=call["id"]),
        AIMessage("I have read the file. What is your question?"),
    )


def _ask(question: str, expected: str, score: Scorer, max_tokens: int = _SHORT) -> Ask:
    return Ask(
        messages=(HumanMessage(question),), max_tokens=max_tokens, score=score, expected=expected
    )


def _code(chance: random.Random) -> str:
    return str(chance.randint(1000, 9999))


TEXTS = (
    Task(name="needle", about="one fact in noise, asked twice", make=needle),
    Task(name="keys", about="three of six facts alike", make=keys),
    Task(name="variables", about="values found through other names", make=variables),
    Task(name="common", about="the words that are in every line of a list", make=common),
    Task(name="frequent", about="the choice with the most votes", make=frequent),
)
