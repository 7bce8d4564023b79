"""Fields of requests that each RPC of InferenceService serves; a request with any other field is refused."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

from fissile.v1 import inference_pb2 as pb

from router.validation import CHAT_SERVED, EMBED_SERVED, GENERATE_SERVED, RERANK_SERVED, SCORE_SERVED


def _within(name: str, served: Set[str]) -> frozenset[str]:
    """A field that is a message, and its served fields."""
    return frozenset({name, *(f"{name}.{path}" for path in served)})


_GENERATE_OR_CHAT: Final = _within("generate", GENERATE_SERVED) | _within("chat", CHAT_SERVED)
# RPC -> paths of the fields. An RPC without an entry is not served.
SERVED: Final[Mapping[str, frozenset[str]]] = {
    "Generate": GENERATE_SERVED,
    "Chat": CHAT_SERVED,
    "GenerateOnce": GENERATE_SERVED,
    "ChatOnce": CHAT_SERVED,
    "Score": SCORE_SERVED,
    "Embed": EMBED_SERVED,
    "Rerank": RERANK_SERVED,
    "Replay": _GENERATE_OR_CHAT
    | _within("receipt", {field.name for field in pb.Receipt.DESCRIPTOR.fields})
    | _within("token_ids", {"ids"})
    | {"worker_id"},
    "Tokenize": frozenset({"model", "text"}),
    "Detokenize": frozenset({"model", "token_ids", "keep_special_tokens"}),
    "CountTokens": _GENERATE_OR_CHAT,
    "RenderPrompt": _within("chat", CHAT_SERVED),
    "ListModels": frozenset({"page_size", "page_token"}),
    "GetModel": frozenset({"model"}),
}
