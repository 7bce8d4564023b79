"""The compiled kernels, loaded by ctypes. Calls let go of the interpreter's lock while they run."""

from __future__ import annotations

import ctypes
import enum
import functools
import threading
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from kernels.cpu import build

_INT = ctypes.c_int64
_FLOAT = ctypes.c_float
_POINTER = ctypes.c_void_p
# Arguments of each function that kernels/cpu/native exports. Those that return something return 0, or 1 without memory.
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "fissile_instruction_set": (ctypes.c_char_p, (_INT, _POINTER)),
    "fissile_select": (ctypes.c_int, (ctypes.c_char_p,)),
    "fissile_set_threads": (None, (_INT,)),
    "fissile_threads": (_INT, ()),
    "fissile_packed_bytes": (_INT, (_INT, _INT, _INT)),
    "fissile_pack_linear": (None, (_INT, _POINTER, _INT, _INT, _INT, _POINTER)),
    "fissile_pack_codes": (None, (_INT, *[_POINTER] * 4, _INT, _INT, _INT, _POINTER)),
    "fissile_nearest_codes": (None, (_POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER)),
    "fissile_linear": (
        ctypes.c_int,
        (_INT, _POINTER, *[_INT] * 5, _POINTER, _POINTER, _POINTER, _POINTER, _INT),
    ),
    "fissile_gated_linear": (
        ctypes.c_int,
        (_INT, _POINTER, *[_INT] * 6, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT),
    ),
    "fissile_head_linear": (ctypes.c_int, (_INT, _POINTER, *[_INT] * 6, _POINTER, _POINTER)),
    "fissile_moe": (
        ctypes.c_int,
        (
            *(_INT, _POINTER, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _INT, _INT),
            *((_INT, _POINTER, _POINTER, _POINTER) * 2),
            *(_FLOAT, _FLOAT, _POINTER),
        ),
    ),
    "fissile_norm": (
        None,
        (_INT, _POINTER, *[_INT] * 5, _POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER),
    ),
    "fissile_rope": (None, (_INT, _POINTER, *[_INT] * 5, _POINTER, _POINTER, _INT, _POINTER)),
    "fissile_silu_and_mul": (None, (_INT, _POINTER, _INT, _INT, _INT, _POINTER)),
    "fissile_gelu_and_mul": (None, (_INT, _POINTER, _INT, _INT, _INT, _POINTER)),
    "fissile_softcap": (None, (_POINTER, _INT, _INT, _INT, _FLOAT, _POINTER)),
    "fissile_write_kv": (
        None,
        (_INT, _INT, _POINTER, _INT, _INT, _POINTER, *[_INT] * 6, _POINTER, _POINTER, _POINTER),
    ),
    "fissile_linear_argmax": (
        ctypes.c_int,
        (_INT, _POINTER, *[_INT] * 5, _POINTER, _POINTER, _POINTER, _POINTER),
    ),
    "fissile_decoder": (ctypes.c_int, (_POINTER, _POINTER)),
    "fissile_drafts": (ctypes.c_int, (_POINTER, _POINTER)),
    "fissile_sample": (None, (_POINTER, _INT, _INT, _INT, *[_POINTER] * 16, _INT)),
    "fissile_logprobs": (None, (_POINTER, _INT, _INT, _INT, _POINTER, _INT, *[_POINTER] * 5)),
    "fissile_attention": (
        ctypes.c_int,
        (
            *(_INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER),
            *(_INT, _INT, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER),
            *(_FLOAT, _FLOAT, _INT, _POINTER, _INT, _POINTER),
        ),
    ),
    "fissile_latent_attention": (
        ctypes.c_int,
        (
            *(_INT, _INT, _POINTER, _INT, _INT, _POINTER, *[_INT] * 4, _POINTER, _INT, _INT, _POINTER, _POINTER),
            *(_FLOAT, _POINTER, _INT, _POINTER),
        ),
    ),
    "fissile_select_tokens": (
        ctypes.c_int,
        (
            *(_INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER, *[_INT] * 3, _POINTER, _INT, _INT),
            *(_POINTER, _POINTER, _INT, _POINTER),
        ),
    ),
    "fissile_route": (ctypes.c_int, (_POINTER, *[_INT] * 3, _POINTER, *[_INT] * 6, _FLOAT, _POINTER, _POINTER)),
}
# Codes of kernels/cpu/native/kernels.hpp; other dtypes are PyTorch's.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Formats of packed weights other than codes.
PACKED_DTYPES = {**DTYPES, torch.int8: 2}
# Weights in codes: the first format, and its parts (CodeLayout in kernels.hpp); weights in several such formats.
CODES = 256
CODE_BITS = {4: 0, 5: 1, 6: 2, 8: 3}
CODE_SCALES = {torch.float32: 0, torch.bfloat16: 1 << 2, torch.float16: 2 << 2, torch.int8: 3 << 2}
CODE_OFFSETS = 1 << 4
CODE_GROUPS = {16: 0, 32: 1 << 5, 64: 2 << 5, 128: 3 << 5}
JOINED = 512
# Dtypes of a KV cache; `DTYPES` are those of models.
KV_DTYPES = {**DTYPES, torch.float16: 3, torch.float8_e4m3fn: 4}
# Columns of a panel of packed weights.
PANEL = 16
# Bytes that packed weights are aligned to.
CACHE_LINE = 64
# The instruction set of any processor: slow, for tests and on request.
PLAIN = "plain"
AVX2 = "avx2"


