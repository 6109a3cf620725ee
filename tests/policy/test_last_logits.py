"""Logits that are kept are those that running the tokens again would give; else there are none."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace

import pytest
import torch

from sidequest_langchain.config import Guard, Tiers
from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.blocks import Row
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy import last_logits
from sidequest_langchain.policy.gathering import running_tips
from sidequest_langchain.policy.last_logits import LastLogits
from tests.engine.driving import PATIENCE_S, ask, ids, model_of, token_bytes
from tests.engine.managing import managed, run, run_together, settle
from tests.engine.test_drafting import foresee
from tests.engine.test_managed_faults import Switch, evict_free
from tests.engine.test_managed_oracle import siblings, turns
from tests.kv.growing import LAYOUT, Grove, check_rows
from tests.support import oracle
from tests.support.tiny import tiny_model

W = 4


# -- what is kept --------------------------------------------------------------------------


class Cache:
    """A tip of so many tokens, how often the cache changed, and what is kept of it."""

    def __init__(self, n_tokens=10, n_kept=W, dtype=torch.float32):
        self.n_changes = 0
        self.layout = (replace(LAYOUT[0], dtype=dtype),)
        self.root = Segment(0, "s", None, ())
        self.tip = below(self.root, n_tokens)
        self.kept = LastLogits(n_kept, self)

    def note(self, end, n=1, tip=None):
        self.kept.note(tip or self.tip, end, rows(*range(end - n + 1, end + 1)))

    def of(self, n, tip=None):
        """After how many tokens each of the logits are."""
        found = self.kept.of(tip or self.tip, n)
        return None if found is None else [int(row[0]) for row in found]


def below(parent, n_tokens):
    segment = Segment(1, "s", parent, LAYOUT)
    parent.children.append(segment)
    segment.extend(range(n_tokens))
    segment.start = parent.end
    return segment


def rows(*ends):
    """Logits that say after how many tokens they are."""
    return torch.tensor(ends, dtype=torch.float32)[:, None].repeat(1, 5)


def test_the_last_ones_in_order():
    cache = Cache()
    for end in (6, 7, 8):
        cache.note(end)
    cache.note(10, n=2)
    assert cache.of(1) == [10]
    assert cache.of(2) == [9, 10]
    assert cache.of(4) == [7, 8, 9, 10]
    assert cache.kept.of(cache.tip, 1)[0].shape == (5,)


def test_more_than_are_kept_at_once():
    cache = Cache(n_kept=3)
    cache.note(10, n=8)
    assert cache.of(3) == [8, 9, 10]
    assert cache.of(4) is None


def test_none_of_too_few():
    cache = Cache()
    assert cache.of(1) is None
    cache.note(9)
    cache.note(10)
    assert cache.of(2) == [9, 10]
    assert cache.of(3) is None


def test_none_where_some_are_missing():
    cache = Cache()
    for end in (7, 8, 10):
        cache.note(end)
    assert cache.of(1) == [10]
    assert cache.of(2) is None
    assert cache.of(3) is None


@pytest.mark.parametrize("end", [9, 11])
def test_none_of_another_end(end):
    """What comes next is not known yet, or the path was cut since."""
    cache = Cache()
    cache.note(end, n=4)
    assert cache.of(1) is None
    assert cache.of(2) is None


def test_none_over_a_cache_that_has_changed():
    cache = Cache()
    cache.note(9, n=3)
    cache.n_changes += 1
    assert cache.of(2) is None
    cache.note(10)
    assert cache.of(1) == [10]
    assert cache.of(2) is None, "some are from before the change"
    cache.tip.extend([1])
    cache.note(11)
    assert cache.of(2) == [10, 11]
    assert cache.of(3) is None
    cache.n_changes += 1
    assert cache.of(1) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_not_kept(dtype):
    """Whatever the logits are in: they differ by how many tokens were computed at once."""
    cache = Cache(dtype=dtype)
    cache.note(10, n=4)
    assert cache.of(1) is None


def test_what_is_old_is_dropped():
    cache = Cache()
    other = below(cache.root, 10)
    cache.note(10, n=2, tip=other)
    for step in range(W):
        assert cache.of(2, other) == [9, 10], step
        cache.kept.begin_step()
        cache.note(10)
    assert cache.of(1, other) is None
    assert list(cache.kept._kept) == [cache.tip]
    cache.kept.forget()
    assert cache.of(1) is None


def test_nothing_is_kept_for_no_canary():
    cache = Cache(n_kept=0)
    cache.note(10)
    assert len(cache.kept._kept) == 0
    assert cache.of(1) is None


@pytest.mark.parametrize(("most", "is_kept"), [(W * 4 * 20 - 1, False), (W * 4 * 20, True)])
def test_no_more_bytes_than_may_be(most, is_kept, monkeypatch):
    """What is kept holds all logits of its step, those of other paths and wrong guesses too."""
    monkeypatch.setattr(last_logits, "MOST_BYTES", most)
    cache = Cache()
    step = torch.zeros(4, 5)
    cache.kept.note(cache.tip, 10, step[1:2])
    assert (cache.of(1) is not None) is is_kept


def test_what_is_kept_is_not_copied():
    cache, step = Cache(), rows(9, 10)
    cache.kept.note(cache.tip, 10, step)
    found = cache.kept.of(cache.tip, 2)
    assert [row.data_ptr() for row in found] == [row.data_ptr() for row in step]


def test_with_the_tip_its_logits_go():
    cache = Cache()
    other = below(cache.root, 10)
    cache.note(10, n=2)
    cache.note(10, n=2, tip=other)
    assert len(cache.kept._kept) == 2
    cache.root.children.remove(other)
    del other
    gc.collect()
    assert list(cache.kept._kept) == [cache.tip]
    assert cache.of(2) == [9, 10]


class TestSealedTip:
    """The tip that ran is empty now, and stands on what it held."""

    def test_says_what_it_said(self):
        cache = Cache()
        tip = below(cache.tip, 0)
        cache.note(10, n=3, tip=tip)
        assert cache.of(3) == cache.of(3, tip) == [8, 9, 10]
        assert cache.of(4) is None

    def test_beside_others_on_the_same_tokens(self):
        cache = Cache()
        below(cache.tip, 0)  # has said nothing yet
        longer = below(cache.tip, 2)
        tip = below(cache.tip, 0)
        cache.note(12, n=2, tip=longer)
        cache.note(10, n=3, tip=tip)
        assert cache.of(3) == [8, 9, 10]
        assert cache.of(2, longer) == [11, 12]

    def test_has_said_more_since(self):
        cache = Cache()
        tip = below(cache.tip, 0)
        cache.note(10, n=3, tip=tip)
        tip.extend([7])
        cache.note(11, tip=tip)
        assert cache.of(4, tip) == [8, 9, 10, 11]
        assert cache.of(3) is None, "that path ends elsewhere"

    def test_over_a_cache_that_has_changed(self):
        cache = Cache()
        cache.note(10, n=3, tip=below(cache.tip, 0))
        cache.n_changes += 1
        assert cache.of(1) is None


# -- what makes them wrong -----------------------------------------------------------------


@pytest.fixture
def grove():
    grove = Grove()
    yield grove
    check_integrity(grove.tree)
    check_rows(grove)


class Noting:
    """A tree with a path, and logits of all its tokens."""

    def __init__(self, grove):
        self.tree, self.path = grove.tree, grove.run("abcdefghijkl")
        self.kept = LastLogits(W, self.tree)
        self.note(self.path.tip)

    def note(self, tip):
        self.kept.note(tip, tip.end, torch.zeros(W, 3))

    @property
    def is_known(self):
        return self.kept.of(self.path.tip, W) is not None


@pytest.fixture
def noting(grove):
    found = Noting(grove)
    grove.tree.archive = Archive(fingerprint={"model": "m"}, cpu_bytes=2**20)
    yield found
    grove.tree.archive.close()
    grove.tree.archive = None


def archived(tree, tip):
    tree.archive_rows(tip, range(4))
    return lambda: tree.evict(tip, range(4))


ACTS = {
    "evict": lambda tree, tip: lambda: tree.evict(tip, (1, 2)),
    "evict all": lambda tree, tip: lambda: tree.evict(tip, range(12)),
    "hide": lambda tree, tip: lambda: tree.hide(tip, (1, 2)),
    "8 bits": lambda tree, tip: lambda: tree.compress(tip, range(12), 8),
    "4 bits": lambda tree, tip: lambda: tree.compress(tip, (3, 4), 4),
    "archive": archived,
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_an_act_makes_them_unknown(act, noting):
    does = act(noting.tree, noting.path.tip)
    assert noting.is_known, "what comes before the act changes nothing"
    does()
    assert not noting.is_known
    noting.note(noting.path.tip)
    assert noting.is_known


def test_rows_that_come_back_make_them_unknown(noting):
    tree, tip = noting.tree, noting.path.tip
    archived(tree, tip)()
    noting.note(tip)
    assert noting.is_known
    assert tree.restore(tip) > 0
    assert not noting.is_known


def test_rows_that_are_seen_again_make_them_unknown(noting):
    tree, tip = noting.tree, noting.path.tip
    tree.hide(tip, (1, 2))
    noting.note(tip)
    assert noting.is_known
    tree.unhide(tip)
    assert not noting.is_known


def test_what_is_exact_leaves_them_known(grove, noting):
    noting.tree.archive_rows(noting.path.tip, range(4))
    branch = grove.run("abcdefXY")  # cuts the path
    running = grove.begin("abcdefghijkl")
    grove.feed(running, "mnopqrs")
    noting.tree.seal(running)
    noting.tree.fuse(running.tip, 100)
    assert branch.tip.end == 8
    assert noting.path.tip.end == 12
    assert noting.is_known


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_tip_on_a_siblings_rows_is_unknown(is_sealed, grove):
    """It computed the same tokens anew; of the sibling's rows some have gone."""
    tree = grove.tree
    grove.run("abcd")
    sibling, path = grove.begin("abcd"), grove.begin("abcd")
    grove.feed(sibling, "efghijkl")
    (tree.seal if is_sealed else tree.commit)(sibling)
    tree.evict(sibling.tip.parent if is_sealed else sibling.tip, (0, 3))
    tip = path.tip
    grove.feed(path, "efghijkl")
    kept = LastLogits(W, tree)
    kept.note(tip, 12, torch.zeros(W, 3))
    assert kept.of(tip, W) is not None
    tree.seal(path)
    assert path.tip is tip
    assert tip.parent.residency is not None, "it does not stand on what has lost rows"
    assert kept.of(tip.parent, W) is None
    assert kept.of(tip, W) is None


