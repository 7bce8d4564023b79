"""First question to a service, and commands to call it afterwards, by the model's capabilities."""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from fissile.client import AsyncClient, FissileError
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.cli.client.texts import usage_line
from common.cli.core.client import CommandAnswer, Question, ask, call_failed, client_arguments, milliseconds
from common.cli.group import CHECKOUT
from common.params.options.engine import SERVE
from common.params.options.table import default_of

FIRST_PROMPT: Final = default_of(SERVE, "prompt")
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

    async def answered(
        self, address: str, model: str, on_text: Callable[[str], None], drafting: Sequence[str] = ()
    ) -> tuple[str, Collection[int]]:
        """Asks the question: for an answer, or for a vector if the model generates nothing.

        Args:
            address: of the router.
            model: its name.
            on_text: gets the answer as it comes.
            drafting: addresses of workers that speculate; if there are any, it is asked again without drafts, to say
                what they bring.

        Returns:
            Figures in a line, or two, and what the model can do.

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
            sampling = {"max_tokens": _MAX_TOKENS, "seed": secrets.randbits(32)}
            answer = await ask(client, Question(self.prompt, model, sampling=sampling), _TIMEOUT_S, on_text)
            if not drafting:
                return answer.figures(), capabilities
            counts = [one for worker in drafting for one in await _draft_counts(worker)]
            alone = Question(self.prompt, model, sampling={**sampling, "num_drafts": 0})
            plain = await ask(client, alone, _TIMEOUT_S, _drop)
            return f"{answer.figures()}\n{speculation_line(counts, answer, plain)}", capabilities


def speculation_line(counts: Sequence[wpb.DraftCounts], answer: CommandAnswer, plain: CommandAnswer) -> str:
    """Formats a line with the share of accepted drafts and the speedup.

    Args:
        counts: of the worker's drafts.
        answer: that drafts were verified for.
        plain: the answer to the same question without drafts.
    """
    verified = sum(one.verified for one in counts)
    accepted = sum(one.accepted for one in counts)
    share = f"{accepted} of {verified} drafts accepted ({accepted / verified:.0%})" if verified else "no draft verified"
    with_drafts, without = milliseconds(answer.finish.timings.tpot), milliseconds(plain.finish.timings.tpot)
    speed = f", {without / with_drafts:.2f} times the speed without drafts" if with_drafts > 0 < without else ""
    same = "the same answer" if answer.text == plain.text else "ANOTHER ANSWER, which is an error of Fissile"
    return f"speculation: {share}{speed}, and {same}"


async def _draft_counts(worker: str) -> Sequence[wpb.DraftCounts]:
    async with grpc.aio.insecure_channel(worker) as channel:
        return (await WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=_TIMEOUT_S)).drafts


def _drop(_: str) -> None:
    """Shows nothing."""


def http_step(url: str, model: str, options: str = "") -> str:
    """Command that asks a facade for a chat; "" without a facade.

    Args:
        url: of the facade; "" for none.
        model: name of the model.
        options: further ones that the facade needs.
    """
    body = {"model": model, "messages": [{"role": "user", "content": FIRST_PROMPT}], "max_tokens": 48}
    data = shlex.quote(json.dumps(body))
    return f"curl -s{options} {url}/v1/chat/completions -H 'content-type: application/json' -d {data}" if url else ""


def next_steps(address: str, options: str = "", capabilities: Collection[int] = GENERATES, http: str = "") -> str:
    """Commands that call the service, to be copied into another terminal.

    Args:
        address: of the router.
        options: further ones that it wants.
        capabilities: of its model.
        http: command that calls a facade beside it; "" for none.
    """
    installed = Path(sys.executable).with_name("fissile")
    on_path = shutil.which("fissile")
    if on_path and Path(on_path) == installed:
        program = "fissile"
    else:
        path = shlex.quote(str(installed))
        program = path if installed.exists() else f"{shlex.quote(sys.executable)} -m common.cli.main"
    where = f"--address {shlex.quote(address)}{options}"
    generates = pb.CAPABILITY_GENERATE in capabilities
    commands = [f'{program} generate {where} "{FIRST_PROMPT}"', f"{program} chat {where}"] if generates else []
    if pb.CAPABILITY_EMBED in capabilities and not generates:
        commands.append(f'{program} embed {where} "{FIRST_PROMPT}"')
    if pb.CAPABILITY_RERANK in capabilities:
        commands.append(
            f'{program} rerank {where} "Where did Otto live?" "Otto lived by the river." "Bread needs yeast."'
        )
    commands.append(f"{program} models {where}")
    if http:
        commands.append(http)
    example = CHECKOUT / "examples" / "python_client.py"
    if generates and example.is_file() and not options:
        commands.append(shlex.join([sys.executable, str(example), address]))
    return "\n  ".join([f"\nserving on {address} until Ctrl-C. From another terminal:", *commands]) + "\n"
