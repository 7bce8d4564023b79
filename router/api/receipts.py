"""Receipts of answers: digests of the request, the model and the tokens of a stream."""

from __future__ import annotations

from typing import Final

from fissile.receipts import VERSION, output_sha256, sealed
from fissile.v1 import inference_pb2 as pb

from common.version import fissile_version
from router.requests.stream import ReceiptTerms, RequestStream

_ROUTER_VERSION: Final = fissile_version()


def receipt_of(stream: RequestStream, terms: ReceiptTerms | None) -> pb.Receipt | None:
    """The receipt of a finished answer; None without `terms`, or if a worker sent no digests."""
    request, assembly = stream.request, stream.assembly
    if terms is None:
        return None
    made = pb.Receipt()
    if terms.logits_every:
        chain = assembly.logit_chain
        logits = None if chain is None else chain.of_answer(assembly.delivered)
        if logits is None:
            return None
        made.CopyFrom(logits)
    made.MergeFrom(
        pb.Receipt(
            version=VERSION,
            request_sha256=terms.request.of_answer(request.choice),
            seed=str(request.seed),
            index=request.choice,
            prompt_tokens=assembly.prompt_tokens,
            output_tokens=assembly.delivered,
            output_sha256=output_sha256(assembly.token_ids),
            weights_digest=request.weights_digest,
            numerics=stream.attempts.numerics,
            tokenizer_sha256=terms.tokenizer_sha256,
            template_sha256=terms.template_sha256,
            router_version=_ROUTER_VERSION,
            worker_version=stream.worker_version,
        )
    )
    return sealed(made)
