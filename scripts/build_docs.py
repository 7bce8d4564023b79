"""Builds the site of the documentation: `.venv-docs/bin/python scripts/build_docs.py` (make docs).

Copies every Markdown page of the repository into build/docs/pages, adds pages made from the protos' comments and from
the library's docstrings, and lets MkDocs build build/docs/site from them. The navigation is that of docs/README.md: its
headings are the sections, the links of their tables the pages. A link to a file that is not a page leads to a page with
its text. Broken links and anchors fail the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as dpb

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "docs"
PAGES = OUT / "pages"
CONTENTS = "docs/README.md"
# Made by scripts/setup.sh where npm is there; without it browsers fetch Mermaid from the network.
MERMAID = OUT / "mermaid.min.js"

_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_LANGUAGES = {".py": "python", ".mjs": "javascript", ".yaml": "yaml", ".sh": "bash", ".json": "json"}
_LIBRARY = {
    "worker.llm_engine": ("LLMEngine", "StreamOutput"),
    "common.params.sampling_params": ("SamplingParams",),
    "common.config": ("Config",),
    "common.params.config_parts": ("ParallelConfig", "CompilationConfig", "QuantizationConfig", "LayerQuantConfig"),
    "common.errors": ("InvalidFieldError", "DuplicateRequestError", "NoTokenizerError"),
}
# Title, page and text of each card on the home page.
_CARDS = (
    ("Is it for you?", "overview.md", "What it does, what it does not, and how fast it is."),
    ("Tutorial", "tutorial.md", "Fifteen minutes: serve, ask, kill a worker, and watch the answer go on."),
    ("Run a model", "how-to/run-a-model.md", "Your own checkpoint, on one machine or on several."),
    ("Call it", "how-to/call-it.md", "From a shell, Python, Node, or any gRPC tool."),
    ("Reference", "contents.md#reference", "The contract, statuses, options, metrics, limits."),
    ("Architecture", "explanation/architecture.md", "How a request travels, and why answers are equal."),
)
# The library's reference comes after it.
_LIBRARY_GUIDE = "how-to/library.md"
_CSS = """\
.md-grid { max-width: 72rem; }
.md-typeset table:not([class]) { font-size: .7rem; }
/* Plots are drawn on white: in the dark scheme light and dark change places, and hues stay. */
[data-md-color-scheme="slate"] img[src$=".svg"] { filter: invert(.9) hue-rotate(180deg); }
.md-typeset table:not([class]) td { min-width: 3rem; }
.md-typeset table td:has(code) { min-width: 8.5rem; }
.md-typeset table:not([class]):not(:has(th:nth-child(6))) td:last-child { min-width: 11rem; }
.md-typeset table td code { overflow-wrap: anywhere; }
/* Room for the name of an option above that of its variable. */
.md-typeset table:not([class]) td:has(br) { min-width: 12rem; }
/* Many columns are figures, which need less room. */
.md-typeset table:has(th:nth-child(6)) :is(th, td) { padding: .6em .7em; }
/* On a phone cells wrap, so that a table of a few columns fits; a wider one scrolls. */
@media screen and (max-width: 44.98em) {
  .md-typeset table:not([class]) { font-size: .6rem; }
  .md-typeset table:not([class]) :is(th, td) { min-width: 0 !important; overflow-wrap: break-word; padding: .4em .5em; }
  .md-typeset table:not([class]) td:has(br) { min-width: 8rem !important; }
  .md-typeset table:has(th:nth-child(5)) :is(th, td) { min-width: 3.6rem !important; }
}
"""


def page_of(path: str) -> str | None:
    """Page of the site for a file of the repository; None if it has none."""
    if path == "README.md":
        return "overview.md"
    if path == CONTENTS:
        return "contents.md"
    if path.endswith(".proto"):
        return f"api/{path.removeprefix('protos/').removesuffix('.proto').replace('/', '.')}.md"
    if not path.endswith(".md"):
        return None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path.removesuffix("/README.md").replace("/", "-").removesuffix(".md").lower() + ".md"


def tracked(*patterns: str) -> list[str]:
    """Files of the repository, new ones that are not ignored among them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(path for path in set(done.stdout.split()) if (ROOT / path).is_file())


