"""Links, paths and names in the documentation lead somewhere."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

from common.params.options.table import OPTIONS
from scripts import contract_table, option_reference

ROOT = Path(__file__).parents[2]


def _tracked() -> list[str]:
    return subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\0"
    )


PAGES = [ROOT / name for name in sorted(_tracked()) if name.endswith(".md")]
MKDOCS = ROOT / ".venv-docs" / "bin" / "python"
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:protos|router|worker|common|kernels|tests|deploy|scripts|docs)/[\w./-]+)`")


def _prose(page: Path) -> str:
    return _CODE_BLOCK.sub("", page.read_text())


def _anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _is_there(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in _anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files that exist, and anchors of headings that exist."""
    links = [link for link in _LINK.findall(_prose(page)) if "://" not in link]
    assert [link for link in links if not _is_there(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    """A path in backticks exists, from the top of the repository."""
    assert [path for path in _PATH.findall(_prose(page)) if not (ROOT / path).exists()] == []


_IN_FILE = re.compile(r"((?:`[A-Za-z_][\w.]*`(?:, | and |, and )?)+) (?:in|of) `([\w/]+\.(?:py|proto|cpp|hpp|sh))`")
_IN_BRACKETS = re.compile(r"`([\w/]+\.(?:py|proto|cpp|hpp|sh))` \(((?:`[A-Za-z_][\w.]*`(?:, | and )?)+)\)")
_SOURCES = (".py", ".proto", ".cpp", ".hpp", ".sh", ".toml", ".json", ".yaml")


def _named(text: str) -> list[tuple[str, str]]:
    """Names with their file in prose: `name` in `file`, or `file` (`name`)."""
    found = [(names, file) for names, file in _IN_FILE.findall(text)]
    found += [(names, file) for file, names in _IN_BRACKETS.findall(text)]
    return [(name, file) for names, file in found for name in re.findall(r"`([\w.]+)`", names)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_names_are_in_named_files(page: Path) -> None:
    missing = []
    for name, file in _named(_prose(page)):
        source = (ROOT / file).read_text()
        if not all(re.search(rf"\b{part}\b", source) for part in name.split(".")):
            missing.append(f"{name} in {file}")
    assert missing == []


@functools.cache
def _words() -> frozenset[str]:
    """Every word of our sources, and the names of our files."""
    found = set[str]()
    for name in _tracked():
        path = ROOT / name
        found.update(re.findall(r"\w+", name))
        if path.suffix in _SOURCES and path.is_file():
            found.update(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(found)


# The options page is generated from the options table, which has the variables.
NAMING_PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "options.md"]


@pytest.mark.parametrize("page", NAMING_PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    """A name in backticks that looks like code occurs in our sources."""
    # Names of other projects, such as the C library and gRPC, and one that the page calls absent.
    others = {
        *(
            "M_ARENA_MAX",
            "M_MMAP_THRESHOLD",
            "M_TRIM_THRESHOLD",
            "arch_prctl",
            "MAX_JOBS",
            "GPU_ARCHS",
            "AITER_LOG_LEVEL",
        ),
        *("response_format", "event_engine_callback_cq", "ph2_server", "used_block_ids"),
    }
    names = [
        name
        for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", _prose(page))
        # test_metrics_doc.py compares the names of metrics in Prometheus, which the code derives.
        if re.search(r"_|\w\.[a-z]\w+$", name) and not name.startswith(("fissile_", "gen_ai_"))
    ]
    assert sorted({name for name in names if not set(name.split(".")) <= _words()} - others) == []


def test_wrong_documented_name_is_found() -> None:
    assert _named("`Attempts.verdict` and `numerics_wanted` in `router/a.py`; `worker/b.py` (`validate`)") == [
        ("Attempts.verdict", "router/a.py"),
        ("numerics_wanted", "router/a.py"),
        ("validate", "worker/b.py"),
    ]
    assert "Attempts" in _words()
    assert "Attempts" + "Nowhere" not in _words()


@pytest.mark.parametrize("name", ["explanation/robustness.md", "contributing/contract-coverage.md"])
def test_tests_named_by_pages_exist(name: str) -> None:
    """`…::name` is in the file named before, and `…` cuts a name."""
    page = ROOT / "docs" / name
    missing, source = [], ""
    for path, test in re.findall(r"`(…|[\w/]+\.py)(?:::(\w+))?…?`", _prose(page)):
        file = ROOT / "tests" / path
        if path != "…":
            # Other sources are named from the top of the repository.
            source = next((each.read_text() for each in (file, ROOT / path) if each.is_file()), "")
        if not source or (test and f"def {test}" not in source):
            missing.append(f"{path}::{test}")
    assert missing == []


def test_contract_table_equals_protos_router_and_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert contract_table.main(["--check"]) == 0, capsys.readouterr().err


def test_options_page_equals_options_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert option_reference.main(["--check"]) == 0, capsys.readouterr().err


def test_stale_reference_of_options_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "options.md"
    stale.write_text(option_reference.page(OPTIONS[1:]))
    monkeypatch.setattr(option_reference, "PAGE", stale)
    assert option_reference.main(["--check"]) == 1
    assert option_reference.main([]) == 0
    assert option_reference.main(["--check"]) == 0


def test_field_without_test_is_found() -> None:
    shown = contract_table.marks()
    test = shown.pop("SamplingParams.top_k")
    with pytest.raises(contract_table.Problem, match=r"SamplingParams\.top_k is served, and no test shows it"):
        contract_table.rows(shown)
    for name, said in (("Media.data", "which is refused by name"), ("Nothing.at_all", "not a field")):
        with pytest.raises(contract_table.Problem, match=said):
            contract_table.rows({**contract_table.marks(), name: test})


def test_contents_name_every_page() -> None:
    """docs/README.md, the source of the site's navigation, links to every page except itself and the README."""
    contents = ROOT / "docs/README.md"
    linked = {(contents.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(_prose(contents))}
    assert set(PAGES) - linked == {contents}


@pytest.mark.skipif(not MKDOCS.exists(), reason="MkDocs is not installed: make docs brings it")
def test_site_is_built_without_a_warning() -> None:
    """Includes the references of protos and library; MkDocs is strict about links and anchors."""
    done = subprocess.run([MKDOCS, "scripts/build_docs.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "SamplingParams" in (ROOT / "build/docs/site/api/fissile.v1.inference.html").read_text()
    assert "add_request" in (ROOT / "build/docs/site/api/library.html").read_text()


def test_sources_cite_only_repository_and_papers() -> None:
    """Code and pages cite only files of the repository and papers by name."""
    outside = re.compile(
        r"\.\./shared|design-details|(?:engine|kernel|router|ecosystem|performance)-notes|\bseed 00\d"
        # Numbered rules without a page in the repository; S1 to S12 are in docs/explanation/architecture.md.
        r"|\((?:[A-RU-Z]\d{1,2}|T[2-9]\d?|S(?:1[3-9]|[2-9]\d))\)"
    )
    sources = [ROOT / name for name in _tracked() if Path(name).suffix in {".py", ".md", ".proto", ".cpp", ".hpp"}]
    here = Path(__file__).resolve()
    assert [str(path) for path in sources if path != here and path.exists() and outside.search(path.read_text())] == []
