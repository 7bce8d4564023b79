"""The choice of an instruction set: the best one that this machine has and that computes the same as the plain one."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from ctypes import CDLL
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs

from kernels.cpu import build, instruction_sets, library, linear, self_check
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import Ability
from kernels.select import select_backend
from tests.native import select_or_skip


@pytest.fixture(autouse=True)
def base_afterwards(native: CDLL) -> Iterator[None]:
    """Whatever a test selects, the base set serves the next one."""
    yield
    library.select(native)


@dataclass
class Machine:
    """The library on a machine with other abilities, where a stand-in runs under the names of better sets.

    Attributes:
        spoiled: name of a function, and which of its arguments is the output that the better sets get wrong.
    """

    native: CDLL
    names: dict[str, Ability]
    spoiled: tuple[str, int] | None = None
    _selected: list[str] = field(default_factory=lambda: [library.PLAIN])

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.native, name)
        if self.spoiled is None or name != self.spoiled[0] or self._selected[-1] == library.PLAIN:
            return function
        output = self.spoiled[1]

        def spoil(*arguments: Any) -> Any:
            result = function(*arguments)
            ctypes.c_uint8.from_address(arguments[output]).value ^= 0x7E
            ctypes.c_uint8.from_address(arguments[output] + 1).value ^= 0x7E
            return result

        return spoil

    def fissile_instruction_set(self, number: int, ability: Any) -> bytes | None:
        if number == len(self.names):
            return None
        name = list(self.names)[number]
        ctypes.c_int64.from_address(ctypes.addressof(ability._obj)).value = self.names[name]
        return name.encode()

    def fissile_select(self, name: bytes) -> int:
        self._selected.append(name.decode())
        known = {library.PLAIN, library.AVX2}
        return int(self.native.fissile_select(name if name.decode() in known else b"avx2x16"))


def machine(native: CDLL, spoiled: tuple[str, int] | None = None, **names: Ability) -> CDLL:
    select_or_skip(native, "avx2x16")
    library.select(native)
    return cast(CDLL, Machine(native, {**names, "avx2": Ability.USABLE, "plain": Ability.USABLE}, spoiled))


def test_best_usable_instruction_set_serves(native: CDLL) -> None:
    here = machine(native, amx=Ability.ABSENT, avx512bf16=Ability.USABLE, avx512=Ability.USABLE)
    assert instruction_sets.take(here) == "avx512bf16"


def test_emulated_instruction_set_serves_only_on_request(native: CDLL) -> None:
    here = machine(native, avx2x16=Ability.TESTED)
    assert instruction_sets.take(here) == "avx2"
    assert instruction_sets.take(here, "avx2x16") == "avx2x16"


def test_denied_instruction_set_is_logged_and_skipped(native: CDLL) -> None:
    here = machine(native, amx=Ability.DENIED, avx512=Ability.USABLE)
    with capture_logs() as logs:
        assert instruction_sets.take(here) == "avx512"
    message = "this processor has amx, but the operating system does not let it be used"
    assert [line["reason"] for line in logs] == [message]
    with pytest.raises(library.LibraryUnavailableError, match=message):
        instruction_sets.take(here, "amx")


# Functions of the library, the argument that is the output, counted from the last, and the check that finds them wrong.
SPOILED = [
    ("fissile_linear", -2, "linear 1101 to 150"),
    ("fissile_linear_argmax", -1, "argmax"),
    ("fissile_norm", -2, "add_rms_norm"),
    ("fissile_norm", -1, "add_rms_norm"),
    ("fissile_rope", -1, "rope"),
    ("fissile_silu_and_mul", -1, "silu_and_mul"),
    ("fissile_gelu_and_mul", -1, "gelu_and_mul"),
    ("fissile_softcap", -1, "softcap"),
    ("fissile_moe", -1, "experts"),
    ("fissile_write_kv", -2, "attention"),
    ("fissile_write_kv", -1, "attention"),
    ("fissile_attention", -1, "attention"),
    ("fissile_sample", -10, "sample"),
]


@pytest.mark.parametrize(("function", "output", "check"), SPOILED)
def test_wrong_kernel_selects_next_instruction_set(native: CDLL, function: str, output: int, check: str) -> None:
    here = machine(native, (function, output), avx512=Ability.USABLE)
    with capture_logs() as logs:
        assert instruction_sets.take(here) == "avx2"
    (line,) = logs
    assert line["reason"].startswith(f"the avx512 kernels failed their check: {check} ")
    with pytest.raises(library.LibraryUnavailableError, match="the avx512 kernels failed their check"):
        instruction_sets.take(here, "avx512")
    with capture_logs() as logs:
        assert instruction_sets.take(here) == "avx2"
    assert logs == [], "checked once"


def test_dependent_rows_are_found(native: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is right, but whose last bit depends on the number of rows."""
    product = linear.linear

    def dependent(library: CDLL, x: torch.Tensor, packed: Any) -> torch.Tensor:
        out = product(library, x, packed)
        return out if len(x) > 6 else torch.nextafter(out, out.new_tensor(torch.inf))

    monkeypatch.setattr(linear, "linear", dependent)
    name = library.base_set(native)
    assert self_check.fault(native, name) == (
        "linear 1101 to 150 in float32 gives a row other bits among 1 rows than among 40"
    )


