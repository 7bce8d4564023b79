"""Sampling on the device without sorting; its tokens equal those of kernels/sampling.py.

The order is (value descending, id ascending). A float's bits, transformed so that they count upwards, are its key in
that order. The borders of top-k and then of top-p are keys: three histograms over the key's bits, from the highest, of
counts or of integer masses, find them. Both are exact sums, so neither the order of the additions nor the chunks
matter. Values above the border are kept, and the first few ids equal to it. Noise is drawn for kept ids.

The vocabulary is divided among programs, a chunk of a row each, so that a single row fills the device. Nothing waits
for the host; the kernels to run follow from the parameters, which the host has.

Values and noise are computed as in numpy, except exp and log of float64: here they are the device's (CUDA's libdevice,
ROCm's ocml), which err by about one unit in the last place, as numpy's do. So noise, rounded to float32, differs from
numpy's about once in 2^28 draws, by its last bit, and a mass seldom, by one in 2^44; a token differs only if such a bit
decides. log1p(-u) is computed as log(1 - u): 1 - u is exact, because u is a multiple of 2^-33.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from typing_extensions import override

from kernels.interface import AllowedBits, LogitStats, SampleParams, SamplingOps
from kernels.philox import DOMAIN
from kernels.torch_backend import logit_stats
from kernels.triton_backend.launch import launch
from kernels.triton_backend.penalties import penalize
from kernels.triton_backend.sample_tensors import (
    DeviceMaskedIds,
    SampleTensors,
    columns_to_device,
    mask_others,
    prepare,
    write_biases,
)
from kernels.upload import to_device

# Numbers of a row that a program looks at.
_CHUNK = 1024
# Entries of masks that a program changes.
_ENTRIES = 256
# Bits of a key that a histogram looks at, and the shifts of the three: 11 + 11 + 10, the last sees a known bit again.
_BITS = 11
_SHIFTS = (21, 10, 0)

_DOMAIN = tl.constexpr(DOMAIN)
_LEAST = tl.constexpr(-(2**63))
_LEAST_KEY = tl.constexpr(-(2**31))
# Weights of top-p are in units of 2^-44; below this difference from the largest they round to zero.
_MASS_ONE = tl.constexpr(2.0**44)
_NO_MASS_BELOW = tl.constexpr(-31.5)
# To add it rounds a float64 below 2^51 to an integer, ties to even.
_ROUNDER = tl.constexpr(1.5 * 2.0**52)
# Noise is between -3.14 and 22.9: what lies further below the largest number cannot win. Sums of numbers and noise
# are rounded, each by less than this part of the largest number.
_HOPELESS_BELOW = tl.constexpr(-27.0)
_ROUNDING = tl.constexpr(2.0**-22)
# Kind of a row.
_GREEDY = tl.constexpr(0)
_DRAWN = tl.constexpr(1)
# State of a row, int64 each: its outcome; its border, a key; how many ids with exactly that key are kept, and the
# last of them; and for the search of a border: the known high bits, counted from the least key, and how much is still
# wanted of the keys that have them, 0 without a search.
_MODE = tl.constexpr(0)
_BORDER = tl.constexpr(1)
_TIES = tl.constexpr(2)
_LAST_TIE = tl.constexpr(3)
_KNOWN = tl.constexpr(4)
_WANTED_COUNT = tl.constexpr(5)
_WANTED_MASS = tl.constexpr(6)
_FIELDS = tl.constexpr(8)


# Larger for larger numbers; both zeros have one key.
@triton.jit
def _key(value):
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _LEAST_KEY, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# The number that has an int32 key.
@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# A key and an id as one int64, larger for larger keys and, of equal ones, for lower ids.
@triton.jit
def _candidate(key, id):
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


# -1 if the number is not finite: a row without a finite number gives no token.
@triton.jit
def _id_of(candidate):
    is_finite = tl.abs(_value((candidate >> 32).to(tl.int32))) < float("inf")
    return tl.where(is_finite, 0x7FFFFFFF - (candidate & 0x7FFFFFFF), -1)


# rint(exp(x - largest) * 2^44), an int64; zero for x far below `largest`.
@triton.jit
def _mass(x, largest):
    return (tl.exp((x - largest).to(tl.float64)) * _MASS_ONE + _ROUNDER - _ROUNDER).to(tl.int64)


# ceil(mantissa * total / 2^shift) of int64 numbers: 24 bits times 63, as two words of 32 and more bits; shift is at
# least 24, and the result less than total.
@triton.jit
def _ceil_product(mantissa, shift, total):
    low = mantissa * (total & 0xFFFFFFFF)
    high = mantissa * (total >> 32) + (low >> 32)
    low = low & 0xFFFFFFFF
    few = tl.minimum(shift, 31)
    many = tl.maximum(tl.minimum(shift, 94) - 32, 0)
    by_few = (high << (32 - few)) + (low >> few) + (((low >> few) << few) != low).to(tl.int64)
    by_many = (high >> many) + ((((high >> many) << many) != high) | (low != 0)).to(tl.int64)
    return tl.where(shift < 32, by_few, by_many)


# -log(-log1p(-u)) in float64, rounded to float32, for a random word's u.
@triton.jit
def _gumbel(word):
    uniform = (word.to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-tl.log(1.0 - uniform))).to(tl.float32)


# A program sets some logits to minus infinity; with AFTER, entries that name a token apply only directly after it.
@triton.jit(do_not_specialize=["count"])
def _mask_kernel(logits, row_stride, rows, ids, after, late, count, AFTER: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < count
    if AFTER:
        wanted = tl.load(after + entry, mask=mask, other=0)
        mask = mask & ((wanted < 0) | (wanted == tl.load(late + entry, mask=mask, other=-1)))
    row = tl.load(rows + entry, mask=mask, other=0).to(tl.int64)
    place = logits + row * row_stride + tl.load(ids + entry, mask=mask, other=0)
    tl.store(place, tl.full((BLOCK,), float("-inf"), tl.float32), mask=mask)


# A program sets the logits in a chunk of a row to minus infinity whose bits are not set.
@triton.jit
def _confine_kernel(logits, row_stride, rows, bits, words, vocab, CHUNK: tl.constexpr):
    own = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + own)
    id = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = id < vocab
    word = tl.load(bits + own * words + (id >> 5), mask=inside, other=-1)
    place = logits + row * row_stride + id
    tl.store(place, tl.full((CHUNK,), float("-inf"), tl.float32), mask=inside & (((word >> (id & 31)) & 1) == 0))


# A program finds the first of the largest numbers in a chunk of a row, and whether there is a NaN.
@triton.jit
def _largest_kernel(logits, row_stride, vocab, best, nans, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    id = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = id < vocab
    values = tl.load(logits + row * row_stride + id, mask=inside, other=float("-inf")).to(tl.float32)
    is_nan = ~(values <= float("inf"))
    key = _key(tl.where(is_nan, float("-inf"), values))
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + place, tl.max(tl.where(inside, _candidate(key, id), _LEAST), axis=0))
    tl.store(nans + place, tl.max(is_nan.to(tl.int32), axis=0))


# The candidates of a row's chunks.
@triton.jit
def _of_chunks(candidates, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.load(candidates + row * chunks + chunk, mask=chunk < chunks, other=_LEAST)


# Finds the `count`-th largest key of a row's candidates, at least `count` of them, by bisection.
@triton.jit
def _nth_key(candidates, count):
    keys = candidates >> 32
    low = tl.full((), _LEAST_KEY, tl.int64)
    high = tl.full((), -(_LEAST_KEY + 1), tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


# A program gives a row's id: of the largest number.
@triton.jit
def _greedy_kernel(best, out, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _id_of(tl.max(_of_chunks(best, row, chunks, CHUNKS), axis=0)))


# A program decides a row's outcome, and where the search of its border starts: at the border of min_p, or below that
# of top_k.
@triton.jit
def _begin_kernel(best, nans, temperature, log_min_p, top_k, top_p_shift, largest, state, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    nan = tl.max(tl.load(nans + row * chunks + chunk, mask=chunk < chunks, other=0), axis=0)
    candidates = _of_chunks(best, row, chunks, CHUNKS)
    logit = _value((tl.max(candidates, axis=0) >> 32).to(tl.int32))
    divisor = tl.load(temperature + row)
    logarithm = tl.load(log_min_p + row)
    k = tl.load(top_k + row).to(tl.int64)
    shift = tl.load(top_p_shift + row)
    infinity = float("inf")
    is_greedy = (nan != 0) | (tl.abs(logit) == infinity) | (divisor == 0)
    highest = tl.div_rn(logit, tl.where(is_greedy, 1.0, divisor))
    # Where the division overflows, the largest wins, as without noise.
    is_greedy = is_greedy | (tl.abs(highest) == infinity)
    is_filtered = ~is_greedy
    has_min_p = is_filtered & (logarithm > -infinity)
    border = tl.where(has_min_p, _key(tl.where(has_min_p, highest + logarithm, 0.0)).to(tl.int64) - 1, _LEAST_KEY)
    if is_filtered & (k > 0) & (k <= chunks):
        # At least as many chunks have a number this large, so smaller ones need not be counted.
        border = tl.maximum(border, _key(tl.div_rn(_value(_nth_key(candidates, k)), divisor)).to(tl.int64) - 1)
    own = state + row * _FIELDS
    tl.store(largest + row, highest)
    tl.store(own + _MODE, tl.where(is_greedy, _GREEDY, _DRAWN).to(tl.int64))
    tl.store(own + _BORDER, border)
    tl.store(own + _TIES, tl.zeros((), tl.int64))
    tl.store(own + _LAST_TIE, tl.full((), -1, tl.int64))
    tl.store(own + _KNOWN, tl.zeros((), tl.int64))
    tl.store(own + _WANTED_COUNT, tl.where(is_filtered, k, 0))
    tl.store(own + _WANTED_MASS, (is_filtered & (shift > 0)).to(tl.int64))


# A program adds a chunk of a row to the row's histogram: values above the border that have the known bits, by the
# next bits.
@triton.jit(do_not_specialize=["above", "shift"])
def _histogram_kernel(
    logits,
    row_stride,
    vocab,
    temperature,
    largest,
    state,
    bins,
    above,
    shift,
    WANTED: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = state + row * _FIELDS
    if tl.load(own + WANTED) > 0:
        id = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = id < vocab
        logit = tl.load(logits + row * row_stride + id, mask=inside, other=float("-inf"))
        x = tl.div_rn(logit, tl.load(temperature + row))
        key = _key(x).to(tl.int64)
        place = key - _LEAST_KEY
        counted = inside & (key > tl.load(own + _BORDER)) & ((place >> above) == (tl.load(own + _KNOWN) >> above))
        digit = (place >> shift) & (BINS - 1)
        highest = tl.load(largest + row)
        if WANTED == _WANTED_MASS:
            counted = counted & (x >= highest + _NO_MASS_BELOW)
        if tl.max(counted.to(tl.int32), axis=0) > 0:
            weight = tl.full((CHUNK,), 1, tl.int64)
            if WANTED == _WANTED_MASS:
                weight = _mass(x, highest)
            # Sums of integers are exact in any order.
            tl.atomic_add(bins + row * BINS + digit, weight, mask=counted, sem="relaxed")


# A program finds the bin of a row at which the sums from the highest bin downwards reach the wanted amount, and
# clears the bins. With the last bits the border is found.
@triton.jit(do_not_specialize=["above", "shift"])
def _border_kernel(
    top_p_mantissa,
    top_p_shift,
    largest,
    state,
    bins,
    above,
    shift,
    WANTED: tl.constexpr,
    BINS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = state + row * _FIELDS
    wanted = tl.load(own + WANTED)
    if wanted > 0:
        rank = tl.arange(0, BINS)
        places = bins + row * BINS + (BINS - 1 - rank)
        sums = tl.load(places)
        tl.store(places, tl.zeros((BINS,), tl.int64))
        total = tl.sum(sums, axis=0)
        highest = tl.load(largest + row)
        border = tl.load(own + _BORDER)
        ties = tl.load(own + _TIES)
        known_before = tl.load(own + _KNOWN)
        is_first = above == 32
        each = tl.full((), 1, tl.int64)
        if WANTED == _WANTED_MASS:
            # The numbers that top_k has kept at its border count, too.
            each = _mass(tl.where(ties > 0, _value(border.to(tl.int32)), highest), highest)
            mantissa, exponent = tl.load(top_p_mantissa + row).to(tl.int64), tl.load(top_p_shift + row).to(tl.int64)
            fraction = tl.maximum(_ceil_product(mantissa, exponent, total + ties * each), 1)
            wanted = tl.where(is_first, fraction, wanted)
        # All warps have read the state before one of them changes it.
        tl.debug_barrier()
        if is_first & (wanted > total):
            # All above the border is kept; for counts that is all there is, masses take some of the border's ties.
            if WANTED == _WANTED_MASS:
                tl.store(own + _TIES, tl.cdiv(wanted - total, tl.maximum(each, 1)))
            tl.store(own + WANTED, tl.zeros((), tl.int64))
        else:
            upto = tl.cumsum(sums, axis=0)
            crossing = tl.sum((upto < wanted).to(tl.int32), axis=0)
            wanted -= tl.max(tl.where(upto < wanted, upto, 0), axis=0)
            known = tl.where(is_first, 0, known_before) | ((BINS - 1 - crossing).to(tl.int64) << shift)
            tl.store(own + _KNOWN, known)
            tl.store(own + WANTED, tl.where(shift == 0, 0, wanted))
            if shift == 0:
                key = known + _LEAST_KEY
                if WANTED == _WANTED_MASS:
                    each = _mass(_value(key.to(tl.int32)), highest)
                equal = tl.sum(tl.where(rank == crossing, sums, 0), axis=0)
                keeps_all = wanted + each > equal
                tl.store(own + _BORDER, tl.where(keeps_all, key - 1, key))
                tl.store(own + _TIES, tl.where(keeps_all, 0, tl.cdiv(wanted, each)))


# A program finds the last of the ids at a row's border that are kept.
@triton.jit
def _last_tie_kernel(logits, row_stride, vocab, temperature, state, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = state + row * _FIELDS
    ties = tl.load(own + _TIES)
    if ties > 0:
        border = tl.load(own + _BORDER)
        divisor = tl.load(temperature + row)
        found = tl.zeros((), tl.int32)
        last = tl.full((), -1, tl.int32)
        for start in range(0, vocab, CHUNK):
            id = start + tl.arange(0, CHUNK)
            logit = tl.load(logits + row * row_stride + id, mask=id < vocab, other=float("-inf"))
            equal = (id < vocab) & (_key(tl.div_rn(logit, divisor)).to(tl.int64) == border)
            rank = found + tl.cumsum(equal.to(tl.int32), axis=0)
            last = tl.maximum(last, tl.max(tl.where(equal & (rank <= ties), id, -1), axis=0))
            found += tl.sum(equal.to(tl.int32), axis=0)
        tl.store(own + _LAST_TIE, last.to(tl.int64))


# A program finds the best value plus noise among the kept ids of a chunk of a row.
@triton.jit
def _draw_kernel(
    logits,
    row_stride,
    vocab,
    temperature,
    seeds,
    positions,
    choices,
    largest,
    state,
    drawn,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = state + row * _FIELDS
    if tl.load(own + _MODE) != _GREEDY:
        block = tl.program_id(1) * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        part = tl.arange(0, 4)[None, :]
        id = block[:, None] * 4 + part
        inside = id < vocab
        logit = tl.load(logits + row * row_stride + id, mask=inside, other=float("-inf"))
        x = tl.div_rn(logit, tl.load(temperature + row))
        key = _key(x).to(tl.int64)
        border = tl.load(own + _BORDER)
        kept = inside & ((key > border) | ((key == border) & (id <= tl.load(own + _LAST_TIE))))
        highest = tl.load(largest + row)
        kept = kept & (x >= highest + _HOPELESS_BELOW - tl.minimum(tl.abs(highest), 1e30) * _ROUNDING)
        place = drawn + row * tl.num_programs(1) + tl.program_id(1)
        if tl.max(kept.to(tl.int32)) > 0:
            first, second, third, fourth = tl.philox(
                tl.load(seeds + row), block, tl.load(positions + row), tl.load(choices + row), _DOMAIN
            )
            early = tl.where(part == 0, first[:, None], second[:, None])
            late = tl.where(part == 2, third[:, None], fourth[:, None])
            scores = x + _gumbel(tl.where(part < 2, early, late))
            candidates = tl.where(kept, _candidate(_key(scores), id), _LEAST)
            tl.store(place, tl.max(candidates))
        else:
            tl.store(place, tl.full((), _LEAST, tl.int64))


# A program gives a row's id: of the largest number of a greedy row, of the best draw of another.
@triton.jit
def _decide_kernel(best, drawn, state, out, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(state + row * _FIELDS + _MODE) == _GREEDY:
        tl.store(out + row, _id_of(tl.max(_of_chunks(best, row, chunks, CHUNKS), axis=0)))
    else:
        tl.store(out + row, _id_of(tl.max(_of_chunks(drawn, row, chunks, CHUNKS), axis=0)))


class TritonSamplingOps(SamplingOps):
    """Draws tokens on the device, and copies them to the host on a separate stream, so that later steps do not delay
    them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = None if device.type == "cpu" else torch.cuda.Stream(device)

    @override
    def argmax(self, logits: torch.Tensor, limit: int) -> torch.Tensor:
        return greedy(logits, limit)

    @override
    def fetch(self, ids: torch.Tensor) -> Callable[[], list[int]]:
        if self._copies is None:
            return ids.tolist
        fetched = self._fetch((ids,))

        def wait() -> list[int]:
            return fetched()[0].tolist()

        return wait

    @override
    def logit_stats(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int, given: npt.NDArray[np.int64]
    ) -> Callable[[], LogitStats]:
        ids = to_device(given.ravel(), self._device).view(given.shape)
        fetched = self._fetch(logit_stats.columns(logits, tokens.clamp(min=0), top, ids))
        return lambda: LogitStats(*(column.numpy() for column in fetched()))

    def _fetch(self, tensors: tuple[torch.Tensor, ...]) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Starts to copy tensors to the host; the returned function waits for them, not for later work."""
        if self._copies is None:
            return lambda: tensors
        hosts = tuple(torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors)
        # The thread that waits sleeps instead of turning on a core, which other threads and ranks need
        # (cudaEventBlockingSync; hipEventBlockingSync is documented alike).
        arrived = torch.cuda.Event(blocking=True)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            for host, one in zip(hosts, tensors, strict=True):
                host.copy_(one, non_blocking=True)
            arrived.record(self._copies)
        for one in tensors:
            one.record_stream(self._copies)

        def wait() -> tuple[torch.Tensor, ...]:
            arrived.synchronize()
            return hosts

        return wait

    @override
    def sample(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        choices: npt.NDArray[np.int64],
        num_rejected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if params.penalties is not None:
            penalize(logits, params.penalties)
        write_biases(logits, params.biased)
        mask_others(logits, params.allowed)
        confine(logits, params.confined)
        tensors = prepare(params, seeds, positions, choices, self._device)
        return sample(logits, tensors if num_rejected is None else tensors.moved(num_rejected))


def confine(logits: torch.Tensor, confined: AllowedBits | None) -> None:
    """Writes minus infinity into logits [S, V] on the device for ids whose bit is not set."""
    if confined is not None:
        count, words = confined.bits.shape
        rows, bits = columns_to_device([confined.rows, confined.bits.view(np.int32).ravel()], logits.device)
        grid = (count, triton.cdiv(logits.shape[1], _CHUNK))
        launch(
            _confine_kernel, grid, logits, logits.stride(0), rows, bits, words, logits.shape[1],
            CHUNK=_CHUNK, num_warps=4,
        )  # fmt: skip


def greedy(logits: torch.Tensor, limit: int) -> torch.Tensor:
    """Ids int64 [S] of the largest among the first `limit` logits of each row [S, V], of any float dtype.

    The first of equals; NaN counts as the lowest, and NO_TOKEN is returned if the largest is not finite. A row's
    numbers must be contiguous.
    """
    best, _ = _largest(logits, limit)
    return _greedy(best)


def _greedy(best: torch.Tensor) -> torch.Tensor:
    rows, chunks = best.shape
    out = torch.empty(rows, dtype=torch.int64, device=best.device)
    launch(_greedy_kernel, (rows,), best, out, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=4)
    return out


def _largest(logits: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates for the largest logit, int64 [S, chunks], and whether a chunk has a NaN, int32 [S, chunks]."""
    rows, chunks = logits.shape[0], triton.cdiv(vocab, _CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    nans = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    launch(_largest_kernel, (rows, chunks), logits, logits.stride(0), vocab, best, nans, CHUNK=_CHUNK, num_warps=4)
    return best, nans


def sample(logits: torch.Tensor, tensors: SampleTensors) -> torch.Tensor:
    """Samples ids int64 [S] from float32 logits [S, V] on the device; each row of logits is contiguous.

    See SamplingOps.sample: masks are written into `logits`.
    """
    rows, vocab = logits.shape
    _apply_masks(logits, tensors.masked)
    best, nans = _largest(logits, vocab)
    if not tensors.any_drawn or rows == 0:
        return _greedy(best)
    given, chunks = tensors.rows, best.shape[1]
    row_chunks = triton.next_power_of_2(chunks)
    state = torch.empty(rows, _FIELDS.value, dtype=torch.int64, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    launch(
        _begin_kernel,
        (rows,),
        *(best, nans, given.temperature, given.log_min_p, given.top_k, given.top_p_shift),
        *(largest, state, chunks),
        CHUNKS=row_chunks,
        num_warps=4,
    )
    _find_borders(logits, tensors, largest, state)
    drawn = torch.empty_like(best)
    launch(
        _draw_kernel,
        (rows, chunks),
        *(logits, logits.stride(0), vocab, given.temperature, given.seeds, given.positions, given.choices),
        *(largest, state, drawn),
        CHUNK=_CHUNK,
        num_warps=4,
    )
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(_decide_kernel, (rows,), best, drawn, state, out, chunks, CHUNKS=row_chunks, num_warps=4)
    return out


def _apply_masks(logits: torch.Tensor, masked: DeviceMaskedIds | None) -> None:
    if masked is None:
        return
    count = len(masked.rows)
    launch(
        _mask_kernel,
        (triton.cdiv(count, _ENTRIES),),
        *(logits, logits.stride(0), masked.rows, masked.ids, masked.after, masked.late, count),
        AFTER=masked.after is not None,
        BLOCK=_ENTRIES,
        num_warps=4,
    )


def _find_borders(logits: torch.Tensor, tensors: SampleTensors, largest: torch.Tensor, state: torch.Tensor) -> None:
    """Raises the border in `state`, first that of min_p, to those of top_k and top_p."""
    if not (tensors.any_top_k or tensors.any_top_p):
        return
    bins = torch.zeros(len(logits), 1 << _BITS, dtype=torch.int64, device=logits.device)
    for wanted, sought in ((_WANTED_COUNT, tensors.any_top_k), (_WANTED_MASS, tensors.any_top_p)):
        for above, shift in pairwise((32, *_SHIFTS)) if sought else ():
            _narrow(logits, tensors, largest, state, bins, above, shift, wanted.value)
    rows, vocab = logits.shape
    launch(
        _last_tie_kernel,
        (rows,),
        *(logits, logits.stride(0), vocab, tensors.rows.temperature, state),
        CHUNK=4 * _CHUNK,
        num_warps=8,
    )


def _narrow(
    logits: torch.Tensor,
    tensors: SampleTensors,
    largest: torch.Tensor,
    state: torch.Tensor,
    bins: torch.Tensor,
    above: int,
    shift: int,
    wanted: int,
) -> None:
    """Finds the bits of the borders from `shift` up to `above`; int64 bins [S, 2^_BITS] are zeros before and after."""
    rows, vocab = logits.shape
    launch(
        _histogram_kernel,
        (rows, triton.cdiv(vocab, _CHUNK)),
        *(logits, logits.stride(0), vocab, tensors.rows.temperature, largest, state, bins, above, shift),
        WANTED=wanted,
        BINS=1 << _BITS,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    launch(
        _border_kernel,
        (rows,),
        *(tensors.rows.top_p_mantissa, tensors.rows.top_p_shift, largest, state, bins, above, shift),
        WANTED=wanted,
        BINS=1 << _BITS,
        num_warps=8,
    )
