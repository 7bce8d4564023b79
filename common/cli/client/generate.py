"""`fissile generate`: one question to a running router, or to a checkpoint folder in this process (`--offline`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from fissile.client import AsyncClient
from fissile.v1 import inference_pb2 as pb

from common.cli.client.proof import write_proof
from common.cli.core.client import Answer, Credentials, Question, ask, client_arguments
from common.cli.core.console import TextStream, fitted
from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand, Mode
from common.cli.core.options import Bias, Line, json_option, option, routers_option, timeout_option
from common.cli.core.tls_options import with_credentials
from common.cli.group import OFFLINE, find_entry_points
from common.constraints.forms import FORMS, GRAMMAR, JSON_SCHEMA
from common.errors import ApiError
from common.params.logprobs import LOGPROBS_KINDS
from common.params.sampling_params import SamplingParams
from common.telemetry.logs import LEVEL_VARIABLE, setup_logging

# Fields of SamplingParams. Those that are not given are not sent, so the model's own defaults hold.
SAMPLING_OPTIONS = (
    option(
        "--max-tokens",
        envvar="FISSILE_MAX_TOKENS",
        type=int,
        help="Most tokens to generate. Default: the router's, or the rest of the context.",
    ),
    option("--min-tokens", envvar="FISSILE_MIN_TOKENS", type=int, help="Fewest tokens to generate. Default: 0."),
    option(
        "--temperature",
        envvar="FISSILE_TEMPERATURE",
        type=float,
        help="Sampling temperature; 0 is greedy. Default: the model's, or 1.",
    ),
    option(
        "--top-k",
        envvar="FISSILE_TOP_K",
        type=int,
        help="Sample among the K most likely tokens; 0 is off. Default: the model's, or off.",
    ),
    option(
        "--top-p",
        envvar="FISSILE_TOP_P",
        type=float,
        help="Sample among the most likely tokens whose probabilities sum to P, in (0, 1]. Default: the model's, or 1 "
        "(off).",
    ),
    option(
        "--min-p",
        envvar="FISSILE_MIN_P",
        type=float,
        help="Drop tokens less likely than P times the most likely one, in [0, 1]. Default: the model's, or 0 (off).",
    ),
    option(
        "--repetition-penalty",
        envvar="FISSILE_REPETITION_PENALTY",
        type=float,
        help="Divide the logits of tokens in prompt and answer. Default: the model's, or 1 (off).",
    ),
    option(
        "--presence-penalty",
        envvar="FISSILE_PRESENCE_PENALTY",
        type=float,
        help="Subtract once from the logits of tokens in the answer, in [-2, 2]. Default: 0 (off).",
    ),
    option(
        "--frequency-penalty",
        envvar="FISSILE_FREQUENCY_PENALTY",
        type=float,
        help="Subtract per occurrence from the logits of tokens in the answer, in [-2, 2]. Default: 0 (off).",
    ),
    option(
        "--seed",
        envvar="FISSILE_SEED",
        type=int,
        help="Seed of the sampling: the same seed gives the same answer. Default: derived from the request id.",
    ),
    option(
        "--stop",
        "stop_strings",
        envvar="FISSILE_STOP",
        multiple=True,
        type=Line(),
        help="Text that ends the answer. Repeatable; one a line in the variable.",
    ),
    option(
        "--stop-token-id",
        "stop_token_ids",
        envvar="FISSILE_STOP_TOKEN_ID",
        multiple=True,
        type=int,
        help="Token id that ends the answer. Repeatable.",
    ),
    option(
        "--logit-bias",
        envvar="FISSILE_LOGIT_BIAS",
        metavar="ID=BIAS",
        multiple=True,
        type=Bias(),
        help="Add BIAS, in [-100, 100], to the logit of token ID. Repeatable.",
    ),
    option(
        "--bad-word",
        "bad_words",
        envvar="FISSILE_BAD_WORD",
        multiple=True,
        type=Line(),
        help="Text that the answer must not contain. Repeatable; one a line in the variable.",
    ),
    option(
        "--allowed-token-id",
        "allowed_token_ids",
        envvar="FISSILE_ALLOWED_TOKEN_ID",
        multiple=True,
        type=int,
        help="Generate such token ids only, and end-of-sequence tokens. Repeatable. Default: all.",
    ),
    option(
        "--num-drafts",
        envvar="FISSILE_NUM_DRAFTS",
        type=int,
        help="Verify at most N draft tokens per step; 0: none. The answer is the same. Default: the worker's choice.",
    ),
    option(
        "--json-schema",
        envvar="FISSILE_JSON_SCHEMA",
        metavar="FILE|TEXT",
        help="Confine the answer to JSON of this schema.",
    ),
    option(
        "--json-object", envvar="FISSILE_JSON_OBJECT", is_flag=True, default=None, help="Confine it to a JSON object."
    ),
    option("--regex", envvar="FISSILE_REGEX", help="Confine it to what this regular expression matches."),
    option(
        "--grammar",
        envvar="FISSILE_GRAMMAR",
        metavar="FILE|TEXT",
        help="Confine it to this grammar, in Lark or GBNF.",
    ),
    option(
        "--choice",
        "choices",
        envvar="FISSILE_CHOICE",
        multiple=True,
        type=Line(),
        help="Confine it to such texts. Repeatable; one a line in the variable.",
    ),
    option(
        "--ignore-eos",
        envvar="FISSILE_IGNORE_EOS",
        is_flag=True,
        default=None,
        help="Continue past the model's end-of-sequence tokens.",
    ),
    option(
        "--logprobs",
        envvar="FISSILE_LOGPROBS",
        type=int,
        help="Show the logprob of each token, with the N most likely ones beside it, at most 20. Default: none.",
    ),
    option(
        "--logprobs-kind",
        envvar="FISSILE_LOGPROBS_KIND",
        type=click.Choice(LOGPROBS_KINDS),
        help="Distribution that they are of: the model's own, or the one that tokens are drawn from. Default: raw.",
    ),
    option(
        "--logprob-token-id",
        "logprob_token_ids",
        envvar="FISSILE_LOGPROB_TOKEN_ID",
        multiple=True,
        type=int,
        help="Token id whose logprob is shown beside each token's. Repeatable.",
    ),
    option(
        "--prompt-logprobs",
        envvar="FISSILE_PROMPT_LOGPROBS",
        type=int,
        help="Show the logprobs of the prompt's tokens, with the N most likely ones beside each. Default: none.",
    ),
    option(
        "--prompt-logprobs-start",
        envvar="FISSILE_PROMPT_LOGPROBS_START",
        type=int,
        help="First position of the prompt whose logprob is shown. Default: 1.",
    ),
)


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options above, in their order."""
    return functools.reduce(lambda wrapped, add: add(wrapped), reversed(SAMPLING_OPTIONS), command)


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, checked as the router will check them.

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
    """A constraint's content; a schema or a grammar may be in a file."""
    if form not in (JSON_SCHEMA, GRAMMAR):
        return given
    # A text may be too long for the name of a file.
    with contextlib.suppress(OSError, ValueError):
        if Path(given).is_file():
            return Path(given).read_text("utf-8")
    return given


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument, or standard input when there is none or it is `-`.

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
    addresses: Sequence[str], question: Question, timeout_s: float, credentials: Credentials, *, as_json: bool
) -> Answer:
    """Asks running routers; prints the answer as it streams and its figures, or one JSON object at the end."""
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
            {"addresses", "model", "api_key", "timeout", "tls", "tls_ca", "tls_name", "client_cert", "client_key"}
        ),
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
@routers_option
@option("--model", envvar="FISSILE_MODEL_NAME", default="", help="Model name. Default: the only model of the router.")
@option(
    "--chat/--text", "chat", envvar="FISSILE_CHAT", default=None,
    help="Send a chat or a plain text. Default: a chat if the model has a template.",
)  # fmt: skip
@option("--system", envvar="FISSILE_SYSTEM", default="", help="System message of a chat. Default: none.")
@option("--request-id", envvar="FISSILE_REQUEST_ID", default="", help="Id of the request. Default: a new one.")
@with_sampling_options
@with_credentials
@timeout_option
@json_option
@option(
    "--offline", envvar="FISSILE_OFFLINE", metavar="MODEL",
    help="Checkpoint to run in this process, without a router. --max-tokens is then 64 by default.",
)  # fmt: skip
@option(
    "--receipt", envvar="FISSILE_RECEIPT", type=click.Path(path_type=Path), metavar="FILE",
    help="Write the answer's receipt, with the request and the token ids, to FILE, for `fissile verify`.",
)  # fmt: skip
@option(
    "--logits-every", envvar="FISSILE_LOGITS_EVERY", type=click.IntRange(0), default=0, metavar="N",
    help="Digest the logits of every N-th token into the receipt; 0 is none.",
)  # fmt: skip
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
    answer = asyncio.run(ask_router(addresses, question, timeout, credentials, as_json=as_json))
    if receipt is not None:
        write_proof(receipt, answer)


def _offline_answer(answer: Mapping[str, Any]) -> Answer:
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

    return Answer(logprobs=entries("logprobs"), prompt_logprobs=entries("prompt_logprobs"))


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
