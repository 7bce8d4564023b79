"""Downloads by `huggingface_hub` from a fake hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fake_dns import wait_until
from tests.fake_hub import FakeHub, FakeRepo, digest, fake_hub
from worker.model_download import reported

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer.model": b"pieces",
    "qwen.tiktoken": b"IQ== 0",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"the same with other names of tensors",
    "original/model.safetensors": b"the same in another format",
    "onnx/config.json": b"{}",
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "1_Pooling/old/config.json": b"{}",
    "2_Dense/model.safetensors": b"of a module",
    "README.md": b"# Tiny",
}
WANTED = {
    *("config.json", "tokenizer.json", "tokenizer.model", "qwen.tiktoken", "chat_template.jinja", "model.safetensors"),
    "1_Pooling/config.json",
}
GGUFS = {
    "config.json": b"{}",
    "tiny-q4_k_m.gguf": b"q4_k_m",
    "tiny-Q4_K.gguf": b"q4_k",
    "tiny-Q8_0-00001-of-00002.gguf": b"first",
    "tiny-Q8_0-00002-of-00002.gguf": b"second",
    "BF16/tiny-BF16.gguf": b"bf16",
    "one-F16.gguf": b"1",
    "two-F16.gguf": b"2",
}
# The library writes a file in pieces of this length.
CHUNK = 10 << 20
# The library reads its environment once, so each environment takes a process; it answers for all models.
LARGE = bytes(range(256)) * 47_000
PROGRAM = """
import collections, json, shutil, sys
if len(sys.argv) > 2:
    shutil.disk_usage = lambda path: collections.namedtuple("Usage", "total used free")(0, 0, int(sys.argv[2]))
from common.hub import HubError
from worker.model_download import model_folder
def found(model, weights):
    try:
        folder = model_folder(model, weights=weights)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return str(folder), files
    except HubError as error:
        return str(error), []
json.dump([found(model, weights) for model, weights in json.loads(sys.argv[1])], sys.stdout)
"""

# Some shared file systems honour no locks.
WITHOUT_LOCKS = """
import contextlib, huggingface_hub.utils
huggingface_hub.utils.WeakFileLock = lambda path: contextlib.nullcontext()
"""

# A kill in the middle of a copy.
KILLED_COPY = """
import os, shutil
def copyfile(source, target):
    with open(source, "rb") as whole, open(target, "wb") as cut:
        cut.write(whole.read(1))
    os._exit(9)
shutil.copyfile = copyfile
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as served:
        served.repos["org/tiny"] = FakeRepo({"main": FILES, "v2": {**FILES, "model.safetensors": b"better"}})
        served.repos["org/gated"] = FakeRepo({"main": FILES}, gated=True)
        served.repos["org/gguf"] = FakeRepo({"main": GGUFS})
        served.repos["org/adapter"] = FakeRepo({"main": {"adapter_model.safetensors": b"a"}})
        served.repos["org/pickled"] = FakeRepo({"main": {"config.json": b"{}", "pytorch_model.bin": b"pickled"}})
        yield served


def fetch(
    home: Path, endpoint: str, *models: str, weights: bool = True, free: int | None = None, **environment: str
) -> list[tuple[str, list[str]]]:
    """(folder, files) or (error, no files) of each model, on a disk with `free` bytes if given."""
    with start(home, endpoint, *models, weights=weights, free=free, **environment) as process:
        try:
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    # structlog prints to standard output too, because logging is not set up.
    results = json.loads(out.splitlines()[-1])
    return [(found, files) for found, files in results]