def test_an_open_tip_on_a_siblings_rows_is_unknown(grove):
    """The rows of one that still runs are cut off for another that ends."""
    first, second = (grove.begin("") for _ in range(2))
    for path in (first, second):
        grove.feed(path, "abcdefgh")
    tree = grove.tree
    kept = LastLogits(W, tree)
    kept.note(first.tip, 8, torch.zeros(W, 3))
    assert kept.of(first.tip, W) is not None
    tree.commit(first)
    assert kept.of(first.tip, W) is None


# -- engines -------------------------------------------------------------------------------


@dataclass
class Seen:
    """The end of a step, for one path."""

    end: int
    worst: float | None
    """By how much what is kept differs from running the tokens again; `None`: it is unknown."""


@dataclass
class Looker:
    """Looks at what is kept of the running paths when each step is over."""

    engine: object
    seen: dict[tuple[int, ...], list[Seen]] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self):
        self.core = self.engine._core
        end_step = self.core.manager.end_step

        def ended(*args):
            end_step(*args)
            try:
                self.look()
            except BaseException as error:  # the engine would fail its requests with it
                self.errors.append(error)

        self.core.manager.end_step = ended

    def look(self):
        for tip in running_tips(self.core.tree):
            lineage = [s for s in tip.path() if s.token_ids]
            if not lineage:
                continue  # waits for its turn
            tokens = [token for s in lineage for token in s.token_ids]
            known = self.core.manager.last_logits.of(lineage[-1], W)
            worst = None
            if known is not None:
                again = run_again(self.core, lineage[-1], tokens)
                worst = float((torch.stack(known) - again).abs().max())
            self.seen.setdefault(tuple(tokens[:8]), []).append(Seen(len(tokens), worst))

    def check(self, prompt=None):
        """What was seen of a path, or of all of them, is right; returns where it is known."""
        settle(self.engine)
        assert self.errors == []
        key = None if prompt is None else tuple(prompt[:8])
        found = [one for k, many in self.seen.items() if key in (None, k) for one in many]
        assert all(one.worst <= 1e-4 for one in found if one.worst is not None)
        return {one.end: one.worst is not None for one in found}


