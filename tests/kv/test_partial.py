"""One contract for every `Partial`: equal to attention written down plainly in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sidequest_langchain.kv import partial as partial_module
from sidequest_langchain.kv.partial import KEY_BLOCK, math_partial, merge
from sidequest_langchain.kv.partial_cpu import cpu_partial
from sidequest_langchain.kv.partial_cuda import cuda_partial, is_fused

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ON_CPU = [*FLOATS, torch.float64]
WAYS = [
    *[pytest.param((math_partial, "cpu", t), id=f"math-{t}") for t in ON_CPU],
    *[pytest.param((cpu_partial, "cpu", t), id=f"cpu-{t}") for t in ON_CPU],
    # Without a device only what the flash kernel refuses can run: it goes to the math way.
    pytest.param((cuda_partial, "cpu", torch.float32), id="cuda-fallback"),
]
if torch.cuda.is_available():
    WAYS += [
        pytest.param((p, "cuda", t), id=f"{p.__name__}-{t}-cuda", marks=pytest.mark.gpu)
        for p in (cuda_partial, math_partial)
        for t in FLOATS
    ]
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Relative to outputs and scores of size one; half precision rounds scores and weights."""
MASKS = ["none", "causal", "visible"]
# (query heads, KV heads, head dim): GQA ratios 1, 2, 4, 7, 8
HEADS = [(3, 3, 8), (4, 2, 16), (4, 1, 64), (14, 2, 24), (8, 1, 128), (2, 2, 80)]


@pytest.fixture(params=WAYS)
def way(request):
    """(partial, device, dtype)."""
    return request.param


def plainly(q, k, v, *, scaling, visible=None, softcap=None):
    """Attention and log-sum-exp, one query and head at a time, in float64."""
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    n_heads, n_queries, _ = q.shape
    out = torch.zeros(n_heads, n_queries, v.shape[2], dtype=torch.float64)
    lse = torch.full((n_heads, n_queries), -math.inf, dtype=torch.float64)
    for head in range(n_heads):
        kv_head = head // (n_heads // k.shape[0])
        for query in range(n_queries):
            scores = k[kv_head] @ q[head, query] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            seen = slice(None) if visible is None else visible[query].cpu()
            if len(scores[seen]):
                out[head, query] = torch.softmax(scores[seen], 0) @ v[kv_head][seen]
                lse[head, query] = torch.logsumexp(scores[seen], 0)
    return out, lse


def draw(seed, way, n_queries, n_keys, heads=(4, 2, 16), value_dim=None):
    """Random q, k and v whose scores, scaled, are about normal; k and v are views of storage."""
    _, device, dtype = way
    n_heads, n_kv, dim = heads
    g = torch.Generator().manual_seed(seed)
    shapes = [
        (n_heads, n_queries, dim),
        (n_kv, n_keys + 5, dim),
        (n_kv, n_keys + 5, value_dim or dim),
    ]
    q, k, v = (torch.randn(s, generator=g).to(device, dtype) for s in shapes)
    return q, k[:, 2 : n_keys + 2], v[:, 2 : n_keys + 2]


def mask_of(kind, seed, n_queries, n_keys, device):
    """(keyword arguments of the partial, the same as a table for `plainly`)."""
    if kind == "none":
        return {}, None
    if kind == "causal":
        return {"is_causal": True}, torch.ones(n_queries, n_keys, dtype=torch.bool).tril()
    g = torch.Generator().manual_seed(seed)
    table = torch.rand(n_queries, n_keys, generator=g) > 0.4
    table[::3] = False
    return {"visible": table.to(device)}, table


def agrees(found, wanted, way, *, n_queries, n_heads):
    """Whether a partial's output and log-sum-exp are those of the reference."""
    out, lse = found
    wanted_out, wanted_lse = wanted
    tolerance = TOLERANCE[way[2]]
    assert out.shape == wanted_out.shape
    assert lse.shape == (n_heads, n_queries)
    assert lse.dtype == torch.float32
    assert out.is_floating_point()
    assert out.isfinite().all(), "not finite, which would poison the merge"
    blind = wanted_lse.isinf()
    assert torch.equal(lse.cpu().isneginf(), blind)
    torch.testing.assert_close(
        lse.cpu().double()[~blind], wanted_lse[~blind], atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(
        out.cpu().double()[~blind], wanted_out[~blind], atol=tolerance, rtol=tolerance
    )


def check(
    way, seed, n_queries, n_keys, kind="none", *, heads=(4, 2, 16), value_dim=None, softcap=None
):
    q, k, v = draw(seed, way, n_queries, n_keys, heads, value_dim)
    given, table = mask_of(kind, seed, n_queries, n_keys, q.device)
    scaling = heads[2] ** -0.5 * 1.3
    found = way[0](q, k, v, scaling=scaling, softcap=softcap, **given)
    wanted = plainly(q, k, v, scaling=scaling, visible=table, softcap=softcap)
    agrees(found, wanted, way, n_queries=n_queries, n_heads=heads[0])


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_query_group_and_head_dim(way, heads, kind):
    n_queries = 9
    check(way, 1, n_queries, 9 if kind == "causal" else 21, kind, heads=heads)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 33), (2, 1), (17, 64), (40, 3)])
def test_every_number_of_queries_and_keys(way, n_queries, n_keys, kind):
    check(way, 2, n_queries, n_queries if kind == "causal" else n_keys, kind)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(way, kind, softcap):
    check(way, 3, 6, 6 if kind == "causal" else 19, kind, softcap=softcap)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("value_dim", [8, 24])
