"""What was taken from a tree, kept by the tokens up to it: the mask of the dense way.

Cuts, joins and moves do not change what the tokens are, so the record holds through them.
"""

from __future__ import annotations

from tests.kv.growing import tokens_to


class GoneByHead:
    """Tokens whose rows some heads do not keep."""

    def __init__(self, n_layers, n_heads):
        self.heads = [[set() for _ in range(n_heads)] for _ in range(n_layers)]

    def take(self, segment, keep):
        tokens = tokens_to(segment)
        everywhere = {at: tokens[: segment.start + at + 1] for at in range(segment.n_tokens)}
        for layer, of_layer in enumerate(keep.tolist()):
            for head, kept in enumerate(of_layer):
                # What was shared anew was whole again until now.
                self.heads[layer][head] -= set(everywhere.values())
                self.heads[layer][head] |= {everywhere[at] for at in everywhere.keys() - set(kept)}

    def unseen(self, fed, layer):
        tokens = fed.tokens
        back = {at for s in fed.path.tip.path() if s.residency is None for at in positions(s)}
        return [
            {at for at in range(fed.path.tip.start) if tokens[: at + 1] in heads and at not in back}
            for heads in self.heads[layer]
        ]


def positions(segment):
    return range(segment.start, segment.end)


def rows_with_packed(world, fed, layer):
    """K and V of what is fed and all before it, packed ones as they load."""
    k, v = (t.clone() for t in world.rows_of(fed.tokens, 0, layer))
    for segment in fed.path.tip.path():
        for block in segment.packed:
            at = [segment.start + offset for offset in block.offsets]
            k[:, at], v[:, at] = block.load(layer)
    return k, v


class Gone:
    """Tokens whose rows attention must not see, as the sequences that end with them."""

    def __init__(self):
        self.heads = set()

    def take(self, segment, offsets):
        tokens = tokens_to(segment)
        self.heads |= {tokens[: segment.start + at + 1] for at in offsets}

    def bring(self, segment, offsets):
        tokens = tokens_to(segment)
        self.heads -= {tokens[: segment.start + at + 1] for at in offsets}

    def unseen(self, fed, layer=0):
        """Positions that what is fed does not see; what its own tip holds it does.

        Rows that a running sibling had computed anew are back where it now shares them.
        """
        tokens = fed.tokens
        back = {at for s in fed.path.tip.path() for at in self.back_in(s)}
        gone = {at for at in range(fed.path.tip.start) if tokens[: at + 1] in self.heads}
        return gone - back

    def back_in(self, segment):
        """Positions of a segment that attention sees."""
        managed = segment.residency
        if managed is None or managed.kept_by_head is not None:
            return range(segment.start, segment.end if managed is None else segment.start)
        seen = {*managed.dense, *(at for block in managed.packed for at in block.offsets)}
        return [segment.start + at for at in seen - managed.hidden]


def closed_of(tree):
    return [s for s in tree.segments() if not s.is_open and s.n_tokens]


def some_of(rng, segment, share=0.5):
    """Random offsets, sometimes none or all."""
    share = rng.choice([0.0, share, share, 1.0])
    return [at for at in range(segment.n_tokens) if rng.random() < share]


def evict_some(rng, grove, gone):
    """Evict random rows of about every second closed segment."""
    for segment in closed_of(grove.tree):
        if rng.random() < 0.6:
            offsets = some_of(rng, segment)
            before = grove.tree.n_bytes
            freed = grove.tree.evict(segment, offsets)
            assert freed == before - grove.tree.n_bytes >= 0
            gone.take(segment, offsets)


def manage_some(rng, grove, gone):
    """Evict, pack and hide random rows of most closed segments."""
    for segment in closed_of(grove.tree):
        for act in rng.sample(["evict", "8", "4", "hide"], rng.randint(0, 3)):
            offsets = some_of(rng, segment, 0.3)
            if act in "84":
                grove.tree.compress(segment, offsets, int(act), exempt=(1,))
                continue
            (grove.tree.evict if act == "evict" else grove.tree.hide)(segment, offsets)
            gone.take(segment, offsets)