class LibraryUnavailableError(Exception):
    """The native kernels cannot be used on this machine; the message is one line."""


# Without the lock a second load could select `base_set` again, although a back end computes by another set.
_loading = threading.Lock()


def load(path: Path = build.LIBRARY) -> ctypes.CDLL:
    """Loads the library, once per process, with the instruction set `base_set`.

    Raises:
        LibraryUnavailableError: it was not built, or from other sources, or does not load.
    """
    with _loading:
        return _load(path)


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise LibraryUnavailableError(
            "the CPU kernels were not compiled (no C++ compiler when Fissile was installed); once there is one, run: "
            + build.COMMAND
        )
    if path == build.LIBRARY and not build.is_current():
        raise LibraryUnavailableError(
            f"the CPU kernels were compiled from other sources than those that are here; run: {build.COMMAND}"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryUnavailableError(f"the CPU kernels cannot be loaded: {error}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    select(library)
    return library


class Ability(enum.IntEnum):
    """Ability of this machine to run an instruction set (kernels/cpu/native/dispatch.hpp).

    ABSENT: it cannot; DENIED: the processor could, but the operating system does not allow it; TESTED: it runs, and is
    used on request only; USABLE: it runs.
    """

    ABSENT = 0
    DENIED = 1
    TESTED = 2
    USABLE = 3


def abilities(library: ctypes.CDLL) -> dict[str, Ability]:
    """The instruction sets that the library knows, the best first."""
    found: dict[str, Ability] = {}
    ability = _INT()
    while (name := library.fissile_instruction_set(len(found), ctypes.byref(ability))) is not None:
        found[name.decode()] = Ability(ability.value)
    return found


def select(library: ctypes.CDLL, instruction_set: str | None = None) -> str:
    """Selects an instruction set for all further calls, by name or `base_set`, and returns its name.

    Raises:
        LibraryUnavailableError: this machine cannot run it.
    """
    chosen = base_set(library) if instruction_set is None else instruction_set
    if library.fissile_select(chosen.encode()):
        raise LibraryUnavailableError(f"this machine cannot run {chosen} kernels")
    return chosen


def base_set(library: ctypes.CDLL) -> str:
    """Best instruction set that needs no self-check: AVX2, or else the one that every processor has."""
    return AVX2 if abilities(library).get(AVX2) == Ability.USABLE else PLAIN


def address(values: npt.NDArray[Any]) -> int:
    """Address of contiguous numbers.

    Raises:
        ValueError: they have gaps, which the kernels would not see.
    """
    if not values.flags.c_contiguous:
        raise ValueError("the CPU kernels need contiguous numbers")
    return values.ctypes.data


def check(failed: int) -> None:
    """Raises an exception for a failed call of the library.

    Raises:
        MemoryError: the kernel's own memory could not be had.
    """
    if failed:
        raise MemoryError("the CPU kernels have no memory left")
