"""Links and paths in the documentation lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import contract_table

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
    """A path in backticks, from the top of the repository, is one."""
    assert [path for path in _PATH.findall(_prose(page)) if not (ROOT / path).exists()] == []


def test_the_tests_of_robustness_are_there() -> None:
    """Each test that the page names, in its file or, as `…::name`, in the file before; a name may be cut by `…`."""
    page = ROOT / "docs" / "robustness.md"
    missing, source = [], ""
    for path, name in re.findall(r"`(…|[\w/]+\.py)(?:::(\w+))?…?`", _prose(page)):
        file = ROOT / "tests" / path
        if path != "…":
            # A source that the page speaks of is named from the top of the repository.
            source = next((each.read_text() for each in (file, ROOT / path) if each.is_file()), "")
        if not source or (name and f"def {name}" not in source):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_the_table_of_fields_is_that_of_protos_router_and_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert contract_table.main(["--check"]) == 0, capsys.readouterr().err


def test_a_field_that_nothing_shows_is_found() -> None:
    shown = contract_table.marks()
    test = shown.pop("SamplingParams.top_k")
    with pytest.raises(contract_table.Problem, match=r"SamplingParams\.top_k is served, and no test shows it"):
        contract_table.rows(shown)
    for name, said in (("Media.data", "which is refused by name"), ("Nothing.at_all", "no field")):
        with pytest.raises(contract_table.Problem, match=said):
            contract_table.rows({**contract_table.marks(), name: test})


def test_contents_name_every_page() -> None:
    """docs/README.md, which the site's navigation is made from, links to every page but itself and the README."""
    contents = ROOT / "docs/README.md"
    linked = {(contents.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(_prose(contents))}
    assert set(PAGES) - linked == {contents}


@pytest.mark.skipif(not MKDOCS.exists(), reason="MkDocs is not installed: make docs brings it")
def test_site_is_built_without_a_warning() -> None:
    """The pages with the references of protos and library; MkDocs is strict about links and anchors."""
    done = subprocess.run([MKDOCS, "scripts/build_docs.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "SamplingParams" in (ROOT / "build/docs/site/api/fissile.v1.inference.html").read_text()
    assert "add_request" in (ROOT / "build/docs/site/api/library.html").read_text()


def test_nothing_points_outside() -> None:
    """Code and pages cite what is in the repository, or a paper by its name."""
    outside = re.compile(
        r"\.\./shared|design-details|(?:engine|kernel|router|ecosystem|performance)-notes|\bseed 00\d"
        # Rules by a number that no page of the repository gives; S1 to S12 are in docs/architecture.md.
        r"|\((?:[A-RU-Z]\d{1,2}|T[2-9]\d?|S(?:1[3-9]|[2-9]\d))\)"
    )
    sources = [ROOT / name for name in _tracked() if Path(name).suffix in {".py", ".md", ".proto", ".cpp", ".hpp"}]
    here = Path(__file__).resolve()
    assert [str(path) for path in sources if path != here and path.exists() and outside.search(path.read_text())] == []
