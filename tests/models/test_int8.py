"""The int8 product against whole numbers, in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from sidequest_langchain.models import int8
from sidequest_langchain.models.int8 import (
    Int8Group,
    Int8Linear,
    Int8Product,
    only_wanted,
    quantise_rows,
)
from sidequest_langchain.models.slicing import FEW, NARROW, WIDE, ZERO, slicing_here

SHAPES = [(1, 8, 16), (2, 33, 64), (5, 128, 896), (17, 7, 4864), (64, 256, 96)]


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Values over several orders of magnitude, with outliers, as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x[..., ::13] *= 200
    return x


def exact(x: Tensor, weight: Tensor, slicing=WIDE) -> Tensor:
    """What the product is defined to be, float64."""
    codes, scales = quantise_rows(weight)
    parts, worth = slicing.split(x)
    steps = slicing.join(parts.double() - ZERO)
    return (steps @ codes.double().T) * scales.double() * worth.double()


EACH_SLICING = pytest.mark.parametrize("slicing", [WIDE, NARROW], ids=["wide", "narrow"])


def min_of(slicing):
    """The slicing, or what this processor can take at most."""
    return slicing if slicing_here() is WIDE else NARROW


class TestRounding:
    def test_a_weight_is_half_a_step_off_at_most(self):
        weight = spread(40, 96)
        codes, scales = quantise_rows(weight)

        assert codes.dtype is torch.int8
        assert int(codes.abs().max()) == 127
        error = (codes * scales[:, None] - weight).abs()
        assert bool((error <= 0.5001 * scales[:, None]).all())

    @EACH_SLICING
    def test_an_activation_is_half_a_step_of_its_own_row_off_at_most(self, slicing):
        x = spread(9, 300)
        x[4] *= 1e-5
        x[5] = -x[5].abs()  # the largest of both signs is met
        parts, worth = slicing.split(x)
        near = slicing.join(parts.double() - ZERO) * worth.double()

        # Half a step, and what fp32 itself rounds: of the value, and of the value in steps.
        allowed = 0.6 * worth + 2.0**-22 * x.abs()
        assert bool(((near - x).abs() <= allowed).all())

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    @EACH_SLICING
    def test_the_largest_values_fit(self, slicing, sign):
        parts, worth = slicing.split(torch.full((1, 8), sign * 3.0))

        assert slicing.join(parts.double() - ZERO).unique().tolist() == [sign * slicing.steps]
        assert float(worth) * slicing.steps == pytest.approx(3.0, rel=1e-6)

    def test_narrow_codes_leave_room_for_a_sum_in_16_bits(self):
        x = torch.cat((spread(50, 64), -torch.ones(1, 64), torch.ones(1, 64)))
        parts, _ = NARROW.split(x)

        assert int(parts.max()) == NARROW.base - 1
        assert 2 * int(parts.max()) * 127 < 2**15

    @EACH_SLICING
    @pytest.mark.parametrize("make", [torch.zeros, lambda *shape: torch.full(shape, 1e-38)])
    def test_nothing_stays_nothing(self, make, slicing):
        parts, worth = slicing.split(make(2, 16))

        assert bool((torch.isfinite(worth) & (worth > 0)).all())
        assert bool((parts == ZERO).all())
        codes, scales = quantise_rows(torch.zeros(3, 16))
        assert not codes.any()
        assert bool((scales > 0).all())


class TestProduct:
    @EACH_SLICING
    @pytest.mark.parametrize(("t", "n", "k"), SHAPES)
    def test_is_the_sum_over_whole_numbers(self, t, n, k, slicing):
        x, weight = spread(t, k), spread(n, k, seed=1)
        got = Int8Product([weight], [None], min_of(slicing))(x)

        expected = exact(x, weight, min_of(slicing))
        assert torch.allclose(
            got.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())
        )

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_the_largest_sums_do_not_saturate(self, sign):
        weight, x = torch.ones(64, 4864), sign * torch.ones(3, 4864)
        got = Int8Product([weight], [None])(x)

        assert torch.allclose(got, torch.full((3, 64), sign * 4864.0), rtol=1e-6)

    @pytest.mark.parametrize("k", [256, 97])
    @pytest.mark.parametrize("has_bias", [True, False])
    @EACH_SLICING
    def test_a_row_does_not_depend_on_its_batch(self, k, has_bias, slicing):
        bias = spread(96, seed=3) if has_bias else None
        x = spread(70, k)
        product = Int8Product([spread(96, k, seed=2)], [bias], min_of(slicing))
        together = product(x)

        for at, n in ((0, 1), (3, 2), (5, 9), (20, FEW), (20, FEW + 1), (20, 33)):
            assert torch.equal(product(x[at : at + n]), together[at : at + n])

    def test_an_input_is_left_alone_and_may_want_a_gradient(self):
        x = spread(3, 64).requires_grad_()
        before = x.detach().clone()
        product = Int8Product([spread(96, 64, seed=2)], [None])

        assert torch.equal(product(x), product(before))
        assert torch.equal(x, before)

    def test_the_narrow_slices_serve_processors_that_saturate(self):
        """In a process with the instructions of AVX2: without VNNI pairs add up in 16 bits."""
        code = (
            "import torch\n"
            "from sidequest_langchain.models.quantising import _check_kernel\n"
            "from sidequest_langchain.models.slicing import NARROW, slicing_here\n"
            "print(slicing_here() is NARROW, _check_kernel())"
        )
        env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
        found = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
        )
        assert found.stdout.split() == ["True", "None"], found.stderr

    @pytest.mark.parametrize("has_bias", [True, False])
    def test_blocks_of_rows_are_the_rows(self, has_bias, monkeypatch):
        monkeypatch.setattr(int8, "BLOCK_BYTES", 0)  # 32 rows at a time
        x, bias = spread(101, 64), spread(96, seed=3) if has_bias else None
        product = Int8Product([spread(96, 64, seed=2)], [bias])
        monkeypatch.undo()
        whole = Int8Product([spread(96, 64, seed=2)], [bias])

        assert (product._n_rows, whole._n_rows > 101) == (32, True)
        assert torch.equal(product(x), whole(x))

    def test_a_bias_is_added_and_a_missing_one_is_not(self):
        x, weights = spread(4, 64), [spread(8, 64, seed=1), spread(5, 64, seed=2)]
        bias = spread(5, seed=3)
        plain = Int8Product(weights, [None, None])(x)
        got = Int8Product(weights, [None, bias])(x)

        assert torch.equal(got[:, :8], plain[:, :8])
        assert torch.allclose(got[:, 8:], plain[:, 8:] + bias, rtol=1e-5)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("n", [4, 40])
    def test_odd_inputs_are_served_in_silence(self, n):
        product = Int8Product([spread(96, 64, seed=2)], [spread(96, seed=3)])
        x = spread(n, 64)

        assert torch.equal(product(x.T.contiguous().T), product(x))
        assert product(x[:0]).shape == (0, 96)
        for bad in (torch.inf, torch.nan, 3e38):
            odd = x.clone()
            odd[1, 5] = bad
            got = product(odd)
            assert torch.equal(got[[0, 2, 3]], product(x)[[0, 2, 3]])
            assert bad == 3e38 or not bool(torch.isfinite(got[1]).any())

    def test_what_tells_weights_is_the_same_however_activations_are_sliced(self):
        weight, bias = spread(2048, 512), spread(2048, seed=4)
        codes = (torch.arange(3 * 512) % 128).to(torch.uint8).view(3, 512)
        wide, narrow = (Int8Product([weight], [bias], s).tell(codes) for s in (WIDE, NARROW))
        whole = quantise_rows(weight)[0].double()

        assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))
        assert torch.equal(wide[0].double(), (codes.double() - ZERO) @ whole.T)
        weight[7, 13] *= -1
        assert not torch.equal(Int8Product([weight], [bias]).tell(codes)[0], wide[0])

    def test_bytes_are_those_of_the_weights(self):
        assert Int8Product([torch.ones(96, 64)], [None]).n_bytes == 96 * 64 + 96 * 8


class TestGroup:
    @pytest.fixture
    def layers(self) -> tuple[list[nn.Linear], list[Int8Linear]]:
        torch.manual_seed(5)
        dense = [nn.Linear(64, n) for n in (32, 8, 8)]
        product = Int8Product([d.weight for d in dense], [d.bias for d in dense])
        group = Int8Group(product)
        return dense, [Int8Linear(group, i) for i in range(3)]

    def test_every_layer_has_its_own_output(self, layers):
        dense, ints = layers
        x = torch.randn(2, 5, 64)

        for plain, layer in zip(dense, ints, strict=True):
            got = layer(x)
            assert got.shape == plain(x).shape
            assert torch.allclose(got, plain(x), atol=0.02)

    def test_one_product_serves_the_layers_of_one_input(self, layers, monkeypatch):
        _, ints = layers
        calls = []
        real = Int8Product.__call__
        monkeypatch.setattr(
            Int8Product, "__call__", lambda self, x: calls.append(1) or real(self, x)
        )
        x = torch.randn(1, 3, 64)
        for layer in ints:
            layer(x)
        assert len(calls) == 1
        for layer in ints:
            layer(x)
        assert len(calls) == 2

    def test_another_input_between_two_layers_spoils_neither(self, layers):
        dense, ints = layers
        a, b = torch.randn(1, 64), torch.randn(4, 64)
        got = [ints[0](a), ints[0](b), ints[1](a), ints[1](b), ints[2](b), ints[2](a)]
        plain = [dense[0](a), dense[0](b), dense[1](a), dense[1](b), dense[2](b), dense[2](a)]

        for one, other in zip(got, plain, strict=True):
            assert torch.allclose(one, other, atol=0.02)

    def test_nothing_is_kept_once_all_have_asked(self, layers):
        _, ints = layers
        x = torch.randn(1, 64)
        for layer in ints:
            layer(x)

        assert ints[0]._group._last is None

    def test_no_rows_make_none(self, layers):
        assert layers[1][1](torch.empty(1, 0, 64)).shape == (1, 0, 8)

    def test_says_what_it_is(self, layers):
        assert "in_features=64, out_features=32, weights=int8" in repr(layers[1][0])


class TestWanted:
    def groups(self) -> tuple[Int8Linear, Int8Linear]:
        product = Int8Product([spread(16, 64, seed=1)], [spread(16, seed=2)])
        before, after = Int8Group(product), Int8Group(product, is_after_attention=True)
        return Int8Linear(before, 0), Int8Linear(after, 0)

    @pytest.mark.parametrize("wanted", [[], [29], [3, 17, 29]])
    def test_the_wanted_tokens_are_the_same_to_the_bit_and_the_others_nothing(self, wanted):
        before, after = self.groups()
        x = spread(1, 30, 64)
        whole = before(x)
        with only_wanted(30, wanted):
            assert torch.equal(before(x.clone()), whole)
            got = after(x)

        left_out = [i for i in range(30) if i not in wanted]
        assert torch.equal(got[0, wanted], whole[0, wanted])
        assert not got[0, left_out].any()
        assert torch.equal(after(x), whole)

    def test_a_few_tokens_are_not_worth_it(self):
        _, after = self.groups()
        x = spread(1, 9, 64)
        with only_wanted(9, [7, 8]):
            assert torch.equal(after(x), after(x.clone()))
            assert after(x)[0].any(-1).all()
