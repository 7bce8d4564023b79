"""A router's service of which a test scripts the methods that it needs; the others answer UNIMPLEMENTED."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fissile.v1.inference_pb2_grpc import InferenceServiceServicer

if TYPE_CHECKING:

    class PartialRouter(InferenceServiceServicer):
        """To the type checker: every method is there."""

        ChatOnce: Any
        CountTokens: Any
        Chat: Any
        Detokenize: Any
        Embed: Any
        Generate: Any
        GenerateOnce: Any
        GetModel: Any
        ListModels: Any
        RenderPrompt: Any
        Replay: Any
        Rerank: Any
        Score: Any
        Tokenize: Any

else:
    # As generated, each method answers UNIMPLEMENTED.
    PartialRouter = InferenceServiceServicer
