"""Self-check of an instruction set: compares its kernels with the plain ones before it is used.

Newer instruction sets run on machines that few developers have. A wrong processor, emulator or compiler must be found
at the start, not in an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu import attention, elementwise, experts, linear, sampling
from kernels.cpu.attention import StepArrays
from kernels.cpu.library import DTYPES, PLAIN, select
from kernels.cpu.routing import route
from kernels.grouped_weight import GroupedWeight
from kernels.interface import AllowedBits, AttentionMetaData, ExpertWeights, IndexSpec, KVSpec, Routing, SampleParams
from kernels.logprobs import log_normalizers
from kernels.penalties import Penalties, SeenIds
from kernels.torch_backend.attention import PagedKVCache

# What an entry may differ from the plain one: of itself, and of the largest. Two roundings to bfloat16; sums of a
# thousand float32 in another order.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
ROWS = 40
# How many rows are computed at once, to be compared with all at once: on both sides of tiles of 6, 12 and 16 rows, and
# of 4, 8 and 16 rows of int8 weights; tiles of codes have 6.
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33)

Rows = torch.Tensor
# Computes the given rows of the fixed inputs, ids into [0, ROWS).
Compute = Callable[[CDLL, Rows], torch.Tensor]


@dataclass(frozen=True)
class Check:
    """One kernel on fixed inputs.

    Attributes:
        name: for the line that says what failed.
        entries: of the table (kernels/cpu/native/kernels.hpp) that it calls.
        compute: the kernel.
    """

    name: str
    entries: tuple[str, ...]
    compute: Compute


def fault(library: CDLL, instruction_set: str) -> str | None:
    """Fault of an instruction set that this machine can run, in a few words; None if its kernels are right.

    Compares each kernel with the plain one, within `TOLERANCES`; and each row, computed with fewer other rows and at
    another position, with itself, bit by bit. Leaves the instruction set selected.
    """
    threads = library.fissile_threads()
    # One thread would leave out what several do: to split the keys of a row.
    library.fissile_set_threads(max(threads, 2))
    try:
        return next(_faults(library, instruction_set), None)
    finally:
        library.fissile_set_threads(threads)


def _faults(library: CDLL, instruction_set: str) -> Iterator[str]:
    for dtype in DTYPES:
        for check in checks(dtype):
            select(library, PLAIN)
            expected = check.compute(library, torch.arange(ROWS))
            select(library, instruction_set)
            found = _difference(library, check, expected, TOLERANCES[dtype])
            if found is not None:
                yield f"{check.name} in {str(dtype).removeprefix('torch.')} {found}"


def _difference(library: CDLL, check: Check, expected: torch.Tensor, tolerance: float) -> str | None:
    every = torch.arange(ROWS)
    out = check.compute(library, every)
    if not _close(out, expected, tolerance):
        return "differs from the plain kernels"
    for count in COUNTS:
        for rows in (every[:count], every[-count:].flip(0)):
            if not torch.equal(check.compute(library, rows), out[rows]):
                return f"gives a row other bits among {count} rows than among {ROWS}"
    return None


def _close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if not out.is_floating_point():
        return torch.equal(out, expected)
    wide = expected.double()
    return torch.allclose(out.double(), wide, rtol=tolerance, atol=tolerance * float(wide.abs().max()))


def checks(dtype: torch.dtype) -> list[Check]:
    """Checks of every entry of a table, with inputs in `dtype`."""
    return [
        # (columns, k): whole and broken panels, tasks of 4 and 8 panels, more k than are multiplied at once, odd k.
        *(_linear(n, k, dtype, dtype) for n, k in ((150, 1101), (33, 24), (16, 64))),
        _linear(70, 301, dtype, torch.int8),
        *(_codes(bits, dtype) for bits in (4, 5, 6, 8)),
        *(_gated_linear(dtype, packed_dtype) for packed_dtype in (dtype, torch.int8)),
        _argmax(dtype),
        _norm(dtype),
        _layer_norm(dtype),
        _rope(dtype),
        *(_gated_activation(dtype, gelu) for gelu in (False, True)),
        _softcap(),
        _experts(dtype),
        *(_attention(dtype, kv_dtype, None) for kv_dtype in (dtype, torch.float16, torch.float8_e4m3fn)),
        _attention(dtype, dtype, 65),
        _attention(dtype, dtype, 65, 1.5),
        *(_chunk(dtype, group, dim, window) for group, dim, window in ((2, 64, None), (3, 40, 65))),
        _chunk(dtype, 2, 64, None, 1.5),
        _latent(dtype),
        _route(),
        _sample(),
        _logprobs(),
    ]


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random normal numbers that depend on the shape alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _linear(columns: int, inner: int, dtype: torch.dtype, packed_dtype: torch.dtype) -> Check:
    weight, bias, x = _drawn(columns, inner), _drawn(columns), _drawn(ROWS, inner, dtype=dtype)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        return linear.linear(library, x[rows], linear.pack(library, weight, bias, dtype, packed_dtype))

    entries = ("pack_panel", "linear_scratch", "linear_pack_tasks", "linear_pack", "linear_tasks", "linear")
    kind = " of int8 weights" if packed_dtype == torch.int8 else ""
    return Check(f"linear {inner} to {columns}{kind}", entries, compute)


def _codes(bits: int, dtype: torch.dtype) -> Check:
    """Check of codes in groups of 32. Of 4 bits, scales are float16; of 5 and 6 bits, as K-quants have them, in codes;
    of 8 bits, float32 with offsets."""
    columns, inner = 70, 301
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (columns, inner), dtype=torch.uint8, generator=draw)
    scales, offsets = torch.rand(columns, 10, generator=draw) / (1 << bits), torch.rand(columns, 10, generator=draw)
    if bits == 4:
        weight = GroupedWeight(codes, bits, 32, scales.half())
    elif bits == 8:
        weight = GroupedWeight(codes, bits, 32, scales, offsets=offsets)
    else:
        scale_codes, offset_codes = ((each * 63 / each.max()).to(torch.int8) for each in (scales, offsets))
        factors = torch.full((columns, 3, 2 if bits == 5 else 1), 0.25 / (1 << bits), dtype=torch.float16)
        zeros = torch.zeros(columns, 10, dtype=torch.uint8) if bits == 5 else None
        own_offsets = offset_codes if bits == 5 else None
        weight = GroupedWeight(codes, bits, 32, scale_codes, zeros, own_offsets, factors=factors)
    x = _drawn(ROWS, inner, dtype=dtype)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        return linear.linear(library, x[rows], linear.pack_codes(library, weight, None, dtype))

    entries = ("linear_scratch", "linear_pack_tasks", "linear_pack", "linear_tasks", "linear")
    return Check(f"linear {inner} to {columns} of codes of {bits} bits", entries, compute)


def _gated_linear(dtype: torch.dtype, packed_dtype: torch.dtype) -> Check:
    # Scaled so that rounding of gates does not add up.
    columns, inner = 192, 96
    weight, x = _drawn(columns, inner) / 7, _drawn(ROWS, inner, dtype=dtype)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        return linear.gated_linear(library, x[rows], linear.pack(library, weight, None, dtype, packed_dtype))

    kind = " of int8 weights" if packed_dtype == torch.int8 else ""
    return Check(f"gated linear{kind}", ("multiplies_gated",), compute)


def _argmax(dtype: torch.dtype) -> Check:
    """Check of argmax on numbers of x, times 1 or 0.5 each, which no kernel rounds, so that the place is the same in
    all."""
    columns, inner = 600, 40
    weight = torch.zeros(columns, inner)
    weight[torch.arange(columns), torch.arange(columns) * 7 % inner] = torch.arange(columns) % 2 * 0.5 + 0.5
    x = _drawn(ROWS, inner, dtype=dtype)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        return linear.argmax(library, x[rows], linear.pack(library, weight, None, dtype), 590)

    return Check("argmax", ("largest_of_row",), compute)


def _norm(dtype: torch.dtype) -> Check:
    x, residual, weight = _drawn(ROWS, 100, dtype=dtype), _drawn(ROWS, 1, 100, dtype=dtype)[:, 0], _drawn(100)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        both = elementwise.norm(library, x[rows], weight.to(dtype), 1e-5, residual=residual[rows])
        return torch.cat(both, 1)

    return Check("add_rms_norm", ("norm_tasks", "norm"), compute)


def _layer_norm(dtype: torch.dtype) -> Check:
    x, weight, bias = _drawn(ROWS, 3, 20, dtype=dtype), _drawn(20).to(dtype), _drawn(20, 1)[:, 0].to(dtype)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        return elementwise.norm(library, x[rows], weight, 1e-5, bias.contiguous())[0]

    return Check("layer_norm", ("norm_tasks", "norm"), compute)


def _rope(dtype: torch.dtype) -> Check:
    x, angles = _drawn(ROWS, 3, 48, dtype=dtype), _drawn(ROWS, 1, 20)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        return elementwise.rope(library, x[rows], angles[rows].cos(), angles[rows].sin())

    return Check("rope", ("rope_tasks", "rope"), compute)


def _gated_activation(dtype: torch.dtype, gelu: bool) -> Check:
    x = _drawn(ROWS, 2 * 75, dtype=dtype) * 3

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        return elementwise.silu_and_mul(library, x[rows], gelu)

    return Check("gelu_and_mul" if gelu else "silu_and_mul", ("silu_and_mul_tasks", "silu_and_mul"), compute)


def _softcap() -> Check:
    x = _drawn(ROWS, 75) * 30

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        return elementwise.softcap(library, x[rows], 20.0)

    return Check("softcap", ("softcap_tasks", "softcap"), compute)


def _experts(dtype: torch.dtype) -> Check:
    hidden, inner, count = 48, 40, 3
    # Scaled so that rounding errors of intermediate results do not add up.
    weights = [
        ExpertWeights(_drawn(2 * inner, hidden + e)[:, :hidden] / 7, _drawn(hidden, inner + e)[:, :inner] / 7)
        for e in range(count)
    ]
    x, chosen = _drawn(ROWS, hidden, dtype=dtype), torch.stack([torch.arange(ROWS), torch.arange(ROWS) + 1], 1) % count
    shares = _drawn(ROWS, 2).abs()

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        packed = experts.pack(library, iter(weights), 0, None, dtype)
        return experts.moe(library, x[rows], chosen[rows], shares[rows], packed)

    return Check("experts", ("combine_tasks", "combine"), compute)


# Tokens of one sequence, more than a split of 512 keys; the rows are its last ones.
_KEYS = 600
_BLOCK = 16
_TABLE = np.arange(-(-_KEYS // _BLOCK))[::-1].copy()
_SLOTS = _TABLE[np.arange(_KEYS) // _BLOCK] * _BLOCK + np.arange(_KEYS) % _BLOCK


def _prefill() -> StepArrays:
    return StepArrays(AttentionMetaData(np.array([0, _KEYS]), np.array([_KEYS]), _TABLE[None], _SLOTS))


def _decodes(rows: Rows) -> AttentionMetaData:
    """A step of single tokens, each the last one of a different sequence."""
    lengths = rows.numpy() + _KEYS - ROWS + 1
    tables = np.tile(_TABLE, (len(rows), 1))
    return AttentionMetaData(np.arange(len(rows) + 1), lengths, tables, _SLOTS[lengths - 1])


def _cache(spec: KVSpec, dtype: torch.dtype) -> PagedKVCache:
    return PagedKVCache.allocate(spec, 1, len(_TABLE), _BLOCK, dtype)


def _attention(dtype: torch.dtype, kv_dtype: torch.dtype, window: int | None, softcap: float = 0.0) -> Check:
    k, q, sinks = _drawn(_KEYS, 2, 64, dtype=dtype), _drawn(ROWS, 4, 64, dtype=dtype), _drawn(4)
    v = _drawn(_KEYS, 2, 65)[..., 1:].to(dtype)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        cache = _cache(KVSpec(2, 64), kv_dtype)
        attention.write_kv(library, cache, 0, k, v, _prefill())
        step = StepArrays(_decodes(rows))
        return attention.attention(library, q[rows], cache, 0, step, 0.125, window, sinks, softcap)

    entries = ("attention_state_size", "attention_tasks", "attention", "attention_merge_tasks", "attention_merge")
    kind = "" if kv_dtype == dtype else f" over {str(kv_dtype).removeprefix('torch.')}"
    kind += "" if window is None else " with a window"
    kind += " and capped scores" if softcap else ""
    return Check(f"attention{kind}", ("write_kv_tasks", "write_kv", *entries), compute)


def _chunk(dtype: torch.dtype, group: int, dim: int, window: int | None, softcap: float = 0.0) -> Check:
    """A step whose rows end a chunk of one sequence and share keys, except that one row alone is a decode."""
    k, q = _drawn(_KEYS, 2, dim, dtype=dtype), _drawn(ROWS, 2 * group, dim, dtype=dtype)
    v = _drawn(_KEYS, 2, dim + 1)[..., 1:].to(dtype)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        cache = _cache(KVSpec(2, dim), dtype)
        attention.write_kv(library, cache, 0, k, v, _prefill())
        ordered, places = rows.sort()
        end = _KEYS - ROWS + int(ordered[-1]) + 1
        slots = _SLOTS[end - len(rows) : end]
        step = StepArrays(AttentionMetaData(np.array([0, len(rows)]), np.array([end]), _TABLE[None], slots))
        out = attention.attention(library, q[ordered], cache, 0, step, dim**-0.5, window, None, softcap)
        return out[places.argsort()]

    kind = ", capped scores" if softcap else ""
    return Check(f"attention of a chunk, {group} heads to a key head{kind}", ("attention",), compute)


def _latent(dtype: torch.dtype) -> Check:
    """Step of latent attention to tokens that an indexer chose by whole numbers, so that every kernel chooses the same
    ones."""
    spec = KVSpec(1, 40, latent_value_dim=32, index=IndexSpec(num_heads=3, head_dim=12, topk=90))
    keys, q = _drawn(_KEYS, 1, 40, dtype=dtype)[:, 0], _drawn(ROWS, 4, 40, dtype=dtype)
    index_keys, index_q = (_drawn(*shape).round().to(dtype) for shape in ((_KEYS, 12), (ROWS, 3, 12)))
    weights = _drawn(ROWS, 3).round()

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        cache, step = _cache(spec, dtype), _decodes(rows)
        for filled, numbers in ((cache, keys), (cache.index, index_keys)):
            assert filled is not None
            attention.write_latent(library, filled, 0, numbers, _prefill())
        arrays = StepArrays(step)
        chosen = attention.select_tokens(library, index_q[rows], weights[rows], cache, 0, step, arrays)
        assert chosen is not None
        return attention.latent_attention(library, q[rows], cache, 0, arrays, 0.2, chosen)

    return Check("latent attention to chosen tokens", ("select_tokens_tasks", "select_tokens"), compute)


def _route() -> Check:
    logits, bias = _drawn(ROWS, 24), _drawn(24)
    routing = Routing(5, "sigmoid", renormalize=True, num_groups=4, top_groups=2, scale=1.5)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        ids, weights = route(library, logits[rows], routing, bias)
        return torch.zeros(len(rows), 24).scatter(1, ids, weights)

    return Check("route", ("route_tasks", "route"), compute)


def _sample() -> Check:
    logits = (_drawn(ROWS, 1003) * 4).numpy()
    number = np.arange(ROWS)
    seen = [SeenIds(np.arange(i), range(i, 1003, 3)) for i in number]
    params = SampleParams(
        (number % 3 * 0.7).astype(np.float32),
        np.where(number % 4 == 1, 20, 0),
        np.where(number % 5 == 2, 0.9, 1.0).astype(np.float32),
        np.where(number % 6 == 5, 0.05, 0.0).astype(np.float32),
    )

    bits = np.random.default_rng(1003).integers(1 << 32, size=(ROWS, 32), dtype=np.uint32)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        ids = rows.numpy()
        confined = np.flatnonzero(ids % 4 == 3)
        penalized = np.flatnonzero(ids % 2)
        repetition, presence, frequency = (np.full(len(penalized), one, np.float32) for one in (1.3, 0.2, 0.1))
        own = SampleParams(
            params.temperature[ids],
            params.top_k[ids],
            params.top_p[ids],
            params.min_p[ids],
            penalties=Penalties(penalized, [seen[i] for i in ids[penalized]], repetition, presence, frequency),
            confined=AllowedBits(confined, bits[ids[confined]]),
        )
        seeds = (ids * 7919).astype(np.uint64)
        drawn = sampling.sample(library, logits[ids].copy(), own, seeds, ids.copy(), np.zeros_like(ids))
        return torch.from_numpy(drawn)

    return Check("sample", ("sample",), compute)


def _logprobs() -> Check:
    logits = (_drawn(ROWS, 1003) * 4).numpy()
    number = np.arange(ROWS)

    def compute(library: CDLL, rows: Rows) -> torch.Tensor:
        ids = rows.numpy()
        stats = sampling.logit_stats(library, logits[ids], number[ids] * 25, 5, np.zeros((len(ids), 0), np.int64))
        log_z = log_normalizers(stats).astype(np.float32)
        return torch.from_numpy(np.column_stack((log_z, stats.ranks, stats.top_ids)).astype(np.float32))

    return Check("logprobs", ("logprobs",), compute)
