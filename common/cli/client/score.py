"""`fissile score`: how likely texts are behind a context, by a model of a running router."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click
from fissile.client import Client
from fissile.v1 import inference_pb2 as pb

from common.cli.client.texts import Source, TextCaller, added_usage, shown, usage_line, with_texts
from common.cli.core import output
from common.cli.core.client import Credentials
from common.cli.core.options import options
from common.cli.core.tls_options import with_credentials
from common.limits import MAX_CONTINUATIONS

_HEADINGS: Final = ("LOGPROB", "PER TOKEN", "TOKENS", "GREEDY", "CONTINUATION")


def scores_of(
    caller: TextCaller, continuations: Sequence[str], context: str | None, fields: dict[str, Any], timeout_s: float
) -> tuple[list[pb.Score], pb.Usage]:
    """Scores of the continuations, in their order, and token counts.

    Args:
        caller: of the routers.
        continuations: any number.
        context: what they continue; None scores whole texts.
        fields: of the requests.
        timeout_s: deadline of each call.

    Raises:
        CommandError: a call has failed.
    """

    def score(client: Client, part: Sequence[str]) -> pb.ScoreResponse:
        return client.score(part, context, timeout_s=timeout_s, **fields)

    found: list[pb.Score] = []
    usage = pb.Usage()
    beside = len((context or "").encode())
    for _, answer in caller.ask_in_parts(continuations, MAX_CONTINUATIONS, score, beside):
        found += answer.scores
        usage = added_usage(usage, answer.usage)
    return found, usage


def as_table(scores: Sequence[pb.Score], continuations: Sequence[str]) -> str:
    """The scores as aligned columns with headings."""
    rows = [_row(score, text) for score, text in zip(scores, continuations, strict=True)]
    return output.aligned([_HEADINGS, *rows])


def _row(score: pb.Score, text: str) -> tuple[str, ...]:
    mean = score.logprob / score.tokens
    return f"{score.logprob:.4f}", f"{mean:.4f}", str(score.tokens), "yes" if score.greedy else "no", shown(text)


def token_lines(scores: Sequence[pb.Score]) -> Iterator[str]:
    """Table of the tokens that were scored, by the place of their continuation."""
    rows = [("INDEX", "TOKEN", "LOGPROB", "RANK")]
    for place, score in enumerate(scores):
        rows += [(str(place), str(one.token_id), f"{one.logprob:.4f}", str(one.rank)) for one in score.logprobs]
    yield from ("", output.aligned(rows))


@click.command()
@click.argument("continuations", nargs=-1)
@options("score")
@with_texts
@with_credentials
def score(
    continuations: Sequence[str],
    source: Source,
    addresses: Sequence[str],
    context: str | None,
    has_tokens: bool,
    credentials: Credentials,
    timeout: float,
    as_json: bool,
) -> None:
    """Say how likely CONTINUATIONS are, or the lines of a file or of standard input, each by itself.

    \b
    fissile score --context "The capital of France is" " Paris" " Rome"
    fissile score --file sentences.txt --json

    LOGPROB is the sum of the logprobs of a continuation's tokens: those, to the bit, that decoding them reports.
    GREEDY says whether greedy decoding gives just these. A continuation begins where the context ends, so begin its
    words with a blank. Any number is scored, in calls of up to 128, each with the deadline. Exit code: 0 done,
    1 failed, 2 something must be changed, 3 it may work later.
    """
    fields = source.fields | ({"return_tokens": True} if has_tokens else {})
    given = source.texts(continuations, "continuations")
    with TextCaller(addresses, credentials) as caller:
        found, usage = scores_of(caller, given, context, fields, timeout)
    if as_json:
        listed = [
            {"index": place, "continuation": text, **output.as_fields(one)}
            for place, (one, text) in enumerate(zip(found, given, strict=True))
        ]
        click.echo(json.dumps({"scores": listed, "usage": output.as_fields(usage)}, ensure_ascii=False))
        return
    click.echo(as_table(found, given))
    for line in token_lines(found) if has_tokens else ():
        click.echo(line)
    click.echo(usage_line(f"{len(found)} continuations", usage), err=True)
