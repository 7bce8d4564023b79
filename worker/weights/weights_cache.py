"""Folder of packed weights: the first start of a model writes its packed weights, later starts map them.

Invariants:
  * An entry's name is a digest of all that its bytes are a function of (`Key`), and its header says the key again. An
    entry appears whole, by a rename; one that is damaged or of another key is said in one line and made anew.
  * One process at a time packs one entry, the others of this machine wait for it; where the folder knows no locks all
    pack, and the last rename wins.
  * A mapped entry is locked as long as it is used. When all together are more than the limit, those that have not been
    used for longest go, never one in use; where nobody can tell whether one is in use, none.
  * No failure of the cache is one of the start: without it weights are read and packed as ever.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeVar

import structlog

from common.limits import WEIGHTS_CACHE_BYTES, WEIGHTS_CACHE_WAIT_S
from worker.weights.packed_file import DamagedFileError, PackedFile, UnkeptObjectError, write

log = structlog.get_logger(__name__)

_ENTRY: Final = ".weights"
_LOCK: Final = ".lock"
_PART: Final = ".part"
_POLL_S: Final = 0.1
_SHORT_POLL_S: Final = 0.01
_SHORT_WAIT_S: Final = 2.0
_PART_TRIES: Final = 8
_MIB: Final = 1 << 20
Made = TypeVar("Made")
Model = TypeVar("Model")
Progress = Callable[[int, int], None]
# Raised when a well-formed cache entry does not match the model's code: rebuild it.
_UNUSABLE: Final = (AttributeError, DamagedFileError, ImportError, KeyError, RuntimeError, TypeError, ValueError)


class _LockState(Enum):
    """Outcome of taking a lock."""

    HELD = "held"
    BUSY = "another process has it"
    UNKNOWN = "the file system knows no locks"


@dataclass(frozen=True)
class Key:
    """Facts that determine the bytes of a rank's packed weights.

    Attributes:
        weights: digest of the checkpoint (worker/weights/checkpoint.py), which sees no more than samples of large
            files.
        files: name, bytes and time of the last change, in ns, of each of its files of weights.
        architecture: of the model.
        dtype: of weights and activations.
        layout: the back end, and what its layout depends on.
        sources: digest of the code that reads and packs.
        quantization: how the weights are quantized beside what the checkpoint says.
        rank: of the ranks that share the model, and how many: tensor, expert and data parallel.
    """

    weights: str
    files: tuple[tuple[str, int, int], ...]
    architecture: str
    dtype: str
    layout: str
    sources: str
    quantization: str
    rank: str

    @property
    def text(self) -> str:
        """The key as text, as the file's header has it."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def name(self) -> str:
        """File name of the entry, without its ending."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]


class Keeper(Protocol):
    """Gives layers their packed objects: made from the checkpoint, or mapped from a file."""

    @property
    def mapped_bytes(self) -> int:
        """Size of the mapped file that holds the objects; 0 if they lie in memory of this process."""
        ...

    @property
    def mapped_file(self) -> str:
        """Path of the mapped file; empty without one."""
        ...

    @property
    def needs_weights(self) -> bool:
        """True if `keep` makes objects, so that the checkpoint is needed."""
        ...

    def keep(self, name: str, make: Callable[[], Made]) -> Made:
        """Returns the tensors or packed objects of `make`, made or mapped. Only `make` may change them.

        Raises:
            ValueError: the name was used before.
        """
        ...


class WeightsWriter:
    """Keeper that makes all objects and keeps them for writing.

    Attributes:
        objects: what was made, by name.
    """

    needs_weights = True
    mapped_bytes = 0
    mapped_file = ""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def keep(self, name: str, make: Callable[[], Made]) -> Made:
        """Makes an object and keeps it."""
        if name in self.objects:
            raise ValueError(f"{name} is kept twice")
        made = self.objects[name] = make()
        return made


class WeightsMap:
    """Keeper that takes all objects from a mapped file.

    Args:
        file: of the same model.
        path: of the file.
        adopt: told of everything that is taken.
    """

    needs_weights = False

    def __init__(self, file: PackedFile, path: Path, adopt: Callable[[Any], None]) -> None:
        self._file = file
        self.mapped_file = str(path)
        self._adopt = adopt
        self.mapped_bytes = file.num_bytes

    def keep(self, name: str, make: Callable[[], Made]) -> Made:
        """Takes the object of that name from the file."""
        kept: Made = self._file.restored(name)
        self._adopt(kept)
        return kept


class WeightsCache:
    """Cache folder of packed weights.

    Args:
        folder: made when something is written.
        limit_bytes: of all entries together, those in use among them, which are never removed.
        wait_s: longest wait for another process that packs the same.
    """

    def __init__(
        self, folder: Path, limit_bytes: int = WEIGHTS_CACHE_BYTES, wait_s: float = WEIGHTS_CACHE_WAIT_S
    ) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._wait_s = wait_s

    def load(
        self,
        key: Key,
        build: Callable[[Keeper], Model],
        progress: Progress,
        adopt: Callable[[Any], None],
    ) -> Model:
        """Loads the model, with mapped weights if possible.

        Args:
            key: of its weights.
            build: makes the model with what a Keeper gives.
            progress: called with (bytes written, bytes in all).
            adopt: told of every packed object that was not made by this process.
        """
        with self._packing(key):
            file = self._open(key)
            if file is None:
                making = WeightsWriter()
                model = build(making)
                file = self._write(key, making.objects, progress)
                if file is None:
                    return model
                # The memory of what was made is given back before the same is mapped.
                del making, model
        try:
            return build(WeightsMap(file, self.path(key), adopt))
        except _UNUSABLE as error:
            log.warning("packed weights are not used; remove the file", path=str(self.path(key)), reason=_reason(error))
        return build(WeightsWriter())

    def path(self, key: Key) -> Path:
        """Path of an entry's file."""
        return self._folder / f"{key.name}{_ENTRY}"

    def _open(self, key: Key) -> PackedFile | None:
        path = self.path(key)
        try:
            stream = _opened_in_use(path)
        except OSError:
            return None
        if stream is None:
            log.warning("packed weights are rebuilt", path=str(path), reason="another process keeps the file locked")
            return None
        try:
            file = PackedFile(stream, key.text)
            with contextlib.suppress(OSError):
                os.utime(path)
        except (OSError, *_UNUSABLE) as error:
            log.warning("packed weights are rebuilt", path=str(path), reason=_reason(error))
            stream.close()
            return None
        _warn_of_others(self._folder, path)
        log.info("packed weights mapped", path=str(path), mib=file.num_bytes // _MIB)
        return file

    def _write(self, key: Key, objects: dict[str, Any], progress: Progress) -> PackedFile | None:
        path = self.path(key)
        part: Path | None = None
        begin = time.monotonic()
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part, stream = _new_part(path)
            with stream:
                write(stream, key.text, objects, progress)
                stream.flush()
                os.fsync(stream.fileno())
                part.rename(path)
            _sync(self._folder)
        except (OSError, UnkeptObjectError) as error:
            log.warning("packed weights are not kept", folder=str(self._folder), reason=_reason(error))
            if part is not None:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
            return None
        log.info("packed weights written", path=str(path), seconds=round(time.monotonic() - begin, 1))
        file = self._open(key)
        self._remove_old()
        return file

    def _remove_old(self) -> None:
        """Removes files of dead writers, and unused entries beyond the size limit, least recently used first."""
        with contextlib.suppress(OSError):
            for part in self._folder.glob(f"*{_PART}"):
                _remove_unused(part)
            entries = sorted((each.stat().st_mtime, each.stat().st_size, each) for each in self._entries())
            total = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if total > self._limit_bytes and _remove_unused(path):
                    log.info("packed weights removed", path=str(path))
                    total -= size
                    _remove_unused(path.with_suffix(_LOCK))

    def _entries(self) -> Iterator[Path]:
        return self._folder.glob(f"*{_ENTRY}")

    @contextlib.contextmanager
    def _packing(self, key: Key) -> Iterator[None]:
        """Lock for the one process that may pack. Without file locks, or after the longest wait, every process may."""
        with contextlib.ExitStack() as stack:
            stream = self._lock_file(key)
            if stream is not None:
                stack.enter_context(stream)
                self._wait_for(stream)
            yield

    def _lock_file(self, key: Key) -> BinaryIO | None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return self.path(key).with_suffix(_LOCK).open("ab")
        except OSError:
            return None

    def _wait_for(self, stream: BinaryIO) -> None:
        deadline, said = time.monotonic() + self._wait_s, False
        while _lock(stream, fcntl.LOCK_EX) is _LockState.BUSY and time.monotonic() < deadline:
            if not said:
                log.info("waiting for another process that packs these weights", folder=str(self._folder))
                said = True
            time.sleep(_POLL_S)


# The Python code that reads, converts and packs: packages, and modules of others.
_PACKING_PACKAGES: Final = ("kernels", "worker/model/layers", "worker/model/models", "worker/weights")
_PACKING_MODULES: Final = (
    "worker/config/architectures",
    "worker/config/gguf_config",
    "worker/config/gguf_file",
    "worker/config/gguf_tokenizer",
    "worker/config/model_config",
    "worker/config/quantization",
    "worker/config/shares",
    "worker/config/stored_names",
    "worker/config/transformers_config",
    "worker/model/architectures",
    "worker/model/model_loader",
    "worker/model/sharding",
)


def packing_sources() -> list[Path]:
    """Source files that determine the content of an entry; other changes leave entries valid."""
    top = Path(__file__).resolve().parents[2]
    packages = [path for package in _PACKING_PACKAGES for path in (top / package).rglob("*.py")]
    return sorted([*packages, *(top / f"{name}.py" for name in _PACKING_MODULES)])


@functools.cache
def sources_digest() -> str:
    """Digest of `packing_sources`."""
    top = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in packing_sources():
        digest.update(str(path.relative_to(top)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _lock(stream: BinaryIO, kind: int) -> _LockState:
    """Locks an open file until it is closed: LOCK_SH needs a file open for reading, LOCK_EX for writing (NFS)."""
    try:
        fcntl.flock(stream.fileno(), kind | fcntl.LOCK_NB)
    except OSError as error:
        busy = error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
        return _LockState.BUSY if busy else _LockState.UNKNOWN
    return _LockState.HELD


def _opened_in_use(path: Path) -> BinaryIO | None:
    """Opens the file and locks it against removal; None if another process keeps it locked for long.

    Raises:
        OSError: it is not there or cannot be read.
    """
    deadline = time.monotonic() + _SHORT_WAIT_S
    while True:
        stream = path.open("rb")
        # Another process may have removed or replaced the file between `open` and the lock.
        if _lock(stream, fcntl.LOCK_SH) is not _LockState.BUSY and _is_at(path, stream):
            return stream
        stream.close()
        if time.monotonic() > deadline:
            return None
        time.sleep(_SHORT_POLL_S)


def _new_part(path: Path) -> tuple[Path, BinaryIO]:
    """Creates a file with a unique name for a new entry, locked while it is written.

    Raises:
        OSError: it cannot be made or locked.
    """
    for _ in range(_PART_TRIES):
        # Not by the process id: that of a container's process is 1 in all containers which share the folder.
        part = path.with_suffix(f".{secrets.token_hex(8)}{_PART}")
        # Only this user can write to the file, for any umask.
        stream = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb")
        # Before it is locked, another may take it for one that was left.
        if _lock(stream, fcntl.LOCK_EX) is not _LockState.BUSY and _is_at(part, stream):
            return part, stream
        stream.close()
        part.unlink(missing_ok=True)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _remove_unused(path: Path) -> bool:
    """Removes a file if it is certain that no process has it locked; True if it did."""
    try:
        with path.open("r+b") as stream:
            unused = _lock(stream, fcntl.LOCK_EX) is _LockState.HELD and _is_at(path, stream)
            if unused:
                path.unlink()
    except OSError:
        return False
    return unused


def _is_at(path: Path, stream: BinaryIO) -> bool:
    """True if the path still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def _warn_of_others(*paths: Path) -> None:
    """Warns if other users can change a path: an entry determines the model's answers and has no checksum."""
    for path in paths:
        with contextlib.suppress(OSError):
            found = path.stat()
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
                log.warning(
                    "others can change packed weights, and with them what the model answers; remove or own the path",
                    path=str(path),
                    owner=found.st_uid,
                    mode=f"{found.st_mode & 0o7777:o}",
                )


def _sync(folder: Path) -> None:
    """Makes a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """First line of an error message."""
    if isinstance(error, OSError):
        return os.strerror(error.errno or 0)
    if isinstance(error, DamagedFileError | UnkeptObjectError):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]