def resolved(source: str, link: str) -> tuple[str, str]:
    """File or folder of the repository that a link of `source` leads to, and its anchor."""
    path, _, anchor = link.partition("#")
    target = os.path.normpath(Path(source).parent / path) if path else source
    return target, f"#{anchor}" if anchor else ""


class Site:
    """Pages of the site, written as they are reached."""

    def __init__(self) -> None:
        """Starts with an empty folder of pages."""
        shutil.rmtree(PAGES, ignore_errors=True)
        self._sources: set[str] = set()

    def write(self, page: str, text: str) -> None:
        """Writes one page."""
        (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / page).write_text(text)

    def add_markdown(self, path: str) -> None:
        """Copies a page of the repository, its links leading to pages of the site."""
        page = page_of(path)
        assert page is not None
        parts = _FENCE.split((ROOT / path).read_text())
        parts[::2] = [self._relinked(path, page, text) for text in parts[::2]]
        self.write(page, "".join(parts))

    def _relinked(self, source: str, page: str, text: str) -> str:
        def relinked(match: re.Match[str]) -> str:
            words, link = match.groups()
            if "://" in link:
                return match.group()
            target, anchor = resolved(source, link)
            if (to := self._page_for(target)) is None:
                return words
            return f"[{words}]({os.path.relpath(to, Path(page).parent)}{anchor})"

        return _LINK.sub(relinked, text)

    def _page_for(self, target: str) -> str | None:
        """Page for a file, picture or folder; None for a folder that has none."""
        if (ROOT / target).is_dir():
            target = f"{target}/README.md"
            return page_of(target) if (ROOT / target).is_file() else None
        if (page := page_of(target)) is not None:
            return page
        if target.endswith((".svg", ".png")):
            to = target.removeprefix("docs/")
            (PAGES / to).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / target, PAGES / to)
            return to
        page = f"source/{target}.md"
        if target not in self._sources:
            self._sources.add(target)
            language = _LANGUAGES.get(Path(target).suffix, "text")
            self.write(page, f"# {target}\n\n````{language}\n{(ROOT / target).read_text()}````\n")
        return page


def navigation() -> list[dict[str, object]]:
    """Sections of docs/README.md with their pages, after the home page."""
    nav: list[dict[str, object]] = [{"Home": "index.md"}, {"Overview": "overview.md"}, {"All pages": "contents.md"}]
    for section in re.split(r"^## ", (ROOT / CONTENTS).read_text(), flags=re.MULTILINE)[1:]:
        title, _, table = section.partition("\n")
        pages: list[dict[str, str]] = []
        for row in re.findall(r"^\| (\[.*?) \|", table, re.MULTILINE):
            for name, link in _LINK.findall(row):
                if page := page_of(resolved(CONTENTS, link)[0]):
                    pages.append({name.strip("`"): page})
                if page == _LIBRARY_GUIDE:
                    pages.append({"Library reference": "api/library.md"})
        nav.append({title: pages})
    return nav


def landing_page() -> str:
    """Home page: what Fissile is, and where each kind of reader starts."""
    cards = "\n".join(f"-   **[{title}]({page})**\n\n    {text}\n" for title, page, text in _CARDS)
    return (
        "---\nhide: [navigation, toc]\n---\n\n# Fissile\n\n"
        "Serves large language models over gRPC: **one request, one answer**. With a seed, or greedily, the tokens "
        "depend only on the model and the request, even when a worker dies in the middle of the answer.\n\n"
        "```sh\nmake run     # installs, serves the demo model and asks it something\n```\n\n"
        f'<div class="grid cards" markdown>\n\n{cards}\n</div>\n'
    )


