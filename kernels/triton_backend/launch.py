"""Runs a Triton kernel: on a GPU directly; in the interpreter on float32 copies of tensors that it cannot compute with.

The interpreter computes bfloat16 on bit patterns, truncates when it stores narrow numbers and lacks some FP8 dtypes.
Tensors of these dtypes are widened before the kernel, and rounded by PyTorch after it. Roundings inside the kernel are
therefore missing there: such tests need a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernels import float8
from kernels.triton_backend.target import interpreted

_WIDENED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
# How a compiler is to treat a kernel; the interpreter does not know them all.
_COMPILER_OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "enable_fp_fusion")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Runs `kernel` on every program of `grid`; a grid with a 0 in it runs none.

    Args:
        kernel: a function decorated by `triton.jit`.
        grid: programs in up to 3 dimensions.
        args: tensors and numbers, in the kernel's order.
        constants: its `tl.constexpr` arguments and the compiler's options by name.
    """
    if 0 in grid:
        return
    if not interpreted():
        kernel[grid](*args, **constants)
        return
    constants = {name: value for name, value in constants.items() if name not in _COMPILER_OPTIONS}
    with _widened(args) as wide:
        kernel[grid](*wide, **constants)


@contextmanager
def _widened(args: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Yields the arguments with narrow tensors as float32 of the same strides; written tensors are copied back at the
    end.

    Views of one memory stay views of one memory.
    """
    bases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    yield [_wide(arg, bases) for arg in args]
    for narrow, wide in bases.values():
        # By bits, so that a zero written over one of the other sign comes back.
        changed = wide.view(torch.int32) != narrow.float().view(torch.int32)
        float8.raw(narrow)[changed] = float8.raw(wide[changed].to(narrow.dtype))


def _wide(arg: Any, bases: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if not isinstance(arg, torch.Tensor) or arg.dtype not in _WIDENED:
        return arg
    storage = arg.untyped_storage()
    if storage.data_ptr() not in bases:
        narrow = torch.empty(0, dtype=arg.dtype).set_(storage)
        bases[storage.data_ptr()] = (narrow, narrow.float())
    wide = bases[storage.data_ptr()][1]
    return wide.as_strided(arg.shape, arg.stride(), arg.storage_offset())
