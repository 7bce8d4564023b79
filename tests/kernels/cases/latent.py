"""Latent attention and token selection of DeepSeek-V3 and V3.2: 128 heads on one GPU, 16 on each of 8."""

from __future__ import annotations

import torch

from kernels.interface import IndexSpec, KVSpec
from kernels.triton_backend import latent, selection
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape, StepPlan
from kernels.triton_backend.target import Settings
from tests.kernels.cases import Case

INDEX = IndexSpec(num_heads=64, head_dim=128, topk=2048)
DECODE = Shape(rows=8, seqs=8, blocks=64, max_seqlen_q=1, max_seqlen_k=4096)
PREFILL = Shape(rows=2048, seqs=8, blocks=64, max_seqlen_q=1024, max_seqlen_k=4096)


def _plan(shape: Shape) -> StepPlan:
    return StepPlan.over(torch.zeros(sum(shape.sizes), dtype=torch.int32), shape)


def _attention(
    settings: Settings,
    shape: Shape,
    heads: int,
    block_size: int,
    dtype: torch.dtype = torch.bfloat16,
    narrow: bool = False,
    selected: bool = False,
) -> None:
    spec = KVSpec(1, 576, 512, INDEX if selected else None)
    cache_dtype = settings.target.fp8 if narrow else dtype
    cache = DeviceKVCache.allocate(spec, 1, 4, block_size, cache_dtype, torch.device("cpu"))
    q = torch.empty(shape.rows, heads, 576, dtype=dtype)
    chosen = torch.empty(shape.rows, INDEX.topk, dtype=torch.int32) if selected else None
    latent.latent_attention(q, cache, 0, _plan(shape), 0.1, chosen, settings)


def _selection(settings: Settings, block_size: int, narrow: bool) -> None:
    cache_dtype = settings.target.fp8 if narrow else torch.bfloat16
    cache = DeviceKVCache.allocate(KVSpec(1, 576, 512, INDEX), 1, 4, block_size, cache_dtype, torch.device("cpu"))
    q, weights = torch.empty(8, 64, 128, dtype=torch.bfloat16), torch.empty(8, 64)
    selection.select_tokens(q, weights, cache, 0, _plan(DECODE))


ATTENTION, RANKS = frozenset({"_latent_attention_kernel"}), frozenset({"_order_kernel"})
# What the compiler keeps of 32 rows beside the accumulators.
SPILLS = (("_latent_attention_kernel", 20),)
CASES = {
    "decode": Case(lambda s: _attention(s, DECODE, 16, 64), ATTENTION),
    "decode-fp8": Case(lambda s: _attention(s, DECODE, 128, 16, torch.float16, narrow=True), ATTENTION),
    "decode-float32": Case(lambda s: _attention(s, DECODE, 128, 16, torch.float32), spills=SPILLS),
    "prefill": Case(lambda s: _attention(s, PREFILL, 16, 16), ATTENTION, SPILLS),
    "prefill-selected": Case(lambda s: _attention(s, PREFILL, 16, 64, narrow=True, selected=True), ATTENTION),
    "selection": Case(lambda s: _selection(s, 64, narrow=False), RANKS),
    "selection-fp8": Case(lambda s: _selection(s, 16, narrow=True), RANKS),
}
