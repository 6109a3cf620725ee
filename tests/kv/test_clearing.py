"""Cleared tokens in the tree: another id for each, found only by whoever names them as such."""

from __future__ import annotations

import random

import pytest

from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.clearing import (
    ClearedId,
    has_cleared,
    seen_offsets,
    without_marks,
)
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.labels import StepLabel
from tests.kv.archiving import FINGERPRINT
from tests.kv.growing import Grove, bytes_of, check_rows, ids, reachable_bytes, tokens_to

RUN = (2, 5)


def marked(text: str, *runs: tuple[int, int]) -> tuple[int, ...]:
    """Ids of a text, those in the runs cleared."""
    return tuple(
        ClearedId(token) if any(a <= at < b for a, b in runs) else token
        for at, token in enumerate(ids(text))
    )


def clear(grove: Grove, text: str, *runs: tuple[int, int]) -> int:
    """Clear what is resident of the runs of a text. Returns the rows that left."""
    line = grove.tree.match_cleared("s", ids(text), runs)
    return sum(
        grove.tree.clear(segment, offsets).n_rows
        for run in runs
        for segment, offsets in line.within(*run)
    )


class TestId:
    def test_it_equals_its_like_and_nothing_else(self) -> None:
        assert ClearedId(300) == ClearedId(300)
        assert ClearedId(300) != 300
        assert 300 != ClearedId(300)  # noqa: SIM300
        assert ClearedId(300) != ClearedId(301)
        assert [1, 300] != [1, ClearedId(300)]  # noqa: SIM300
        assert hash(ClearedId(300)) == hash(ClearedId(300)) != hash(300)
        assert len({300, ClearedId(300), ClearedId(ClearedId(300))}) == 2

    def test_it_is_the_tokens_id_in_all_else(self) -> None:
        assert int(ClearedId(300)) == 300
        assert ClearedId(300) + 1 == 301
        assert without_marks([1, ClearedId(2)]) == (1, 2)
        assert not has_cleared(without_marks([ClearedId(2)]))
        assert has_cleared([1, ClearedId(2)])


def test_rows_go_and_tokens_are_others(grove: Grove) -> None:
    path = grove.run("abcdefgh")
    done = grove.tree.clear(path.tip, range(*RUN))
    assert (done.n_rows, done.freed_bytes, done.is_copied) == (3, bytes_of(3), False)
    assert tokens_to(path.tip) == marked("abcdefgh", RUN)
    assert seen_offsets(path.tip) == {0, 1, 5, 6, 7}
    assert grove.tree.n_tokens == 5
    assert grove.tree.match("s", ids("abcdefgh"))[1] == 2
    assert grove.tree.match("s", marked("abcdefgh", RUN))[1] == 8
    again = grove.tree.clear(path.tip, range(*RUN))
    assert (again.n_rows, again.freed_bytes) == (0, 0)


def test_whoever_has_it_whole_computes_it_again(grove: Grove) -> None:
    grove.run("abcdefgh")
    assert clear(grove, "abcdefgh", RUN) == 3
    whole = grove.run("abcdefgh")
    assert whole.n_reused == 2
    assert seen_offsets(whole.tip) == set(range(6))
    assert grove.tree.match("s", ids("abcdefgh"))[1] == 8
    line = grove.tree.match_cleared("s", ids("abcdefgh"), [RUN])
    assert line.ids() == marked("abcdefgh", RUN)


def test_where_it_is_cleared_goes_before_what_is_longer(grove: Grove) -> None:
    """A branch that computed it anew got further since: it has no need to lose its rows."""
    grove.run("abcdefg")
    clear(grove, "abcdefg", RUN)
    grove.run("abcdefghij")
    line = grove.tree.match_cleared("s", ids("abcdefghij"), [RUN])
    assert line.ids() == marked("abcdefg", RUN)
    # Unless it does not hold all of what is to be cleared.
    line = grove.tree.match_cleared("s", ids("abcdefghij"), [RUN, (7, 9)])
    assert line.ids() == tuple(ids("abcdefghij"))
    [(segment, offsets)] = line.within(*RUN)
    assert grove.tree.has_cleared_twin(segment, offsets)
    with pytest.raises(ValueError, match="has a sibling of which these tokens are cleared"):
        grove.tree.clear(segment, offsets)
    [(segment, offsets)] = line.within(7, 9)
    assert not grove.tree.has_cleared_twin(segment, offsets)


def test_who_reads_it(grove: Grove) -> None:
    first = grove.run("abcd", "first")
    second = grove.run("abcdefgh", "second")
    other = grove.begin("abcdxy", "other")
    [top, *_] = second.tip.path()
    found, is_pinned = grove.tree.readers_from(top, 2)
    assert {path.label.call_id for path in found} == {"first", "second", "other"}
    assert not is_pinned
    found, _ = grove.tree.readers_from(top, 4)
    assert {path.label.call_id for path in found} == {"second"}  # `other` has nothing behind it yet
    grove.feed(other, "x")
    found, _ = grove.tree.readers_from(top, 4)
    assert {path.label.call_id for path in found} == {"second", "other"}
    grove.tree.pin(second)
    assert grove.tree.readers_from(top, 2)[1]
    grove.tree.unpin(second.tip)
    grove.tree.discard(other)
    assert first.tip is top


