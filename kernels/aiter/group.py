"""Sums over tensor-parallel ranks by AITER."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from kernels.aiter.library import AiterLibrary
from kernels.interface import Ranks


class AiterGroup:
    """Sums over the GPUs of one machine by AITER, without RCCL, for tensors up to a size.

    The size is AITER's, since 0.1.18 $AITER_CUSTOM_AR_MAX_SIZE bytes.

    It makes PyTorch's default process group, which AITER takes as it finds it, over a store that the ranks have: so
    there is no port to agree on. AITER asks for a TCPStore.

    Args:
        library: AITER.
        ranks: of which AITER takes that rank i is on GPU i.
        device: of this rank.
    """

    def __init__(self, library: AiterLibrary, ranks: Ranks, device: torch.device) -> None:
        self._aiter = library
        self._device = device
        process_groups = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        cast(Any, torch.distributed).init_process_group(
            process_groups, store=ranks.open_store(), rank=ranks.rank, world_size=ranks.size
        )
        library.call("aiter.ops.communication:init_dist_env", ranks.size, ranks.rank, local_rank=ranks.rank)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`; see RankSums.all_reduce."""
        if not x.numel():
            return x
        summed: torch.Tensor = self._aiter.call(
            "aiter.dist.communication_op:tensor_model_parallel_all_reduce", x.contiguous()
        )
        return summed

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context manager for the capture of steps. At its end the ranks exchange the addresses of the captured sums'
        tensors."""
        with self._aiter.call("aiter.dist.parallel_state:graph_capture"):
            yield
        # The inputs of steps were written on AITER's stream, and are written on another one from now on.
        self.synchronize()

    def synchronize(self) -> None:
        """Waits until this rank's device has computed all sums that were started."""
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Closes the process group and frees this rank's buffers, which kernels of the other GPUs read."""
        self._aiter.call("aiter.ops.communication:destroy_dist_env")
