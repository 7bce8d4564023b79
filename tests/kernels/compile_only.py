"""Compiles what our launchers launch for a target: `python -m tests.kernels.compile_only gfx942 invariant elementwise`.

The launchers run as in production, on tensors of the CPU; Triton specialises each kernel as it would and compiles it,
and nothing is launched. So there are no signatures written by hand that could go stale.
The second argument says whose tiles: `invariant` or `tuned`, of workers that are batch-invariant or not, or `agreeing`,
of batch-invariant workers on a GPU whose tiles agree (kernels/triton_backend/agreement.py). Prints a line of JSON for
each kernel: case, kernel, shared bytes, spilled registers, whether it uses matrix instructions.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.triton_backend.target import TARGETS, Settings

GPU_TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel."""

    case: str
    kernel: str
    shared: int
    spills: int
    uses_matrix: bool


class _NoDevice:
    """A driver that knows only its target."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda


class _Agrees:
    """Agreement of a GPU whose tiles all give the same bits."""

    def of_products(self, dtype: torch.dtype) -> bool:
        return True

    def of_attention(self, dtype: torch.dtype, head_dim: int) -> bool:
        return True


def compile_area(target: str, area: str, tiles: str) -> list[Compiled]:
    """Compiles every case of `tests.kernels.cases.AREA`."""
    triton.runtime.driver.set_active(_NoDevice(GPU_TARGETS[target]))
    settings = Settings(TARGETS[target], tiles != "tuned", _Agrees() if tiles == "agreeing" else None)
    results: dict[Any, tuple[str, Any]] = {}
    case = ""
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        results.setdefault((case, kernel.hash), (f"{case}/{self.__name__}", kernel))
        return kernel

    JITFunction.run = compile_instead
    try:
        for name, made in importlib.import_module(f"tests.kernels.cases.{area}").CASES.items():
            case = name
            made.run(settings)
    finally:
        JITFunction.run = run
    return [_compiled(name, kernel) for name, kernel in results.values()]


def _compiled(name: str, kernel: Any) -> Compiled:
    case, _, function = name.rpartition("/")
    text = kernel.asm["amdgcn"] if "amdgcn" in kernel.asm else kernel.asm["ptx"]
    spills = _amd_spills(text) if "amdgcn" in kernel.asm else _nvidia_spills(kernel.asm["cubin"])
    matrix = bool(re.search(r"v_mfma|mma\.sync|wgmma", text))
    return Compiled(case, function, kernel.metadata.shared, spills, matrix)


def _amd_spills(text: str) -> int:
    counts = re.findall(r"\.(?:v|s)gpr_spill_count: +(\d+)", text)
    return sum(map(int, counts))


def _nvidia_spills(cubin: bytes) -> int:
    """Bytes of local memory, which holds spilled registers, in registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.findall(r"STACK:(\d+)", text)[0]) // 4


if __name__ == "__main__":
    target, tiles, *areas = sys.argv[1:]
    for area in areas:
        for found in compile_area(target, area, tiles):
            print(json.dumps({"area": area, **asdict(found)}))
