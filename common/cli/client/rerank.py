"""`fissile rerank`: documents in order of their relevance to a query, by a reranker of a running router."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import click
from fissile.client import Client
from fissile.v1 import inference_pb2 as pb

from common.cli.client.texts import Source, TextCaller, added_usage, shown, usage_line, with_texts
from common.cli.core import output
from common.cli.core.client import Credentials
from common.cli.core.options import argument, options
from common.cli.core.tls_options import with_credentials
from common.limits import MAX_DOCUMENTS

_HEADINGS: Final = ("RELEVANCE", "INDEX", "DOCUMENT")


def ranked(
    caller: TextCaller, query: str, documents: Sequence[str], fields: dict[str, Any], timeout_s: float
) -> tuple[list[pb.RankedDocument], pb.Usage]:
    """Orders documents by relevance, the best first. Returns them with token counts.

    A document's relevance depends on itself and the query alone, so that those of several calls can be compared.

    Args:
        caller: of the routers.
        query: what is looked for.
        documents: any number.
        fields: of the requests.
        timeout_s: deadline of each call.

    Raises:
        CommandError: a call has failed.
    """

    def rerank(client: Client, part: Sequence[str]) -> pb.RerankResponse:
        return client.rerank(query, part, timeout_s=timeout_s, **fields)

    beside = len(query.encode()) + len(fields.get("instruction", "").encode())
    found: list[pb.RankedDocument] = []
    usage = pb.Usage()
    for start, answer in caller.ask_in_parts(documents, MAX_DOCUMENTS, rerank, beside):
        for document in answer.documents:
            document.index += start
            document.document = documents[document.index]
        found += answer.documents
        usage = added_usage(usage, answer.usage)
    return sorted(found, key=lambda document: (-document.relevance, document.index)), usage


def as_table(documents: Sequence[pb.RankedDocument]) -> str:
    """The documents as aligned columns with headings, each in one line."""
    rows = [(f"{one.relevance:.4f}", str(one.index), shown(one.document)) for one in documents]
    return output.aligned([_HEADINGS, *rows])


@click.command()
@argument("query")
@click.argument("documents", nargs=-1)
@options("rerank")
@with_texts
@with_credentials
def rerank(
    query: str,
    documents: Sequence[str],
    source: Source,
    addresses: Sequence[str],
    top: int | None,
    instruction: str,
    credentials: Credentials,
    timeout: float,
    as_json: bool,
) -> None:
    """Order DOCUMENTS, or the lines of a file or of standard input, by their relevance to QUERY.

    \b
    fissile rerank "Where did Otto live?" "Otto lived by the river." "Bread needs yeast."
    grep -i wolf stories.txt | fissile rerank "Which wolf was gentle?" --top 5

    The best one comes first, with its relevance from 0 to 1; equally relevant ones are in the order in which they were
    given. The model has to be a reranker (CAPABILITY_RERANK in `fissile models --json`). Any number of documents is
    ordered, in calls of up to 1,024, each with the deadline. Exit code: 0 done, 1 failed, 2 something must be changed,
    3 it may work later.
    """
    fields = source.fields | ({"instruction": instruction} if instruction else {})
    given = source.texts(documents, "documents")
    with TextCaller(addresses, credentials) as caller:
        found, usage = ranked(caller, query, given, fields, timeout)
    best = found[:top]
    if as_json:
        listed = [output.as_fields(document) for document in best]
        click.echo(json.dumps({"documents": listed, "usage": output.as_fields(usage)}, ensure_ascii=False))
        return
    click.echo(as_table(best))
    click.echo(usage_line(f"{len(found)} documents", usage), err=True)