def library_page() -> str:
    """Page of the library's classes, for mkdocstrings to fill."""
    parts = [
        "# Library reference\n",
        "The classes for programs that run the engine themselves. [The engine as a library](../how-to/library.md) "
        "shows their use.\n",
    ]
    for module, names in _LIBRARY.items():
        parts += [f"::: {module}.{name}\n    options:\n      show_bases: false\n" for name in names]
    return "\n".join(parts)


class ProtoPage:
    """Page of one proto file: its services, messages and enums with the comments that are the contract."""

    def __init__(self, file: dpb.FileDescriptorProto, files: dict[str, str]) -> None:
        """Reads the comments of `file`, compiled with its source info; `files` has the file of each type of ours."""
        self._file = file
        self._files = files
        self._locations = {tuple(at.path): at for at in file.source_code_info.location}

    def text(self) -> str:
        """The page as Markdown."""
        return "\n".join(self._blocks()) + "\n"

    def _blocks(self) -> Iterator[str]:
        yield f"# {self._file.package}: {Path(self._file.name).name}\n"
        yield f"Made from the comments of `protos/{self._file.name}`, which are the contract.\n"
        # 12 is `syntax`, 2 `package`: numbers of fields in descriptor.proto, as paths of comments have them.
        yield _dedented(self._comment((12,)) or self._comment((2,)))
        for i, service in enumerate(self._file.service):
            yield from self._service((6, i), service)
        for i, message in enumerate(self._file.message_type):
            yield from self._message((4, i), message, message.name)
        for i, enum in enumerate(self._file.enum_type):
            yield from self._enum((5, i), enum, enum.name)

    def _service(self, path: tuple[int, ...], service: dpb.ServiceDescriptorProto) -> Iterator[str]:
        yield f"## {service.name}\n\n{_prose(self._comment(path))}\n"
        for i, method in enumerate(service.method):
            request = self._streamed(method.input_type, method.client_streaming)
            response = self._streamed(method.output_type, method.server_streaming)
            yield f"### {method.name}\n\n{request} → {response}\n\n{_prose(self._comment((*path, 2, i)))}\n"

    def _streamed(self, name: str, streaming: bool) -> str:
        return ("stream of " if streaming else "") + self._type_link(name)

    def _message(self, path: tuple[int, ...], message: dpb.DescriptorProto, name: str) -> Iterator[str]:
        yield f"## {name}\n\n{_prose(self._comment(path))}\n"
        # The compiler makes a oneof for each optional field.
        synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
        for i, oneof in enumerate(message.oneof_decl):
            if i not in synthetic:
                members = [one.name for one in message.field if one.HasField("oneof_index") and one.oneof_index == i]
                yield f"`{oneof.name}` is one of `{'`, `'.join(members)}`. {_prose(self._comment((*path, 8, i)))}\n"
        if message.field:
            yield "| field | type | meaning |\n| --- | --- | --- |"
            for i, field in enumerate(message.field):
                yield f"| `{field.name}` | {self._field_type(message, field)} | {_cell(self._comment((*path, 2, i)))} |"
            yield ""
        for i, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message((*path, 3, i), nested, f"{name}.{nested.name}")
        for i, enum in enumerate(message.enum_type):
            yield from self._enum((*path, 4, i), enum, f"{name}.{enum.name}")

    def _field_type(self, message: dpb.DescriptorProto, field: dpb.FieldDescriptorProto) -> str:
        entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        if entry := entries.get(field.type_name.rpartition(".")[2]):
            key, value = (self._field_type(entry, one) for one in entry.field)
            return f"map of {key} to {value}"
        name = self._type_link(field.type_name) if field.type_name else f"`{_scalar(field)}`"
        if field.label == dpb.FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {name}"
        return f"optional {name}" if field.proto3_optional else name

    def _enum(self, path: tuple[int, ...], enum: dpb.EnumDescriptorProto, name: str) -> Iterator[str]:
        yield f"## {name}\n\n{_prose(self._comment(path))}\n"
        yield "| value | number | meaning |\n| --- | --- | --- |"
        for i, value in enumerate(enum.value):
            yield f"| `{value.name}` | {value.number} | {_cell(self._comment((*path, 2, i)))} |"
        yield ""

    def _type_link(self, full_name: str) -> str:
        """Link to a type's heading, on this page or its file's page; none for types of other projects."""
        name = full_name.removeprefix(".")
        if (file := self._files.get(name)) is None:
            return f"`{name}`"
        local = name.removeprefix(f"{self._file.package}.")
        page = "" if file == self._file.name else Path(page_of(f"protos/{file}") or "").name
        return f"[`{local}`]({page}#{re.sub(r'^.*?[.](?=[A-Z])', '', name).replace('.', '').lower()})"

    def _comment(self, path: tuple[int, ...]) -> str:
        at = self._locations.get(path)
        return at.leading_comments if at else ""


