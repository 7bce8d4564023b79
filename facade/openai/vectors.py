"""`/v1/embeddings` and `/v1/rerank`: their bodies to calls, and the answers to JSON. Pure."""

from __future__ import annotations

import base64
import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from fissile.client import Embeddings
from fissile.client.base import embed, rerank
from fissile.v1 import inference_pb2 as pb

from common.limits import MAX_EMBED_INPUTS
from facade.http.bodies import Body, TokenIdList, UInt32, decode
from facade.http.runner import QuestionPlan
from facade.openai.completions import prompts_of

_EMBED_NAMES: Final = {"inputs": "input*", "inputs.text": "input*", "inputs.token_ids.ids": "input*"}
_Format = Literal["float", "base64"]


class EmbeddingBody(Body):
    """The fields of an embedding that are served; `user` has no effect."""

    input: str | list[str | UInt32 | TokenIdList]
    model: str = ""
    encoding_format: _Format | None = None
    dimensions: UInt32 | None = None
    user: str | None = None
    priority: Literal["low", "normal", "high"] | None = None
    normalize: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    cache_salt: str | None = None
    request_id: str | None = None


def parse_embeddings(body: bytes) -> QuestionPlan[Embeddings]:
    """The call for a body of `/v1/embeddings`.

    Raises:
        ApiError: a field is invalid, or not served.
        ValueError: an argument does not fit.
    """
    given = decode(body, EmbeddingBody)
    names = ("model", "dimensions", "priority", "normalize", "pooling", "cache_salt", "request_id")
    fields = {name: value for name in names if (value := getattr(given, name)) is not None}
    asked = embed(prompts_of(given.input, "input", MAX_EMBED_INPUTS), fields)
    shown = functools.partial(embeddings_json, model=given.model, form=given.encoding_format or "float")
    return QuestionPlan(asked, shown, _EMBED_NAMES)


def embeddings_json(vectors: Embeddings, *, model: str, form: _Format) -> Mapping[str, Any]:
    """The vectors as OpenAI's clients read them; base64 is of float32, little endian."""
    data = [
        {"object": "embedding", "index": i, "embedding": _written(each.values, form)}
        for i, each in enumerate(vectors.embeddings)
    ]
    usage = {"prompt_tokens": vectors.usage.prompt_tokens, "total_tokens": vectors.usage.prompt_tokens}
    facts = {"weights_digest": vectors.weights_digest, "numerics": vectors.numerics}
    return {"object": "list", "data": data, "model": model, "usage": usage, "fissile": facts}


def _written(values: Sequence[float], form: _Format) -> list[float] | str:
    numbers = array("f", values)
    return base64.b64encode(numbers.tobytes()).decode("ascii") if form == "base64" else numbers.tolist()


class DocumentText(Body):
    """A document as an object."""

    text: str


class RerankBody(Body):
    """The fields of a reranking that are served; `user` has no effect."""

    query: str
    documents: list[str | DocumentText]
    model: str = ""
    top_n: UInt32 | None = None
    return_documents: bool = True
    instruction: str | None = None
    user: str | None = None
    priority: Literal["low", "normal", "high"] | None = None
    request_id: str | None = None


def parse_rerank(body: bytes) -> QuestionPlan[pb.RerankResponse]:
    """The call for a body of `/v1/rerank`.

    Raises:
        ApiError: a field is invalid, or not served.
        ValueError: an argument does not fit.
    """
    given = decode(body, RerankBody)
    texts = [each if isinstance(each, str) else each.text for each in given.documents]
    names = ("model", "top_n", "instruction", "return_documents", "priority", "request_id")
    fields = {name: value for name in names if (value := getattr(given, name)) is not None}
    return QuestionPlan(rerank(given.query, texts, fields), functools.partial(rerank_json, body=given))


def rerank_json(ranked: pb.RerankResponse, *, body: RerankBody) -> Mapping[str, Any]:
    """The ranked documents as clients of Jina, Cohere and vLLM read them."""
    results = [
        {"index": each.index, "relevance_score": each.relevance}
        | ({"document": {"text": each.document}} if body.return_documents else {})
        for each in ranked.documents
    ]
    tokens = ranked.usage.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"rerank-{ranked.request_id}", "model": body.model, "usage": usage, "results": results}
