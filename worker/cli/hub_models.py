"""`fissile pull`, `fissile list` and `fissile rm`: models of the Hugging Face Hub in the cache of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from common.cli.core.errors import CommandError
from common.cli.core.options import argument, options
from common.cli.core.output import aligned
from common.hub import HubError, HubModel
from common.telemetry.logs import setup_logging
from common.text.tokenizer import TokenizerError
from worker.config.model_config import ModelConfig, ModelError
from worker.config.model_tokenizer import model_tokenizer_files
from worker.hub_client import import_library
from worker.model_download import download, ending_at_signals, model_folder

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_GB: Final = 1e9
_MB: Final = 1e6
_COMMIT_CHARS: Final = 12
_SERVED: Final = "yes"
_DAMAGED: Final = "its folder is damaged"


def command_model_folder(model: str, *, weights: bool = True) -> Path:
    """The checkpoint folder or GGUF file of a command's model, which is downloaded if necessary.

    Raises:
        CommandError: the model is not available (exit code 2).
    """
    try:
        with ending_at_signals():
            return model_folder(model, weights=weights)
    except HubError as error:
        raise CommandError(str(error)) from None


@click.command()
@argument("model")
@options("pull")
def pull(model: str, revision: str | None, file: str, include: tuple[str, ...], log_level: str) -> None:
    """Download MODEL, org/name on the Hugging Face Hub, so that later starts need no network.

    Prints the revision, which names these very files for ever, and the folder or file. `org/name:Q4_K_M` downloads a
    GGUF file. Complete files are never downloaded again.
    """
    setup_logging(log_level, service="pull")
    hub = _parsed(model, revision, file)
    try:
        with ending_at_signals():
            path = download(hub, include=include)
    except HubError as error:
        raise CommandError(str(error)) from None
    click.echo(f"{replace(hub, revision=_commit(path))}\n{path}")


def _parsed(model: str, revision: str | None, file: str) -> HubModel:
    hub = HubModel.parse(model)
    if hub is None:
        raise CommandError(
            f"{model!r} cannot be a name on the Hub; valid: org/name, org/name:Q4_K_M, org/name@revision"
        )
    if hub.revision and revision:
        raise CommandError(f"--revision {revision} and {model}: name one revision")
    if hub.file and file:
        raise CommandError(f"--file {file} and {model}: name one file")
    return replace(hub, revision=revision or hub.revision, file=file or hub.file)


def _commit(path: Path) -> str:
    """The commit of a path in the cache, which begins with a repository's folder, `snapshots` and the commit."""
    from huggingface_hub import constants  # noqa: PLC0415

    return path.relative_to(constants.HF_HUB_CACHE).parts[2]


@dataclass(frozen=True)
class CachedModel:
    """A row of `fissile list`.

    Attributes:
        name: as `--model` takes it.
        revision: commit; "" for a download that was interrupted before any commit had a file, and a damaged folder.
        refs: branches and tags of this commit.
        size: bytes.
        architecture: from config.json; "" without one.
        served: `yes`, or why not.
        path: folder or GGUF file.
    """

    name: str
    revision: str
    refs: tuple[str, ...]
    size: int
    architecture: str
    served: str
    path: str


@click.command("list")
@options("list")
def list_models(as_json: bool) -> None:
    """List the models in the cache of this machine, and whether a worker can serve them."""
    cache = _scanned()
    rows = [row for repo in cache.repositories for row in _rows(repo)] + [
        CachedModel(name, "", (), _stored_bytes(folder), "", served, str(folder))
        for folders, served in ((cache.interrupted, "its download is not complete"), (cache.damaged, _DAMAGED))
        for name, folder in folders.items()
    ]
    found = sorted(rows, key=lambda row: (row.name, row.revision))
    if as_json:
        click.echo(json.dumps([asdict(row) for row in found]))
        return
    if not found:
        click.echo("no model was downloaded yet; `fissile pull org/name` downloads one")
        return
    heads = ("MODEL", "REVISION", "SIZE", "ARCHITECTURE", "SERVED")
    cells = [
        (
            row.name,
            row.revision[:_COMMIT_CHARS] + (f" ({', '.join(row.refs)})" if row.refs else ""),
            _size(row.size),
            row.architecture or "-",
            row.served,
        )
        for row in found
    ]
    click.echo(aligned([heads, *cells]))


def _size(count: int) -> str:
    return f"{count / _GB:.2f} GB" if count >= _GB / 10 else f"{count / _MB:.1f} MB"


def _rows(repo: CachedRepoInfo) -> Iterator[CachedModel]:
    for revision in repo.revisions:
        folder = revision.snapshot_path
        refs = tuple(sorted(revision.refs))
        ggufs = [each for each in revision.files if each.file_path.suffix == ".gguf"]
        for each in ggufs:
            name = f"{repo.repo_id}:{each.file_path.relative_to(folder)}"
            path = each.file_path
            yield CachedModel(name, revision.commit_hash, refs, each.size_on_disk, *_verdict(path), str(path))
        if not ggufs or (folder / "config.json").exists():
            architecture, served = _verdict(folder)
            size = revision.size_on_disk - sum(each.size_on_disk for each in ggufs)
            yield CachedModel(repo.repo_id, revision.commit_hash, refs, size, architecture, served, str(folder))


