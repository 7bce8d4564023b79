"""Names of models on the Hugging Face Hub: `org/name`, with `:Q4_K_M` for a GGUF file and `@revision` for a revision.

A local folder or file of that name takes precedence. `worker/model_download.py` downloads the model.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_FORM: Final = re.compile(rf"({_PART}/({_PART}))(?::({_PART}(?:/{_PART})*))?(?:@(\S+))?")


class HubError(Exception):
    """A model that the Hub does not provide; the message is one line that says why."""


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        repo: `org/name`.
        name: without the organization.
        file: a GGUF file of the repository, or the end of its name, such as `Q4_K_M`; "" for a checkpoint folder.
        revision: branch, tag or commit; None is the main branch.
    """

    repo: str
    name: str
    file: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, model: str) -> HubModel | None:
        """Parses the name of a model on the Hub; None when `model` can only be a path."""
        return cls(match[1], match[2], match[3] or "", match[4]) if (match := _FORM.fullmatch(model)) else None

    def __str__(self) -> str:
        file = f":{self.file}" if self.file else ""
        return f"{self.repo}{file}" if self.revision is None else f"{self.repo}{file}@{self.revision}"


def hub_model(model: str) -> HubModel | None:
    """The model on the Hub that `model` names; None for a path, which need not exist."""
    return None if os.path.exists(model) else HubModel.parse(model)


def default_model_name(model: str) -> str:
    """The name of a model in requests: of its folder, its file or its repository, without suffix and organization."""
    hub, path = hub_model(model), Path(model).absolute()
    if hub is not None:
        return hub.name
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem) if os.path.isfile(path) else path.resolve().name