def start(
    home: Path,
    endpoint: str,
    *models: str,
    weights: bool = True,
    free: int | None = None,
    program: str = PROGRAM,
    **environment: str,
) -> subprocess.Popen[str]:
    """A process that downloads models; see `fetch`."""
    wanted = json.dumps([(model, weights) for model in models])
    return subprocess.Popen(
        [sys.executable, "-c", program, wanted, *([] if free is None else [str(free)])],
        cwd=ROOT,
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "FISSILE_LOG_LEVEL": "error", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def part(hub: FakeHub, tmp_path: Path) -> Path:
    """Where bytes of org/tiny's weights, 12 MB, are kept until all have arrived; its folder is there."""
    hub.repos["org/tiny"] = FakeRepo({"main": {**FILES, "model.safetensors": LARGE}})
    path = tmp_path / "hub/models--org--tiny/blobs" / f"{digest('model.safetensors', LARGE)}.incomplete"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.slow
def test_hub_download_fetches_needed_files_once(hub: FakeHub, tmp_path: Path) -> None:
    (main, files), (v2, _) = fetch(tmp_path, hub.endpoint, "org/tiny", "org/tiny@v2")
    assert set(files) == hub.downloaded() == WANTED
    assert Path(main).is_relative_to(tmp_path)
    assert (Path(main) / "model.safetensors").read_bytes() == b"weights"
    assert (Path(v2) / "model.safetensors").read_bytes() == b"better"
    hub.requested.clear()
    assert fetch(tmp_path, hub.endpoint, "org/tiny") == [(main, files)]
    assert hub.downloaded() == set()
    assert fetch(tmp_path, hub.endpoint, "org/tiny", HF_HUB_OFFLINE="1") == [(main, files)]
    # Port 9 is discard; no server listens there.
    assert fetch(tmp_path, "http://127.0.0.1:9", "org/tiny") == [(main, files)]


def test_without_weights(hub: FakeHub, tmp_path: Path) -> None:
    [(folder, files)] = fetch(tmp_path, hub.endpoint, "org/pickled", weights=False)
    assert files == ["config.json"]
    assert Path(folder).is_dir()
    fetch(tmp_path, hub.endpoint, "org/tiny", weights=False)
    assert hub.downloaded() == WANTED - {"model.safetensors"}
    # The cache is incomplete.
    [(error, _)] = fetch(tmp_path, hub.endpoint, "org/tiny", HF_HUB_OFFLINE="1")
    assert error == "org/tiny is neither a path here nor complete in the cache of the Hub, and HF_HUB_OFFLINE is set"


def test_hub_refusals_are_explained(hub: FakeHub, tmp_path: Path) -> None:
    models = ("org/none", "org/tiny@v9", "org/gated", "org/pickled", "org/adapter", "models/llama--8b")
    errors = [error for error, _ in fetch(tmp_path, hub.endpoint, *models)]
    assert errors == [
        f"org/none is neither a path here nor a model on {hub.endpoint} that HF_TOKEN may read",
        f"org/tiny has no revision 'v9' on {hub.endpoint}",
        f"org/gated is gated: accept its terms on {hub.endpoint}/org/gated and set HF_TOKEN to your token",
        "org/pickled has no safetensors; pickled weights, which may run code, are not loaded",
        "org/adapter has no config.json; give a checkpoint in the form of transformers",
        "models/llama--8b is neither a path here nor a name on the Hub",
    ]
    assert hub.downloaded() == set()
    [(_, files)] = fetch(tmp_path, hub.endpoint, "org/gated", HF_TOKEN=hub.token)
    assert set(files) == WANTED


def test_unreachable_hub_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    [(error, _)] = fetch(tmp_path, "http://127.0.0.1:9", "org/tiny")
    assert error.startswith(
        "org/tiny is not a path here and not complete in the cache, and http://127.0.0.1:9 cannot be reached: "
    )
    assert "refused" in error
    hub.broken = True
    [(error, _)] = fetch(tmp_path, hub.endpoint, "org/tiny")
    assert "cannot be reached: " in error
    assert "500" in error
    assert "\n" not in error


def test_broken_connection_and_server_error_lose_no_byte(hub: FakeHub, part: Path, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = len(LARGE) - 1
    hub.fail_once |= {"tokenizer.json", "model.safetensors"}
    [(folder, files)] = fetch(tmp_path, hub.endpoint, "org/tiny")
    assert set(files) == WANTED
    assert (Path(folder) / "model.safetensors").read_bytes() == LARGE
    assert [each for each in hub.ranges if each] == [f"bytes={CHUNK}-"]


def test_small_file_continues_in_the_next_process(hub: FakeHub, part: Path, tmp_path: Path) -> None:
    kept = part.with_name(f"{digest('tokenizer.json', FILES['tokenizer.json'])}.incomplete")
    kept.write_bytes(FILES["tokenizer.json"][:5])
    hub.wrong["tokenizer.json"] = b"?" * 5 + FILES["tokenizer.json"][5:]
    [(folder, _)] = fetch(tmp_path, hub.endpoint, "org/tiny")
    assert (Path(folder) / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]


def test_killed_download_continues_in_the_next_process(hub: FakeHub, part: Path, tmp_path: Path) -> None:
    hub.held, hub.held_bytes = threading.Event(), CHUNK + 100
    with start(tmp_path, hub.endpoint, "org/tiny") as process:
        try:
            wait_until(lambda: part.exists() and part.stat().st_size >= CHUNK)
        finally:
            process.kill()
            hub.held.set()
    hub.held = None
    hub.ranges.clear()
    [(folder, files)] = fetch(tmp_path, hub.endpoint, "org/tiny")
    assert set(files) == WANTED
    assert (Path(folder) / "model.safetensors").read_bytes() == LARGE
    assert [each for each in hub.ranges if each] == [f"bytes={CHUNK}-"]
    assert not part.exists()


def test_copy_cut_by_a_kill_is_replaced_where_links_are_disabled(hub: FakeHub, tmp_path: Path) -> None:
    with start(tmp_path, hub.endpoint, "org/tiny", program=KILLED_COPY + PROGRAM, HF_HUB_DISABLE_SYMLINKS="1") as cut:
        try:
            assert cut.wait(60) == 9
        finally:
            cut.kill()
    [left] = [path for path in tmp_path.glob("hub/models--*/snapshots/*/**/*") if path.is_file()]
    assert left.suffix == ".incomplete"
    [(folder, files)] = fetch(tmp_path, hub.endpoint, "org/tiny", HF_HUB_DISABLE_SYMLINKS="1")
    assert set(files) == {*WANTED, left.name}, folder
    # Older versions copied to the file itself.
    weights = Path(folder) / "model.safetensors"
    assert not weights.is_symlink()
    weights.write_bytes(b"we")
    fetch(tmp_path, hub.endpoint, "org/tiny", HF_HUB_DISABLE_SYMLINKS="1")
    assert {name: (Path(folder) / name).read_bytes() for name in WANTED} == {name: FILES[name] for name in WANTED}


@pytest.mark.parametrize(
    ("kept", "has_ranges"),
    [pytest.param(b"", True, id="new"), pytest.param(b"?" * 5_000, False, id="damaged, no ranges")],
)
def test_two_downloads_into_one_part_without_locks_are_whole(
    hub: FakeHub, part: Path, tmp_path: Path, kept: bytes, has_ranges: bool
) -> None:
    """The second one begins while the first one waits for the rest, and both then write to the same file."""
    hub.has_ranges = has_ranges
    part.write_bytes(kept)
    hub.held, hub.held_bytes = threading.Event(), CHUNK + 100
    program = WITHOUT_LOCKS + PROGRAM
    processes = [start(tmp_path, hub.endpoint, "org/tiny", program=program)]
    try:
        wait_until(lambda: len(hub.ranges) == 1 and part.stat().st_size > len(kept))
        processes.append(start(tmp_path, hub.endpoint, "org/tiny", program=program))
        wait_until(lambda: len(hub.ranges) == 2)
        hub.held.set()
        results = [process.communicate(timeout=60) for process in processes]
    finally:
        hub.held.set()
        for process in processes:
            process.kill()
            process.wait()
    for out, errors in results:
        [(folder, files)] = json.loads(out.splitlines()[-1] if out else "[]") or [(errors, [])]
        assert set(files) == WANTED, folder
        assert (Path(folder) / "model.safetensors").read_bytes() == LARGE
    assert not list(part.parent.glob("*.incomplete"))


@pytest.mark.parametrize(
    ("kept", "missing", "has_ranges", "ranges"),
    [
        pytest.param(LARGE[:5_000_000], len(LARGE) - 5_000_000, True, ["bytes=5000000-"], id="right"),
        pytest.param(LARGE, 0, True, [], id="complete"),
        pytest.param(b"?" * 5_000_000, len(LARGE) - 5_000_000, True, ["bytes=5000000-", ""], id="damaged"),
        pytest.param(LARGE + b"?", len(LARGE), True, [""], id="too long"),
        pytest.param(LARGE[:5_000_000], len(LARGE) - 5_000_000, False, ["bytes=5000000-"], id="no ranges"),
    ],
)
def test_content_is_whole_whatever_part_was_kept(
    hub: FakeHub, part: Path, tmp_path: Path, kept: bytes, missing: int, has_ranges: bool, ranges: list[str]
) -> None:
    hub.has_ranges = has_ranges
    hub.repos["org/tiny"] = FakeRepo({"main": {"config.json": b"{}", "model.safetensors": LARGE}})
    part.write_bytes(kept)
    # The part's bytes are on the disk already; config.json has two.
    [(folder, _)] = fetch(tmp_path, hub.endpoint, "org/tiny", free=missing + 2)
    assert (Path(folder) / "model.safetensors").read_bytes() == LARGE
    assert hub.ranges == ranges
    assert not part.exists()


def test_disk_without_room_for_the_rest_of_a_part_is_refused(hub: FakeHub, part: Path, tmp_path: Path) -> None:
    part.write_bytes(LARGE[:5_000_000])
    [(error, _)] = fetch(tmp_path, hub.endpoint, "org/tiny", free=len(LARGE) - 5_000_000 - 1)
    assert error.startswith("org/tiny needs 0.0 GB in ")
    assert part.stat().st_size == 5_000_000


def test_content_with_another_digest_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.wrong["model.safetensors"] = b"WEIGHTS"
    [(error, _)] = fetch(tmp_path, hub.endpoint, "org/tiny")
    sent, listed = (digest("model.safetensors", content) for content in (b"WEIGHTS", b"weights"))
    found = f"model.safetensors arrived with the SHA-256 {sent}, the Hub lists {listed}"
    assert error == f"org/tiny: {found}; check HF_ENDPOINT and proxies, and try again"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"WEIGHTS"]


def test_digest_that_is_no_sha256_names_no_file(hub: FakeHub, tmp_path: Path) -> None:
    listed = ["../../../outside", f"{tmp_path}/outside", "0" * 63, "0" * 64 + "\n", "A" * 64]
    for i, each in enumerate(listed):
        hub.repos[f"org/tiny-{i}"] = FakeRepo({"main": {"config.json": b"{}", f"{i}.safetensors": b"weights"}})
        hub.digests[f"{i}.safetensors"] = each
    found = fetch(tmp_path / "home", hub.endpoint, *(f"org/tiny-{i}" for i in range(len(listed))))
    assert [files for _, files in found] == [
        ["config.json" if j else f"{i}.safetensors" for j in (0, 1)] for i in range(5)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_file_name_that_leaves_the_folder_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    names = ["../outside.safetensors", "/outside.safetensors", "a//b.json", "..\\a.json", "a\0.json"]
    for i, name in enumerate(names):
        hub.repos[f"org/tiny-{i}"] = FakeRepo({"main": {**FILES, name: b"weights"}})
    found = fetch(tmp_path / "home", hub.endpoint, *(f"org/tiny-{i}" for i in range(len(names))))
    reason = "which is not a path inside the repository"
    assert [error for error, _ in found] == [
        f"org/tiny-{i}: {hub.endpoint} lists {name!r}, {reason}" for i, name in enumerate(names)
    ]
    assert hub.downloaded() == set()


def test_other_file_with_an_odd_name_stops_no_download(hub: FakeHub, tmp_path: Path) -> None:
    """Names of screenshots have U+202F before AM and PM."""
    hub.repos["org/tiny"] = FakeRepo(
        {"main": {**FILES, "assets/Screenshot 10.00.00\u202fAM \U0001f600\u200d.png": b"x"}}
    )
    [(folder, files)] = fetch(tmp_path, hub.endpoint, "org/tiny")
    assert "model.safetensors" in files, folder


def test_commit_pins_a_revision(hub: FakeHub, tmp_path: Path) -> None:
    old = hub.repos["org/tiny"].commit("main")
    assert old is not None
    [(folder, _)] = fetch(tmp_path, hub.endpoint, f"org/tiny@{old}")
    assert Path(folder).name == old
    assert (Path(folder) / "model.safetensors").read_bytes() == b"weights"


def test_model_larger_than_the_disk_is_refused_before_the_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10**18
    [(error, _)] = fetch(tmp_path, hub.endpoint, "org/tiny")
    assert error.startswith(f"org/tiny needs 1000000000.0 GB in {tmp_path}/hub, whose disk has ")
    assert error.endswith(" GB free; free some, or set HF_HOME to a folder of another disk")
    assert hub.downloaded() == set()


def test_gguf_file_is_found_by_its_quantization(hub: FakeHub, tmp_path: Path) -> None:
    names = ("Q4_K_M", "q4_k", "Q8_0", "bf16", "tiny-Q4_K.gguf", "tiny-Q8_0-00001-of-00002.gguf", "BF16/tiny-BF16.gguf")
    found = [Path(path) for path, _ in fetch(tmp_path, hub.endpoint, *(f"org/gguf:{name}" for name in names))]
    contents = [path.read_bytes() for path in found]
    assert contents == [b"q4_k_m", b"q4_k", b"first", b"bf16", b"q4_k", b"first", b"bf16"]
    assert hub.downloaded() == GGUFS.keys() - {"config.json", "one-F16.gguf", "two-F16.gguf"}
    offline = fetch(tmp_path, hub.endpoint, "org/gguf:Q8_0", HF_HUB_OFFLINE="1")
    assert [Path(path) for path, _ in offline] == [found[2]]


def test_gguf_file_that_is_not_one_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    errors = [error for error, _ in fetch(tmp_path, hub.endpoint, "org/gguf", "org/gguf:Q5_K", "org/gguf:F16")]
    names = ", ".join(sorted(GGUFS.keys() - {"config.json"}))
    assert errors == [
        f"org/gguf has GGUF files alone; name one, such as org/gguf:BF16/tiny-BF16.gguf, of {names}",
        f"org/gguf has no GGUF file 'Q5_K'; its GGUF files: {names}",
        "org/gguf:F16 may be one-F16.gguf or two-F16.gguf: give the whole name of one file",
    ]
    assert hub.downloaded() == set()


def test_download_without_a_terminal_logs_how_much_has_arrived(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"before" * 1_000_000)
    with capture_logs() as lines, reported("org/tiny", tmp_path, 30_000_000, every_s=0.01):
        wait_until(lambda: any(line["gigabytes"] == 0 for line in lines))
        (tmp_path / "new.incomplete").write_bytes(bytes(20_000_000))
        wait_until(lambda: any(line["gigabytes"] == 0.02 for line in lines))
    assert lines[-1] == {
        "event": "downloading",
        "log_level": "info",
        "model": "org/tiny",
        "gigabytes": 0.02,
        "of_gigabytes": 0.03,
    }
