"""How many tokens a worker computes in a step when nobody says."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# Arithmetic is a CPU's limit from some dozen tokens on: larger steps are no quicker per token, and all prompts of a
# step wait for the last one.
ON_CPU: Final = 512
# On a GPU, real or simulated. Config has 16384, for who knows that the memory for such a step is there.
ON_GPU: Final = 2048
# What the drivers of AMD and of NVIDIA make.
DEVICES: Final = (Path("/dev/kfd"), Path("/dev/nvidiactl"))


def default_token_budget(kernels: str, *, is_simulated: bool, max_num_seqs: int) -> int:
    """For the kernels that will probably serve; which ones do is known only with PyTorch loaded.

    Args:
        kernels: as in Config.
        max_num_seqs: as in Config: each has at least one token in a step.
    """
    may_be_gpu = kernels in ("triton", "aiter") or (kernels == "auto" and any(path.exists() for path in DEVICES))
    return max(ON_GPU if is_simulated or may_be_gpu else ON_CPU, max_num_seqs)