@pytest.mark.parametrize("why", ["open", "pinned", "strange"])
def test_what_cannot_be_cleared(grove: Grove, why: str) -> None:
    path = grove.run("abcdefgh")
    before = tokens_to(path.tip)
    segment, offsets = path.tip, [2, 3]
    if why == "open":
        path = grove.begin("abcdefgh")
        segment, offsets = path.tip, []
    elif why == "pinned":
        grove.tree.pin(path)
    else:
        offsets = [2, 8]
    with pytest.raises(ValueError, match=r"open|pinned|offsets"):
        grove.tree.clear(segment, offsets)
    if why == "open":
        grove.tree.discard(path)
    elif why == "pinned":
        grove.tree.unpin(segment)
    assert before == tuple(ids("abcdefgh"))
    assert not any(has_cleared(s.token_ids) for s in grove.tree.segments())


def test_copies_come_back_and_the_ids_stay(grove: Grove) -> None:
    """What was computed behind the gap stays as it was: nobody may take it for the whole."""
    grove.tree.archive = Archive(
        fingerprint=FINGERPRINT, cpu_bytes=10_000, disk_bytes=0, folder=None
    )
    path = grove.run("abcdefgh")
    done = grove.tree.clear(path.tip, range(*RUN))
    assert (done.is_copied, done.freed_bytes) == (True, bytes_of(3))
    assert grove.tree.restore(path.tip) == bytes_of(3)
    assert seen_offsets(path.tip) == set(range(8))
    assert tokens_to(path.tip) == marked("abcdefgh", RUN)
    again = grove.tree.clear(path.tip, range(*RUN))
    assert (again.n_rows, again.freed_bytes) == (3, bytes_of(3))
    grove.tree.release_leaf(path.tip)
    grove.tree.archive.close()
    grove.tree.archive = None


def test_hidden_rows_stay_where_they_are(grove: Grove) -> None:
    path = grove.run("abcdefgh")
    done = grove.tree.clear(path.tip, range(*RUN), is_hidden=True)
    assert (done.n_rows, done.freed_bytes, grove.tree.n_tokens) == (3, 0, 8)
    assert seen_offsets(path.tip) == {0, 1, 5, 6, 7}


@pytest.mark.parametrize("seed", range(40))
def test_any_history(seed: int) -> None:
    """Whole and cleared conversations over few letters, cut and shared; found as by hand."""
    rng = random.Random(seed)
    grove = Grove()
    runs = [(2, 4), (6, 9)]
    for _ in range(25):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 14)))
        asked = rng.choice([[], runs[:1], runs[1:], runs])
        asked = [(a, b) for a, b in asked if b < len(text)]
        line = grove.tree.match_cleared("s", ids(text), asked)
        assert line.n_tokens == len(line.ids())
        assert _key(line.ids(), asked) == max(_resident_keys(grove, text, asked))
        n_rows = grove.tree.n_tokens
        if asked and line.n_tokens >= asked[-1][1] and rng.random() < 0.8:
            for run in asked:
                parts = line.within(*run)
                if not any(grove.tree.has_cleared_twin(s, offsets) for s, offsets in parts):
                    n_rows -= sum(grove.tree.clear(s, o).n_rows for s, o in parts)
            assert grove.tree.n_tokens == n_rows
        tokens = (*line.ids(), *ids(text)[line.n_tokens :])
        path = grove.tree.begin("s", tokens, StepLabel(call_id=f"c{grove.tree.serial}"))
        assert path.n_reused >= line.n_tokens
        grove.feed(path, text[path.n_reused :])
        if rng.random() < 0.1:
            grove.tree.discard(path)
        else:
            grove.tree.commit(path)
            assert tokens_to(path.tip) == tokens
        if rng.random() < 0.1:
            chosen = rng.choice([*grove.tree.paths.values(), path])
            grove.release(chosen.label.call_id)
        check_integrity(grove.tree)
        check_rows(grove)
    assert reachable_bytes(grove.tree) == grove.tree.n_bytes


def _key(found: tuple[int, ...], runs: list[tuple[int, int]]) -> tuple[int, int, int]:
    """What `match_cleared` prefers: all that is asked for, then more of it cleared, then more."""
    end = runs[-1][1] if runs else 0
    return min(len(found), end), sum(isinstance(t, ClearedId) for t in found), len(found)


def _resident_keys(
    grove: Grove, text: str, runs: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Of every resident head that a prompt may begin with."""
    plain = ids(text)
    keys = [(0, 0, 0)]
    for segment in grove.tree.segments():
        tokens = tokens_to(segment)
        n = 0
        while n < min(len(tokens), len(plain)) and _may_be(tokens, plain, n, runs):
            n += 1
        keys.append(_key(tokens[:n], runs))
    return keys


def _may_be(
    tokens: tuple[int, ...], plain: list[int], at: int, runs: list[tuple[int, int]]
) -> bool:
    is_in_run = any(a <= at < b for a, b in runs)
    return int(tokens[at]) == plain[at] and (is_in_run or not isinstance(tokens[at], ClearedId))
