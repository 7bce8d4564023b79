"""`fissile embed`: vectors of texts, by a model of a running router."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click
import numpy as np
from fissile.client import Client, Embeddings
from fissile.v1 import inference_pb2 as pb

from common.cli.client.texts import Source, TextCaller, added_usage, usage_line, with_texts
from common.cli.core import output
from common.cli.core.client import Credentials
from common.cli.core.errors import CommandError
from common.cli.core.options import options
from common.cli.core.tls_options import with_credentials
from common.limits import MAX_EMBED_INPUTS, MAX_EMBED_NUMBERS

LINES: Final = "lines"
JSON: Final = "json"
NPY: Final = "npy"


def vectors_of(
    caller: TextCaller, texts: Sequence[str], fields: dict[str, Any], timeout_s: float
) -> Iterator[Embeddings]:
    """Embeds texts in as many calls as they need; yields the answers in order.

    Args:
        caller: of the routers.
        texts: any number.
        fields: of the requests.
        timeout_s: deadline of each call.

    Raises:
        CommandError: a call has failed.
    """
    model = caller.ask(lambda client: client.model(fields.get("model", ""), timeout_s=timeout_s))
    numbers = fields.get("dimensions", model.embedding_size) or 1
    most = max(1, min(MAX_EMBED_INPUTS, MAX_EMBED_NUMBERS // numbers))

    def embed(client: Client, part: Sequence[str]) -> Embeddings:
        return client.embed(part, timeout_s=timeout_s, **fields)

    for _, answer in caller.ask_in_parts(texts, most, embed):
        yield answer


class _VectorWriter:
    """Writes vectors to standard output: a line for each at once, or all at the end.

    Attributes:
        count: vectors so far.
        size: numbers of each.
        usage: token counts so far.
    """

    def __init__(self, form: str) -> None:
        self.count = self.size = 0
        self.usage = pb.Usage()
        self._form = form
        self._kept: list[Embeddings] = []

    def take(self, answer: Embeddings) -> None:
        """Writes or keeps the vectors of one call."""
        if self._form == LINES:
            for place, embedding in enumerate(answer.embeddings, self.count):
                click.echo(json.dumps({"index": place, "embedding": _numbers(embedding)}))
        else:
            self._kept.append(answer)
        self.count += len(answer.embeddings)
        self.size = len(answer.embeddings[0].values)
        self.usage = added_usage(self.usage, answer.usage)

    def end(self) -> None:
        """Writes the vectors that were kept."""
        if self._form == NPY:
            rows = [embedding.values for answer in self._kept for embedding in answer.embeddings]
            np.save(sys.stdout.buffer, np.array(rows, np.float32))
        elif self._form == JSON:
            click.echo(json.dumps(self._whole()))

    def _whole(self) -> dict[str, Any]:
        last = output.as_fields(self._kept[-1].message)
        return {
            "embeddings": [_numbers(embedding) for answer in self._kept for embedding in answer.embeddings],
            "usage": output.as_fields(self.usage),
            **{name: last[name] for name in ("pooling", "weights_digest", "numerics")},
        }


def _numbers(embedding: pb.Embedding) -> list[float]:
    """Numbers of a vector, each with as many digits as float32 needs."""
    numbers: list[float] = output.as_fields(embedding)["values"]
    return numbers


@click.command()
@click.argument("texts", nargs=-1)
@options("embed")
@with_texts
@with_credentials
def embed(
    texts: Sequence[str],
    source: Source,
    addresses: Sequence[str],
    pooling: str | None,
    normalize: bool,
    dimensions: int | None,
    form: str,
    credentials: Credentials,
    timeout: float,
) -> None:
    """Turn TEXTS, or each line of a file or of standard input, into vectors.

    \b
    fissile embed "A wolf lived by the river." "Otto built a boat."
    fissile embed --file corpus.txt --priority low --format npy > corpus.npy
    fissile models --json                   # has the length of a model's vectors, and its pooling

    The vectors go to standard output in the order of the texts, figures to standard error. Any number of texts is
    embedded, in calls of as many as fit in one, each with the deadline. Instructions that a model wants before a query
    are yours to write. Exit code: 0 done, 1 failed, 2 something must be changed, 3 it may work later.
    """
    if form == NPY and sys.stdout.isatty():
        raise CommandError("--format npy is not text: send standard output to a file, with > vectors.npy")
    fields = source.fields | {"normalize": normalize}
    if pooling is not None:
        fields["pooling"] = f"POOLING_{pooling.upper()}"
    if dimensions is not None:
        fields["dimensions"] = dimensions
    given, writer = source.texts(texts, "texts"), _VectorWriter(form)
    with TextCaller(addresses, credentials) as caller:
        for answer in vectors_of(caller, given, fields, timeout):
            writer.take(answer)
            pooled = pb.Pooling.Name(answer.pooling).removeprefix("POOLING_").lower()
    writer.end()
    click.echo(usage_line(f"{writer.count} vectors of {writer.size} numbers ({pooled})", writer.usage), err=True)
