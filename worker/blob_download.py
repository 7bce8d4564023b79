"""Downloads large files of the Hugging Face Hub into the cache; continues what an ended process left there.

`huggingface_hub` downloads to a file of its process and starts it again in the next one. Here a part of a file is named
after the digest of the whole content, so any later process continues it. The library then finds the complete content in
its cache and only links it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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

    # The library's own lock of this content: another process that downloads it has it.
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / blobs.parent.name / f"{file.sha256}.lock"
    for folder in (lock.parent, blobs):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if (blobs / file.sha256).exists():
            return
        part = file.part(blobs)
        while True:
            is_continued = part.exists()
            _append(model, commit, file, part)
            with part.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if digest == file.sha256:
                part.rename(blobs / file.sha256)
                return
            part.unlink()
            # Bytes of an earlier process may be damaged: then the whole file is downloaded once more.
            if not is_continued:
                raise HubError(f"{model}: {file.path} arrived with the SHA-256 {digest}, the Hub lists {file.sha256}")


def _append(model: HubModel, commit: str, file: LargeFile, part: Path) -> None:
    """Downloads the bytes of a file that a part of it lacks, and appends them.

    The URL names a commit, whose files never change, and the digest is compared in the end. An `If-Range` with the
    Hub's tag would fail, because the servers that deliver the content have tags of their own.
    """
    from huggingface_hub import hf_hub_url  # noqa: PLC0415
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    with part.open("ab") as stream:
        if stream.tell() > file.size:
            stream.truncate(0)
        http_get(
            hf_hub_url(model.repo, file.path, revision=commit),
            stream,
            resume_size=part.stat().st_size,
            headers=build_hf_headers(),
            expected_size=file.size,
            displayed_filename=file.path,
        )