def _verdict(folder: Path) -> tuple[str, str]:
    """Architecture of a checkpoint folder or GGUF file, and whether a worker can serve it."""
    try:
        return _checked(folder)
    # One bad file must not hide the other models.
    except Exception as error:
        return _named_architecture(folder), f"it cannot be read: {type(error).__name__}"


def _checked(folder: Path) -> tuple[str, str]:
    try:
        config = ModelConfig.from_folder(folder)
        architecture = config.architecture
    except ModelError as error:
        return _named_architecture(folder), str(error).replace(f"{folder}/", "").replace(str(folder), "it")
    try:
        model_tokenizer_files(folder)
    except TokenizerError as error:
        return architecture, str(error).replace(f"{folder}: ", "").replace(str(folder), "it")
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        return architecture, "its weights are not downloaded"
    return architecture, _SERVED


def _named_architecture(folder: Path) -> str:
    try:
        return str(json.loads((folder / "config.json").read_text("utf-8"))["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


@click.command("rm")
@argument("models", nargs=-1, required=True, metavar="MODEL...")
@options("rm")
def remove(models: tuple[str, ...], as_json: bool) -> None:
    """Remove models from the cache of this machine: org/name with all revisions, or org/name@revision."""
    cache = _scanned()
    from huggingface_hub import constants, scan_cache_dir  # noqa: PLC0415

    folders = {model: cache.interrupted[model] for model in models if model in cache.interrupted}
    commits = list({commit: None for model in models if model not in folders for commit in _commits(cache, model)})
    size = sum(map(_stored_bytes, folders.values()))
    for folder in folders.values():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise CommandError(f"{folder} cannot be removed: {error}") from None
    if commits:
        strategy = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*commits)
        size += strategy.expected_freed_size
        strategy.execute()
    if as_json:
        click.echo(json.dumps({"removed": commits, "freed_bytes": size}))
    else:
        click.echo(f"removed {', '.join(dict.fromkeys(models))}: {_size(size)} freed")


def _commits(cache: _Cache, model: str) -> list[str]:
    """Commits of a model in the cache.

    Raises:
        CommandError: there is none, or the model's folder is damaged.
    """
    hub = HubModel.parse(model)
    if hub is not None and hub.file:
        raise CommandError(f"{model}: a file cannot be removed alone; valid: {hub.repo}, with all its files")
    if hub is None:
        raise CommandError(f"{model!r} cannot be a repository on the Hub; valid: org/name, org/name@revision")
    if hub.repo in cache.damaged:
        folder = cache.damaged[hub.repo]
        raise CommandError(f"{model}: {cache.reason(folder)}; mend {folder}, or remove it yourself")
    found = [
        each.commit_hash
        for repo in cache.repositories
        for each in repo.revisions
        if repo.repo_id == hub.repo
        and (hub.revision is None or hub.revision in each.refs or each.commit_hash.startswith(hub.revision))
    ]
    if not found:
        raise CommandError(f"{model} is not in the cache; `fissile list` shows what is")
    return found


@dataclass(frozen=True)
class _Cache:
    """Models in the cache of this machine.

    Attributes:
        repositories: those that can be read.
        interrupted: folders whose snapshots are missing or empty, by name: org/name.
        damaged: folders with files in a snapshot that cannot be read, by name.
        warnings: why they cannot be read; each names its folder.
    """

    repositories: Sequence[CachedRepoInfo] = ()
    interrupted: Mapping[str, Path] = field(default_factory=dict)
    damaged: Mapping[str, Path] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def reason(self, folder: Path) -> str:
        """Why a folder cannot be read."""
        return next((each for each in self.warnings if str(folder) in each), _DAMAGED)


def _scanned() -> _Cache:
    try:
        import_library()
    except HubError as error:
        raise CommandError(str(error)) from None
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir  # noqa: PLC0415

    # The library's warnings name resolved paths.
    place = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    try:
        scan = scan_cache_dir(place)
    except CacheNotFound:
        return _Cache()
    folders = {path.name.removeprefix("models--").replace("--", "/"): path for path in place.glob("models--*")}
    interrupted = {
        name: folder for name, folder in folders.items()
        if folder.is_dir() and all(path.is_dir() and not path.is_symlink() for path in folder.glob("snapshots/**/*"))
    }  # fmt: skip
    models = [repo for repo in scan.repos if repo.repo_type == "model" and repo.repo_id not in interrupted]
    known = {repo.repo_id for repo in models}
    damaged = {name: folder for name, folder in folders.items() if name not in interrupted and name not in known}
    return _Cache(models, interrupted, damaged, [str(warning) for warning in scan.warnings])


def _stored_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