def _scalar(field: dpb.FieldDescriptorProto) -> str:
    return dpb.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _dedented(comment: str) -> str:
    """A file's comment, with its lists as Markdown has them."""
    lines = [line.removeprefix(" ") for line in comment.splitlines()]
    text = "\n".join(re.sub(r"^ {2}(?=[*-] )", "", line) for line in lines)
    return re.sub(r"(?<!\n)\n(?=\* )", "\n\n", re.sub(r"^ {4}(?=\S)", "  ", text, flags=re.MULTILINE), count=1) + "\n"


def _prose(comment: str) -> str:
    return re.sub(r"^ ", "", comment.strip("\n"), flags=re.MULTILINE)


def _cell(comment: str) -> str:
    """A comment on one line of a table."""
    paragraphs = re.split(r"\n\s*\n", _prose(comment))
    return "<br>".join(" ".join(text.split()) for text in paragraphs).replace("|", "\\|")


def types_of(file: dpb.FileDescriptorProto) -> Iterator[str]:
    """Full names of the messages and enums of a file."""
    yield from (f"{file.package}.{enum.name}" for enum in file.enum_type)
    scopes = [(f"{file.package}.{message.name}", message) for message in file.message_type]
    while scopes:
        name, message = scopes.pop()
        yield name
        yield from (f"{name}.{enum.name}" for enum in message.enum_type)
        scopes += [(f"{name}.{nested.name}", nested) for nested in message.nested_type]


def described(files: list[str]) -> list[dpb.FileDescriptorProto]:
    """The proto files as descriptors with their comments."""
    out = OUT / "protos.binpb"
    names = [path.removeprefix("protos/") for path in files]
    command = ["-m", "grpc_tools.protoc", "-Iprotos", "--include_source_info", f"--descriptor_set_out={out}", *names]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    return list(dpb.FileDescriptorSet.FromString(out.read_bytes()).file)


def write_config() -> Path:
    """MkDocs' configuration: mkdocs.yml with the folders, the navigation and, if it is here, Mermaid."""
    config: dict[str, object] = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": str(PAGES),
        "site_dir": str(OUT / "site"),
        "nav": navigation(),
        "plugins": {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)]}}}},
    }
    if MERMAID.is_file():
        shutil.copyfile(MERMAID, PAGES / MERMAID.name)
        config["extra_javascript"] = [MERMAID.name]
    path = OUT / "mkdocs.yml"
    # JSON is YAML.
    path.write_text(json.dumps(config, indent=2))
    return path


def main() -> int:
    """Assembles the pages and builds the site; MkDocs' exit code."""
    OUT.mkdir(parents=True, exist_ok=True)
    site = Site()
    for path in tracked("*.md"):
        site.add_markdown(path)
    protos = described(tracked("protos/*.proto"))
    files = {name: file.name for file in protos for name in types_of(file)}
    for file in protos:
        site.write(str(page_of(f"protos/{file.name}")), ProtoPage(file, files).text())
    site.write("api/library.md", library_page())
    site.write("index.md", landing_page())
    site.write("site.css", _CSS)
    config = write_config()
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--clean", "-f", str(config)]
    # The theme's own advertisement of what will replace it.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
