"""The size check finds files, functions and classes that are too large, and counts no prose."""

from __future__ import annotations

from pathlib import Path

from scripts.check_sizes import problems


def found(source: str, path: str = "router/a.py") -> list[str]:
    return list(problems(Path(path), source))


def test_lines_of_code_count_and_prose_does_not() -> None:
    prose = '"""Says\n\nmuch."""\n\n# And more.\n\n\ndef f() -> None:\n    """Does\n    nothing."""\n    pass\n'
    assert found(prose + "x = 1\n" * 498) == []
    assert found(prose + "x = (\n    1\n)\n" * 167) == [
        "router/a.py:1: 503 lines of code; cut it along its subjects, into files of at most 500"
    ]


def test_size_check_skips_properties_and_special_methods() -> None:
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(25))
    others = (
        "    def __init__(self): ...\n    @property\n    def p(self): ...\n    @p.setter\n    def p(self, p): ...\n"
    )
    assert found("class C:\n" + methods + others) == []
    [line] = found("class C:\n" + methods + others + "    def more(self): ...\n")
    assert "class C has 26 methods" in line
    assert found("class C:\n" + methods * 2, "tests/a.py") == []


def test_long_functions_are_named_unless_triton_compiles_them() -> None:
    body = "def f():\n" + "    x = 1\n" * 60
    [line] = found(body)
    assert "f has 61 lines of code" in line
    assert found("@triton.jit\n" + body) == []
    assert found("def f():\n" + '    """A\n    B."""\n' + "    x = 1\n" * 59) == []
