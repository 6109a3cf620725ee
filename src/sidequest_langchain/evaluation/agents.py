"""Tasks over an agent's trace: tool results, instructions at its beginning, a replay.

The trace is scripted: the calls and what the tools say are ours; the model answers the questions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from sidequest_langchain.evaluation.sample import Ask, Count, Sample, Task, filled
from sidequest_langchain.evaluation.scoring import names, obeys
from sidequest_langchain.evaluation.texts import diary
from sidequest_langchain.evaluation.words import CAPITALS, COLOURS, PEOPLE, THINGS, TOWNS, WEATHER

_SHORT = 16
_SYSTEM = SystemMessage(
    "You are a travel assistant. You look things up with the tool `look_up` and answer the "
    "user's questions from its results, in as few words as you can."
)


def revival(chance: random.Random, n_tokens: int, count: Count) -> Sample:
    """A fact inside of tool result k: asked, then left alone for turns, then asked again.

    Another fact is asked for the first time at the end: nothing had ever looked at it.
    """
    owners = chance.sample(PEOPLE, 3)
    codes = [str(chance.randint(1000, 9999)) for _ in owners]
    results = _results(n_tokens, chance, count, n_frame=45, n_least=4)
    n_first = max(2, len(results) * 3 // 4)
    early, unseen = chance.sample(range(n_first), 2)
    for place, owner, code in zip((early, unseen, n_first), owners, codes, strict=True):
        results[place] += f"\nThe code of {owner}'s locker is {code}."

    def ask(which: int, *before: BaseMessage) -> Ask:
        question = f"What is the code of {owners[which]}'s locker? Answer with the number only."
        return Ask(
            messages=(*before, HumanMessage(question)),
            max_tokens=_SHORT,
            score=names(codes[which]),
            expected=codes[which],
        )

    first = [m for i in range(n_first) for m in _visit(i, results[i])]
    later = [m for i in range(n_first, len(results)) for m in _visit(i, results[i])]
    opening = HumanMessage("Look up the towns of my journey.")
    return Sample(
        asks=(
            ask(0, _SYSTEM, opening, *first),
            Ask(messages=(HumanMessage("Say hello to me, in one word."),), max_tokens=8),
            ask(2, HumanMessage("Look up the other towns, too."), *later),
            ask(0),
            ask(1),
        )
    )


def fairness(chance: random.Random, n_tokens: int, count: Count) -> Sample:
    """Two instructions at the beginning; after a long middle both must still be obeyed.

    Eviction by score alone lets whole instructions vanish: arXiv:2510.00231.
    """
    begins, ends = chance.choice(("Captain", "Friend", "Report")), chance.choice(("over", "done"))
    countries = chance.sample(sorted(CAPITALS), 6)
    opening: list[BaseMessage] = [
        SystemMessage(
            f'Two rules hold for every answer you give. Rule 1: its first word is "{begins}". '
            f'Rule 2: its last word is "{ends}".'
        )
    ]
    for country in countries[:3]:
        opening.append(HumanMessage(f"What is the capital of {country}?"))
        opening.append(AIMessage(f"{begins}, it is {CAPITALS[country]}, {ends}."))
    lines = "\n".join(filled(diary(chance), n_tokens, count))
    call = {"name": "read_file", "args": {"name": "diary.txt"}, "id": "call00000"}
    opening.append(HumanMessage("Read the file diary.txt."))
    opening.append(AIMessage("", tool_calls=[call]))
    opening.append(ToolMessage(lines, tool_call_id=call["id"]))
    opening.append(AIMessage(f"{begins}, I have read it, {ends}."))
    asks = []
    for i, country in enumerate(countries[3:]):
        question = HumanMessage(f"What is the capital of {country}?")
        asks.append(
            Ask(
                messages=(question,) if i else (*opening, question),
                max_tokens=32,
                score=obeys(begins=begins, ends=ends),
                expected=f"{begins}, it is {CAPITALS[country]}, {ends}.",
            )
        )
    return Sample(asks=tuple(asks))


def replay(chance: random.Random, n_tokens: int, count: Count) -> Sample:
    """An agent that says something after every tool result: its logits are compared."""
    results = _results(n_tokens, chance, count, n_frame=85, n_least=2)
    towns = [result.split(":")[0] for result in results]
    asks = []
    for i, result in enumerate(results):
        town = chance.choice(towns[: i + 1])
        question = chance.choice(_QUESTIONS).format(town=town)
        before = () if i else (_SYSTEM, HumanMessage("Look up the towns of my journey."))
        said = (*before, *_visit(i, result), HumanMessage(question))
        asks.append(Ask(messages=said, max_tokens=32))
    return Sample(asks=tuple(asks))


_QUESTIONS = (
    "Who is the mayor of {town}? Answer in a sentence.",
    "What does the market of {town} sell? Answer in a sentence.",
    "Describe the hotel of {town} in a sentence.",
    "How do I get to {town}, and how long does it take?",
    "Which towns have you looked up so far? List their names.",
    "What shall I pack for {town}? Think of the weather.",
)


def _results(
    n_tokens: int, chance: random.Random, count: Count, *, n_frame: int, n_least: int
) -> list[str]:
    """What the tool says of different towns, as many as make a trace of about `n_tokens`.

    Args:
        n_tokens: Of the whole trace.
        chance: Draws the towns and what is said of them.
        count: Tokens of a text.
        n_frame: Tokens of the turns around each result, about.
        n_least: Fewest results.
    """
    results: list[str] = []
    n = 0
    for kind in ("", "Upper ", "Lower ", "Old ", "New "):
        for town in chance.sample(TOWNS, len(TOWNS)):
            result = _result(kind + town, chance)
            n += count(result) + n_frame
            if n > n_tokens and len(results) >= n_least:
                return results
            results.append(result)
    return results


def _visit(i: int, result: str) -> Iterator[BaseMessage]:
    """A tool call and what the tool said."""
    call = {"name": "look_up", "args": {"town": result.split(":")[0]}, "id": f"call{i:05d}"}
    yield AIMessage("", tool_calls=[call])
    yield ToolMessage(result, tool_call_id=call["id"])


def _result(town: str, chance: random.Random) -> str:
    """What the tool says of a town, about 70 tokens; no number of four digits is in it."""
    goods = ", ".join(chance.sample(THINGS, 4))
    return (
        f"{town}: the mayor is {chance.choice(PEOPLE)}; expect {chance.choice(WEATHER)}.\n"
        f"The market sells {goods}.\n"
        f"The hotel has a {chance.choice(COLOURS)} door and {chance.randint(3, 60)} rooms; the "
        f"train from {chance.choice(TOWNS)} takes {chance.randint(20, 90)} minutes."
    )


AGENTS = (
    Task(
        name="revival",
        about="facts in tool results: asked, left alone for turns, asked again",
        make=revival,
        is_agent=True,
    ),
    Task(name="fairness", about="two instructions, both obeyed after a long middle", make=fairness),
    Task(
        name="replay",
        about="an agent's recorded answers, forced: KL, top-1 and NLL against the full cache",
        make=replay,
        is_agent=True,
        is_forced=True,
    ),
)
