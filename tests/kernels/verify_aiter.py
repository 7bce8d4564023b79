"""Compares what AITER computes on this machine's GPU with PyTorch's back end in float32: what no machine of ours can.

    python -m tests.kernels.verify_aiter [PART_OF_A_NAME]

Prints each operation's relative error, and ends with 1 if one is too large or was not AITER's. On an AMD GPU with
AITER; tests/kernels/aiter/test_verify.py runs the same comparisons over a stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.aiter.backend import AiterBackend
from kernels.aiter.dispatch import SINCE
from kernels.aiter.library import AiterLibrary, AiterUnavailableError
from kernels.interface import (
    AttentionMetaData,
    ExpertWeights,
    KernelBackend,
    KVSpec,
    PackedFormat,
    QuantizedWeight,
    Routing,
)
from kernels.torch_backend.attention import PagedKVCache
from kernels.triton_backend import plan as step_plan
from kernels.triton_backend import target
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape, StepPlan
from kernels.triton_backend.target import Settings
from tests.kernels.dense_layers import REFERENCE, Sizes, by_single_operations, decoder

# Of the Euclidean norm. bfloat16 has 8 bits, E4M3 has 4, and both sides of an FP8 product are rounded; in an
# expert a gate is multiplied by an up, and another product comes behind them (measured in the interpreter: 0.067).
LARGEST_ERROR, LARGEST_8_BIT_ERROR, LARGEST_8_BIT_EXPERT_ERROR = 0.01, 0.05, 0.1
# Relative error of two layers, which round to bfloat16 between their operations.
LARGEST_LAYERS_ERROR = 0.03
HIDDEN, BLOCK_SIZE, BLOCKS = 4096, 64, 64
# Rows and keys of sequences: a chunk, a prompt, decodes of a short and a long context; then decodes only. The first is
# of more than 128 rows, for which AITER 0.1.20 rotates with another kernel.
STEPS = {"mixed": [(170, 200), (33, 33), (1, 5), (1, 900)], "decode": [(1, 200), (1, 33), (1, 5), (1, 900)]}
# Padding of a captured step of decodes: sequences without keys, and rows with the slot -1.
CAPTURED = Shape(rows=8, seqs=8, blocks=16, max_seqlen_q=1, max_seqlen_k=1024)
ROTATION = "aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache"


class Caches:
    """Caches on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> DeviceKVCache:
        return DeviceKVCache.allocate(spec, num_layers, num_blocks, block_size, dtype, self._device)


class Plans:
    """Plans of steps, and no attention."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, metadata: AttentionMetaData, cache: object, num_heads: int) -> StepPlan:
        return step_plan.plan(metadata, self._device, BLOCK_SIZE)


class Nothing:
    """A back end that has only what AITER's needs of another: cache and plan."""

    name = "nothing"
    batch_invariant = False
    numerics: tuple[object, ...] = ()
    layout: tuple[object, ...] = ()
    graphs = linear = elementwise = experts = latent_attention = sampling = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kv_cache = Caches(device)
        self.attention = Plans(device)


# AITER's result and the reference's.
Pair = tuple[torch.Tensor, torch.Tensor]
# A name, the error that is allowed, and what computes both.
Case = tuple[str, float, Callable[[], Pair]]


@dataclass(frozen=True)
class Comparison:
    """One operation on one kind of input.

    Attributes:
        name: for people.
        error: of the result, relative to the reference's Euclidean norm; infinite where there is none.
        allowed: how large it may be.
        reason: why it was not computed.
    """

    name: str
    error: float
    allowed: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is small enough."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        verdict = "ok    " if self.passed else "FAILED"
        return f"{verdict} {self.name:44} {self.error:.2e} (at most {self.allowed:.0e}) {self.reason}".rstrip()


class Share:
    """Selects every `count`-th check, so that several processes divide the checks of one run among them.

    Args:
        number: of this process, from 1 on.
        count: of the processes.
    """

    def __init__(self, number: int = 1, count: int = 1) -> None:
        self._left, self._count = number - 1, count

    @classmethod
    def parse(cls, text: str) -> Share:
        """The share that a command line gives as NUMBER/COUNT."""
        number, _, count = text.partition("/")
        return cls(int(number), int(count))

    def takes_next(self) -> bool:
        """True if this process has the next check."""
        self._left, taken = (self._left or self._count) - 1, self._left == 0
        return taken


