"""Finds AITER, checks that its version is one that we can call, and calls it.

AITER is never a dependency: ROCm images contain it (docs/reference/rocm.md). It is found without importing it, because
its import fails with unhelpful errors on machines where it cannot run. Its functions are compared with signatures.json
in their sources, and only a version that passes is imported.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog
import torch

from kernels.aiter.signatures import Signatures, Variants, declared, signature

_log = structlog.get_logger(__name__)

# The distribution's name on AMD's index and in its own setup.py.
DISTRIBUTION = "amd-aiter"
# Parameter that AITER's guard puts before those of an operation without tensors.
_DUMMY = "dummy"


class AiterUnavailableError(Exception):
    """AITER cannot be used here; the message is one line that says why, and what to change."""


@dataclass(frozen=True)
class Installation:
    """AITER as found on this machine.

    Attributes:
        source: the folder that holds `aiter/`.
        version: as its distribution says, `unknown` for a source tree.
    """

    source: Path
    version: str


def find() -> Installation:
    """Finds AITER's installation; imports nothing.

    Raises:
        AiterUnavailableError: it is not installed.
    """
    spec = find_spec("aiter")
    if spec is None or not spec.submodule_search_locations:
        raise AiterUnavailableError("AITER is not installed; ROCm images bring it (docs/reference/rocm.md)")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "ops").is_dir():
        raise AiterUnavailableError(
            f"the package `aiter` in {folder} is not AMD's AITER but PyPI's asynchronous iterators of that name: "
            "`pip uninstall aiter`, and take a ROCm image that brings AITER (docs/reference/rocm.md)"
        )
    return Installation(folder.parent, _version())


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def checked(installation: Installation, signatures: Signatures, since: Mapping[str, str]) -> frozenset[str]:
    """The AITER functions that we call, as far as the installation declares them as a supported version does.

    Args:
        installation: see `find`.
        signatures: of the supported versions.
        since: functions that only later versions have -> the first that does.

    Raises:
        AiterUnavailableError: a function is missing, or has other parameters.
    """
    found = declared(installation.source, signatures.functions)
    for function, variants in signatures.functions.items():
        if function not in found and function not in since:
            raise _unsupported(installation.version, f"there is no function {function}", signatures.tags)
        if function in found and found[function] not in variants:
            what = f"function {function} has parameters ({found[function]}){_unlike(found[function], variants)}"
            raise _unsupported(installation.version, what, signatures.tags)
    return frozenset(found)


def _unlike(found: str, variants: Variants) -> str:
    """Difference between parameters and those of the newest known version, in words."""
    last = list(variants)[-1]
    found_names, known = _texts(found), _texts(last)
    more = [name for name in found_names if name not in known]
    fewer = [name for name in known if name not in found_names]
    parts = [f"with {', '.join(more)}"] * bool(more) + [f"without {', '.join(fewer)}"] * bool(fewer)
    return f", unlike {variants[last][-1]} {' and '.join(parts) or 'in another order'}"


def _texts(parameters: str) -> list[str]:
    """Text of each parameter, with its default."""
    every = signature(parameters).parameters.values()
    return [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in every]


def _unsupported(version: str, what: str, tags: Iterable[str]) -> AiterUnavailableError:
    return AiterUnavailableError(f"unsupported aiter version {version}: {what}; supported tags: {', '.join(tags)}")


class AiterLibrary:
    """AITER's imported functions.

    Args:
        installation: see `find`.
        functions: `module:function` of those that may be called and that it has.
        signatures: of the supported versions.

    Attributes:
        version: of the installation.
        functions: as given.

    Raises:
        AiterUnavailableError: it cannot be imported here, or PyTorch has an operation of it with other parameters.
    """

    def __init__(self, installation: Installation, functions: frozenset[str], signatures: Signatures) -> None:
        self.version = installation.version
        self.functions = functions
        self._functions = {name: _imported(name, installation.version) for name in functions}
        self._uncalled = set(functions)
        for name in functions:
            _check_schema(name, installation.version, signatures)

    @classmethod
    def load(cls, since: Mapping[str, str]) -> AiterLibrary:
        """Finds, checks and imports AITER; see `checked`.

        Raises:
            AiterUnavailableError: it cannot be used here.
        """
        installation, signatures = find(), Signatures.load()
        return cls(installation, checked(installation, signatures, since), signatures)

    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the AITER function `module:function`. The name must be a literal, because tests read our calls from the
        source.

        The first call of each is logged, since AITER may compile for minutes then.
        """
        if function not in self._uncalled:
            return self._functions[function](*args, **kwargs)
        self._uncalled.discard(function)
        _log.info("first call of an AITER function", function=function)
        began = time.monotonic()
        result = self._functions[function](*args, **kwargs)
        _log.info("AITER function ready", function=function, seconds=round(time.monotonic() - began, 3))
        return result

    @property
    def called(self) -> frozenset[str]:
        """Functions among `functions` that have been called."""
        return self.functions - self._uncalled

    def enum(self, name: str, member: str) -> Any:
        """A member of an enumeration that AITER's compiled module declares.

        Raises:
            AiterUnavailableError: it does not exist.
        """
        try:
            return importlib.import_module("aiter").__dict__[name].__members__[member]
        except (KeyError, AttributeError):
            raise AiterUnavailableError(f"unsupported aiter version {self.version}: no {name}.{member}") from None


def _imported(function: str, version: str) -> Callable[..., Any]:
    module, name = function.split(":")
    try:
        found: Callable[..., Any] = importlib.import_module(module).__dict__[name]
    except Exception as error:
        # The import may raise anything: a missing ROCm is a RuntimeError, a missing compiler an OSError.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AiterUnavailableError(f"aiter {version} cannot be imported here: {module}: {reason}") from error
    return found


def _check_schema(function: str, version: str, signatures: Signatures) -> None:
    """Compares the declared parameters with PyTorch's registration of a compiled function."""
    module, name = function.split(":")
    if not hasattr(torch.ops.aiter, name):
        return
    found = [argument.name for argument in getattr(torch.ops.aiter, name).default._schema.arguments]
    found = found[1:] if found[:1] == [_DUMMY] else found
    known = [list(signature(text).parameters) for text in signatures.functions[function]]
    if found not in known:
        what = f"operation {module}:{name} has parameters ({', '.join(found)})"
        expected = "; ".join(f"({', '.join(names)})" for names in known)
        raise _unsupported(version, f"{what}, supported: {expected}", signatures.tags)
