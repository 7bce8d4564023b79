"""Downloads from a hub that lies: one line that says what to do, and no file outside of the cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_hub import FakeHub, FakeRepo, digest, fake_hub
from tests.unit.worker.test_model_download import fetch

FILES = {"config.json": b"{}", "tokenizer.json": b'{"version": "1.0"}', "model.safetensors": b"weights"}
COMMIT = "0" * 40


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as served:
        yield served


def info(sha: Any = COMMIT, **sibling: Any) -> bytes:
    files = [{"rfilename": name, "size": 2, "blobId": COMMIT, **sibling} for name in FILES]
    return json.dumps({"id": "a/b", "sha": sha, "siblings": files, "private": False}).encode()


NO_HUB = r" cannot be downloaded: http://\S+ does not answer like a Hub \(.+\); check HF_ENDPOINT and proxies, or set "
LIES: dict[str, tuple[str, tuple[int, bytes | None, dict[str, str]], str]] = {
    "login page": ("info", (200, b"<html>Log in</html>", {"Content-Type": "text/html"}), NO_HUB),
    "list": ("info", (200, b"[]", {}), NO_HUB),
    "no id": ("info", (200, b"{}", {}), NO_HUB),
    "files": ("info", (200, b'{"id": "a/b", "sha": "0", "siblings": 5}', {}), NO_HUB),
    "null files": ("info", (200, b'{"id": "a/b", "sha": "0", "siblings": [null]}', {}), NO_HUB),
    "no commit": ("info", (200, info(sha=None), {}), " names no commit; check HF_ENDPOINT"),
    "commit": ("info", (200, info(sha=5), {}), NO_HUB),
    "path": ("info", (200, info(rfilename=5), {}), NO_HUB),
    "size": ("info", (200, info(size="2"), {}), "lists 'config.json' with '2' bytes; check HF_ENDPOINT"),
    "negative size": ("info", (200, info(size=-2), {}), "lists 'config.json' with -2 bytes; check HF_ENDPOINT"),
    "digest": ("info", (200, info(blobId=5), {}), NO_HUB),
    "answer without end": ("info", (200, None, {}), " answers with more than 104857600 bytes; check HF_ENDPOINT"),
    "error without end": ("config.json", (500, None, {}), " answers with more than 104857600 bytes; check HF_ENDPOINT"),
    "loop": ("info", (302, b"", {"Location": "/api/models/org/loop"}), "redirects"),
    "wrong place": ("info", (404, b"<html>", {}), "404 Not Found"),
    "limit": (
        "info",
        (429, b"", {"Retry-After": "86400"}),
        r"127\.0\.0\.1 limits how often it is asked: try again in 86400 s, or set HF_TOKEN for a higher limit",
    ),
    "limit of files": ("config.json", (429, b"", {"Retry-After": "61"}), "try again in 61 s, or set HF_TOKEN"),
    "limit of resolvers": (
        "config.json",
        (429, b"", {"RateLimit": '"resolvers";r=0;t=86400'}),
        "limits how often it is asked: try again in 86400 s, or set HF_TOKEN",
    ),
    "longer of two limits": (
        "info",
        (429, b"", {"RateLimit": '"api";r=0;t=86400', "Retry-After": "1"}),
        "limits how often it is asked: try again in 86400 s, or set HF_TOKEN",
    ),
    "long limit": ("info", (429, b"", {"Retry-After": "9" * 5000}), "try again in 1000000000 s, or set HF_TOKEN"),
    "unavailable": (
        "config.json",
        (503, b"", {"Retry-After": "86400"}),
        r"127\.0\.0\.1 answers with status 503: try again in 86400 s",
    ),
    "timeout": ("config.json", (408, b"", {"Retry-After": "86400"}), "answers with status 408: try again in 86400 s"),
    "token": (
        "info",
        (401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "does not accept the token; renew HF_TOKEN, or unset it for public models",
    ),
    "forbidden": ("info", (403, b"", {}), "refuses access; set HF_TOKEN to a token that may read the model"),
    "list of files": ("tree", (200, b"<html>", {}), NO_HUB),
    "file without end": (
        "config.json",
        (200, None, {}),
        r"config\.json has more than the 2 bytes that the Hub lists; ",
    ),
    "short file": ("config.json", (200, b"", {}), r"should be of size 2 but has size 0 \(config\.json\)"),
    "other file": (
        "config.json",
        (200, b"[]", {}),
        r"config\.json arrived with the SHA-1 \w{40}, the Hub lists \w{40}; ",
    ),
}


def test_lie_is_one_line_that_says_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    names = [f"org/{case.replace(' ', '-')}" for case in LIES]
    for name, (what, answer, _) in zip(names, LIES.values(), strict=True):
        hub.repos[name] = FakeRepo({"main": FILES})
        hub.lies[name, what] = answer
    found = fetch(tmp_path, hub.endpoint, *names)
    for name, (line, files), (_, _, said) in zip(names, found, LIES.values(), strict=True):
        assert not files, name
        assert re.search(said, line), (name, line)
        assert line.isprintable(), name


def test_file_is_named_after_its_digest_whatever_the_header_says(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny"] = FakeRepo({"main": FILES})
    commit = hub.repos["org/tiny"].commit("main")
    for name, content in FILES.items():
        headers = {"ETag": '"../../../../outside"', "X-Repo-Commit": str(commit)}
        hub.lies["org/tiny", name] = (200, content, headers)
    [(folder, files)] = fetch(tmp_path / "home", hub.endpoint, "org/tiny")
    assert set(files) == FILES.keys(), folder
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    # A hub that lists no digests leaves names to the library, which takes the header's.
    hub.digests |= dict.fromkeys(FILES, "")
    [(line, files)] = fetch(tmp_path / "other", hub.endpoint, "org/tiny")
    assert "127.0.0.1 sends the ETag '../../../../outside', which cannot be a file's name; check HF_ENDPOINT" in line
    assert {path.name for path in tmp_path.iterdir()} == {"home", "other"}
    # The library strips letters of the ETag alone. No file can be made in /proc.
    for header, value in (("ETag", "W.."), ("X-Repo-Commit", "/proc")):
        for name, content in FILES.items():
            headers = {"ETag": f'"{digest(name, content)}"', "X-Repo-Commit": str(commit), header: value}
            hub.lies["org/tiny", name] = (200, content, headers)
        [(line, files)] = fetch(tmp_path / "third", hub.endpoint, "org/tiny")
        named = value.removeprefix("W")
        assert f"127.0.0.1 sends the {header} {named!r}, which cannot be a file's name; check HF_ENDPOINT" in line


def test_rate_limit_of_an_answer_with_the_file_is_no_error(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny"] = FakeRepo({"main": FILES})
    content = FILES["config.json"]
    for status, headers in ((200, {}), (302, {"Location": f"{hub.endpoint}/org/other/resolve/main/config.json"})):
        limit = {"RateLimit": '"resolvers";r=0;t=86400'}
        hub.lies["org/tiny", "config.json"] = (status, content if status == 200 else b"", {**headers, **limit})
        hub.repos["org/other"] = FakeRepo({"main": FILES})
        [(folder, files)] = fetch(tmp_path / str(status), hub.endpoint, "org/tiny")
        assert set(files) == FILES.keys(), folder


def test_token_is_not_sent_to_another_host(hub: FakeHub, tmp_path: Path) -> None:
    with fake_hub() as other:
        elsewhere = other.endpoint.replace("127.0.0.1", "localhost")
        for served in (hub, other):
            served.repos["org/tiny"] = FakeRepo({"main": FILES}, gated=served is hub)
        path = f"/org/tiny/resolve/{hub.repos['org/tiny'].commit('main')}/model.safetensors"
        hub.lies["org/tiny", "model.safetensors"] = (302, b"", {"Location": elsewhere + path})
        [(folder, files)] = fetch(tmp_path, hub.endpoint, "org/tiny", HF_TOKEN=hub.token)
        assert set(files) == FILES.keys(), folder
        assert other.authorized == {None}
        assert f"Bearer {hub.token}" in hub.authorized


def test_endpoint_that_is_no_url_is_one_line(tmp_path: Path) -> None:
    [(line, files)] = fetch(tmp_path, "http://[", "org/tiny")
    assert line == "a variable HF_* of the environment, such as HF_ENDPOINT, is malformed: Invalid IPv6 URL"
    assert not files
