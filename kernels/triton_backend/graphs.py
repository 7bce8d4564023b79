"""Steps captured into CUDA and HIP graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.interface import AttentionMetaData
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape, StepPlan, on_device

# Runs before the capture, in which Triton compiles and libraries allocate their buffers.
_WARM_RUNS = 2


class TritonGraphs:
    """StepGraphs for a GPU. With interpreted kernels, a captured step is computed again over the same memory.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Graphs never run at the same time, so they share the memory that they allocate.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def plan(self, cache: DeviceKVCache, num_heads: int, num_seqs: int, most_rows: int, max_seq_len: int) -> StepPlan:
        """A plan that contains only padding."""
        shape = Shape(
            rows=num_seqs * most_rows,
            seqs=num_seqs,
            blocks=-(-max_seq_len // cache.block_size),
            max_seqlen_q=most_rows,
            max_seqlen_k=max_seq_len,
        )
        memory = torch.zeros(sum(shape.sizes), dtype=torch.int32, device=self._device)
        plan = StepPlan.over(memory, shape)
        plan.slot_mapping.fill_(-1)
        return plan

    def write(self, plan: StepPlan, metadata: AttentionMetaData, cache: DeviceKVCache) -> None:
        """Writes a step into a plan. Copies only the step's part of the block tables: entries after a sequence's end
        are not read.

        Raises:
            ValueError: the step does not fit.
        """
        shape = replace(plan.shape, blocks=min(plan.shape.blocks, metadata.block_tables.shape[1]))
        given = on_device(metadata, shape, self._device, cache.block_size)
        head = len(given.memory) - given.block_tables.numel()
        plan.memory[:head].copy_(given.memory[:head])
        plan.block_tables[:, : shape.blocks].copy_(given.block_tables)

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Captures `run` into a graph; see StepGraphs.capture."""
        if self._device.type != "cuda":
            return run
        warm = torch.cuda.Stream(self._device)
        warm.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(warm):
            for _ in range(_WARM_RUNS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
