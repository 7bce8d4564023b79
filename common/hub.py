"""Models by their name on the Hugging Face Hub, `org/name` or `org/name@revision`, downloaded once into HF_HOME.

A local folder of that name takes precedence. Only files that a model needs are downloaded, never pickled weights.
`huggingface_hub` honours HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE, and shows progress on a terminal.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Sequence

log = structlog.get_logger(__name__)

# Files of the top folder, and sentence-transformers' module configurations, such as `1_Pooling/config.json`. Other
# folders hold copies in other formats.
CONFIGURATION_FILES: Final = ("*.json", "*.jinja")
WEIGHT_FILES: Final = ("*.safetensors",)
_BELOW: Final = ("[!0-9]*/*", "[0-9][!_]*/*", "[0-9]_*/*/*", "[0-9]_*/*.safetensors")
_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_FORM: Final = re.compile(rf"({_PART}/({_PART}))(?:@(\S+))?")


class HubError(Exception):
    """A model that the Hub does not provide; the message is one line that says why."""


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        repo: `org/name`.
        name: without the organization.
        revision: branch, tag or commit; None is the main branch.
    """

    repo: str
    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, model: str) -> HubModel | None:
        """Parses the name of a model on the Hub; None when `model` can only be a folder."""
        match = _FORM.fullmatch(model)
        return None if match is None else cls(match[1], match[2], match[3])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def default_model_name(model: str) -> str:
    """The name of a model in requests: that of its folder or its repository, without organization and revision."""
    hub = None if Path(model).is_dir() else HubModel.parse(model)
    return Path(model).resolve().name if hub is None else hub.name


def model_folder(model: str, *, weights: bool = True) -> Path:
    """The checkpoint folder of a model; downloads it if `model` is not a local folder but can be a name on the Hub.

    Args:
        model: a folder, which need not exist, or a name on the Hub.
        weights: True if the weights are needed too.

    Raises:
        HubError: the Hub does not have or give the model, or cannot be reached and the cache does not have it.
        ModuleNotFoundError: huggingface_hub is not installed.
    """
    hub = None if Path(model).is_dir() else HubModel.parse(model)
    if hub is None:
        return Path(model)
    folder = _download(hub, (*CONFIGURATION_FILES, *(WEIGHT_FILES if weights else ())))
    if weights and not any(folder.glob(WEIGHT_FILES[0])):
        raise HubError(f"{hub} has no safetensors; pickled weights, which may run code, are not loaded")
    return folder


def _download(model: HubModel, patterns: Sequence[str]) -> Path:
    # Importing it takes half a second, and folders do not need it.
    from huggingface_hub import constants, errors, snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

    if not sys.stderr.isatty():
        disable_progress_bars()
    log.info("downloading the model from the Hub", model=str(model), endpoint=constants.ENDPOINT)
    started = time.monotonic()
    try:
        folder = snapshot_download(
            model.repo, revision=model.revision, allow_patterns=list(patterns), ignore_patterns=list(_BELOW)
        )
    except errors.RevisionNotFoundError:
        raise HubError(f"{model.repo} has no revision {model.revision or 'main'!r} on {constants.ENDPOINT}") from None
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/{model.repo}"
        raise HubError(f"{model} is gated: accept its terms on {page} and set HF_TOKEN to your token") from None
    except errors.RepositoryNotFoundError:
        where = f"on {constants.ENDPOINT} that HF_TOKEN may read"
        raise HubError(f"{model} is neither a folder here nor a model {where}") from None
    except errors.LocalEntryNotFoundError as error:
        raise HubError(_unreachable(model, error, constants.HF_HUB_OFFLINE, constants.ENDPOINT)) from None
    # HTTPError of whichever HTTP client this version of the library uses: a broken connection.
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise HubError(f"{model} cannot be downloaded from {constants.ENDPOINT}: {_line(error)}") from None
    log.info("model downloaded", model=str(model), folder=folder, seconds=round(time.monotonic() - started, 1))
    return Path(folder)


def _unreachable(model: HubModel, error: Exception, offline: bool, endpoint: str) -> str:
    """The error for a model that is missing or incomplete in the cache."""
    if offline:
        return f"{model} is neither a folder here nor complete in the cache of the Hub, and HF_HUB_OFFLINE is set"
    reason = _line(error.__cause__ or error)
    return f"{model} is not a folder here and not complete in the cache, and {endpoint} cannot be reached: {reason}"


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
