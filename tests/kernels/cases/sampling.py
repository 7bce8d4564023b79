"""Sampling over Qwen3's vocabulary, with all filters, and penalties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kernels.interface import MaskedIds, SampleParams
from kernels.penalties import Penalties, SeenIds
from kernels.triton_backend import sampling
from kernels.triton_backend.penalties import penalize
from kernels.triton_backend.sample_tensors import prepare
from tests.kernels.cases import Case

VOCAB = 151_936


def _sample() -> None:
    one, half, zero = np.ones(2, np.float32), np.full(2, 0.5, np.float32), np.zeros(2, np.int64)
    seen = [SeenIds(np.arange(2), [1]), SeenIds(np.arange(1), [])]
    penalties = Penalties(np.arange(2), seen, one, one, one, torch.zeros(2, dtype=torch.int64))
    penalize(torch.empty(2, VOCAB), penalties)
    params = SampleParams(one, zero + 20, half, half, MaskedIds(zero, zero))
    late = replace(params, masked=MaskedIds(zero, zero, zero, torch.zeros(2, dtype=torch.int64)))
    sampling.sample(torch.empty(2, VOCAB), prepare(late, zero.astype(np.uint64), zero, zero, torch.device("cpu")))
    tensors = prepare(params, zero.astype(np.uint64), zero, zero, torch.device("cpu"))
    sampling.sample(torch.empty(2, VOCAB), tensors)


CASES = {
    "sample": Case(lambda _: _sample()),
    "greedy": Case(lambda _: sampling.greedy(torch.empty(2, VOCAB), VOCAB)),
    "greedy_bfloat16": Case(lambda _: sampling.greedy(torch.empty(2, VOCAB, dtype=torch.bfloat16), VOCAB)),
    "greedy_float16": Case(lambda _: sampling.greedy(torch.empty(2, VOCAB, dtype=torch.float16), VOCAB)),
}
