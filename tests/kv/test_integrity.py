"""The audit finds every kind of damage; on a sound tree it is silent."""

from __future__ import annotations

import pytest
import torch

from sidequest_langchain.errors import CacheCorrupted
from sidequest_langchain.kv.archive import Ticket
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.residency import Archived, Residency
from tests.kv.growing import Grove


@pytest.fixture
def grove():
    """`ab(cd ef*)`: a trunk, a closed leaf and an open one with room to grow."""
    grove = Grove()
    grove.run("abcd")
    grove.feed(grove.begin("abef"), "ef", at_once=False)
    return grove


def leaf_of(grove):
    return grove.tree.paths[0].tip


def test_a_sound_tree_passes(grove):
    check_integrity(grove.tree)
    check_integrity(Grove().tree)


def damage_bytes(grove):
    grove.tree.n_bytes += 1


def damage_tokens(grove):
    grove.tree.n_tokens -= 1


def lose_a_token(grove):
    leaf_of(grove).token_ids.pop()
    grove.tree.n_tokens -= 1


def gain_a_token(grove):
    leaf_of(grove).token_ids.append(7)
    grove.tree.n_tokens += 1


def empty_a_leaf(grove):
    grove.tree.n_tokens -= 2
    grove.tree.n_bytes += leaf_of(grove).crop(0)


def move_a_start(grove):
    leaf_of(grove).start += 1


def cut_a_link(grove):
    leaf_of(grove).parent = next(iter(grove.tree.segments())).parent


def keep_for_nobody(grove):
    leaf_of(grove).paths.clear()
    del grove.tree.paths[0]


def lose_a_path(grove):
    leaf_of(grove).paths.clear()
    leaf_of(grove).n_pins = 1


def free_under_a_path(grove):
    leaf = leaf_of(grove)
    leaf.parent.children.remove(leaf)
    grove.tree.n_bytes -= leaf.free()
    grove.tree.n_tokens -= 2


def show_a_view(grove):
    leaf = leaf_of(grove)
    wide = torch.zeros(2, 2, 6)
    leaf.storage._parts[0] = wide[:, :, :3]


def shorten_a_layer(grove):
    leaf = leaf_of(grove)
    before = leaf.n_bytes
    leaf.storage._parts[-1] = leaf.storage._parts[-1][:, :1].clone()
    grove.tree.n_bytes += leaf.n_bytes - before


def hold_a_strange_path(grove):
    leaf_of(grove).paths.add(grove.tree.paths[1])


def repeat_a_sibling(grove):
    twin = grove.begin("ab")
    grove.feed(twin, "cd")
    twin.tip.is_open = twin.is_running = False


def forget_a_path(grove):
    del grove.tree.paths[0]


def managed(grove, **facts):
    leaf = leaf_of(grove)
    before = leaf.n_resident
    leaf.residency = Residency(**{"n_tokens": 2, **facts})
    grove.tree.n_tokens += leaf.n_resident - before


def lose_kinds(grove):
    leaf_of(grove).kinds.pop()


def manage_for_nothing(grove):
    managed(grove)


def manage_an_open_tip(grove):
    grove.tree.paths[1].tip.residency = Residency(n_tokens=2, hidden=frozenset([0]))


def count_other_tokens(grove):
    managed(grove, n_tokens=3, kept=(0, 1))


def hide_strangers(grove):
    managed(grove, hidden=frozenset([2]))


def archive_strangers(grove):
    copy = Archived(ticket=Ticket("k", 0), offsets=(1, 0), rows=(0, 1), bits=None)
    managed(grove, archived=(copy,))


def mix_rows_up(grove):
    grove.tree.evict(leaf_of(grove), [0])
    managed(grove, kept=(2,))


def repeat_a_row(grove):
    leaf = leaf_of(grove)
    rows = [(leaf.keys[at], leaf.values[at]) for at in (0, 1)]
    block = PackedBlock.pack(*zip(*rows, strict=True), [0, 1], bits=8)
    grove.tree.n_bytes += block.n_bytes
    managed(grove, packed=(block,))


def lose_packed_bytes(grove):
    grove.tree.compress(leaf_of(grove), [0], 8)
    grove.tree.n_bytes -= leaf_of(grove).packed[0].n_bytes


def keep_strange_rows_by_head(grove):
    managed(grove, kept_by_head=torch.tensor([[[1, 0]], [[0, 1]]]))


def forget_a_scratch(grove):
    grove.tree.scratch(leaf_of(grove), 2, 3)
    grove.tree.scratches.clear()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_bytes, "bytes do not add up"),
        (damage_tokens, "tokens do not add up"),
        (lose_a_token, "has slack"),
        (gain_a_token, "more tokens than rows"),
        (empty_a_leaf, "is empty"),
        (move_a_start, "starts elsewhere"),
        (cut_a_link, "hangs loose"),
        (keep_for_nobody, "kept for nobody"),
        (lose_a_path, "path 0 is not at its tip"),
        (free_under_a_path, "path 0 ends outside of the tree"),
        (show_a_view, "is a view"),
        (shorten_a_layer, "layers differ in length"),
        (hold_a_strange_path, "strange paths"),
        (forget_a_path, "strange paths"),
        (repeat_a_sibling, "repeats a sibling's rows"),
        (lose_kinds, "kinds of other tokens"),
        (manage_for_nothing, "managed for nothing"),
        (manage_an_open_tip, "open, yet managed"),
        (count_other_tokens, "rows of other tokens"),
        (hide_strangers, "hides tokens"),
        (archive_strangers, "copies of strange rows"),
        (mix_rows_up, "rows out of order"),
        (repeat_a_row, "a row is in two places"),
        (lose_packed_bytes, "bytes do not add up"),
        (keep_strange_rows_by_head, "heads keep strange rows"),
        (forget_a_scratch, "bytes do not add up"),
    ],
)
def test_damage_is_found_and_named(grove, damage, says):
    damage(grove)
    with pytest.raises(CacheCorrupted, match=says) as caught:
        check_integrity(grove.tree)
    assert "do not balance" in str(caught.value)
