"""Default step sizes of a worker, for the kernels that will probably serve.

The actual kernels are known only with PyTorch loaded. A wrong guess costs speed, never an answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from common.params.config_parts import MIXED, PREFILL_FIRST

# CPU arithmetic is the limit from some dozen tokens on: larger steps are no faster per token, and all prompts of a
# step wait for the last one.
BUDGET_ON_CPU: Final = 512
# On a GPU, real or simulated. Config's own default of 16384 needs memory that may not be there.
BUDGET_ON_GPU: Final = 2048
# A step of prompts has read the weights that answers need too. On a GPU, steps of answers alone are captured graphs.
POLICY_ON_CPU: Final = MIXED
POLICY_ON_GPU: Final = PREFILL_FIRST
# Longest step with prompts while any sequence decodes, seconds. With a model of 0.6B on two cores, a step of 1,024
# prompt tokens took 3 s, and every stream waited for it.
PREFILL_SLICE_S: Final = 0.25
# Device files of the drivers of AMD and NVIDIA.
DEVICES: Final = (Path("/dev/kfd"), Path("/dev/nvidiactl"))


def default_token_budget(kernels: str, *, is_simulated: bool, max_num_seqs: int) -> int:
    """Default token budget of a step.

    Args:
        kernels: as in Config.
        is_simulated: whether a cost model stands for the kernels.
        max_num_seqs: as in Config: each has a token in a step. Where steps are mixed, prompts have theirs beside them.
    """
    if _as_on_gpu(kernels, is_simulated):
        return max(BUDGET_ON_GPU, max_num_seqs)
    return BUDGET_ON_CPU + max_num_seqs


def default_scheduling_policy(kernels: str, *, is_simulated: bool) -> str:
    """Default scheduling policy; arguments as for `default_token_budget`."""
    return POLICY_ON_GPU if _as_on_gpu(kernels, is_simulated) else POLICY_ON_CPU


def _as_on_gpu(kernels: str, is_simulated: bool) -> bool:
    may_be_gpu = kernels in ("triton", "aiter") or (kernels == "auto" and any(path.exists() for path in DEVICES))
    return is_simulated or may_be_gpu