def run_again(core, tip, tokens, n=W):
    """Logits after the last `n` tokens, computed as the guard would, `[n, V]`."""
    at = tip.end - n
    row = Row(tip=tip, n_new=n, position=at, is_stored=False, horizon=at)
    return core.adapter.forward([row], tokens[-n:], range(n))


def made(make_engine, family="llama", policy=None, model=None, **settings):
    given = {
        "budget_tokens": None,
        "budget_bytes": 2000 * token_bytes(model_of(family)),
        "guard": Guard(max_kl=50.0, canary_tokens=W),
        "interval": 1000,
        "trigger": 0.002,
        "target": 0.001,
    }
    config = managed(policy or Switch(), **(given | settings))
    return make_engine(model or model_of(family), config=config)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt_oss"])
def test_what_is_kept_is_what_running_again_gives(family, make_engine):
    """While the tip is sealed twice, and then idle."""
    engine = made(make_engine, family)
    looker = Looker(engine)
    run(engine, ask(ids(40), 38, ignore_eos=True))
    known = looker.check()
    # The last chunk of the prompt says one, and each token one more.
    assert [end for end, is_known in known.items() if is_known] == list(range(40 + W - 1, 78))
    assert [end for end, is_known in known.items() if not is_known][-1] == 40 + W - 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 7, "seed": 3, "top_logprobs": 5},
        {"top_logprobs": 3},
    ],
    ids=str,
)
def test_drawing_leaves_them_as_they_are(sampling, make_engine):
    engine = made(make_engine)
    looker = Looker(engine)
    run(engine, ask(ids(40), 12, ignore_eos=True, **sampling))
    assert sum(looker.check().values()) == 12 - W + 1


