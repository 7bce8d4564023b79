"""Downloads models from the Hugging Face Hub, once, into the cache of `huggingface_hub`.

Only files that serving needs are downloaded, never pickled weights. The library honours HF_HOME, HF_ENDPOINT, HF_TOKEN
and HF_HUB_OFFLINE, shows progress on a terminal and keeps complete files. Files are continued
(worker/blob_download.py).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import structlog

from common.hub import HubError, HubModel, hub_model
from worker.blob_download import PARTIAL, HubFile, download_files
from worker.hub_client import bound_answers, import_library, too_many_requests

log = structlog.get_logger(__name__)

# Files of the top folder, and sentence-transformers' module configurations, such as `1_Pooling/config.json`. Other
# folders hold copies in other formats.
_CONFIGURATION: Final = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt")
_WEIGHTS: Final = "*.safetensors"
_BELOW: Final = ("[!0-9]*/*", "[0-9][!_]*/*", "[0-9]_*/*/*", "[0-9]_*/*.safetensors")
# Mistral's repositories have their weights twice: `consolidated` files have names of tensors that only Mistral uses.
_IGNORED: Final = (*_BELOW, "consolidated*.safetensors")
_GGUF: Final = ".gguf"
# SHA-256, or Git's SHA-1.
_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_SHARD: Final = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")
# Attempts for one download, where each failed one is an error of the server or a lost connection.
_ATTEMPTS: Final = 3
_FIRST_SERVER_ERROR: Final = 500
_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = 403
_TOO_MANY_REQUESTS: Final = 429
# Seconds between two log lines about a download, where no progress bar is shown.
_REPORT_S: Final = 15.0
_GB: Final = 1e9


def model_folder(model: str, *, weights: bool = True) -> Path:
    """The checkpoint folder or GGUF file of a model; downloads it if `model` is no path but can be a name on the Hub.

    Args:
        model: a path, which need not exist, or a name on the Hub.
        weights: True if the weights are needed too.

    Raises:
        HubError: the Hub does not have or give the model, or cannot be reached and the cache does not have it.
        ModuleNotFoundError: huggingface_hub is not installed.
    """
    hub = hub_model(model)
    return Path(model) if hub is None else download(hub, weights=weights)


def download(model: HubModel, *, weights: bool = True, include: Sequence[str] = ()) -> Path:
    """Downloads the files of a model that the cache lacks.

    Args:
        model: name on the Hub.
        weights: True if the weights are needed too.
        include: patterns of further files.

    Returns:
        The folder in the cache, whose name is the commit, or the GGUF file in it.

    Raises:
        HubError: as `model_folder`.
    """
    # Folders do not need it.
    import_library()
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars  # noqa: PLC0415

    (enable_progress_bars if sys.stderr.isatty() else disable_progress_bars)()
    bound_answers()
    with _explained(model):
        repository = _listed(model)
        needed = _chosen(repository.sizes, _patterns(model, weights), _IGNORED)
        if repository.sizes:
            _check_wanted(model, repository.sizes, needed, weights=weights)
        wanted = needed + _chosen(repository.sizes, include)
        size = _check_disk(model, repository, wanted)
        shown = (
            contextlib.nullcontext() if sys.stderr.isatty() or not size else reported(str(model), _blobs(model), size)
        )
        with shown:
            folder = _fetched(model, repository, wanted, (*_patterns(model, weights), *include))
    if model.file:
        return _gguf_file(model, folder)
    if weights and not any(folder.glob(_WEIGHTS)):
        raise HubError(f"{model} has no safetensors; pickled weights, which may run code, are not loaded")
    return folder


@dataclass(frozen=True)
class Repository:
    """Files of a repository at one commit.

    Attributes:
        sizes: bytes by path; empty if neither the Hub nor the cache has the list.
        blobs: names of the files' contents in the cache, by path; only for a list of the Hub.
        files: files with their digests, which a later process can continue, by path; only for a list of the Hub.
        commit: hash of the commit; "" without a list of the Hub.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    blobs: dict[str, str] = field(default_factory=dict)
    files: dict[str, HubFile] = field(default_factory=dict)
    commit: str = ""


