"""Elementwise kernels on the rows of Qwen3-8B."""

from __future__ import annotations

import torch

from kernels.triton_backend import elementwise
from tests.kernels.cases import Case

CASES = {
    "silu_and_mul": Case(lambda _: elementwise.silu_and_mul(torch.empty(7, 24_576, dtype=torch.bfloat16))),
}