def test_values_of_another_size_than_keys(way, kind, value_dim):
    check(way, 4, 5, 5 if kind == "causal" else 11, kind, value_dim=value_dim)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", ["none", "visible"])
@pytest.mark.parametrize("n_keys", [KEY_BLOCK, KEY_BLOCK + 1])
def test_more_keys_than_are_scored_at_once(way, n_keys, kind, softcap):
    check(way, 5, 3, n_keys, kind, heads=(2, 1, 8), softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_long_prompt_of_its_own(way, softcap, monkeypatch):
    monkeypatch.setattr(partial_module, "KEY_BLOCK", 16)
    check(way, 6, 50, 50, "causal", softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("n_keys", [4, 40])
def test_a_query_that_sees_nothing_has_no_weight_and_a_finite_output(
    way, n_keys, softcap, monkeypatch
):
    monkeypatch.setattr(partial_module, "KEY_BLOCK", 16)
    q, k, v = draw(7, way, 3, n_keys)
    visible = torch.zeros(3, n_keys, dtype=torch.bool, device=q.device)
    visible[1, 0] = True
    out, lse = way[0](q, k, v, scaling=0.25, softcap=softcap, visible=visible)
    assert lse[:, [0, 2]].isneginf().all()
    assert lse[:, 1].isfinite().all()
    assert out.isfinite().all()
    seen = v[:, 0].repeat_interleave(2, 0)
    torch.testing.assert_close(out[:, 1].double(), seen.double(), atol=1e-2, rtol=1e-2)


def test_large_scores_do_not_overflow(way):
    q, k, v = draw(8, way, 4, 7)
    found = way[0](q * 30, k * 30, v, scaling=0.25)
    wanted = plainly(q * 30, k * 30, v, scaling=0.25)
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1].cpu().double(), wanted[1], rtol=2e-2, atol=1.0)


def test_inputs_are_left_alone(way):
    q, k, v = draw(9, way, 5, 5)
    before = q.clone(), k.clone(), v.clone()
    way[0](q, k, v, scaling=0.25)
    way[0](q, k, v, scaling=0.25, softcap=3.0, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


# -- merge ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_parts_over_disjoint_keys_merge_to_the_whole(way, seed):
    n_keys = 30
    q, k, v = draw(seed, way, 5, n_keys)
    g = torch.Generator().manual_seed(seed)
    cuts = sorted(torch.randint(1, n_keys, (3,), generator=g).tolist())
    visible = torch.rand(5, n_keys, generator=g) > 0.6
    visible[:, 0] = True  # the whole is never empty, as a token always sees itself
    visible[2, 1:] = False  # to this query all parts but the first are
    visible = visible.to(q.device)
    parts = [
        way[0](q, k[:, a:b], v[:, a:b], scaling=0.3, visible=visible[:, a:b])
        for a, b in zip([0, *cuts], [*cuts, n_keys], strict=True)
        if a < b
    ]
    order = torch.randperm(len(parts), generator=g).tolist()
    lses = torch.stack([parts[i][1] for i in order])
    merged = merge(torch.stack([parts[i][0] for i in order]), lses), torch.logsumexp(lses, 0)
    assert merged[0].dtype == torch.float32
    wanted = plainly(q, k, v, scaling=0.3, visible=visible)
    agrees(merged, wanted, way, n_queries=5, n_heads=4)


def test_an_empty_part_changes_nothing():
    q, k, v = draw(10, (math_partial, "cpu", torch.float32), 4, 6)
    out, lse = math_partial(q, k, v, scaling=0.3)
    nothing = torch.full_like(out, 1e6), torch.full_like(lse, -math.inf)
    merged = merge(
        torch.stack([nothing[0], out, nothing[0]]), torch.stack([nothing[1], lse, nothing[1]])
    )
    torch.testing.assert_close(merged, out)


def test_one_part_is_itself():
    q, k, v = draw(11, (math_partial, "cpu", torch.float32), 4, 6)
    out, lse = math_partial(q, k, v, scaling=0.3)
    torch.testing.assert_close(merge(out[None], lse[None]), out)


# -- which way -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "is_masked", "softcap", "wanted"),
    [
        (torch.float16, 64, 64, False, None, True),
        (torch.bfloat16, 256, 256, False, None, True),
        (torch.float32, 64, 64, False, None, False),
        (torch.float16, 60, 60, False, None, False),
        (torch.float16, 264, 264, False, None, False),
        (torch.float16, 64, 32, False, None, False),
        (torch.float16, 64, 64, True, None, False),
        (torch.float16, 64, 64, False, 30.0, False),
    ],
)
def test_what_the_flash_kernel_takes(dtype, dim, value_dim, is_masked, softcap, wanted):
    q, k = torch.zeros(2, 1, dim, dtype=dtype), torch.zeros(1, 3, dim, dtype=dtype)
    v = torch.zeros(1, 3, value_dim, dtype=dtype)
    assert is_fused(q, k, v, is_masked=is_masked, softcap=softcap) is wanted


@pytest.mark.parametrize("given", [{"softcap": 5.0}, {"is_causal": True}, {}], ids=str)
def test_what_the_flash_kernel_refuses_goes_the_math_way(given):
    q, k, v = draw(12, (cuda_partial, "cpu", torch.float32), 4, 4)
    found = cuda_partial(q, k, v, scaling=0.3, **given)
    wanted = math_partial(q, k, v, scaling=0.3, **given)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
