"""Matrix products with float weights: against float64 and PyTorch's own, and a row's bits at every place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import sampling
from kernels.torch_backend.backend import TorchBackend
from kernels.triton_backend import linear
from kernels.triton_backend.packed_weight import pack, pack_heads
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from kernels.triton_backend.tiles import cut

pytestmark = pytest.mark.each_value

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (N, K) on both sides of tiles; the last has two parts of K, which few rows split.
SHAPES = [(1, 1), (33, 24), (16, 33), (50, 300)]
INVARIANT = Settings(TARGETS[INTERPRETER])


def drawn(n: int, k: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((n, k), (n,), (rows, k)))
    return weight, bias, x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_within_one_rounding_of_float64(dtype: torch.dtype, n: int, k: int, settings: Settings) -> None:
    weight, bias, x = drawn(n, k, 19, dtype)
    used = bias if n % 2 else None
    packed = pack(weight, used, dtype, None, CPU)
    backend = TorchBackend()
    reference = backend.linear.pack(weight, used, dtype)
    for rows in (x, x[:2]):
        out = linear.linear(rows, packed, settings)
        assert (out.shape, out.dtype) == ((len(rows), n), dtype)
        exact = rows.double() @ weight.double().t() + (0.0 if used is None else used.double())
        size = rows.double().abs() @ weight.double().abs().t() + bias.double().abs()
        assert bool(((out.double() - exact).abs() <= 0.5 * torch.finfo(dtype).eps * exact.abs() + 3e-6 * size).all())
        theirs = backend.linear.apply(rows, reference)
        torch.testing.assert_close(out, theirs, rtol=2 * torch.finfo(dtype).eps, atol=4e-5)
    assert linear.linear(x[:0], packed, settings).shape == (0, n)


def test_more_tiles_of_rows_than_go_together(settings: Settings) -> None:
    weight, _, x = drawn(33, 8, 170, torch.float32)
    out = linear.linear(x, pack(weight, None, torch.float32, None, CPU), settings)
    torch.testing.assert_close(out, x @ weight.t(), atol=1e-5, rtol=1e-5)


def exact_in_tiles(n: int, k: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and x whose sums over 32 numbers of K are exact in float32, and rounded when they are added up.

    So numpy's product of one tile, whose bits depend on a row's place, plays no part; what the kernel does, does.
    """
    generator = torch.Generator().manual_seed(n * k)
    weight, x = (torch.randint(-99, 100, shape, generator=generator).float() for shape in ((n, k), (rows, k)))
    powers = torch.randint(-12, 12, (-(-k // 32),), generator=generator).repeat_interleave(32)[:k]
    return torch.ldexp(weight, powers), x


# (N, K, T): one program does all parts of K, of which there are one, two and four.
@pytest.mark.parametrize(("n", "k", "rows"), [(33, 24, 19), (50, 300, 19), (20, 530, 50)])
def test_row_bits_are_independent_of_other_rows(n: int, k: int, rows: int) -> None:
    weight, x = exact_in_tiles(n, k, rows)
    packed = pack(weight, torch.randn(n), torch.float32, None, CPU)
    whole = linear.linear(x, packed, INVARIANT)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for count in (1, 7, 17):
        assert torch.equal(linear.linear(x[order[:count]], packed, INVARIANT), whole[order[:count]]), f"{count} rows"
    chunks = [linear.linear(chunk, packed, INVARIANT) for chunk in (x[:1], x[1:17], x[17:])]
    assert torch.equal(torch.cat(chunks), whole)


def test_order_of_k_changes_bits() -> None:
    """Shows that the test above can fail: in tiles of 16 some rows have other bits."""
    weight, x = exact_in_tiles(50, 300, 19)
    packed = pack(weight, None, torch.float32, None, CPU)
    tuned = Settings(INVARIANT.target, batch_invariant=False)
    assert not torch.equal(linear.linear(x, packed, tuned), linear.linear(x, packed, INVARIANT))


@pytest.mark.parametrize(("n", "k", "rows", "parts"), [(50, 300, 19, 2), (20, 530, 50, 4)])
def test_few_rows_split_k_and_many_do_not(n: int, k: int, rows: int, parts: int) -> None:
    """Shows that the test of bits covers products with and without split K."""
    few, many = (cut(INVARIANT, "single", each, n, k) for each in (7, rows))
    assert few.parts == parts
    assert few.split
    assert not many.split
    assert few == replace(many, split=True)


@given(
    st.sampled_from(sorted(TARGETS)),
    st.booleans(),
    st.sampled_from(["half", "single", "widened", "eight"]),
    st.integers(1, 9000),
    st.integers(1, 200_000),
    st.integers(1, 60_000),
)
def test_split_k_parts_cover_k_for_any_row_count(
    target: str, invariant: bool, operands: str, rows: int, columns: int, inner: int
) -> None:
    settings = Settings(TARGETS[target], invariant)
    found = cut(settings, operands, rows, columns, inner)  # type: ignore[arg-type]
    assert found.part_length % found.tiles.inner == found.part_length % 128 == 0
    assert found.parts * found.part_length >= inner
    assert found.tiles.rows >= 16
    assert found.parts > 1 or not found.split
    one = cut(settings, operands, 1, columns, inner)  # type: ignore[arg-type]
    assert not invariant or replace(found, split=one.split) == one


def test_rows_of_a_view_and_weights_of_another_dtype(settings: Settings) -> None:
    weight = torch.randn(1 + 40 * 24)[1:].view(40, 24)
    x = torch.randn(17, 60)[:, 7:31]
    packed = pack(weight, None, torch.float32, None, CPU)
    out = linear.linear(x, packed, settings)
    torch.testing.assert_close(out, x @ weight.t(), atol=2e-5, rtol=2e-5)
    assert torch.equal(linear.linear(x.t().contiguous().t(), packed, settings), out)
    half = linear.linear(x.half(), pack(weight.double(), None, torch.float16, None, CPU), settings)
    assert torch.equal(half, linear.linear(x.half(), pack(weight.half(), None, torch.float16, None, CPU), settings))


def test_overflowed_row_gives_nan_without_affecting_others(settings: Settings) -> None:
    weight, _, x = drawn(40, 30, 9, torch.float32)
    packed = pack(weight, None, torch.float32, None, CPU)
    whole = linear.linear(x, packed, settings)
    x[4, 7] = torch.nan
    spoiled = linear.linear(x, packed, settings)
    assert spoiled[4].isnan().all()
    spoiled[4] = whole[4]
    assert torch.equal(spoiled, whole)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("columns", [1, 50])
def test_argmax_equals_argmax_of_product(columns: int, settings: Settings) -> None:
    """Ties everywhere, and a limit at the end of the tokenizer's ids."""
    weight, bias, x = drawn(columns, 9, 18, torch.float16)
    packed = pack(weight.round(), bias.round(), torch.float16, None, CPU)
    x = x.round()
    x[3], x[4, 2], x[5] = torch.nan, torch.inf, 0.0
    whole = linear.linear(x, packed, settings).float().numpy()
    for limit in (16, columns, columns + 9):
        expected = sampling.greedy(whole[:, :limit])
        found = linear.argmax(x, packed, limit, settings)
        assert found.dtype == torch.int64
        assert found.tolist() == expected.tolist()
    assert linear.argmax(x[:0], packed, columns, settings).tolist() == []


def test_argmax_compares_in_model_dtype(settings: Settings) -> None:
    """2049 is 2048 in float16, so the first of both is the largest there; in float32 it is the second."""
    weight = torch.tensor([[0.0, 0.0], [2048.0, 0.0], [2048.0, 1.0]])
    for dtype, best in ((torch.float16, 1), (torch.float32, 2)):
        x = torch.ones(1, 2, dtype=dtype)
        assert linear.argmax(x, pack(weight, None, dtype, None, CPU), 3, settings).tolist() == [best]


def test_argmax_with_more_tiles_than_are_compared_at_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_BEST_BLOCK", 4)
    weight, _, x = drawn(200, 3, 5, torch.float32)
    packed = pack(weight.round(), None, torch.float32, None, CPU)
    expected = linear.linear(x.round(), packed, settings).argmax(1)
    assert linear.argmax(x.round(), packed, 200, settings).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_use_separate_matrices(dtype: torch.dtype, settings: Settings) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3, 20, 40, generator=generator).to(dtype)
    x = torch.randn(19, 3, 64, generator=generator).to(dtype)[:, :, 8:48]
    packed = pack_heads(weight, dtype, CPU)
    out = linear.head_linear(x, packed, settings)
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert (out.shape, out.dtype) == ((19, 3, 20), dtype)
    size = torch.einsum("thk,hnk->thn", x.double().abs(), weight.double().abs())
    assert bool(((out.double() - exact).abs() <= 0.5 * torch.finfo(dtype).eps * exact.abs() + 3e-6 * size).all())
    assert linear.head_linear(x[:0], packed, settings).shape == (0, 3, 20)
    if settings.batch_invariant:
        assert torch.equal(linear.head_linear(x[4:6], packed, settings), out[4:6])


def test_heads_with_a_long_k_are_split_too(settings: Settings) -> None:
    weight, x = torch.randn(2, 7, 300), torch.randn(3, 2, 300)
    out = linear.head_linear(x, pack_heads(weight, torch.float32, CPU), settings)
    torch.testing.assert_close(out, torch.einsum("thk,hnk->thn", x, weight), atol=5e-5, rtol=1e-5)


def test_rows_of_a_weight() -> None:
    weight, _, _ = drawn(20, 24, 1, torch.bfloat16)
    packed = pack(weight, None, torch.bfloat16, None, CPU)
    assert torch.equal(linear.rows(packed, torch.tensor([19, 0, 19])), weight[[19, 0, 19]])
    with pytest.raises(ValueError, match=r"a weight of torch.int8 has no rows of torch.bfloat16"):
        linear.rows(pack(weight, None, torch.bfloat16, torch.int8, CPU), torch.tensor([0]))


def test_mismatched_shapes_are_refused(settings: Settings) -> None:
    weight, _, x = drawn(20, 24, 3, torch.float32)
    packed = pack(weight, None, torch.float32, None, CPU)
    for wrong in (x[:, :23], x.half()):
        with pytest.raises(ValueError, match=r"do not go with a weight of 24 in torch\.float32"):
            linear.linear(wrong, packed, settings)
        with pytest.raises(ValueError, match=r"do not go with a weight of 24 in torch\.float32"):
            linear.argmax(wrong, packed, 20, settings)
    with pytest.raises(ValueError, match=r"torch.float32 cannot be packed as torch.bfloat16"):
        pack(weight, None, torch.float32, torch.bfloat16, CPU)