def error_reason(error: Exception) -> str:
    """An exception on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class Verifier:
    """The comparisons of one back end.

    Args:
        backend: what is verified, in bfloat16.
        fp8: what a KV cache may have too.
        device: where.
        formats: of weights in 8 bits, as `KernelBackend.packed_format` calls them.
    """

    def __init__(
        self, backend: KernelBackend, fp8: torch.dtype, device: torch.device, formats: tuple[str, ...]
    ) -> None:
        self.backend = backend
        self.device = device
        self._fp8 = fp8
        self._formats = formats
        self._random = torch.Generator().manual_seed(0)

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers on the CPU."""
        return (torch.randn(shape, generator=self._random) * scale).to(dtype)

    def on(self, tensor: torch.Tensor | None) -> Any:
        """A copy on the device."""
        return None if tensor is None else tensor.to(self.device)

    def all(self, part: str, share: Share | None = None) -> Iterator[Comparison]:
        """Every operation with `part` in its name, of a share of them."""
        for name, allowed, compute in self._cases():
            if part not in name or (share is not None and not share.takes_next()):
                continue
            try:
                found, expected = compute()
            except Exception as error:
                yield Comparison(name, float("inf"), allowed, error_reason(error))
            else:
                yield Comparison(name, _error(found, expected), allowed)

    def _cases(self) -> Iterator[Case]:
        fp8 = self._fp8
        for rows in (1, 33):
            yield f"rms_norm, {rows} rows", LARGEST_ERROR, partial(self.rms_norm, rows)
            yield f"add_rms_norm, {rows} rows", LARGEST_ERROR, partial(self.add_rms_norm, rows)
            yield f"silu_and_mul, {rows} rows", LARGEST_ERROR, partial(self.silu_and_mul, rows)
            yield f"linear, {rows} rows", LARGEST_ERROR, partial(self.linear, rows)
            yield f"moe, {rows} rows", LARGEST_ERROR, partial(self.moe, rows)
            for name in self._formats:
                yield f"linear, {name}, {rows} rows", LARGEST_8_BIT_ERROR, partial(self.linear, rows, name)
                yield f"moe, {name}, {rows} rows", LARGEST_8_BIT_EXPERT_ERROR, partial(self.moe, rows, name)
            yield f"linear stored by blocks, {rows} rows", LARGEST_8_BIT_ERROR, partial(self.block_linear, rows)
            yield f"moe stored by blocks, {rows} rows", LARGEST_8_BIT_EXPERT_ERROR, partial(self.block_moe, rows)
        yield "layer_norm", LARGEST_ERROR, self.layer_norm
        yield "rms_norm of heads", LARGEST_ERROR, self.head_norm
        yield "rope", LARGEST_ERROR, partial(self.rope, 128)
        yield "rope of a part of heads", LARGEST_ERROR, partial(self.rope, 64)
        yield "route by softmax", LARGEST_ERROR, partial(self.route, Routing(8, renormalize=True), 128)
        groups = Routing(8, "sigmoid", renormalize=True, num_groups=8, top_groups=4, scale=2.5)
        yield "route by sigmoid in groups", LARGEST_ERROR, partial(self.route, groups, 256)
        for step in STEPS:
            yield f"decoder layers, {step}", LARGEST_LAYERS_ERROR, partial(self.layers, step)
            if step == "decode":
                yield "decoder layers, captured", LARGEST_LAYERS_ERROR, partial(self.layers, step, CAPTURED)
            attention = partial(self.attention, step)
            yield f"attention, {step}", LARGEST_ERROR, attention
            yield f"attention with window and sinks, {step}", LARGEST_ERROR, partial(attention, 100, True)
            yield f"attention over FP8, {step}", LARGEST_ERROR, partial(attention, dtype=fp8)
            yield f"latent attention, {step}", LARGEST_ERROR, partial(self.latent_attention, step)

    def rms_norm(self, rows: int) -> Pair:
        """Norm by AITER and by the reference, on random numbers."""
        x, weight = self.draw(rows, HIDDEN), self.draw(HIDDEN)
        found = self.backend.elementwise.rms_norm(self.on(x), self.on(weight), 1e-6)
        return found, REFERENCE.elementwise.rms_norm(x.float(), weight.float(), 1e-6)

    def head_norm(self) -> Pair:
        """Norm of slices of wider rows."""
        qkv, weight = self.draw(9, 48, 128), self.draw(128)
        found = self.backend.elementwise.rms_norm(self.on(qkv)[:, :32], self.on(weight), 1e-6)
        return found, REFERENCE.elementwise.rms_norm(qkv[:, :32].float(), weight.float(), 1e-6)

    def add_rms_norm(self, rows: int) -> Pair:
        """Both results, side by side."""
        x, residual, weight = self.draw(rows, HIDDEN), self.draw(rows, HIDDEN), self.draw(HIDDEN)
        found = self.backend.elementwise.add_rms_norm(self.on(x), self.on(residual), self.on(weight), 1e-6)
        expected = REFERENCE.elementwise.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-6)
        return torch.cat(found), torch.cat(expected)

    def layer_norm(self) -> Pair:
        """Layer norm of the indexer's width."""
        x, weight, bias = self.draw(9, 128), self.draw(128), self.draw(128)
        found = self.backend.elementwise.layer_norm(self.on(x), self.on(weight), self.on(bias), 1e-6)
        return found, REFERENCE.elementwise.layer_norm(x.float(), weight.float(), bias.float(), 1e-6)

    def rope(self, rotary_dim: int) -> Pair:
        """Queries and keys, side by side."""
        qkv, angles = self.draw(9, 48, 128), self.draw(9, 1, rotary_dim // 2, dtype=torch.float32)
        wide, on_device = qkv.float(), self.on(qkv)
        cos, sin = angles.cos(), angles.sin()
        found = self.backend.elementwise.rope(on_device[:, :32], on_device[:, 32:40], self.on(cos), self.on(sin))
        return torch.cat(found, 1), torch.cat(REFERENCE.elementwise.rope(wide[:, :32], wide[:, 32:40], cos, sin), 1)

    def silu_and_mul(self, rows: int) -> Pair:
        x = self.draw(rows, HIDDEN)
        return self.backend.elementwise.silu_and_mul(self.on(x)), REFERENCE.elementwise.silu_and_mul(x.float())

    def linear(self, rows: int, quantize: str | None = None) -> Pair:
        x, weight, bias = self.draw(rows, 1024), self.draw(1536, 1024, scale=0.03), self.draw(1536)
        packed = self.backend.linear.pack(self.on(weight), self.on(bias), torch.bfloat16, self._format(quantize))
        reference = REFERENCE.linear.pack(weight, bias, torch.float32)
        return self.backend.linear.apply(self.on(x), packed), REFERENCE.linear.apply(x.float(), reference)

    def _format(self, quantize: str | None) -> PackedFormat | None:
        if quantize is None:
            return None
        packed_format = self.backend.packed_format(quantize, torch.bfloat16)
        if packed_format is None:
            raise AssertionError(f"no weights in {quantize} here")
        return packed_format

    def route(self, routing: Routing, num_experts: int) -> Pair:
        """Weights by expert, so that the order of the chosen does not count."""
        logits = self.draw(33, num_experts, dtype=torch.float32)
        bias = self.draw(num_experts, dtype=torch.float32) if routing.scoring == "sigmoid" else None
        ids, weights = self.backend.experts.route(self.on(logits), routing, self.on(bias))
        expected_ids, expected = REFERENCE.experts.route(logits, routing, bias)
        none = torch.zeros_like(logits)
        return none.scatter(1, ids.cpu(), weights.cpu()), none.scatter(1, expected_ids, expected)

    def chosen(self, rows: int, count: int) -> torch.Tensor:
        """Four experts of each row, every other one of another rank, which has the first `count`."""
        orders = [torch.rand(rows, count, generator=self._random).argsort(1)[:, :2] for _ in range(2)]
        return torch.stack((orders[0] + count, orders[1]), 2).flatten(1)

    def moe(self, rows: int, quantize: str | None = None) -> Pair:
        """Half of the experts are another rank's."""
        x, count = self.draw(rows, 512), 8
        gate_ups = [self.draw(512, 512, scale=0.05) for _ in range(count)]
        downs = [self.draw(512, 256, scale=0.05) for _ in range(count)]
        both = list(zip(gate_ups, downs, strict=True))
        ids = self.chosen(rows, count)
        weights = self.draw(rows, 4, dtype=torch.float32).softmax(1)
        mine = (ExpertWeights(self.on(gate_up), self.on(down)) for gate_up, down in both)
        packed = self.backend.experts.pack(mine, count, None, torch.bfloat16, self._format(quantize))
        reference = REFERENCE.experts.pack([ExpertWeights(*pair) for pair in both], count, None, torch.float32)
        found = self.backend.experts.apply(self.on(x), self.on(ids), self.on(weights), packed)
        return found, REFERENCE.experts.apply(x.float(), ids, weights, reference)

    def stored(self, rows: int, columns: int) -> tuple[QuantizedWeight, QuantizedWeight]:
        """A weight as a checkpoint has it, on the device and on the CPU."""
        # Clamped to FP8's range: before PyTorch 2.13, larger numbers become NaN.
        numbers = self.draw(rows, columns, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn)
        shape = (-(-rows // 128), columns // 128)
        scales = (1 + torch.rand(shape, generator=self._random)) * 0.01 * columns**-0.5
        on_device = QuantizedWeight(self.on(numbers), self.on(scales), "per_128x128")
        return on_device, QuantizedWeight(numbers, scales, "per_128x128")

    def block_linear(self, rows: int) -> Pair:
        """Product with row counts that fill no block."""
        x, bias = self.draw(rows, 1024), self.draw(1600)
        mine, reference = self.stored(1600, 1024)
        packed = self.backend.linear.pack(mine, self.on(bias), torch.bfloat16)
        found = self.backend.linear.apply(self.on(x), packed)
        return found, REFERENCE.linear.apply(x.float(), REFERENCE.linear.pack(reference, bias, torch.float32))

    def block_moe(self, rows: int) -> Pair:
        """Half of the experts are another rank's."""
        x, count = self.draw(rows, 512), 8
        pairs = [(self.stored(512, 512), self.stored(512, 256)) for _ in range(count)]
        ids = self.chosen(rows, count)
        weights = self.draw(rows, 4, dtype=torch.float32).softmax(1)
        mine, reference = ([ExpertWeights(gate_up[side], down[side]) for gate_up, down in pairs] for side in (0, 1))
        packed = self.backend.experts.pack(mine, count, None, torch.bfloat16)
        found = self.backend.experts.apply(self.on(x), self.on(ids), self.on(weights), packed)
        floats = REFERENCE.experts.pack(reference, count, None, torch.float32)
        return found, REFERENCE.experts.apply(x.float(), ids, weights, floats)

    def attention(
        self, step: str, window: int | None = None, with_sinks: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> Pair:
        """Over a cache of other tokens too."""
        metadata, plan = self._step(step)
        cache: Any = self.backend.kv_cache.allocate(KVSpec(8, 128), 1, BLOCKS, BLOCK_SIZE, dtype)
        whole = self.draw(*cache.data.shape).to(dtype)
        cache.data.copy_(whole)
        q = self.draw(metadata.num_tokens, 32, 128)
        sinks = self.draw(32, dtype=torch.float32) if with_sinks else None
        metadata.plan = plan
        found = self.backend.attention.apply(self.on(q), cache, 0, metadata, 0.09, window, self.on(sinks))
        reference = _reference_cache(whole.float(), KVSpec(8, 128))
        metadata.plan = REFERENCE.attention.plan(metadata, reference, 32)
        return found, REFERENCE.attention.apply(q.float(), reference, 0, metadata, 0.09, window, sinks)

    def layers(self, step: str, padded: Shape | None = None) -> Pair:
        """What `fuse_decoder` makes of two layers: their results, and the keys and values that they store."""
        metadata, plan = self._step(step)
        tokens = metadata.num_tokens
        if padded is not None:
            plan = StepPlan.over(self.on(torch.from_numpy(step_plan.staged(metadata, padded))), padded)
        sizes = Sizes(hidden=512, inner=1024, heads=32, kv_heads=8, head_dim=128)
        spec = KVSpec(sizes.kv_heads, sizes.head_dim)
        cache: Any = self.backend.kv_cache.allocate(spec, 2, BLOCKS, BLOCK_SIZE, torch.bfloat16)
        whole = self.draw(*cache.data.shape)
        cache.data.copy_(whole)
        x, angles = self.draw(plan.shape.rows, 512), self.draw(plan.shape.rows, 1, 64, dtype=torch.float32)
        cos, sin = angles.cos(), angles.sin()
        metadata.plan = plan
        fused: Any = self.backend.fuse_decoder(decoder(self.backend, torch.bfloat16, sizes), torch.bfloat16)
        found = fused.run(self.on(x), self.on(cos), self.on(sin), cache, metadata)[:tokens]
        reference = _reference_cache(whole.float(), spec)
        metadata.plan = REFERENCE.attention.plan(metadata, reference, 32)
        model = decoder(REFERENCE, torch.float32, sizes)
        expected = by_single_operations(model, x[:tokens].float(), cos[:tokens], sin[:tokens], reference, metadata)
        slots = torch.from_numpy(metadata.slot_mapping)
        stored = cache.data.cpu().float().flatten(2, 3)
        wanted = reference.data[:, :, :-1].transpose(3, 4).flatten(2, 3)
        others = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool).index_fill_(0, slots, False)
        if not torch.equal(stored[:, :, others], wanted[:, :, others]):
            raise AssertionError("keys or values of other tokens were overwritten")
        return (
            torch.cat((found.cpu().float().flatten(), stored[:, :, slots].flatten())),
            torch.cat((expected.flatten(), wanted[:, :, slots].flatten())),
        )

    def latent_attention(self, step: str) -> Pair:
        """DeepSeek's: latents of 512 and 64 rotated numbers, 16 heads of a rank."""
        metadata, plan = self._step(step)
        spec = KVSpec(1, 576, latent_value_dim=512)
        cache: Any = self.backend.kv_cache.allocate(spec, 1, BLOCKS, BLOCK_SIZE, torch.bfloat16)
        whole = self.draw(1, 1, BLOCKS, BLOCK_SIZE, 1, 576)
        cache.data.copy_(whole)
        q = self.draw(metadata.num_tokens, 16, 576)
        metadata.plan = plan
        found = self.backend.latent_attention.apply(self.on(q), cache, 0, metadata, 0.06, None)
        reference = _reference_cache(whole.float(), spec)
        metadata.plan = REFERENCE.attention.plan(metadata, reference, 16)
        return found, REFERENCE.latent_attention.apply(q.float(), reference, 0, metadata, 0.06, None)

    def _step(self, name: str) -> tuple[AttentionMetaData, StepPlan]:
        counts, lengths = (np.array(column, np.int64) for column in zip(*STEPS[name], strict=True))
        longest = -(-int(lengths.max()) // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(BLOCKS)
        tables = order[: len(counts) * longest].reshape(len(counts), longest)
        metadata = AttentionMetaData(
            cu_seqlens_q=np.concatenate((np.zeros(1, np.int64), counts.cumsum())),
            seq_lens=lengths,
            block_tables=tables,
            slot_mapping=_slots(counts, lengths, tables),
        )
        return metadata, step_plan.plan(metadata, self.device, BLOCK_SIZE)


def _slots(
    counts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], tables: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Slots of the last `counts` tokens of each sequence."""
    places = [np.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
    return np.concatenate(
        [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for table, p in zip(tables, places, strict=True)]
    )


def _reference_cache(whole: torch.Tensor, spec: KVSpec) -> PagedKVCache:
    cache = REFERENCE.kv_cache.allocate(spec, len(whole), BLOCKS, BLOCK_SIZE, torch.float32)
    cache.data[:, :, :-1] = whole.transpose(3, 4)
    return cache


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm()) if found.shape == expected.shape else float("inf")


class AiterVerifier(Verifier):
    """The comparisons of AITER's back end.

    Args:
        library: AITER.
        settings: the architecture.
        device: where.
    """

    def __init__(self, library: AiterLibrary, settings: Settings, device: torch.device) -> None:
        other: Any = Nothing(device)
        self._library = library
        super().__init__(AiterBackend(other, library, settings), settings.target.fp8, device, ("w8a8_fp8",))

    def layers(self, step: str, padded: Shape | None = None) -> Pair:
        """As for all back ends; where AITER refuses, rotation and write are our Triton kernel, which is not meant."""
        compared = super().layers(step, padded)
        if ROTATION not in self._library.called:
            raise AssertionError("rotation and write were not AITER's")
        return compared


def verify(library: AiterLibrary, settings: Settings, device: torch.device, part: str = "") -> list[Comparison]:
    """All comparisons with `part` in their names, printed as they come."""
    comparisons = []
    for comparison in AiterVerifier(library, settings, device).all(part):
        print(comparison, flush=True)
        comparisons.append(comparison)
    return comparisons


def main(arguments: list[str]) -> int:
    """Compares what has the first argument in its name. Returns the exit code."""
    try:
        library = AiterLibrary.load(SINCE)
        settings = Settings(target.current(), batch_invariant=False)
        comparisons = verify(library, settings, torch.device("cuda"), *arguments[:1])
    except (AiterUnavailableError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"aiter {library.version} on {settings.target.name}")
    return 0 if all(comparison.passed for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
