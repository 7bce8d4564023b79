"""`fissile generate`: one question to a running router, or to a checkpoint folder in this process (`--offline`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from fissile.client import AsyncClient
from fissile.v1 import inference_pb2 as pb

from common.cli.client.proof import write_proof
from common.cli.client.waterfall import stages_of, waterfall
from common.cli.core.client import CommandAnswer, Credentials, Question, ask, client_arguments
from common.cli.core.console import TextStream, fitted
from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand, Mode
from common.cli.core.options import options
from common.cli.core.tls_options import with_credentials
from common.cli.group import OFFLINE, find_entry_points
from common.constraints.forms import FORMS, GRAMMAR, JSON_SCHEMA
from common.errors import ApiError
from common.params.sampling_params import SamplingParams
from common.telemetry.logs import LEVEL_VARIABLE, setup_logging


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    """Keeps the options of sampling that the user gave, checked as the router will check them.

    The request lacks the others, so the model's own defaults hold.

    Raises:
        CommandError: a value is out of range (exit code 2).
    """
    chosen = {name: value for name, value in sampling.items() if value is not None and value != ()}
    confined = {name: _content(name, chosen.pop(name)) for name in FORMS if name in chosen}
    if len(confined) > 1:
        raise CommandError(f"give one of {', '.join(f'--{name}'.replace('_', '-') for name in confined)}")
    if confined:
        chosen["constraint"] = confined
    if "logit_bias" in chosen:
        chosen["logit_bias"] = dict(chosen["logit_bias"])
    try:
        SamplingParams(**chosen)
    except ApiError as error:
        raise CommandError(str(error)) from error
    return chosen


def _content(form: str, given: Any) -> Any:
    """Reads the content of a constraint; a schema or a grammar may be in a file."""
    if form not in (JSON_SCHEMA, GRAMMAR):
        return given
    # A text may be too long for the name of a file.
    with contextlib.suppress(OSError, ValueError):
        if Path(given).is_file():
            return Path(given).read_text("utf-8")
    return given


def read_prompt(argument: str | None) -> str:
    """Reads the prompt: the argument, or standard input without one or for `-`.

    Raises:
        UsageError: standard input is a terminal, or the prompt is empty.
    """
    if argument not in (None, "-"):
        prompt = str(argument)
    elif sys.stdin.isatty():
        raise click.UsageError("no prompt: give one as an argument or on standard input")
    else:
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise click.UsageError("the prompt is empty")
    return prompt


async def ask_router(
    addresses: Sequence[str],
    question: Question,
    timeout_s: float,
    credentials: Credentials,
    *,
    as_json: bool,
    has_waterfall: bool = False,
) -> CommandAnswer:
    """Asks running routers; prints the answer as it streams and its figures, or one JSON object at the end.

    `has_waterfall`: below the figures, it also prints how long each stage took.
    """
    shown = TextStream(quiet=as_json)
    async with AsyncClient(**client_arguments(addresses, credentials)) as client:
        try:
            answer = await ask(client, question, timeout_s, shown.write)
        finally:
            shown.end_line()
    if as_json:
        click.echo(json.dumps(answer.as_dict(), ensure_ascii=False))
    else:
        for line in answer.logprob_lines():
            click.echo(line, err=True)
        click.echo(fitted(answer.figures()), err=True)
        if has_waterfall:
            for line in waterfall(stages_of(answer.finish.timings), shutil.get_terminal_size().columns):
                click.echo(line, err=True)
    return answer


# Modes of the commands that show logprobs.
LOGPROB_MODES: Final = (
    Mode(
        "without --logprobs, --logprob-token-id or --prompt-logprobs",
        lambda given: given["logprobs"] is None and given["prompt_logprobs"] is None and not given["logprob_token_ids"],
        "no logprobs are shown",
        unused=frozenset({"logprobs_kind"}),
    ),
    Mode(
        "without --prompt-logprobs",
        lambda given: given["prompt_logprobs"] is None,
        "no logprobs of the prompt are shown",
        unused=frozenset({"prompt_logprobs_start"}),
    ),
)
_MODES: Final = (
    Mode(
        "with --offline",
        lambda given: given["offline"] is not None,
        "no router is called",
        unused=frozenset(
            {
                *("addresses", "model", "api_key", "timeout", "tls", "tls_ca", "tls_name", "client_cert", "client_key"),
                "has_waterfall",
            }
        ),
    ),
    Mode(
        "with --json", lambda given: given["as_json"], "`timings_ms` has the times", unused=frozenset({"has_waterfall"})
    ),
    Mode(
        "without --receipt",
        lambda given: given["receipt"] is None,
        "digests of logits are a part of the receipt",
        unused=frozenset({"logits_every"}),
    ),
    Mode(
        "with --text",
        lambda given: given["chat"] is False,
        "a plain text has no messages",
        unused=frozenset({"system"}),
    ),
    *LOGPROB_MODES,
)


@click.command(cls=ModalCommand, modes=_MODES)
@click.argument("prompt", required=False)
@options("generate")
@with_credentials
def generate(
    prompt: str | None,
    addresses: Sequence[str],
    model: str,
    chat: bool | None,
    system: str,
    request_id: str,
    credentials: Credentials,
    timeout: float,
    as_json: bool,
    has_waterfall: bool,
    offline: str | None,
    receipt: Path | None,
    logits_every: int,
    **sampling: Any,
) -> None:
    """Send PROMPT (or standard input) to a model and stream its answer.

    The answer goes to standard output, its figures to standard error. Exit code: 0 finished, 1 failed, 2 the request
    must be changed, 3 it may work later (no router, no worker, a full queue).
    """
    has_receipt = receipt is not None
    question = Question(
        read_prompt(prompt), model, chat, system, request_id, given(sampling), has_receipt, logits_every
    )
    if offline is not None:
        generate_offline(offline, question, as_json=as_json)
        return
    asked = ask_router(addresses, question, timeout, credentials, as_json=as_json, has_waterfall=has_waterfall)
    answer = asyncio.run(asked)
    if receipt is not None:
        write_proof(receipt, answer)


def _offline_answer(answer: Mapping[str, Any]) -> CommandAnswer:
    """Converts the logprobs of an offline answer into the messages that a router sends."""

    def entries(name: str) -> list[pb.TokenLogprobs]:
        return [
            pb.TokenLogprobs(
                token_id=one["token_id"],
                logprob=one["logprob"],
                rank=one["rank"],
                top=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in one["top"]],
                given=one["given"],
            )
            for one in answer.get(name, ())
        ]

    return CommandAnswer(logprobs=entries("logprobs"), prompt_logprobs=entries("prompt_logprobs"))


def generate_offline(folder: str, question: Question, *, as_json: bool) -> None:
    """Runs the model of a checkpoint folder in this process; the engine is found by its entry point.

    Raises:
        CommandError: the folder cannot be served, or the request is not valid (exit code 2).
    """
    if question.has_receipt:
        raise CommandError("--offline has no receipts, which name a router and a worker: leave --receipt out")
    if question.chat or question.system:
        raise CommandError("--offline continues a prompt: leave out --chat and --system, or ask a router")
    # Needs the tokenizers package, which the command line itself does not.
    from common.text.tokenizer import TokenizerError  # noqa: PLC0415

    entries = find_entry_points(OFFLINE)
    engine, model_error = entries["engine"].load(), entries["model_error"].load()
    setup_logging(os.environ.get(LEVEL_VARIABLE, "warning"), service="offline")
    ids = [question.request_id] if question.request_id else None
    try:
        (answer,) = engine(folder).generate([question.prompt], dict(question.sampling), request_ids=ids)
    except (ApiError, TokenizerError, model_error) as error:
        raise CommandError(str(error)) from error
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))
        return
    shown = TextStream()
    shown.write(answer["text"])
    shown.end_line()
    for line in _offline_answer(answer).logprob_lines():
        click.echo(line, err=True)
    click.echo(
        f"TTFT {answer['ttft'] * 1e3:.1f} ms, {answer['tpot'] * 1e3:.2f} ms per token, "
        f"{answer['num_tokens_output']} tokens from {answer['num_tokens_input']}, {answer['finish_reason']}",
        err=True,
    )