@pytest.mark.parametrize("wrong", [1, 2, 3, 1000])
def test_guesses(wrong, make_engine, monkeypatch):
    """All wrong, some, none: what a wrong guess was told is not kept."""
    engine = made(make_engine, prompt_lookup=6)
    looker = Looker(engine)
    prompt = tuple(ids(40))
    answer = oracle.greedy(model_of("llama"), prompt, 30, ignore_eos=True)
    foresee(monkeypatch, {prompt: answer}, wrong=wrong)
    result = run(engine, ask(prompt, 30, ignore_eos=True))
    counters = engine._core.counters
    assert list(result.token_ids) == answer
    assert counters.n_guessed_tokens > 0
    assert (counters.n_right_guesses > 0) is (wrong > 1)
    known = looker.check()
    assert {end for end, is_known in known.items() if is_known} == {
        end for end in known if end >= 40 + W - 1
    }
    assert max(known) == 69


@pytest.mark.parametrize("prompt_lookup", [0, 6])
def test_two_in_one_step(prompt_lookup, make_engine, monkeypatch):
    """One of them still reads its prompt while the other one answers."""
    engine = made(make_engine, prompt_lookup=prompt_lookup)
    looker = Looker(engine)
    prompts = [tuple(ids(33)), tuple(ids(70, seed=1))]
    answers = {p: oracle.greedy(model_of("llama"), p, 24, ignore_eos=True) for p in prompts}
    if prompt_lookup:
        foresee(monkeypatch, answers, wrong=3)
    results = run_together(engine, [ask(p, 24, ignore_eos=True) for p in prompts])
    assert [list(r.token_ids) for r in results] == list(answers.values())
    for prompt in prompts:
        known = looker.check(prompt)
        assert known
        for end, is_known in known.items():
            assert is_known is (end >= len(prompt) + W - 1), end


def test_branches_of_one_trunk(make_engine):
    engine = made(make_engine)
    looker = Looker(engine)
    run(engine, ask(ids(40), 2, ignore_eos=True))
    prompts = [(*ids(40), *ids(n, seed=n)) for n in (5, 9)]
    run_together(engine, [ask(p, 20, ignore_eos=True) for p in prompts])
    looker.check()
    found = [one for many in looker.seen.values() for one in many]
    assert sum(one.worst is not None for one in found) >= 2 * (20 - W)


def test_a_reply_that_is_cut_off(make_engine):
    """A token that reaches past a stop string is not kept: what followed it is not either."""
    text = run(made(make_engine), ask(ids(40), 20, ignore_eos=True)).text
    engine = made(make_engine)
    looker = Looker(engine)
    result = run(engine, ask(ids(40), 20, ignore_eos=True, stop=(text[9:11],)))
    assert result.finish_reason == "stop"
    settle(engine)
    engine._core.call(looker.look).result(PATIENCE_S)
    assert any(looker.check().values())


