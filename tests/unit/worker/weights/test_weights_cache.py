"""Packed weights in files: the same bits from a mapped model, and a start that never fails because of the cache."""

from __future__ import annotations

import ast
import errno
import fcntl
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from structlog.testing import capture_logs

from common.config import Config
from common.params.sampling_params import SamplingParams
from kernels.select import CPU_BACKENDS, select_backend
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.linear import PackedHeads, PackedLinear
from kernels.torch_backend.moe import TorchPackedExperts
from tests.checkpoints import make_checkpoint
from tests.native import backend_or_skip
from worker.cli.worker import worker as worker_command
from worker.config.engine_config import default_weights_cache
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model import model_loader
from worker.model.model_runner import ModelRunner
from worker.model.numerics import numerics_digest
from worker.model.sharding import Shard
from worker.weights import checkpoint as loader
from worker.weights import packed_file, weights_cache
from worker.weights.checkpoint import DIGEST_SAMPLES, weight_files, weights_digest
from worker.weights.packed_file import DamagedFileError, PackedFile, UnkeptObjectError, write
from worker.weights.weights_cache import Key, WeightsCache, WeightsWriter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ROOT = Path(__file__).resolve().parents[4]
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80, "head_dim": 16}
ARCHITECTURES = ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v32")
KEY = Key("digest", (), "Arch", "bfloat16", "layout", "sources", "", "0 of 1")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(architecture: str) -> Path:
        if architecture not in made:
            shape = {key: value for key, value in SHAPE.items() if architecture == "qwen3" or "layers" in key}
            made[architecture] = make_checkpoint(
                tmp_path_factory.mktemp("model"), architecture, dtype="bfloat16", **shape
            )
        return made[architecture]

    return checkpoint


def started(folder: Path, cache: Path | str, shard: Shard | None = None, **given: Any) -> ModelRunner:
    config = Config(model=str(folder), weights_cache=str(cache), max_model_len=512, **given)
    runner = ModelRunner(config, ModelConfig.from_folder(folder), shard=shard)
    runner.allocate_kv_cache(32)
    return runner


def bits(runner: ModelRunner) -> tuple[bytes, str]:
    """Logits of a prompt, and the description of the kernels' bits."""
    seq = Sequence(list(range(5, 45)), 16, SamplingParams())
    seq.block_table = [0, 1, 2]
    batch = ScheduledBatch({seq.id: seq}, [40], 40)
    return runner.run_model(runner.prepare_model(batch)).numpy().tobytes(), repr(runner.kernels.numerics)


def events(logs: list[Any]) -> list[str]:
    return [line["event"] for line in logs if "packed weights" in line["event"]]