def _listed(model: HubModel) -> Repository:
    from huggingface_hub import HfApi, constants, errors, get_cached_repo_tree  # noqa: PLC0415

    try:
        info = HfApi().model_info(model.repo, revision=model.revision, files_metadata=True)
    except errors.RevisionNotFoundError:
        raise
    # The download will raise it again if the cache cannot replace the Hub.
    except (OSError, errors.HTTPError):  # type: ignore[attr-defined]
        with contextlib.suppress(errors.CachedRepoTreeNotFoundError):
            return Repository({each.path: 0 for each in get_cached_repo_tree(model.repo, revision=model.revision)})
        return Repository()
    if not info.sha:
        raise HubError(f"{model}: {constants.ENDPOINT} names no commit; check HF_ENDPOINT")
    found = info.siblings or []
    sizes = {each.rfilename: each.size or 0 for each in found}
    for name in (info.sha, *sizes):
        if not _is_inside(name):
            raise HubError(f"{model}: {constants.ENDPOINT} lists {name!r}, which is not a path inside the repository")
    for name, size in sizes.items():
        if type(size) is not int or size < 0:
            raise HubError(f"{model}: {constants.ENDPOINT} lists {name!r} with {size!r} bytes; check HF_ENDPOINT")
    blobs = {each.rfilename: (each.lfs.sha256 if each.lfs else each.blob_id) or "" for each in found}
    files = {
        each.rfilename: HubFile(each.rfilename, blobs[each.rfilename], each.size)
        for each in found
        # The Hub sends larger files by its own protocol alone, which the library has.
        if _DIGEST.fullmatch(blobs[each.rfilename])
        and each.size is not None
        and each.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
    }
    return Repository(sizes, blobs, files, info.sha)


def _is_inside(name: str) -> bool:
    """True if a path of a repository stays inside the folder that it is joined to."""
    return "\0" not in name and not {"", ".", ".."}.intersection(name.replace("\\", "/").split("/"))


def _patterns(model: HubModel, weights: bool) -> tuple[str, ...]:
    """Patterns of the files that serving needs."""
    if not model.file:
        return (*_CONFIGURATION, _WEIGHTS) if weights else _CONFIGURATION
    if model.file.endswith(_GGUF):
        name = _SHARD.sub(r"-?????\1", glob.escape(model.file))
        return (name, f"*/{name}")
    # Repositories spell `Q4_K_M` in capitals or not.
    end = "".join(f"[{char.lower()}{char.upper()}]" if char.isalpha() else char for char in model.file)
    ends = (f"{end}{_GGUF}", f"{end}-?????-of-?????{_GGUF}")
    return (*ends, *(f"*[-._/]{each}" for each in ends))


def _chosen(paths: Iterable[str], allowed: Sequence[str], ignored: Sequence[str] = ()) -> list[str]:
    from huggingface_hub.utils._paths import filter_repo_objects  # noqa: PLC0415

    # GGUF files may be in a folder of their own.
    left_out = [] if any(each.endswith(_GGUF) for each in allowed) else list(ignored)
    return list(filter_repo_objects(paths, allow_patterns=list(allowed), ignore_patterns=left_out)) if allowed else []


def _check_wanted(model: HubModel, paths: Iterable[str], wanted: Sequence[str], *, weights: bool) -> None:
    """Refuses a repository without the files, before anything is downloaded."""
    ggufs = sorted(path for path in paths if path.endswith(_GGUF))
    if model.file:
        found = {_SHARD.sub(r"\1", path) for path in wanted if path.endswith(_GGUF)}
        if not found:
            names = ", ".join(ggufs) or "none"
            raise HubError(f"{model.repo} has no GGUF file {model.file!r}; its GGUF files: {names}")
        if len(found) > 1:
            raise HubError(f"{model} may be {' or '.join(sorted(found))}: give the whole name of one file")
        return
    if weights and not any(path.endswith(_WEIGHTS[1:]) for path in wanted):
        if ggufs:
            some = f"{model.repo}:{ggufs[0]}"
            raise HubError(f"{model} has GGUF files alone; name one, such as {some}, of {', '.join(ggufs)}")
        raise HubError(f"{model} has no safetensors; pickled weights, which may run code, are not loaded")
    if "config.json" not in wanted:
        raise HubError(f"{model} has no config.json; give a checkpoint in the form of transformers")


