"""First question to a service, and commands that can call it afterwards: by what its model can do."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fissile.client import AsyncClient, FissileError
from fissile.v1 import inference_pb2 as pb

from common.cli.client.texts import usage_line
from common.cli.core.client import Question, ask, call_failed, client_arguments
from common.cli.group import CHECKOUT

FIRST_PROMPT: Final = "Tell me a story."
# Enough for a short story to come to its end.
_MAX_TOKENS: Final = 256
_TIMEOUT_S: Final = 600.0
# What to expect of a model that was not asked.
GENERATES: Final = frozenset({pb.CAPABILITY_GENERATE})


@dataclass(frozen=True, slots=True)
class FirstQuestion:
    """Request to send when the router serves, if any, and whether to end after it."""

    ask: bool
    prompt: str
    once: bool

    async def answered(self, address: str, model: str, on_text: Callable[[str], None]) -> tuple[str, Collection[int]]:
        """Asks it: for an answer, or for a vector where the model generates nothing.

        Args:
            address: of the router.
            model: its name.
            on_text: gets the answer as it comes.

        Returns:
            Figures in a line, and what the model can do.

        Raises:
            CommandError: the request has failed.
        """
        async with AsyncClient(**client_arguments([address])) as client:
            try:
                capabilities = (await client.model(model)).capabilities
                if pb.CAPABILITY_GENERATE not in capabilities:
                    embedded = await client.embed([self.prompt], model=model, timeout_s=_TIMEOUT_S)
                    size = len(embedded.embeddings[0].values)
                    return usage_line(f"a vector of {size} numbers", embedded.usage), capabilities
            except FissileError as error:
                raise call_failed(error, address) from error
            question = Question(self.prompt, model, sampling={"max_tokens": _MAX_TOKENS})
            return (await ask(client, question, _TIMEOUT_S, on_text)).figures(), capabilities


def next_steps(address: str, options: str = "", capabilities: Collection[int] = GENERATES) -> str:
    """Commands that call the service, to be copied into another terminal.

    Args:
        address: of the router.
        options: further ones that it wants.
        capabilities: of its model.
    """
    installed = Path(sys.executable).with_name("fissile")
    on_path = shutil.which("fissile")
    if on_path and Path(on_path) == installed:
        program = "fissile"
    else:
        program = str(installed) if installed.exists() else f"{shlex.quote(sys.executable)} -m common.cli.main"
    where = f"--address {address}{options}"
    generates = pb.CAPABILITY_GENERATE in capabilities
    commands = [f'{program} generate {where} "{FIRST_PROMPT}"', f"{program} chat {where}"] if generates else []
    if pb.CAPABILITY_EMBED in capabilities and not generates:
        commands.append(f'{program} embed {where} "{FIRST_PROMPT}"')
    if pb.CAPABILITY_RERANK in capabilities:
        commands.append(
            f'{program} rerank {where} "Where did Otto live?" "Otto lived by the river." "Bread needs yeast."'
        )
    commands.append(f"{program} models {where}")
    example = CHECKOUT / "examples" / "python_client.py"
    if generates and example.is_file() and not options:
        commands.append(f"{sys.executable} {example} {address}")
    return "\n  ".join([f"\nserving on {address} until Ctrl-C. From another terminal:", *commands]) + "\n"
