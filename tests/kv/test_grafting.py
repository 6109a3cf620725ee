"""Any tree, saved and joined to any other: every row is where its tokens ask for it, once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidequest_langchain.kv.grafting import Grafted, Planted
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.loaded_thread import loaded_thread
from sidequest_langchain.kv.saved_thread import items_of, take
from sidequest_langchain.kv.thread_file import ThreadFile, file_of, write_thread
from tests.kv.growing import LAYOUT, Grove, check_rows, reachable_bytes, resident_heads, text_of

SCOPES = st.sampled_from("st")
PROMPTS = st.text("ab", min_size=1, max_size=9)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), PROMPTS, SCOPES),
        st.tuples(st.just("begin"), PROMPTS, SCOPES),
        st.tuples(st.just("evict"), st.integers(0, 9), st.integers(1, 3)),
        st.tuples(st.just("pack"), st.integers(0, 9), st.integers(1, 3)),
    ),
    max_size=8,
)


def grown(acts, name) -> Grove:
    grove = Grove()
    for n, (verb, what, more) in enumerate(acts):
        call = f"{name}{n}"
        if verb == "run":
            grove.run(what, call, more)
        elif verb == "begin":
            path = grove.begin(what, call, more)
            grove.feed(path, what[path.n_reused :])
        else:
            closed = [s for s in grove.tree.segments() if not s.is_open and s.n_tokens]
            if closed:
                segment = closed[what % len(closed)]
                offsets = range(0, segment.n_tokens, more)
                if verb == "evict":
                    grove.tree.evict(segment, offsets)
                else:
                    grove.tree.compress(segment, offsets, 8)
    return grove


def joined(source: Grove, target: Grove, *, leaves_out=()) -> Grafted:
    """Save all paths of one that ended, and let the other take them in."""
    ended = [p for p in source.tree.paths.values() if not p.is_running and p.tip.token_ids]
    snapshot = take(ended, None, lambda segment: False)
    items, facts = items_of(snapshot, None)
    with tempfile.TemporaryDirectory() as folder:
        path = file_of(Path(folder), "t")
        write_thread(path, items, facts, {})
        assert not any(s.storage for s in snapshot.segments), "all was let go of"
        with ThreadFile(path) as file:
            thread = loaded_thread(file, LAYOUT, 200)
            for name, tensor in file.rows(lambda shape: True):
                owner, rest = name.split(".", 1)
                thread.segments[int(owner)].tensors[rest] = tensor
            file.finish()
    known = {
        s.number
        for s in thread.segments
        if target.tree.n_known(s.scope, thread.path_ids(s.number)) >= s.end
    }
    planted = [
        Planted(
            parent=s.parent,
            scope=s.scope,
            ids=s.ids,
            kinds=s.kinds,
            storage=None if s.number in (known | set(leaves_out)) else s.storage(LAYOUT),
            residency=None if s.number in (known | set(leaves_out)) else s.residency(LAYOUT),
        )
        for s in thread.segments
    ]
    return target.tree.graft(planted, thread.paths, target.tree.next_serial)


def check(grove: Grove) -> None:
    check_integrity(grove.tree)
    check_rows(grove)
    assert reachable_bytes(grove.tree) == grove.tree.n_bytes


@settings(max_examples=120, deadline=None)
@given(ACTS, ACTS)
def test_any_tree_joins_any_other(mine, theirs):
    source, target = grown(mine, "m"), grown(theirs, "t")
    ended = {p.label.call_id: text_of(p) for p in source.tree.paths.values() if not p.is_running}
    before, n_bytes = resident_heads(target.tree), target.tree.n_bytes
    done = joined(source, target)
    check(target)
    check(source)
    after = resident_heads(target.tree)
    assert before <= after
    texts = {p.label.call_id: text_of(p) for p in target.tree.paths.values()}
    assert ended.items() <= texts.items()
    assert done.n_bytes == target.tree.n_bytes - n_bytes
    again = joined(source, target)
    assert (again.n_paths, again.n_bytes) == (0, 0)
    assert resident_heads(target.tree) == after
    for call in ended:
        target.release(call)
    assert resident_heads(target.tree) == before
    check(target)


@settings(max_examples=60, deadline=None)
@given(ACTS, ACTS, st.sets(st.integers(0, 9), max_size=4))
def test_what_stands_on_nothing_is_left_out(mine, theirs, gone):
    source, target = grown(mine, "m"), grown(theirs, "t")
    joined(source, target, leaves_out=gone)
    check(target)
    ended = {p.label.call_id: text_of(p) for p in source.tree.paths.values() if not p.is_running}
    for path in target.tree.paths.values():
        if path.label.call_id in ended:
            assert ended[path.label.call_id].startswith(text_of(path))


def test_what_is_there_in_part_is_nothing_to_stand_on(grove):
    source = Grove()
    source.run("abcd", "one")
    source.run("abcdef", "two")
    grove.run("ab", "mine")
    done = joined(source, grove, leaves_out={0})
    assert (done.n_paths, done.n_bytes) == (0, 0)
    assert grove.drawing() == "ab"


def test_a_path_whose_end_was_swept_moves_on_to_it(grove):
    source = Grove()
    source.run("abc", "one")
    source.run("abcdef", "two")
    grove.run("abc", "one")
    grove.run("abcdef", "two")
    grove.tree.sweep(lambda: "def" in grove.drawing())
    assert text_of(next(p for p in grove.tree.paths.values() if p.label.call_id == "two")) == "abc"
    done = joined(source, grove)
    assert done.n_paths == 1
    assert grove.drawing() == "abc(def)"
    assert len(grove.tree.paths) == 2


def test_a_promise_counts_and_ends(grove):
    grove.run("abc")
    n_bytes, n_tokens = grove.tree.n_bytes, grove.tree.n_tokens
    grove.tree.promise(1000, 7)
    assert (grove.tree.n_bytes, grove.tree.n_tokens) == (n_bytes + 1000, n_tokens + 7)
    assert grove.tree.peak_bytes >= n_bytes + 1000
    check_integrity(grove.tree)
    grove.tree.promise(-1000, -7)
    assert (grove.tree.n_bytes, grove.tree.n_tokens) == (n_bytes, n_tokens)


@pytest.mark.parametrize("n_kept", [0, 1])
def test_a_scope_that_gets_nothing_leaves_no_root(grove, n_kept):
    source = Grove()
    source.run("abc", scope="fresh")
    joined(source, grove, leaves_out={0} if not n_kept else ())
    assert ("fresh" in grove.tree._roots) == bool(n_kept)