def _blobs(model: HubModel) -> Path:
    """Folder of the cache with the contents of a repository's files."""
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.file_download import repo_folder_name  # noqa: PLC0415

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.repo, repo_type="model") / "blobs"


def _check_disk(model: HubModel, repository: Repository, wanted: Sequence[str]) -> int:
    """Refuses a download that does not fit on the disk of the cache. Returns the bytes that are to come."""
    from huggingface_hub import constants  # noqa: PLC0415

    cache, kept = Path(constants.HF_HUB_CACHE), _blobs(model)
    lacking = [path for path in wanted if path in repository.blobs and not (kept / repository.blobs[path]).exists()]
    files = repository.files
    size = sum(files[path].missing_bytes(kept) if path in files else repository.sizes[path] for path in lacking)
    free = shutil.disk_usage(next(each for each in (cache, *cache.absolute().parents) if each.exists())).free
    if size > free:
        raise HubError(
            f"{model} needs {size / _GB:.1f} GB in {cache}, whose disk has {free / _GB:.1f} GB free; free some, or set "
            "HF_HOME to a folder of another disk"
        )
    if lacking:
        log.info(
            "downloading the model from the Hub", model=str(model), endpoint=constants.ENDPOINT, files=len(lacking),
            gigabytes=round(size / _GB, 2),
        )  # fmt: skip
    return size