def test_every_entry_of_the_table_is_checked() -> None:
    header = (build.SOURCES / "kernels.hpp").read_text()
    table = header[header.index("struct Kernels {") :]
    entries = set(re.findall(r"\(\*(\w+)\)\(", table))
    assert "linear" in entries
    assert entries == {entry for check in self_check.checks(torch.float32) for entry in check.entries}


def test_usable_instruction_sets_pass_self_check(native: CDLL) -> None:
    for name, ability in library.abilities(native).items():
        if ability == Ability.USABLE and name != library.PLAIN:
            assert self_check.fault(native, name) is None, name


def test_backend_description_names_instruction_set(native: CDLL) -> None:
    plain = CpuBackend("plain")
    assert plain.description == "cpu:plain"
    assert "plain" in plain.numerics
    before = plain.numerics
    del plain
    assert before != CpuBackend().numerics or library.base_set(native) == library.PLAIN


def test_backend_keeps_its_instruction_set(native: CDLL) -> None:
    """A second engine with another one would change the bits of the first one's answers."""
    select_or_skip(native, "avx2")
    first = CpuBackend("plain")
    message = "this process computes by plain kernels for another engine: avx2 would change its answers; take plain"
    with pytest.raises(library.LibraryUnavailableError, match=message):
        CpuBackend("avx2")
    with pytest.raises(ValueError, match=message):
        select_backend("cpu", "avx2")
    beside = [CpuBackend("plain"), CpuBackend()]
    assert {each.instruction_set for each in beside} == {"plain"}
    del first
    with pytest.raises(library.LibraryUnavailableError, match=message):
        CpuBackend("avx2")
    beside.clear()
    assert CpuBackend("avx2").instruction_set == "avx2"


def test_cpu_isa_option_is_refused_with_other_kernels(native: CDLL) -> None:
    assert select_backend("auto", "plain").description == "cpu:plain"
    with pytest.raises(ValueError, match="cpu_isa 'sse' is not known; choose one of: auto, amx, avx512bf16, avx512"):
        select_backend("cpu", "sse")
    with pytest.raises(ValueError, match="cpu_isa 'avx2': of native kernels only"):
        select_backend("torch", "avx2")
    absent = [name for name, ability in library.abilities(native).items() if ability == Ability.ABSENT]
    if absent:
        with pytest.raises(ValueError, match=f"kernels 'cpu': this machine cannot run {absent[0]} kernels"):
            select_backend("cpu", absent[0])
