"""Every call of AITER that our source makes, bound against every version that we support.

The calls are read from the source, so a new one is in the test as soon as it is written.
"""

from __future__ import annotations

import ast
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from kernels.aiter import signatures
from kernels.aiter.dispatch import OPERATIONS, SINCE
from kernels.aiter.signatures import CALLERS, LibraryCall, Signatures, calls, own_calls, release
from tests.kernels.aiter.fake_aiter import lay

ROOT = Path(__file__).resolve().parents[3]
SIGNATURES = Signatures.load()
SUPPORTED = ("0.1.13", "0.1.16", "0.1.18", "0.1.20.post1")


def problems(made: list[LibraryCall], tag: str) -> list[str]:
    """What is wrong with calls under one version."""
    found = []
    for call in made:
        parameters = SIGNATURES.parameters(call.function, tag)
        if parameters is not None:
            found += [problem for problem in [call.problem(parameters)] if problem]
        elif release(tag) >= release(SINCE.get(call.function, "0")):
            found.append(f"line {call.line}: {tag} has no {call.function}")
    return found


def test_signatures_cover_supported_versions() -> None:
    assert SIGNATURES.tags == SUPPORTED


@pytest.mark.parametrize("tag", SUPPORTED)
def test_all_calls_bind(tag: str) -> None:
    assert len(own_calls()) >= len(OPERATIONS)
    assert problems(own_calls(), tag) == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("self._aiter.call('aiter.ops.rmsnorm:rmsnorm2d_fwd', x, weight)", "missing a required argument: 'epsilon'"),
        ("a.call('aiter.ops.rmsnorm:rmsnorm2d_fwd', x, weight, eps, bias=b)", "unexpected keyword argument 'bias'"),
        ("a.call('aiter.ops.rmsnorm:rmsnorm2d_fwd', 1, 2, 3, 4, 5)", "too many positional arguments"),
        ("a.call('aiter.ops.activation:silu_and_mul', out, x, limit=1.0)", "unexpected keyword argument 'limit'"),
        ("a.call('aiter.ops.moved:rmsnorm2d_fwd', x, weight, eps)", "has no aiter.ops.moved:rmsnorm2d_fwd"),
    ],
)
def test_wrong_call_is_found(call: str, expected: str) -> None:
    assert expected in "\n".join(problems(calls(f"def f(self):\n    return {call}\n"), "0.1.13"))


@pytest.mark.parametrize(
    "call", ["a.call(name, x)", "a.call('rmsnorm', x)", "a.call('m:f', *x)", "a.call('m:f', **x)", "a.call()"]
)
def test_unreadable_call_is_refused(call: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        calls(call)


def test_only_later_functions_are_guarded() -> None:
    missing = {name for name in SIGNATURES.functions if SIGNATURES.tags_of(name) != set(SUPPORTED)}
    assert missing == set(SINCE)
    for name, first in SINCE.items():
        having = {tag for tag in SUPPORTED if release(tag) >= release(first)}
        assert SIGNATURES.tags_of(name) == having
        # An operation without them is not AITER's.
        assert any(name in operation.functions for operation in OPERATIONS.values())


def test_operations_name_their_functions() -> None:
    called = {call.function for call in own_calls()}
    assert called == {name for operation in OPERATIONS.values() for name in operation.functions}
    assert called == set(SIGNATURES.functions)


def test_documentation_names_versions_and_functions() -> None:
    text = (ROOT / "docs/reference/rocm.md").read_text("utf-8")
    assert f"The versions {', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]} are supported." in text
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.MULTILINE))
    for name, operation in OPERATIONS.items():
        own = {function.rpartition(":")[2] for function in operation.functions} - {"shuffle_weight"}
        assert set(re.findall(r"`(\w+)`", rows[name])) == own


def test_only_callers_import_or_call_aiter() -> None:
    for path in [*ROOT.glob("kernels/**/*.py"), *ROOT.glob("worker/**/*.py")]:
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "aiter" for name in names), path
        if path not in CALLERS:
            assert not any(f".call({quote}aiter" in source for quote in "\"'"), path


def test_leading_arguments_are_equal_in_all_versions() -> None:
    """What goes by position has one name in all versions, so its meaning has not moved."""
    for call in own_calls():
        texts = [SIGNATURES.parameters(call.function, tag) for tag in SUPPORTED]
        leading = [list(signatures.signature(text).parameters)[: call.positional] for text in texts if text]
        assert all(a == b for a, b in pairwise(leading)), call


def test_signatures_are_made_from_sources(tmp_path: Path) -> None:
    module = tmp_path / "aiter/ops/rmsnorm.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "@compile_ops('module', fc_name='f')\n"
        "def rmsnorm2d_fwd(input: Tensor, /, weight: Tensor, *, epsilon: float = 1e-6, **more: int) -> Tensor: ...\n"
        "def other(): ...\n",
        "utf-8",
    )
    names = ["aiter.ops.rmsnorm:rmsnorm2d_fwd", "aiter.ops.missing:f"]
    found = signatures.declared(tmp_path, names)
    assert found == {names[0]: "input, /, weight, *, epsilon=1e-06, **more"}
    known = signatures.with_version(SIGNATURES, "0.1.19", found, [names[0]])
    assert known.tags == ("0.1.13", "0.1.16", "0.1.18", "0.1.19", "0.1.20.post1")
    assert known.parameters(names[0], "0.1.19") == found[names[0]]
    assert known.parameters(names[0], "0.1.18") == SIGNATURES.parameters(names[0], "0.1.18")
    assert list(known.functions) == [names[0]]
    known.save(tmp_path / "signatures.json")
    assert Signatures.load(tmp_path / "signatures.json") == known


def test_command_writes_signatures_of_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, "0.1.13")
    file = tmp_path / "signatures.json"
    saved: list[Signatures] = []

    def save(self: Signatures) -> None:
        saved.append(self)

    monkeypatch.setattr(Signatures, "save", save)
    monkeypatch.setenv("AITER_SRC", str(tmp_path))
    assert signatures.main(["0.1.14"]) == signatures.main([str(tmp_path), "0.1.14"]) == 0
    full = {name: [{"params": "a", "tags": ["v0.1.13"]}] for name in SIGNATURES.functions}
    file.write_text(json.dumps(full), "utf-8")
    assert signatures.main([str(file)]) == 0
    for made in saved[:2]:
        assert made.tags == ("0.1.13", "0.1.14", *SUPPORTED[1:])
        assert {made.parameters(name, "0.1.14") for name in SINCE} == {None}
        assert all(made.parameters(name, "0.1.14") == SIGNATURES.parameters(name, "0.1.13") for name in made.functions)
    assert saved[2] == Signatures(("0.1.13",), {name: {"a": ("0.1.13",)} for name in sorted(full)})
    for wrong in ([], ["newest"], [str(tmp_path / "nothing"), "0.1.14"]):
        assert signatures.main(wrong) == 2
    assert len(saved) == 3


def test_signatures_are_made_from_full_list() -> None:
    full = {
        "m:f": [{"params": "a,b = 1", "tags": ["v0.1.9", "v0.1.10"]}, {"params": "a", "tags": ["v0.1.8"]}],
        "m:g": [{"params": "", "tags": ["v0.1.10"]}],
    }
    made = signatures.from_full(full, ["m:f"])
    assert made == Signatures(("0.1.8", "0.1.9", "0.1.10"), {"m:f": {"a, b=1": ("0.1.9", "0.1.10"), "a": ("0.1.8",)}})
