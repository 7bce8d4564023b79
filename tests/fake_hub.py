"""The part of the Hugging Face Hub's HTTP interface that `snapshot_download` uses, on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = r"(?P<repo>[^/]+/[^/]+)"
INFO = re.compile(rf"/api/models/{REPO}(?:/revision/(?P<revision>[^/]+))?")
TREE = re.compile(rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)")
FILE = re.compile(rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
REFUSED = tuple(f" {status}" for status in (401, 403, 404, 500))
LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class FakeRepo:
    """Files of a repository by revision; `gated` ones need a token."""

    revisions: Mapping[str, Mapping[str, bytes]]
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, or the commit itself; None if there is none."""
        commits = {name: _commit(name, files) for name, files in self.revisions.items()}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, commit: str) -> Mapping[str, bytes]:
        """The files of a commit."""
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


def _commit(name: str, files: Mapping[str, bytes]) -> str:
    """A hash that no other repository has, as those of commits."""
    digest = hashlib.sha1(name.encode())
    for path, content in files.items():
        digest.update(path.encode() + b"\0" + hashlib.sha1(content).digest())
    return digest.hexdigest()


@dataclass
class FakeHub:
    """A hub that serves.

    Attributes:
        endpoint: its URL.
        token: opens gated repositories.
        repos: repositories by name.
        requested: method and path of every request; behind it the status of one that is refused.
        authorized: header `Authorization` of the requests; None for requests without one.
        ranges: header `Range` of every request for the content of weights.
        broken: True to answer all with 500.
        cut: bytes of a file after which its connection breaks, by path; each breaks once.
        fail_once: paths of files whose first request for their content is answered with 500.
        sizes: sizes that the list of files claims, by path.
        digests: SHA-256 that the list of files claims, by path.
        wrong: what is sent instead of a file's content, by path.
        has_ranges: False to send whole files whatever range is asked for.
        lies: status, content and headers of every answer about a repository, by its name and `info`, `tree` or a file's
            path; a content of None has no end.
        held: a file's content stops behind `held_bytes` until this is set, if there is such an event.
        held_bytes: how many.
    """

    endpoint: str = ""
    token: str = "hf_right"
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    requested: list[str] = field(default_factory=list)
    authorized: set[str | None] = field(default_factory=set)
    ranges: list[str] = field(default_factory=list)
    broken: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    fail_once: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, bytes] = field(default_factory=dict)
    has_ranges: bool = True
    lies: dict[tuple[str, str], tuple[int, bytes | None, dict[str, str]]] = field(default_factory=dict)
    held: threading.Event | None = None
    held_bytes: int = 1

    def downloaded(self) -> set[str]:
        """Paths of files that were read."""
        matches = (FILE.fullmatch(line.removeprefix("GET ")) for line in self.requested if line.startswith("GET "))
        return {match["path"] for match in matches if match and not match["path"].endswith(REFUSED)}


def digest(path: str, content: bytes) -> str:
    """Names a content, as the Hub does: of weights, which Git LFS stores, by their SHA-256, of others as Git does."""
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serves until the block ends."""
    hub = FakeHub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"
    _cut: int | None = None

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Not on standard error."""

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.authorized.add(self.headers["Authorization"])
        if self.served.broken:
            self._send(500, b"", {}, body)
            return
        for name, form, answer in (("tree", TREE, self._tree), ("info", INFO, self._info), ("", FILE, self._file)):
            if match := form.fullmatch(path):
                lie = self.served.lies.get((match["repo"], name or match["path"]))
                self._send(*(lie or self._checked(match, answer)), body)
                return
        self._send(404, b"", {}, body)

    def _checked(self, match: re.Match[str], answer: Any) -> tuple[int, bytes, dict[str, str]]:
        repo = self.served.repos.get(match["repo"])
        if repo is None:
            return 401, b"{}", {"X-Error-Code": "RepoNotFound"}
        commit = repo.commit(match["revision"] or "main")
        if commit is None:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        result: tuple[int, bytes, dict[str, str]] = answer(repo, commit, match)
        return result

    def _info(self, repo: FakeRepo, commit: str, match: re.Match[str]) -> tuple[int, bytes, dict[str, str]]:
        siblings: list[dict[str, Any]] = []
        for path, content in repo.files(commit).items():
            size = self.served.sizes.get(path, len(content))
            siblings.append({"rfilename": path, "size": size, "blobId": self._digest(path, content)})
            if path.endswith(LARGE):
                siblings[-1]["lfs"] = {
                    "sha256": self._digest(path, content),
                    "size": size,
                    "pointerSize": 130,
                }
        info = {"id": match["repo"], "modelId": match["repo"], "sha": commit, "siblings": siblings, "private": False}
        return 200, json.dumps(info).encode(), {"Content-Type": "application/json"}

    def _digest(self, path: str, content: bytes) -> str:
        return self.served.digests.get(path, digest(path, content))

    def _tree(self, repo: FakeRepo, commit: str, match: re.Match[str]) -> tuple[int, bytes, dict[str, str]]:
        files = [
            {"type": "file", "path": path, "size": len(content), "oid": digest(path, content)}
            for path, content in repo.files(commit).items()
        ]
        return 200, json.dumps(files).encode(), {"Content-Type": "application/json"}

    def _file(self, repo: FakeRepo, commit: str, match: re.Match[str]) -> tuple[int, bytes, dict[str, str]]:
        if repo.gated and self.headers["Authorization"] != f"Bearer {self.served.token}":
            return 403, b"", {"X-Error-Code": "GatedRepo"}
        path = match["path"]
        content = repo.files(commit).get(path)
        if content is None:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        if self.command == "GET" and path in self.served.fail_once:
            self.served.fail_once.remove(path)
            return 500, b"", {}
        headers = {"ETag": f'"{digest(path, content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        content = self.served.wrong.get(path, content)
        if self.command == "GET":
            self._cut = self.served.cut.pop(path, None)
            if path.endswith(LARGE):
                self.served.ranges.append(self.headers["Range"] or "")
        if (start := self.headers["Range"]) and self.served.has_ranges:
            first = int(start.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return 206, content[first:], headers
        return 200, content, headers

    def _send(self, status: int, content: bytes | None, headers: dict[str, str], body: bool) -> None:
        refusal = f" {status}" if f" {status}" in REFUSED else ""
        self.served.requested.append(f"{self.command} {unquote(urlsplit(self.path).path)}{refusal}")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if content is not None and "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not body:
            return
        if content is None:
            self._write_for_ever()
            return
        if self.served.held is not None and "ETag" in headers:
            self._write(content[: self.served.held_bytes])
            self.served.held.wait(60)
            content = content[self.served.held_bytes :]
        self._write(content[: self._cut])
        if self._cut is not None:
            self._cut, self.close_connection = None, True

    def _write_for_ever(self) -> None:
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(bytes(1 << 20))

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)