@pytest.mark.parametrize("lost", [(), range(2, 12, 3)], ids=["none gone", "some gone"])
def test_a_path_that_goes_on_over_a_siblings_rows(lost, make_engine):
    """It computed the same tokens anew, until it is sealed: then it sees what the sibling has."""
    engine = made(make_engine)
    prompt = ids(32)
    run(engine, ask(prompt, 40, ignore_eos=True))
    tree = engine._core.tree

    def lose():
        [path] = tree.paths.values()
        for segment in path.tip.path():
            if segment.start >= 32:
                tree.evict(segment, [at for at in lost if at < segment.n_tokens])

    engine._core.call(lose).result(PATIENCE_S)
    looker = Looker(engine)
    run(engine, ask(prompt, 30, call="again", ignore_eos=True))
    known = looker.check()
    first_seal = 32 + 16
    assert known[first_seal - 1]
    assert not known[first_seal], "its rows are not those that it was computed with"
    assert not known[first_seal + W - 1]
    assert known[first_seal + W]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        *[(policy, turns) for policy in ("h2o", "staged", "window")],
        *[(policy, siblings) for policy in ("h2o", "window")],
        ("staged", siblings),
    ],
)
def test_acts_of_all_kinds(policy, family, steps, make_engine):
    """Between cycles that evict, pack, archive and release, and paths that begin, end and share."""
    engine = made(
        make_engine,
        family,
        policy,
        budget_bytes=110 * token_bytes(model_of(family)),
        tiers=Tiers(cpu_bytes=2**20),
        trigger=0.8,
        target=0.6,
        interval=7,
        prompt_lookup=3,
    )
    looker = Looker(engine)
    steps(engine)
    looker.check()
    assert engine._core.tree.n_changes > 1
    known = [one.worst is not None for many in looker.seen.values() for one in many]
    assert sum(known) > 5
    assert known.count(False) > 5


@pytest.mark.parametrize("act", ["evict", "compress"])
def test_a_prompt_that_is_there_to_its_end(act, make_engine):
    """Its last token is run again, over its own row as it is stored: the guard has a fresh one."""
    engine = made(make_engine)
    prompt = ids(32)
    run(engine, ask(prompt, 2, ignore_eos=True))
    tree = engine._core.tree

    def lose():
        [path] = tree.paths.values()
        for segment in path.tip.path():
            last = [at for at in range(segment.n_tokens) if 28 <= segment.start + at < 32]
            tree.evict(segment, last) if act == "evict" else tree.compress(segment, last, 4)

    engine._core.call(lose).result(PATIENCE_S)
    assert tree.n_changes
    looker = Looker(engine)
    run(engine, ask(prompt, 12, call="again", ignore_eos=True))
    assert looker.check()[32 + 2 * W]


# -- the guard -----------------------------------------------------------------------------


class Cycling:
    """Runs cycles in the middle of decoding, and counts the forward passes of the canary."""

    def __init__(self, make_engine, at, *, prompts=None, **settings):
        self.at, self.passes, self.receipts, self.errors = dict(at), [], [], []
        self.switch = Switch()
        self.engine = made(make_engine, policy=self.switch, **settings)
        self.core = self.engine._core
        self.manager = self.core.manager
        self.prompts = prompts or [ids(40)]
        canary, end_step = self.manager._cycles._canary, self.manager.end_step
        forward = canary._forward
        self.n_passes = 0

        def counted(*args, **given):
            self.n_passes += 1
            return forward(*args, **given)

        def ended(*args):
            end_step(*args)
            act = self.at.pop(self.n_decoded, None)
            if act is not None:
                try:
                    self.cycle(act)
                except BaseException as error:
                    self.errors.append(error)

        canary._forward = counted
        self.manager.end_step = ended

    @property
    def n_decoded(self):
        """Tokens that the path has of its answer; none before the prompt is read."""
        tips = running_tips(self.core.tree)
        return min((tip.end for tip in tips), default=0) - max(map(len, self.prompts))

    def cycle(self, policy):
        self.switch.policy, self.n_passes = policy, 0
        receipts = [r for r in self.manager.manage() if r.outcome == "done"]
        self.switch.policy = None
        self.passes.append(self.n_passes)
        self.receipts.append(receipts)

    def run(self, n=30):
        run_together(self.engine, [ask(p, n, ignore_eos=True) for p in self.prompts])
        assert self.errors == []
        assert not self.at, "a cycle did not come"
        assert all(self.receipts), "a cycle did nothing"
        return self


@pytest.mark.parametrize(
    ("n_decoded", "wanted"), [(0, 2), (1, 2), (W - 2, 2), (W - 1, 1), (W, 1), (12, 1)]
)
def test_known_logits_spare_a_pass(n_decoded, wanted, make_engine):
    assert Cycling(make_engine, {n_decoded: evict_free}).run().passes == [wanted]


