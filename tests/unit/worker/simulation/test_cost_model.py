"""The cost model's arithmetic by hand, its shape, and the presets' figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidFieldError
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.simulation.cost_model import INSTANT, FixedCost, Roofline, StepWork
from worker.simulation.presets import CHIPS, MODELS, cost_model

ROOFLINES = [
    f"{chip}-{model}{fp8}-tp8" for chip in CHIPS for model in MODELS for fp8 in ("", "-fp8")
] + ["mi300x-llama-8b", "mi300x-qwen3-32b", "mi355x-llama-70b"]  # fmt: skip


def roofline(name: str) -> Roofline:
    made = cost_model(name)
    assert isinstance(made, Roofline)
    return made


def prefill_of(tokens: int, computed: int = 0) -> StepWork:
    """One prompt's last `tokens` tokens, `computed` being in the cache."""
    return StepWork.of_rows([(computed, tokens)], 1)


def decode_of(context_lens: list[int]) -> StepWork:
    """One token for each sequence, whose context has the given length with it."""
    rows = [(length - 1, 1) for length in context_lens]
    return StepWork.of_rows(rows, len(rows))


def test_step_work_of_batch() -> None:
    prompt, chunk, decoding = Sequence([1] * 5, 16), Sequence([2] * 40, 16), Sequence([3] * 10, 16)
    chunk.num_computed_tokens, decoding.num_computed_tokens = 16, 9
    work = StepWork.of(ScheduledBatch({s.id: s for s in (prompt, chunk, decoding)}, [5, 8, 1], 14))
    # The chunk ends before the prompt does, so it is not sampled. Pairs: 1+..+5, 17+..+24, 10.
    assert work == StepWork(tokens=14, sampled=2, context_tokens=5 + 24 + 10, pairs=15 + sum(range(17, 25)) + 10)
    decoding.num_computed_tokens = 8
    drafts = ScheduledBatch({decoding.id: decoding}, [2], 2, scheduled_spec_decode_tokens={decoding.id: [7]})
    assert StepWork.of(drafts) == StepWork(tokens=2, sampled=2, context_tokens=10, pairs=9 + 10)
    assert decode_of([10]) == StepWork(1, 1, 10, 10)
    assert prefill_of(8, computed=16) == StepWork(8, 1, 24, sum(range(17, 25)))


def test_fixed_costs() -> None:
    assert INSTANT.step_s(prefill_of(10_000)) == 0
    assert FixedCost(0.5, 0.001).step_s(prefill_of(100)) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("text", "seconds"), [("instant", 0), ("fixed:5ms", 0.005), ("fixed:0.5s", 0.5), ("fixed:250us", 0.00025)]
)
def test_fixed_presets(text: str, seconds: float) -> None:
    assert cost_model(text).step_s(decode_of([7])) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "fixed:5", "fixed:-1ms", "fixed:ms", "mi300x", "mi300x-gpt-2", "mi300x-llama-8b-tp3"]
)
def test_unknown_preset_lists_presets(text: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"simulate is .*instant.*fixed:5ms.*mi300x, mi355x.*llama-8b"):
        cost_model(text)


def test_weights_must_fit() -> None:
    assert roofline("mi300x-llama-70b").kv_tokens(0.9) < 100_000  # 141 of 192 GB
    assert roofline("mi300x-llama-70b-fp8").kv_tokens(0.9) > 300_000
    assert roofline("mi300x-llama-70b").kv_tokens(0.7) == 0


@pytest.mark.parametrize(
    ("model", "billions", "kv_bytes"),
    [
        ("qwen3-0.6b", 0.60, 114_688),
        ("qwen3-8b", 8.19, 147_456),
        ("qwen3-32b", 32.76, 262_144),
        ("llama-8b", 8.03, 131_072),
        ("llama-70b", 70.55, 327_680),
    ],
)
def test_preset_sizes_equal_published(model: str, billions: float, kv_bytes: int) -> None:
    made = roofline(f"mi300x-{model}")
    assert made.shape.params / 1e9 == pytest.approx(billions, abs=0.005)
    assert made.kv_bytes_per_token == kv_bytes


def test_cost_model_equals_docstring_example() -> None:
    made, decode, prefill = roofline("mi300x-llama-8b"), decode_of([1000]), prefill_of(2048)
    assert made.linear_s(decode) * 1e6 == pytest.approx(3776, abs=1)
    assert made.attention_s(decode) * 1e6 == pytest.approx(33, abs=0.5)
    assert made.overhead_s * 1e6 == pytest.approx(1160)
    assert made.step_s(decode) * 1e6 == pytest.approx(4969, abs=1)
    assert made.linear_s(prefill) * 1e6 == pytest.approx(48_592 + 2, abs=2)
    assert made.attention_s(prefill) * 1e6 == pytest.approx(1870, abs=1)
    assert made.step_s(prefill) * 1e3 == pytest.approx(51.6, abs=0.05)
    assert made.kv_tokens(0.9) == pytest.approx(1.20e6, rel=0.005)


@given(
    name=st.sampled_from(ROOFLINES),
    lens=st.lists(st.integers(1, 30_000), min_size=1, max_size=20),
    more=st.integers(1, 5000),
)
def test_more_work_never_takes_less_time(name: str, lens: list[int], more: int) -> None:
    made = roofline(name)
    base = made.step_s(decode_of(lens))
    assert base > made.overhead_s
    assert made.step_s(decode_of([*lens, more])) >= base
    assert made.step_s(decode_of([lens[0] + more, *lens[1:]])) >= base
    assert made.step_s(prefill_of(more)) <= made.step_s(prefill_of(more + 1))
    assert made.step_s(prefill_of(more, 0)) <= made.step_s(prefill_of(more, 1000))


@pytest.mark.parametrize("name", ROOFLINES)
def test_batches_and_chips_reduce_time(name: str) -> None:
    """One decode is bound by memory, so 64 take hardly longer; a long prompt is bound by arithmetic."""
    made = roofline(name)
    assert made.step_s(decode_of([100] * 64)) < 3 * made.step_s(decode_of([100]))
    long, longer = (made.linear_s(prefill_of(tokens)) for tokens in (8192, 16_384))
    assert longer == pytest.approx(2 * long, rel=0.01)
    one = Roofline(made.shape, made.chip, 1, made.weight_bytes)
    assert made.linear_s(prefill_of(8192)) <= one.linear_s(prefill_of(8192))


def test_fp8_and_newer_chip_scale_costs() -> None:
    decode, prefill = decode_of([1000]), prefill_of(8192)
    bf16, fp8, newer = (roofline(f"{n}") for n in ("mi300x-llama-8b", "mi300x-llama-8b-fp8", "mi355x-llama-8b"))
    for work in (decode, prefill):
        assert fp8.linear_s(work) == pytest.approx(bf16.linear_s(work) / 2, rel=0.001)
    assert newer.linear_s(decode) == pytest.approx(bf16.linear_s(decode) * 5.3 / 8)
    assert newer.linear_s(prefill) == pytest.approx(bf16.linear_s(prefill) * 1307.4 / 2516.6)
    assert (fp8.all_reduce_s(decode), roofline("mi300x-llama-8b-tp2").all_reduce_s(decode) > 0) == (0, True)