@pytest.mark.parametrize("kernels", CPU_BACKENDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mapped_model_has_bits_of_packed_model(
    architecture: str, kernels: str, checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_or_skip(kernels)
    folder = checkpoints(architecture)
    expected = bits(started(folder, "", kernels=kernels))
    with capture_logs() as logs:
        first = bits(started(folder, tmp_path, kernels=kernels))
    assert events(logs) == ["packed weights written", "packed weights mapped"]

    def nothing_is_read(*_: object, **__: object) -> None:
        raise AssertionError("the checkpoint is read")

    monkeypatch.setattr(model_loader, "load_weights", nothing_is_read)
    monkeypatch.setattr(type(select_backend(kernels).linear), "pack", nothing_is_read)
    second = bits(started(folder, tmp_path, kernels=kernels))
    assert (first, second) == (expected, expected)


def test_backend_adopts_packed_objects_individually(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, adopted = checkpoints("deepseek_v32"), list[object]()
    started(folder, tmp_path, kernels="torch")
    monkeypatch.setattr(TorchBackend, "adopt", lambda _, packed: adopted.append(packed))
    started(folder, tmp_path, kernels="torch")
    assert {type(each) for each in adopted if not isinstance(each, torch.Tensor)} == {
        PackedLinear,
        PackedHeads,
        TorchPackedExperts,
    }


def test_each_rank_and_dtype_has_cache_entry(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoints("qwen3")
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        for dtype in ("bfloat16", "float32"):
            runner = ModelRunner(
                Config(model=str(folder), weights_cache=str(tmp_path), dtype=dtype),
                ModelConfig.from_folder(folder),
                shard=shard,
            )
            del runner
    assert len(list(tmp_path.glob("*.weights"))) == 6


def test_checkpoint_of_same_shape_has_its_entry(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3", dtype="bfloat16", seed=1, **SHAPE)
    digests = {bits(started(folder, tmp_path / "cache")) for folder in (checkpoints("qwen3"), other)}
    assert len(digests) == 2
    assert len(list((tmp_path / "cache").glob("*.weights"))) == 2


def test_change_outside_digest_samples_selects_other_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16", **SHAPE)
    file = next(folder.glob("*.safetensors"))
    monkeypatch.setattr(loader, "DIGEST_WHOLE_BYTES", file.stat().st_size - 1)
    monkeypatch.setattr(loader, "DIGEST_WINDOW_BYTES", 1)
    started(folder, tmp_path / "cache")
    digest = weights_digest(folder)
    data = bytearray(file.read_bytes())
    between = (len(data) - 1) * (DIGEST_SAMPLES // 2) // (DIGEST_SAMPLES - 1) + 1
    data[between] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(0, 12345))
    assert weights_digest(folder) == digest, "the numerics class is that of the samples"
    assert weight_files(folder) == ((file.name, len(data), 12345),)
    assert bits(started(folder, tmp_path / "cache")) == bits(started(folder, ""))
    assert len(list((tmp_path / "cache").glob("*.weights"))) == 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "prefix": lambda data: data[:20],
    "header": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "magic": lambda data: b"x" + data[1:],
    "cut off": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "length": lambda data: data[:8] + (1 << 60).to_bytes(8, "little") + data[16:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_file_is_logged_and_rebuilt(damage: str, tmp_path: Path) -> None:
    cache, path = WeightsCache(tmp_path), WeightsCache(tmp_path).path(KEY)
    load(cache)
    good = path.read_bytes()
    path.write_bytes(DAMAGES[damage](good))
    with capture_logs() as logs:
        assert torch.equal(load(cache), torch.arange(10.0))
    assert events(logs) == ["packed weights are rebuilt", "packed weights written", "packed weights mapped"]
    assert path.read_bytes() == good


def load(cache: WeightsCache, key: Key = KEY, calls: list[bool] | None = None) -> torch.Tensor:
    def build(kept: Any) -> torch.Tensor:
        if calls is not None:
            calls.append(kept.needs_weights)
        made: torch.Tensor = kept.keep("x", lambda: torch.arange(10.0))
        return made

    return cache.load(key, build, lambda *_: None, lambda _: None)


CHANGES = {
    "name": (b'{"x":', b'{"y":', "KeyError: 'x'"),
    "code": (
        b"kernels.torch_backend.linear:PackedLinear",
        b"os:system",
        "names os:system, which is not a packed object",
    ),
    "field": (b'"bias":', b'"bios":', "TypeError: "),
    "place": (b'"offset":0', b'"offset":8192', "ValueError: "),
    "dtype": (b'"dtype":"float32"', b'"dtype":"float33"', "AttributeError: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_unfitting_cache_file_is_logged_and_unused(change: str, tmp_path: Path) -> None:
    calls: list[bool] = []

    def build(kept: Any) -> PackedLinear:
        calls.append(kept.needs_weights)
        made: PackedLinear = kept.keep("x", lambda: PackedLinear(torch.arange(10.0), None))
        return made

    cache, path = WeightsCache(tmp_path), WeightsCache(tmp_path).path(KEY)
    cache.load(KEY, build, lambda *_: None, lambda _: None)
    old, new, reason = CHANGES[change]
    change_header(path, old, new)
    calls.clear()
    with capture_logs() as logs:
        model = cache.load(KEY, build, lambda *_: None, lambda _: None)
    assert torch.equal(model.weight_t, torch.arange(10.0))
    assert calls == [False, True]
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert (line["event"], line["path"]) == ("packed weights are not used; remove the file", str(path))
    assert line["reason"].startswith(reason)
    assert "\n" not in line["reason"]


def change_header(path: Path, old: bytes, new: bytes) -> None:
    """Of a file whose header is shorter than a page before and after."""
    data, prefix = path.read_bytes(), packed_file._PREFIX
    _, length, _ = prefix.unpack(data[: prefix.size])
    header = data[prefix.size : prefix.size + length]
    assert header.count(old) == 1
    header = header.replace(old, new)
    page = prefix.pack(packed_file.MAGIC, len(header), packed_file._digest(header)) + header
    path.write_bytes(page.ljust(4096, b"\0") + data[4096:])


def test_weights_file_of_another_key_is_not_used(tmp_path: Path) -> None:
    cache, other = WeightsCache(tmp_path), replace(KEY, weights="other")
    load(cache)
    cache.path(KEY).rename(cache.path(other))
    calls: list[bool] = []
    load(cache, other, calls)
    assert calls == [True, False]
    with cache.path(other).open("rb") as file, pytest.raises(DamagedFileError, match="other weights"):
        PackedFile(file, KEY.text)


class Recorded(io.BytesIO):
    """Keeps where each write began, and how long it was."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, int]] = []

    def write(self, data: ReadableBuffer, /) -> int:
        place, count = self.tell(), super().write(data)
        self.writes.append((place, count))
        return count


@pytest.mark.parametrize("sizes", [[1], [4096], [8192 - 4096], [3, 5000, 70_000, 8192], [20_000, 1]])
def test_packed_file_is_written_in_aligned_pieces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: list[int]
) -> None:
    piece = 8192
    monkeypatch.setattr(packed_file, "_PIECE_BYTES", piece)
    tensors = [torch.randint(-128, 127, (size,), dtype=torch.int8) for size in sizes]
    file, told = Recorded(), list[tuple[int, int]]()
    write(file, "key", {"all": tensors}, lambda done, total: told.append((done, total)))
    *whole, last = file.writes
    assert [place for place, _ in file.writes] == [i * piece for i in range(len(file.writes))]
    assert {count for _, count in whole} <= {piece}
    assert last[1] < piece
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == sum(-(-size // 4096) * 4096 for size in sizes)
    (tmp_path / "file").write_bytes(file.getvalue())
    with (tmp_path / "file").open("rb") as kept:
        restored = PackedFile(kept, "key").restored("all")
    assert all(torch.equal(one, other) for one, other in zip(restored, tensors, strict=True))


def test_start_continues_without_writable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with capture_logs() as logs:
        assert torch.equal(load(WeightsCache(tmp_path / "file" / "below")), torch.arange(10.0))
    assert [(line["event"], line["log_level"]) for line in logs] == [("packed weights are not kept", "warning")]


def test_full_disk_leaves_only_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_cache, "write", full)
    with capture_logs() as logs:
        assert torch.equal(load(WeightsCache(tmp_path)), torch.arange(10.0))
    assert [line["reason"] for line in logs] == ["No space left on device"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_uncacheable_weights_are_used(tmp_path: Path) -> None:
    with capture_logs() as logs:
        made = WeightsCache(tmp_path).load(KEY, lambda kept: kept.keep("x", object), lambda *_: None, lambda _: None)
    assert type(made) is object
    assert [line["reason"] for line in logs] == ["a packed weight holds a builtins.object"]


def test_least_recently_used_entries_are_removed_unless_in_use(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path, limit_bytes=28_000)
    keys = [replace(KEY, weights=str(i)) for i in range(4)]
    kept = load(cache, keys[0])
    for age, key in enumerate(keys[1:3]):
        load(cache, key)
        os.utime(cache.path(key), (age, age))
    os.utime(cache.path(keys[0]), (0, 0))
    (tmp_path / "left.1.part").write_bytes(b"x")
    load(cache, keys[3])
    there = [cache.path(key).exists() for key in keys]
    assert there == [True, False, True, True], "entries of two pages each; the oldest is in use"
    assert not list(tmp_path.glob("*.part"))
    assert len(list(tmp_path.glob("*.lock"))) == 3
    assert torch.equal(kept, torch.arange(10.0))


def locks_of_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """flock as on NFS: an exclusive lock needs write access to the file, a shared lock read access."""
    real = fcntl.flock

    def flock(descriptor: int, kind: int) -> None:
        lacking = os.O_RDONLY if kind & fcntl.LOCK_EX else os.O_WRONLY
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == lacking:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_nfs_locks_keep_used_and_remove_unused_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks_of_nfs(monkeypatch)
    cache = WeightsCache(tmp_path, limit_bytes=0)
    keys = [replace(KEY, weights=str(i)) for i in range(3)]
    kept = load(cache, keys[0])
    for key in keys[1:]:
        load(cache, key)
    assert [cache.path(key).exists() for key in keys] == [True, False, True]
    assert torch.equal(kept, torch.arange(10.0))


def test_entries_are_not_removed_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks(monkeypatch)
    cache = WeightsCache(tmp_path, limit_bytes=0)
    keys = [replace(KEY, weights=str(i)) for i in range(2)]
    for key in keys:
        load(cache, key)
    assert all(cache.path(key).exists() for key in keys)


def test_start_continues_when_locks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", flock)
    with capture_logs() as logs:
        assert torch.equal(load(WeightsCache(tmp_path, wait_s=0)), torch.arange(10.0))
    assert events(logs) == ["packed weights are not kept"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_start_waits_for_briefly_locked_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls = WeightsCache(tmp_path), list[bool]()
    load(cache)
    remover = cache.path(KEY).open("r+b")
    fcntl.flock(remover, fcntl.LOCK_EX)
    # Gone as soon as the start has seen the lock.
    monkeypatch.setattr("worker.weights.weights_cache.time.sleep", lambda _: remover.close())
    kept = load(cache, calls=calls)
    assert remover.closed
    assert calls == [False]
    assert torch.equal(kept, torch.arange(10.0))


def test_locked_cache_entry_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cache, "_SHORT_WAIT_S", 0.05)
    cache, calls = WeightsCache(tmp_path), list[bool]()
    load(cache)
    with cache.path(KEY).open("r+b") as other, capture_logs() as logs:
        fcntl.flock(other, fcntl.LOCK_EX)
        load(cache, calls=calls)
    assert calls == [True, False]
    assert logs[0]["reason"] == "another process keeps the file locked"


def test_entry_replaced_while_opening_is_reopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path, real = WeightsCache(tmp_path), WeightsCache(tmp_path).path(KEY), fcntl.flock
    load(cache)
    (tmp_path / "other").write_bytes(path.read_bytes())

    def flock(descriptor: int, kind: int) -> None:
        if kind & fcntl.LOCK_SH and (tmp_path / "other").exists():
            (tmp_path / "other").rename(path)
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    kept = load(cache)
    assert not (tmp_path / "other").exists()
    assert not weights_cache._remove_unused(path), "the lock is on the file that is there"
    assert torch.equal(kept, torch.arange(10.0))


def test_cache_writable_by_others_is_warned(tmp_path: Path) -> None:
    """A folder or an entry that anybody can write to was used without a word."""
    cache = WeightsCache(tmp_path / "cache")
    before = os.umask(0)
    try:
        with capture_logs() as logs:
            load(cache)
    finally:
        os.umask(before)
    assert not [log for log in logs if "others can change" in log["event"]]
    assert cache.path(KEY).stat().st_mode & 0o777 == 0o644
    (tmp_path / "cache").chmod(0o777)
    cache.path(KEY).chmod(0o666)
    with capture_logs() as logs:
        load(cache)
    said = [(log["path"], log["mode"]) for log in logs if "others can change" in log["event"]]
    assert said == [(str(tmp_path / "cache"), "777"), (str(cache.path(KEY)), "666")]


def test_damaged_packed_weights_are_named(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Former fault: the error blamed the checkpoint, at every start."""
    folder = checkpoints("qwen3")
    started(folder, tmp_path)
    (entry,) = tmp_path.glob("*.weights")
    content = bytearray(entry.read_bytes())
    half = len(content) // 2
    content[half:] = b"\xff" * (len(content) - half)
    entry.write_bytes(content)
    with pytest.raises(ModelError, match=f"the packed weights in {entry} are damaged: remove that file"):
        numerics_digest(started(folder, tmp_path))


def test_writers_with_equal_process_id_use_separate_files(tmp_path: Path) -> None:
    cache, second = WeightsCache(tmp_path), list[torch.Tensor]()

    def progress(written: int, in_all: int) -> None:
        if not second:
            second.append(torch.empty(0))
            second.append(load(WeightsCache(tmp_path, wait_s=0)))

    with capture_logs() as logs:
        made = cache.load(KEY, lambda kept: kept.keep("x", lambda: torch.arange(10.0)), progress, lambda _: None)
    assert events(logs) == ["packed weights written", "packed weights mapped"] * 2
    assert torch.equal(made, second[1])
    assert not list(tmp_path.glob("*.part"))


def test_removed_part_file_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, removed = fcntl.flock, list[Path]()

    def flock(descriptor: int, kind: int) -> None:
        for part in tmp_path.glob("*.part"):
            if not removed:
                part.unlink()
                removed.append(part)
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with capture_logs() as logs:
        load(WeightsCache(tmp_path))
    assert len(removed) == 1
    assert events(logs) == ["packed weights written", "packed weights mapped"]


def test_start_waits_for_same_packing_in_bounded_time(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path, wait_s=0.2)
    with cache.path(KEY).with_suffix(".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with capture_logs() as logs:
            assert torch.equal(load(cache), torch.arange(10.0))
    assert logs[0]["event"].startswith("waiting for another process")


STARTER = """
import sys, time, torch
from pathlib import Path
from worker.weights.weights_cache import Key, WeightsCache

packs = []

def make():
    packs.append(time.sleep(0.5))
    return torch.arange(3_000_000.0)

key = Key("digest", (), "Arch", "bfloat16", "layout", "sources", "", "0 of 1")
cache = WeightsCache(Path(sys.argv[1]))
made = cache.load(key, lambda kept: kept.keep("x", make), lambda *_: None, lambda _: None)
assert torch.equal(made, torch.arange(3_000_000.0))
print(len(packs))
"""


@pytest.mark.slow
def test_one_of_two_concurrent_processes_packs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    packs = sorted(process.communicate(timeout=300)[0].split()[-1] for process in both)
    assert packs == ["0", "1"]
    assert len(list(tmp_path.glob("*.weights"))) == 1


def test_packed_objects_are_restored_unchanged(tmp_path: Path) -> None:
    table = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    objects: dict[str, Any] = {
        "transposed": PackedLinear(table.t(), None),
        "same memory": table,
        "gaps": torch.arange(12.0).view(3, 4)[:, ::2],
        "empty": torch.empty(0, 4, dtype=torch.int8),
        "tree": [(1, 2.5, None, True, "a"), torch.tensor(3), torch.float8_e4m3fn],
    }
    with (tmp_path / "f").open("w+b") as file:
        write(file, "key", objects, lambda *_: None)
        file.seek(0)
        packed = PackedFile(file, "key")
        back = {name: packed.restored(name) for name in objects}
    assert back["transposed"].weight_t.stride() == (1, 4)
    assert back["transposed"].weight_t.data_ptr() == back["same memory"].data_ptr()
    for name in ("same memory", "gaps", "empty"):
        assert torch.equal(back[name], objects[name])
    assert back["tree"][0] == objects["tree"][0]
    assert (int(back["tree"][1]), back["tree"][2]) == (3, torch.float8_e4m3fn)


def test_packed_file_cannot_name_foreign_code(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w+b") as file:
        write(file, "key", {"x": PackedLinear(torch.zeros(1), None)}, lambda *_: None)
        file.seek(0)
        packed = PackedFile(file, "key")
        packed._objects["x"]["class"] = "os:system"
        with pytest.raises(DamagedFileError, match="names os:system"):
            packed.restored("x")
    with pytest.raises(UnkeptObjectError):
        write((tmp_path / "g").open("wb"), "key", {"x": KEY}, lambda *_: None)


def test_duplicate_packed_name_is_refused() -> None:
    making = WeightsWriter()
    making.keep("x", int)
    with pytest.raises(ValueError, match="x is kept twice"):
        making.keep("x", int)


def test_weights_cache_option_is_folder_or_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    option = next(each for each in worker_command.params if each.name == "weights_cache")
    assert option.envvar == "FISSILE_WEIGHTS_CACHE"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_weights_cache() == str(tmp_path / "fissile" / "weights")


# Imported by the packing code, but without effect on an entry.
PACKS_NOTHING = {"worker.model.forward_context"}


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports when it is loaded."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("worker", "kernels"):
            found.add(node.module)
    return found


def test_source_digest_covers_exactly_packing_code() -> None:
    """Former fault: a comment in worker/session/outbox.py caused all cached models of a host to be packed again."""
    paths = weights_cache.packing_sources()
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    needed = {module for path in paths for module in imported(path)} - PACKS_NOTHING
    assert {module for module in needed if not module.startswith("kernels")} <= modules
    assert not modules & {
        "worker.session.outbox",
        "worker.engine.scheduler",
        "worker.model.model_runner",
        "worker.cli.worker",
    }