@pytest.mark.parametrize(("n_since", "wanted"), [(1, 2), (W - 1, 2), (W, 1), (9, 1)])
def test_they_are_known_again_so_many_tokens_after_an_act(n_since, wanted, make_engine):
    found = Cycling(make_engine, {8: evict_free, 8 + n_since: evict_free}).run()
    assert found.passes == [1, wanted]


def test_a_cycle_that_does_nothing_leaves_them_known(make_engine):
    cycling = Cycling(make_engine, {8: evict_free, 9: evict_free})
    refusing = Guard(max_kl=1e-12, canary_tokens=W)
    cycling.manager._cycles._canary._limits = refusing
    run(cycling.engine, ask(ids(40), 30, ignore_eos=True))
    assert cycling.errors == []
    assert cycling.receipts == [[], []]
    assert cycling.passes[0] == 1
    assert not any(s.residency for s in cycling.core.tree.segments())


def test_all_paths_are_run_again_where_one_is_unknown(make_engine):
    """They are one pass: one that is spared for some of them spares nothing."""
    prompts = [ids(40), ids(40, seed=1)]
    both = Cycling(make_engine, {W: evict_free}, prompts=prompts).run()
    assert both.passes == [1]
    assert Cycling(make_engine, {W - 2: evict_free}, prompts=prompts).run().passes == [2]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("n_paths", [1, 2])
def test_the_receipts_say_what_they_would_say_without(family, n_paths, make_engine, monkeypatch):
    at = {W: evict_free, 2 * W: evict_free, 3 * W + 1: evict_free}
    prompts = [ids(40, seed=n) for n in range(n_paths)]
    found = []
    for is_off in (False, True):
        if is_off:
            monkeypatch.setattr(LastLogits, "of", lambda self, tip, n: None)
        cycling = Cycling(make_engine, at, prompts=prompts, family=family).run()
        found.append([[(r.segment_id, r.kl) for r in some] for some in cycling.receipts])
        assert cycling.passes == [2 if is_off else 1] * 3
    for with_them, without in zip(*found, strict=True):
        assert [segment for segment, _ in with_them] == [segment for segment, _ in without]
        for (_, one), (_, other) in zip(with_them, without, strict=True):
            assert other > 1e-5
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_an_idle_path_is_known_until_something_changes(make_engine):
    """What ran last is asked as it ended."""
    cycling = Cycling(make_engine, {})
    run(cycling.engine, ask(ids(40), 12, ignore_eos=True))
    for wanted in (1, 2):
        cycling.core.call(lambda: cycling.cycle(evict_free)).result(PATIENCE_S)
        assert cycling.passes[-1] == wanted
        assert cycling.receipts[-1]


def other_weights(engine):
    with torch.no_grad():
        engine._core.adapter.model.lm_head.weight.mul_(1.5)


def test_other_weights_say_something_else(make_engine, monkeypatch):
    found = []
    for is_off in (False, True):
        if is_off:
            monkeypatch.setattr(LastLogits, "of", lambda self, tip, n: None)
        cycling = Cycling(make_engine, {}, model=tiny_model("llama"))
        run(cycling.engine, ask(ids(40), 12, ignore_eos=True))
        other_weights(cycling.engine)
        cycling.core.call(lambda at=cycling: at.cycle(evict_free)).result(PATIENCE_S)
        found.append(cycling.receipts[0][0].kl)
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_say_nothing_that_is_kept(dtype, make_engine):
    engine = made(make_engine, model=tiny_model("llama").to(dtype))
    run(engine, ask(ids(40), 12, ignore_eos=True))
    core = engine._core

    def look():
        [tip] = running_tips(core.tree)
        return core.manager.last_logits.of(tip, W)

    assert core.call(look).result(PATIENCE_S) is None


def n_bytes_of(kept):
    """Bytes of the memory that is held by logits, each allocation once."""
    found = [one.logits for some in kept._kept.values() for one in some]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values()
    )


def test_paths_that_idle_hold_no_more_bytes_than_may_be(make_engine, monkeypatch):
    engine = made(make_engine)
    n_vocab = engine._core.adapter.model.config.vocab_size
    most = 3 * W * n_vocab * 4
    monkeypatch.setattr(last_logits, "MOST_BYTES", most)
    for n in range(8):
        run(engine, ask(ids(20, seed=n), 8, ignore_eos=True))
    assert 0 < n_bytes_of(engine._core.manager.last_logits) <= most
