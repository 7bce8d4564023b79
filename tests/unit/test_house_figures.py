"""The figures of the source tree count correctly."""

from __future__ import annotations

from typing import Any

from scripts.house_figures import GOALS, LIMITS, figures

CLASS = "class {name}:\n    def f(self): ...\n"
LONG = "\n" * 60


def found(files: dict[str, str]) -> dict[str, Any]:
    """Figures that differ from those of an empty tree."""
    plain = figures({"router/a.py": '"""A file."""' + LONG})
    return {name: value for name, value in figures(files).items() if value != plain[name]}


def test_circles_and_upward_imports_are_named() -> None:
    files = {"common/limits.py": "import common.errors" + LONG, "common/errors.py": "import common.limits" + LONG}
    shown = found({**files, "common/cli/main.py": "import common.errors" + LONG})
    assert shown.pop("lines of common") == 180
    assert shown == {
        "import circles": ["common/errors.py common/limits.py"],
        "upward imports": ["common/limits.py: imports common/errors.py, which is above it in ORDER"],
    }


def test_file_of_common_needs_two_users_or_the_command_line() -> None:
    files = {f"common/{name}.py": LONG for name in ("both", "one", "cmd", "none")}
    files["common/program.py"] = 'if __name__ == "__main__":\n    main()' + LONG
    files["router/a.py"] = "import common.both, common.one" + LONG
    files["worker/a.py"] = "if TYPE_CHECKING:\n    import common.both" + LONG
    files["common/cli/main.py"] = "def f():\n    import common.cmd" + LONG
    assert figures(files)["files of common with one user"] == ["common/none.py (no user)", "common/one.py (router)"]


def test_classes_are_counted_by_name_and_size() -> None:
    properties = "".join(f"    @property\n    def p{i}(self): ...\n" for i in range(26))
    files = {
        "router/a.py": CLASS.format(name="Landing") + CLASS.format(name="Same") + "class Big:\n" + properties,
        "worker/a.py": CLASS.format(name="Same") + "class Long:\n    x = 1\n" + "\n" * 348 + "    y = 1\n",
        "worker/model/a.py": CLASS.format(name="Embedded") + LONG,
        "kernels/a.py": CLASS.format(name="PrefixSetting"),
    }
    shown = found(files)
    assert shown["class names twice"] == ["Same (router/a.py, worker/a.py)"]
    assert shown["classes named by participles"] == ["router/a.py: Landing"]
    assert shown["large classes"] == [
        "router/a.py: Big (26 methods, 53 lines)",
        "worker/a.py: Long (0 methods, 351 lines)",
    ]
    assert shown["short files"] == ["kernels/a.py", "router/a.py"]


def test_each_limit_is_above_the_goal_of_its_figure() -> None:
    assert figures({}).keys() == GOALS.keys()
    assert all(limit > GOALS[name] for name, limit in LIMITS.items())
