"""Downloads large files of the Hugging Face Hub into the cache; continues what an ended process left there.

`huggingface_hub` downloads to a file of its process and starts it again in the next one. Here a part of a file is named
after the digest of the whole content, so any later process continues it. The library then finds the complete content in
its cache and only links it.
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
from typing import Final
from uuid import uuid4

from common.hub import HubError, HubModel

PARTIAL: Final = ".incomplete"
_THREADS: Final = 8


@dataclass(frozen=True)
class LargeFile:
    """A file that the Hub lists with the digest of its content.

    Attributes:
        path: in the repository.
        sha256: of its content, in hexadecimal; names the content in the cache.
        size: bytes.
    """

    path: str
    sha256: str
    size: int

    def part(self, blobs: Path) -> Path:
        """Path of the bytes that arrive before the file is complete."""
        return blobs / f"{self.sha256}{PARTIAL}"

    def missing_bytes(self, blobs: Path) -> int:
        """Bytes that are still to be downloaded into a folder of the cache."""
        if (blobs / self.sha256).exists():
            return 0
        part = self.part(blobs)
        kept = part.stat().st_size if part.exists() else 0
        return self.size - kept if kept <= self.size else self.size


def download_large_files(model: HubModel, commit: str, files: Sequence[LargeFile], blobs: Path) -> None:
    """Downloads the contents of files that the cache lacks, several at once.

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


def _download(model: HubModel, commit: str, file: LargeFile, blobs: Path) -> None:
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # noqa: PLC0415

    # The library's own lock of this content. Some shared file systems ignore it: then several processes download.
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / blobs.parent.name / f"{file.sha256}.lock"
    for folder in (lock.parent, blobs):
        folder.mkdir(parents=True, exist_ok=True)
    part, blob = file.part(blobs), blobs / file.sha256
    with WeakFileLock(lock):
        is_damaged = False
        while not blob.exists():
            with _Part(part) as stream:
                start = 0 if is_damaged else stream.kept_bytes(file.size)
                _write(model, commit, file, stream, start)
                os.ftruncate(stream.fileno(), file.size)
                stream.seek(0)
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                if digest == file.sha256:
                    stream.move(part, blob)
                    continue
            # Bytes of an earlier process may be damaged: then the whole file is downloaded once more.
            is_damaged = True
            if not start and not blob.exists():
                part.unlink(missing_ok=True)
                raise HubError(f"{model}: {file.path} arrived with the SHA-256 {digest}, the Hub lists {file.sha256}")


class _Part(io.BufferedRandom):
    """The bytes of a content that have arrived, in a file that several processes may write at once.

    Each process writes every byte at its offset in the content. The bytes of a commit are equal for all processes, so
    writers that overlap do no harm.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666)))

    def kept_bytes(self, size: int) -> int:
        """Bytes to continue from; 0 if the file is longer than the content, which has `size` bytes."""
        kept = os.fstat(self.fileno()).st_size
        return kept if kept <= size else 0

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


def _write(model: HubModel, commit: str, file: LargeFile, stream: _Part, start: int) -> None:
    """Downloads the bytes of a file from `start` on, and writes them at their offsets.

    The URL names a commit, whose files never change, and the digest is compared in the end. An `If-Range` with the
    Hub's tag would fail, because the servers that deliver the content have tags of their own.
    """
    from huggingface_hub import hf_hub_url  # noqa: PLC0415
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    stream.seek(start)
    http_get(
        hf_hub_url(model.repo, file.path, revision=commit),
        stream,
        resume_size=start,
        headers=build_hf_headers(),
        expected_size=file.size,
        displayed_filename=file.path,
    )
    stream.flush()
