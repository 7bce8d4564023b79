"""Downloads files of the Hugging Face Hub into the cache; continues what an ended process left there.

`huggingface_hub` downloads to a file of its process and starts it again in the next one. It names contents after the
header of an answer and compares no digest. Here a file is named after the digest that the Hub lists, so any later
process continues it, and only the listed content gets that name. The library then finds all files in its cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from common.hub import HubError, HubModel

PARTIAL: Final = ".incomplete"
_THREADS: Final = 8
_SHA256_CHARS: Final = 64
# Larger files have a progress bar.
_SHOWN_BYTES: Final = 10 << 20


@dataclass(frozen=True)
class HubFile:
    """A file that the Hub lists with the digest of its content.

    Attributes:
        path: in the repository.
        digest: of its content, in hexadecimal: SHA-256 of a file in Git LFS, else Git's SHA-1; names the content in the
            cache.
        size: bytes.
    """

    path: str
    digest: str
    size: int

    @property
    def algorithm(self) -> str:
        """Name of the digest, for messages."""
        return "SHA-256" if len(self.digest) == _SHA256_CHARS else "SHA-1"

    def part(self, blobs: Path) -> Path:
        """Path of the bytes that arrive before the file is complete."""
        return blobs / f"{self.digest}{PARTIAL}"

    def missing_bytes(self, blobs: Path) -> int:
        """Bytes that are still to be downloaded into a folder of the cache."""
        if (blobs / self.digest).exists():
            return 0
        part = self.part(blobs)
        kept = part.stat().st_size if part.exists() else 0
        return self.size - kept if kept <= self.size else self.size

    def digest_of(self, stream: io.BufferedRandom) -> str:
        """Digest of a stream of `size` bytes, from its position on."""
        if len(self.digest) == _SHA256_CHARS:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        # Git puts the kind and the length of a content in front of it.
        begun = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: begun).hexdigest()


def download_files(model: HubModel, commit: str, files: Sequence[HubFile], blobs: Path) -> None:
    """Downloads the files that the cache lacks, several at once, and links them into the commit's folder.

    Args:
        model: name on the Hub.
        commit: whose files they are.
        files: the wanted ones.
        blobs: folder of the cache for the repository's contents.

    Raises:
        HubError: a content has another digest than the listed one.
        OSError, HTTPError: the Hub does not answer, or not with the file.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="download") as threads:
        list(threads.map(lambda file: _download(model, commit, file, blobs), files))
    for file in files:
        _link(blobs / file.digest, blobs.parent / "snapshots" / commit / file.path)


def _link(blob: Path, pointer: Path) -> None:
    """Makes `pointer` name a content, by the library's means: it copies where the file system has no links.

    A copy gets its name when it is whole. One of another size, which an older version cut, is replaced.
    """
    from huggingface_hub.file_download import _create_symlink  # noqa: PLC0415

    if pointer.exists() and pointer.stat().st_size == blob.stat().st_size:
        return
    pointer.parent.mkdir(parents=True, exist_ok=True)
    # Beside the pointer, because links are relative.
    own = pointer.with_name(f".{uuid4().hex}{PARTIAL}")
    try:
        _create_symlink(str(blob), str(own))
        own.replace(pointer)
    finally:
        own.unlink(missing_ok=True)


def _download(model: HubModel, commit: str, file: HubFile, blobs: Path) -> None:
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # noqa: PLC0415

    # The library's own lock of this content. Some shared file systems ignore it: then several processes download.
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / blobs.parent.name / f"{file.digest}.lock"
    for folder in (lock.parent, blobs):
        folder.mkdir(parents=True, exist_ok=True)
    part, blob = file.part(blobs), blobs / file.digest
    with WeakFileLock(lock):
        is_damaged = False
        while not blob.exists():
            with _Part(part, model, file) as stream:
                start = 0 if is_damaged else stream.kept_bytes()
                _write(model, commit, file, stream, start)
                os.ftruncate(stream.fileno(), file.size)
                stream.seek(0)
                digest = file.digest_of(stream)
                if digest == file.digest:
                    stream.move(part, blob)
                    continue
            # Bytes of an earlier process may be damaged: then the whole file is downloaded once more.
            is_damaged = True
            if not start and not blob.exists():
                part.unlink(missing_ok=True)
                found = f"{file.path} arrived with the {file.algorithm} {digest}, the Hub lists {file.digest}"
                raise HubError(f"{model}: {found}; check HF_ENDPOINT and proxies, and try again")


class _Part(io.BufferedRandom):
    """The bytes of a content that have arrived, in a file that several processes may write at once.

    Each process writes every byte at its offset in the content. The bytes of a commit are equal for all processes, so
    writers that overlap do no harm.
    """

    def __init__(self, path: Path, model: HubModel, file: HubFile) -> None:
        super().__init__(io.FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666)))
        self._model = model
        self._file = file

    def kept_bytes(self) -> int:
        """Bytes to continue from; 0 if this file is longer than the content."""
        kept = os.fstat(self.fileno()).st_size
        return kept if kept <= self._file.size else 0

    def write(self, data: Any, /) -> int:
        """Writes bytes that arrived.

        Raises:
            HubError: the content has more bytes than the Hub lists, perhaps without an end.
        """
        if self.tell() + len(data) > self._file.size:
            found = f"{self._file.path} has more than the {self._file.size} bytes that the Hub lists"
            raise HubError(f"{self._model}: {found}; check HF_ENDPOINT and proxies, and try again")
        return super().write(data)

    def truncate(self, pos: int | None = None, /) -> int:
        """Keeps all bytes: `http_get` truncates if the server sends the whole file, but others may write here."""
        del pos
        return self.tell()

    def move(self, path: Path, target: Path) -> None:
        """Renames this file from `path` to `target`; a no-op if another process has renamed or replaced it."""
        own = path.with_name(f"{target.name}.{uuid4().hex}{PARTIAL}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(own)
            # Between the digest and the rename, another process may have renamed this file and begun a new one.
            is_own = os.path.samestat(own.stat(), os.fstat(self.fileno()))
            own.rename(target if is_own else path)


def _write(model: HubModel, commit: str, file: HubFile, stream: _Part, start: int) -> None:
    """Downloads the bytes of a file from `start` on, and writes them at their offsets.

    The URL names a commit, whose files never change, and the digest is compared in the end. An `If-Range` with the
    Hub's tag would fail, because the servers that deliver the content have tags of their own.
    """
    from huggingface_hub import hf_hub_url  # noqa: PLC0415
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import silent_tqdm  # noqa: PLC0415

    stream.seek(start)
    shown: dict[str, Any] = {} if file.size > _SHOWN_BYTES else {"tqdm_class": silent_tqdm}
    http_get(
        hf_hub_url(model.repo, file.path, revision=commit),
        stream,
        resume_size=start,
        headers=build_hf_headers(),
        expected_size=file.size,
        displayed_filename=file.path,
        **shown,
    )
    stream.flush()
