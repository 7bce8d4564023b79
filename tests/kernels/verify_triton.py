"""Runs our Triton kernels on this machine's GPU, against PyTorch's and against themselves: what no machine of ours can.

    python -m tests.kernels.verify_triton [PART_OF_A_NAME] [--share 1/4]

First each operation's error relative to PyTorch's in float32, with weights as checkpoints store them too; then what has
to be equal to the bit: a row among other rows, a prompt as decodes, rows that verify drafts, sampled tokens and
numpy's, a captured step and the same step kernel by kernel. Ends with 1 where one is not.
tests/kernels/triton_backend/test_verify.py runs some of it in the interpreter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kernels import sampling
from kernels.grouped_weight import GroupedWeight
from kernels.interface import (
    GROUPED,
    AllowedBits,
    AllowedIds,
    AnyWeight,
    AttentionMetaData,
    BiasedIds,
    ExpertWeights,
    IndexSpec,
    KVSpec,
    MaskedIds,
    QuantizedFormat,
    QuantizedWeight,
    SampleParams,
)
from kernels.select import select_backend
from kernels.triton_backend import plan
from kernels.triton_backend.backend import TritonBackend
from tests.kernels.dense_layers import REFERENCE
from tests.kernels.verify_aiter import BLOCK_SIZE, Comparison, Share, Verifier, error_reason

Check = tuple[str, Callable[[], bool]]
FORMATS = ("int8", "fp8", "w8a8_int8", "w8a8_fp8")
STORED = (
    QuantizedFormat(torch.float8_e4m3fn, "per_128x128"),
    QuantizedFormat(torch.float8_e4m3fn, "per_1x128"),
    QuantizedFormat(torch.float8_e4m3fn, "per_token"),
    QuantizedFormat(torch.int8, "per_token"),
    QuantizedFormat(torch.uint8, "per_1x32"),
    GROUPED,
)


def packed_formats(backend: TritonBackend) -> tuple[str, ...]:
    """The FORMATS that the GPU supports; without FP8 hardware only the others."""
    return tuple(name for name in FORMATS if backend.packed_format(name, torch.bfloat16) is not None)


def _bits(rows: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(vocab).integers(1 << 32, size=(rows, -(-vocab // 32)), dtype=np.uint32)


class BitVerifier:
    """What must be equal to the bit.

    Args:
        backend: batch-invariant.
        inner, outer, rows: K, N and T of products.
        tokens: of the prompt that is computed in one step, in two, and token by token.
        vocab: ids that are sampled from.
    """

    def __init__(
        self,
        backend: TritonBackend,
        inner: int = 4096,
        outer: int = 6144,
        rows: int = 300,
        tokens: int = 700,
        vocab: int = 151_936,
    ) -> None:
        self.backend = backend
        self._inner, self._outer, self._rows = inner, outer, rows
        self._tokens, self._vocab = tokens, vocab
        self._random = torch.Generator().manual_seed(0)

    def all(self, part: str, share: Share | None = None) -> Iterator[Comparison]:
        """Every check with `part` in its name, of a share of them; an error of infinity is one that failed."""
        for name, check in self._checks():
            if part not in name or (share is not None and not share.takes_next()):
                continue
            try:
                yield Comparison(name, 0.0 if check() else float("inf"), 0.0)
            except Exception as error:
                yield Comparison(name, float("inf"), 0.0, error_reason(error))

    def _checks(self) -> Iterator[Check]:
        for quantize in (None, "int4", *packed_formats(self.backend)):
            yield f"bits of rows of a product, weights {quantize or 'bfloat16'}", partial(self.rows, quantize)
        yield "bits of a prompt in chunks and in decodes", self.chunks
        yield "bits of rows that verify drafts", self.drafts
        yield "tokens selected by an indexer", self.selected
        yield "tokens sampled as numpy does", self.sampled
        yield "bits of a captured step", self.captured

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers on the device."""
        return torch.randn(shape, generator=self._random).to(self.backend.device, dtype)

    def rows(self, quantize: str | None) -> bool:
        """Rows among all, among the first few, and in another order."""
        x, weight = self.draw(self._rows, self._inner), self.draw(self._outer, self._inner)
        packed_format = None if quantize is None else self.backend.packed_format(quantize, torch.bfloat16)
        packed = self.backend.linear.pack(weight, None, torch.bfloat16, packed_format)
        whole, order = self.backend.linear.apply(x, packed), torch.randperm(len(x), generator=self._random).to(x.device)
        fewer = all(
            torch.equal(self.backend.linear.apply(x[:n], packed), whole[:n]) for n in (1, 2, 7, 16, 33, 64, 65, 129)
        )
        return fewer and torch.equal(self.backend.linear.apply(x[order], packed), whole[order])

    def chunks(self) -> bool:
        """Attention of a prompt as one step, as two chunks, and of its last tokens as decodes beside another."""
        tokens = self._tokens
        cache = self.backend.kv_cache.allocate(KVSpec(2, 128), 1, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, torch.bfloat16)
        q, k, v = self.draw(tokens, 8, 128), self.draw(tokens, 2, 128), self.draw(tokens, 2, 128)
        self.backend.attention.write(cache, 0, k, v, self._step((0, tokens)))
        whole = self.backend.attention.apply(q, cache, 0, self._step((0, tokens)), 0.09)
        for spans in ([(0, 300), (300, tokens)], *([(i, i + 1), (0, 40)] for i in range(tokens - 3, tokens))):
            rows = torch.cat([q[start:end] for start, end in spans])
            found = self.backend.attention.apply(rows, cache, 0, self._step(*spans), 0.09)
            if not torch.equal(found, torch.cat([whole[start:end] for start, end in spans])):
                return False
        return True

    def drafts(self) -> bool:
        """Attention of a sequence's last rows beside another's row, in a plan of their own, in a captured step's with
        padding, and each as a decode."""
        tokens, most = self._tokens, 9
        cache = self.backend.kv_cache.allocate(KVSpec(2, 128), 1, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, torch.bfloat16)
        q, k, v = self.draw(tokens, 8, 128), self.draw(tokens, 2, 128), self.draw(tokens, 2, 128)
        self.backend.attention.write(cache, 0, k, v, self._step((0, tokens)))
        decodes = [
            self.backend.attention.apply(q[i : i + 1], cache, 0, self._step((i, i + 1)), 0.09)
            for i in (3, *range(tokens - most, tokens))
        ]
        captured = self.backend.graphs.plan(cache, 8, 3, most, 2 * tokens)
        for count in range(2, most + 1):
            step = self._step((3, 4), (tokens - count, tokens))
            rows = torch.cat((q[3:4], q[tokens - count :], q.new_zeros(3 * most - count - 1, 8, 128)))
            expected = torch.cat((decodes[0], *decodes[-count:]))
            if not torch.equal(self.backend.attention.apply(rows[: count + 1], cache, 0, step, 0.09), expected):
                return False
            self.backend.graphs.write(captured, step, cache)
            step.plan = captured
            if not torch.equal(self.backend.attention.apply(rows, cache, 0, step, 0.09)[: count + 1], expected):
                return False
        return True

    def _step(self, *spans: tuple[int, int]) -> AttentionMetaData:
        """Rows [start, end) of one sequence, as sequences of their own that share its blocks."""
        starts, ends = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        blocks = np.arange(-(-self._tokens // BLOCK_SIZE), dtype=np.int64)
        metadata = AttentionMetaData(
            cu_seqlens_q=np.concatenate((np.zeros(1, np.int64), (ends - starts).cumsum())),
            seq_lens=ends,
            block_tables=np.tile(blocks, (len(spans), 1)),
            slot_mapping=np.concatenate([np.arange(start, end) for start, end in spans]),
        )
        metadata.plan = plan.plan(metadata, self.backend.device, BLOCK_SIZE)
        return metadata

    def selected(self) -> bool:
        """Selection in a plan for far longer sequences, by integer scores with many ties, against a sort."""
        tokens, topk = self._tokens, self._tokens // 3
        cache = self.backend.kv_cache.allocate(
            KVSpec(1, 64, 32, IndexSpec(4, 128, topk)), 1, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, torch.bfloat16
        )
        keys, q, weights = (self.draw(*shape).round() for shape in ((tokens, 128), (8, 4, 128), (8, 4)))
        self.backend.latent_attention.write_index(cache, 0, keys, self._step((0, tokens)))
        ends = (tokens, topk, topk + 1, 1)
        step = self._step(*((end - 1, end) for end in ends))
        step.plan = self.backend.graphs.plan(cache, 1, len(q), 1, 16 * tokens)
        self.backend.graphs.write(step.plan, step, cache)
        found = self.backend.latent_attention.select_tokens(q, weights.float(), cache, 0, step)
        assert found is not None
        scores = ((q.double() @ keys.double().t()).relu() * weights.double()[:, :, None]).sum(1)
        for row, (score, end) in enumerate(zip(scores.tolist(), ends, strict=False)):
            expected = sorted(sorted(range(end), key=lambda position: (-score[position], position))[:topk])
            if found[row].tolist() != expected + [-1] * (topk - len(expected)):
                return False
        return bool((found[len(ends) :] == -1).all())

    def sampled(self) -> bool:
        """Sampling with every filter; float64 logarithms are the device's own, so a rare token may differ."""
        count = 16
        logits = self.draw(count, self._vocab, dtype=torch.float32) * 4
        params = SampleParams(
            temperature=np.linspace(0, 2, count, dtype=np.float32),
            top_k=np.arange(count, dtype=np.int64) * 7 % 60,
            top_p=np.linspace(0.5, 1, count, dtype=np.float32),
            min_p=np.linspace(0, 0.1, count, dtype=np.float32),
        )
        rows = np.arange(count)
        ids = np.arange(4 * count) * 97 % self._vocab
        late = torch.arange(count) % 3 - 1
        masked = MaskedIds(rows, rows * 5, rows - 1, late)
        params = replace(
            params,
            biased=BiasedIds(rows.repeat(4), ids, np.linspace(-100, 100, 4 * count, dtype=np.float32)),
            allowed=AllowedIds(np.repeat(rows[::3], 40), np.tile(np.arange(40) * 31 % self._vocab, len(rows[::3]))),
            masked=masked,
            confined=AllowedBits(rows[1::3], _bits(len(rows[1::3]), self._vocab)),
        )
        choice = rows.astype(np.uint64), rows + 9, rows * 0
        expected = sampling.sample(logits.cpu().numpy().copy(), params, *choice)
        there = replace(params, masked=replace(masked, late=late.to(logits.device)))
        return np.array_equal(self.backend.sampling.sample(logits, there, *choice).cpu().numpy(), expected)

    def captured(self) -> bool:
        """A product, a norm and their replay over other numbers."""
        x, weight, norm = self.draw(5, 512), self.draw(768, 512), self.draw(768)
        packed = self.backend.linear.pack(weight, None, torch.bfloat16)

        def run() -> torch.Tensor:
            return self.backend.elementwise.rms_norm(self.backend.linear.apply(x, packed), norm, 1e-6)

        replay = self.backend.graphs.capture(run)
        x.copy_(self.draw(5, 512))
        return torch.equal(replay().clone(), run())


class StoredVerifier:
    """Products and experts by weights as checkpoints store them, against PyTorch's by what they are worth.

    Args:
        backend: Triton's.
        inner, outer, rows: K, N and T of products; `outer` is I of experts, and `inner` their H.
    """

    def __init__(self, backend: TritonBackend, inner: int = 2880, outer: int = 1536, rows: int = 40) -> None:
        self.backend = backend
        self._inner, self._outer, self._rows = inner, outer, rows
        self._random = torch.Generator().manual_seed(0)

    def all(self, part: str, share: Share | None = None) -> Iterator[Comparison]:
        """Every format that the back end keeps, with `part` in the name, of a share of them."""
        for stored in STORED:
            numbers = str(stored.numbers).removeprefix("torch.")
            for name, compute in (("linear", self.linear), ("moe", self.moe)):
                title = f"{name} of stored {numbers} {stored.quant_type}"
                if part not in title or not self.backend.keeps_quantized(stored, torch.bfloat16):
                    continue
                if share is not None and not share.takes_next():
                    continue
                try:
                    found, expected = compute(stored)
                    error = (found.float().cpu() - expected).norm() / expected.norm()
                    yield Comparison(title, float(error), 1e-2)
                except Exception as failure:
                    yield Comparison(title, float("inf"), 1e-2, error_reason(failure))

    def draw(self, stored: QuantizedFormat, rows: int, inner: int) -> AnyWeight:
        """Numbers about as large as weights are."""
        if stored == GROUPED:
            return self._codes(rows, inner)
        mxfp4 = stored.quant_type == "per_1x32"
        shapes = {
            "per_token": (rows,),
            "per_1x32": (rows, inner // 32),
            "per_1x128": (rows, -(-inner // 128)),
            "per_128x128": (-(-rows // 128), -(-inner // 128)),
        }
        width = inner // 2 if mxfp4 else inner
        drawn = torch.randint(0 if mxfp4 else -100, 256 if mxfp4 else 100, (rows, width), generator=self._random)
        scales = torch.randint(1, 9, shapes[stored.quant_type], generator=self._random)
        return QuantizedWeight(
            drawn.float().to(stored.numbers),
            (scales + 112).byte() if mxfp4 else scales * 1e-4,
            stored.quant_type,
        )

    def _codes(self, rows: int, inner: int) -> GroupedWeight:
        """Codes of 4 bits with scales, zero points and offsets, in an order of columns."""
        codes = torch.randint(0, 16, (rows, inner), generator=self._random, dtype=torch.uint8)
        zeros = torch.randint(0, 16, (rows, inner // 32), generator=self._random, dtype=torch.uint8)
        scales = (torch.rand(rows, inner // 32, generator=self._random) / 100).half()
        order = torch.randperm(inner, generator=self._random)
        return GroupedWeight(codes, 4, 32, scales, zeros, scales.float() / 2, order)

    def linear(self, stored: QuantizedFormat) -> tuple[torch.Tensor, torch.Tensor]:
        """A product with a bias."""
        weight, bias = self.draw(stored, self._outer, self._inner), torch.randn(self._outer, generator=self._random)
        x = torch.randn(self._rows, self._inner, generator=self._random).bfloat16()
        packed = self.backend.linear.pack(weight, bias, torch.bfloat16)
        expected = REFERENCE.linear.apply(x.float(), REFERENCE.linear.pack(weight, bias, torch.float32))
        return self.backend.linear.apply(x.to(self.backend.device), packed), expected

    def moe(self, stored: QuantizedFormat) -> tuple[torch.Tensor, torch.Tensor]:
        """Two of four experts for each row."""
        inner = self._outer
        experts = [
            ExpertWeights(self.draw(stored, 2 * inner, self._inner), self.draw(stored, self._inner, inner))
            for _ in range(4)
        ]
        x = torch.randn(self._rows, self._inner, generator=self._random).bfloat16() / 8
        ids = torch.rand(self._rows, 4, generator=self._random).argsort(1)[:, :2].contiguous()
        shares = torch.rand(self._rows, 2, generator=self._random)
        expected = REFERENCE.experts.apply(
            x.float(), ids, shares, REFERENCE.experts.pack(experts, 0, None, torch.float32)
        )
        packed, device = self.backend.experts.pack(experts, 0, None, torch.bfloat16), self.backend.device
        return self.backend.experts.apply(x.to(device), ids.to(device), shares.to(device), packed), expected


def main(arguments: list[str]) -> int:
    """Checks what has the first argument in its name. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="part of the names of the checks")
    parser.add_argument("--share", type=Share.parse, default=Share(), help="share of the checks, as NUMBER/PROCESSES")
    options = parser.parse_args(arguments)
    try:
        backend = select_backend("triton")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    assert isinstance(backend, TritonBackend)
    failed = 0
    formats = packed_formats(backend)
    for name in FORMATS:
        if name not in formats:
            print(f"skip   weights {name}: {backend.description} has no FP8")
    near = Verifier(backend, backend.settings.target.fp8, backend.device, formats)
    for verifier in (near, StoredVerifier(backend), BitVerifier(backend)):
        for comparison in verifier.all(options.part, options.share):
            print(comparison, flush=True)
            failed += not comparison.passed
    print(f"{backend.description}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
