"""Segments by themselves: storage that grows, shrinks and is cut, and the tokens beside it."""

from __future__ import annotations

import pytest
import torch

from sidequest_langchain.kv.layout import LayerShape, bytes_per_token
from sidequest_langchain.kv.segment import GROWTH_ROWS, Path, Segment, n_common
from sidequest_langchain.labels import StepLabel
from tests.kv.growing import CPU, LAYOUT, TOKEN_BYTES, ids, rows_of, storage_bytes


def make(text, parent=None, *, room=0):
    """A segment that holds `text`, and room for more."""
    segment = Segment(1, "s", parent, LAYOUT)
    if text:
        segment.reserve(max(len(text) + room, 2))
    tokens = tuple(ids(text))
    for layer in range(len(LAYOUT)):
        k, v = rows_of(tokens, 0, layer)
        segment.keys[layer][:, : len(text)] = k
        segment.values[layer][:, : len(text)] = v
    segment.token_ids = list(tokens)
    return segment


def holds(segment, text, first=0):
    """Whether the valid rows are those of `text[first:]`."""
    tokens = tuple(ids(text))
    return all(
        torch.equal(segment.keys[layer][:, : segment.n_rows], rows_of(tokens, first, layer)[0])
        and torch.equal(
            segment.values[layer][:, : segment.n_rows], rows_of(tokens, first, layer)[1]
        )
        for layer in range(len(LAYOUT))
    )


def bytes_in(segment):
    return storage_bytes([*segment.keys, *segment.values])


def test_bytes_per_token_add_up_over_unequal_layers():
    half = LayerShape(n_kv_heads=3, key_dim=8, value_dim=4, dtype=torch.bfloat16, device=CPU)
    assert half.bytes_per_token == 3 * (8 + 4) * 2
    assert bytes_per_token((*LAYOUT, half)) == TOKEN_BYTES + 72
    assert bytes_per_token(LAYOUT) == TOKEN_BYTES == 88
    assert bytes_per_token(()) == 0


def test_a_new_segment_begins_where_its_parent_ends_and_holds_nothing():
    trunk = make("abc")
    leaf = make("", trunk)
    assert (leaf.start, leaf.end, leaf.n_rows, leaf.n_bytes, leaf.capacity) == (3, 3, 0, 0, 0)
    assert [t.shape for t in leaf.keys] == [(2, 0, 3), (1, 0, 2)]
    assert [t.shape for t in leaf.values] == [(2, 0, 2), (1, 0, 4)]
    assert [t.dtype for t in leaf.keys] == [torch.float32, torch.float64]


def test_reserve_grows_the_storage_and_keeps_the_rows():
    segment = make("abcd")
    assert segment.reserve(3) == 3 * TOKEN_BYTES
    assert (segment.capacity, segment.n_bytes) == (7, 7 * TOKEN_BYTES)
    assert segment.n_bytes == bytes_in(segment)
    assert holds(segment, "abcd")
    assert segment.reserve(3) == 0
    assert segment.reserve(0) == 0


@pytest.mark.parametrize(
    ("n_rows", "n_more", "capacity"),
    [
        (4, 1, 4 + GROWTH_ROWS),
        (4, 2, 6),
        (800, 1, 900),
        (0, 1, GROWTH_ROWS),
    ],
)
def test_says_beforehand_what_it_will_hold(n_rows, n_more, capacity):
    segment = make("a" * n_rows)
    segment.fit()
    assert segment.capacity_for(n_more) == capacity
    before = segment.capacity
    assert segment.reserve(n_more) == (capacity - before) * TOKEN_BYTES
    assert segment.capacity == capacity


def test_fit_gives_back_the_room_to_grow():
    segment = make("abcd", room=6)
    assert segment.capacity == 10
    assert segment.fit() == -6 * TOKEN_BYTES
    assert (segment.capacity, bytes_in(segment)) == (4, 4 * TOKEN_BYTES)
    assert holds(segment, "abcd")
    assert segment.fit() == 0


def test_crop_keeps_the_head():
    segment = make("abcdef")
    assert segment.crop(2) == -4 * TOKEN_BYTES
    assert (segment.token_ids, segment.capacity) == (ids("ab"), 2)
    assert bytes_in(segment) == 2 * TOKEN_BYTES
    assert holds(segment, "ab")


@pytest.mark.parametrize("n_head", [0, 2, 6])
def test_a_head_and_the_rest_are_the_whole(n_head):
    whole = make("abcdef", room=4)
    head = make("")
    taken = head.copy_head(whole, n_head)
    change = whole.drop_head(n_head)
    assert (taken, change) == (n_head * TOKEN_BYTES, (6 - n_head - 10) * TOKEN_BYTES)
    assert (head.token_ids, whole.token_ids) == (ids("abcdef"[:n_head]), ids("abcdef"[n_head:]))
    assert holds(head, "abcdef"[:n_head])
    assert holds(whole, "abcdef", n_head)
    assert (whole.start, head.capacity, whole.capacity) == (n_head, n_head, 6 - n_head)
    assert bytes_in(head) + bytes_in(whole) == 6 * TOKEN_BYTES
    assert all(t.is_contiguous() for t in (*head.keys, *whole.keys, *whole.values))


def test_the_storages_of_two_segments_are_not_shared():
    whole = make("abcdef")
    head = make("")
    head.copy_head(whole, 3)
    whole.keys[0].fill_(-1)
    assert holds(head, "abc")


def test_free_lets_go_of_the_storage_even_if_the_segment_is_still_held():
    segment = make("abcd")
    assert segment.free() == 4 * TOKEN_BYTES
    assert (segment.n_bytes, segment.keys, segment.values) == (0, [], [])
    assert segment.free() == 0


def test_the_path_is_its_segments_with_rows_and_itself():
    root = Segment(0, "s", None, ())
    trunk = make("ab", root)
    leaf = make("", trunk)
    assert leaf.path() == [trunk, leaf]
    assert trunk.path() == [trunk]
    assert root.path() == [root]


def test_who_needs_a_segment():
    segment = make("ab", Segment(0, "s", None, ()))
    assert not segment.is_needed
    path = Path(StepLabel(call_id="c"), 0, segment, 0)
    for name, given in {
        "children": [make("")],
        "paths": {path},
        "n_pins": 1,
        "is_open": True,
    }.items():
        before = getattr(segment, name)
        setattr(segment, name, given)
        assert segment.is_needed, name
        setattr(segment, name, before)


def test_paths_compare_by_identity():
    segment, label = make("ab"), StepLabel(call_id="c")
    assert len({Path(label, 0, segment, 0), Path(label, 0, segment, 0)}) == 2


@pytest.mark.parametrize("n", [0, 1, 511, 512, 513, 1024, 1500])
def test_the_common_head_over_block_borders(n):
    mine = list(range(1500))
    theirs = [*mine[:n], -1, *mine[n + 1 :]][:1500]
    assert n_common(mine, theirs) == n
    assert n_common(mine, tuple(theirs)) == n
    assert n_common(mine, [9, 9, *theirs], 2) == n


@pytest.mark.parametrize(
    ("mine", "theirs", "offset", "n"),
    [
        ("abc", "abcd", 0, 3),
        ("abcd", "abc", 0, 3),
        ("abc", "xabc", 1, 3),
        ("abc", "abc", 3, 0),
        ("abc", "abc", 9, 0),
        ("", "abc", 0, 0),
        ("abc", "", 0, 0),
        ("abc", "xbc", 0, 0),
    ],
)
def test_the_common_head_of_short_texts(mine, theirs, offset, n):
    assert n_common(ids(mine), tuple(ids(theirs)), offset) == n