@contextlib.contextmanager
def reported(model: str, blobs: Path, size: int, every_s: float = _REPORT_S) -> Iterator[None]:
    """Logs again and again how much of a download has arrived.

    Args:
        model: its name.
        blobs: folder in which the files arrive.
        size: bytes of the download.
        every_s: seconds between two lines.
    """
    before, done = _stored_bytes(blobs), threading.Event()

    def report() -> None:
        while not done.wait(every_s):
            arrived = round((_stored_bytes(blobs) - before) / _GB, 2)
            log.info("downloading", model=model, gigabytes=arrived, of_gigabytes=round(size / _GB, 2))

    thread = threading.Thread(target=report, name="download-report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _stored_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        # A partial file gets another name when it is complete.
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _fetched(model: HubModel, repository: Repository, wanted: Sequence[str], patterns: Sequence[str]) -> Path:
    """Downloads files; those of `patterns` if the repository could not be listed. Returns their folder."""
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

    allowed = [glob.escape(path) for path in wanted] or list(patterns)
    ignored = None if wanted or model.file else list(_IGNORED)
    files = [repository.files[path] for path in wanted if path in repository.files]
    started = time.monotonic()
    for attempt in range(_ATTEMPTS):
        try:
            download_files(model, repository.commit, files, _blobs(model))
            if files and len(files) == len(wanted):
                # It only looks at the files, which its bars call a download of 0 bytes.
                disable_progress_bars()
            folder = snapshot_download(
                model.repo, revision=model.revision, allow_patterns=allowed, ignore_patterns=ignored
            )
        except errors.HTTPError as error:  # type: ignore[attr-defined]
            response = getattr(error, "response", None)
            is_passing = response is None or response.status_code >= _FIRST_SERVER_ERROR
            if attempt == _ATTEMPTS - 1 or not is_passing:
                raise
            time.sleep(1)
        else:
            break
    log.info("model at hand", model=str(model), folder=folder, seconds=round(time.monotonic() - started, 1))
    return Path(folder)


def _gguf_file(model: HubModel, folder: Path) -> Path:
    """The file of a GGUF model in its folder, the first one of several parts."""
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*{_GGUF}"))
    found = _chosen(paths, _patterns(model, weights=True))
    if not found:
        raise HubError(f"{model} is neither a file here nor complete in the cache of the Hub")
    return folder / found[0]


@contextlib.contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """Converts the library's errors to a HubError of one line."""
    from huggingface_hub import constants, errors  # noqa: PLC0415

    hub = constants.ENDPOINT
    try:
        yield
    except errors.RevisionNotFoundError:
        raise HubError(f"{model.repo} has no revision {model.revision or 'main'!r} on {hub}") from None
    except errors.GatedRepoError:
        page = f"{hub}/{model.repo}"
        raise HubError(f"{model} is gated: accept its terms on {page} and set HF_TOKEN to your token") from None
    except errors.RepositoryNotFoundError:
        where = f"on {hub} that HF_TOKEN may read"
        raise HubError(f"{model} is neither a path here nor a model {where}") from None
    except errors.HFValidationError:
        raise HubError(f"{model} is neither a path here nor a name on the Hub") from None
    except errors.LocalEntryNotFoundError as error:
        raise HubError(_unreachable(model, error, constants.HF_HUB_OFFLINE, hub)) from None
    # HTTPError of whichever HTTP client this version of the library uses: a broken connection.
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise HubError(f"{model} cannot be downloaded: {_advice(error, hub) or f'{hub}: {_line(error)}'}") from None
    except HubError:
        raise
    # The library raises exceptions of any kind for answers of another form, such as the page of a proxy that wants a
    # login.
    except Exception as error:
        said = f"{type(error).__name__}: {_line(error)}"
        advice = "check HF_ENDPOINT and proxies, or set HF_HUB_OFFLINE=1 to use the kept files"
        raise HubError(f"{model} cannot be downloaded: {hub} does not answer like a Hub ({said}); {advice}") from None


def _advice(error: BaseException, hub: str) -> str | None:
    """Advice after an error of the disk, or an answer with a status that says it; None for other errors."""
    if isinstance(error, OSError) and error.errno is not None and (error.filename or error.errno == errno.ENOSPC):
        place = error.filename or "the disk of HF_HOME"
        return f"{place}: {error.strerror}; set HF_HOME to a folder with room that this user may write"
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status == _TOO_MANY_REQUESTS:
        return too_many_requests(hub, response)
    if status == _UNAUTHORIZED:
        return f"{hub} does not accept the token; renew HF_TOKEN, or unset it for public models"
    if status == _FORBIDDEN:
        return f"{hub} refuses access; set HF_TOKEN to a token that may read the model"
    return None


def _unreachable(model: HubModel, error: Exception, offline: bool, endpoint: str) -> str:
    """The error for a model that is missing or incomplete in the cache."""
    if offline:
        return f"{model} is neither a path here nor complete in the cache of the Hub, and HF_HUB_OFFLINE is set"
    cause = error.__cause__ or error
    if advice := _advice(cause, endpoint):
        return f"{model} is not a path here and not complete in the cache; {advice}"
    reason = _line(cause)
    return f"{model} is not a path here and not complete in the cache, and {endpoint} cannot be reached: {reason}"


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


@contextlib.contextmanager
def ending_at_signals() -> Iterator[None]:
    """Lets SIGINT and SIGTERM end this process at once during a download, with one line on standard error.

    Otherwise Python would wait until the library's threads have finished their files. For the main thread.
    """

    def end(number: int, _: FrameType | None) -> None:
        _remove_partial_files()
        # Not by `sys.stderr`, which may write later, on a thread of its own.
        os.write(2, b"\nerror: the download was interrupted; the next one continues it\n")
        os._exit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _remove_partial_files() -> None:
    """Removes the library's files of this process, which it would not continue in the next one."""
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                path = descriptor.readlink()
                # A part that can be continued is named after its digest alone, the library's after the process too.
                if path.suffix == PARTIAL and "." in path.stem:
                    path.unlink()
