"""A router's death as a client without a proxy sees it, and how it goes on at another router."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb

from tests.chaos.support import client_of, code_of
from tests.e2e.service import Process, free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model

TOKENS = 400


def read_until(call: Any, tokens: int, got: list[int] | None = None) -> list[int]:
    """Reads until `got` has so many tokens."""
    got = [] if got is None else got
    while len(got) < tokens:
        got.extend(next(call).token_ids)
    return got


def behind(asked: pb.GenerateRequest, got: list[int]) -> pb.GenerateRequest:
    """The request, to go on behind what has come."""
    asked.request_id = asked.request_id or "goes-on"
    asked.resume.answers.add(token_ids=pb.TokenIds(ids=got))
    return asked


def test_the_same_request_gives_the_same_tokens_at_another_router(tmp_path: Path) -> None:
    """C10: a status without details after text, and a repeat that begins with what had come."""
    with running_service(tmp_path, simulated_model(tmp_path / "model"), worker_options=OPTIONS) as service:
        port = free_port()
        arguments = ["router", "--port", str(port), "--worker", service.workers[0].address]
        other = Process("other", arguments, port, tmp_path / "other.log")
        other.start()
        try:
            other.wait_serving()
            call = service.stub.Generate(request(1, TOKENS), timeout=60)
            got = read_until(call, 20)
            service.router.stop(signal.SIGKILL)
            with pytest.raises(grpc.RpcError) as caught:
                read_until(call, TOKENS, got)
            assert code_of(caught.value) is grpc.StatusCode.UNAVAILABLE
            assert "grpc-status-details-bin" not in dict(call.trailing_metadata() or ())
            with client_of(other) as stub:
                again = generate(stub, request(1, TOKENS))
                rest = generate(stub, behind(request(1, TOKENS), got))
        finally:
            other.stop()
    assert 20 <= len(got) < TOKENS
    assert again.token_ids[: len(got)] == got
    assert len(again.token_ids) == TOKENS
    assert [*got, *rest.token_ids] == again.token_ids
    assert rest.finish is not None
    assert rest.finish.usage.completion_tokens == TOKENS


def test_what_a_dead_router_has_begun_goes_on_at_another_and_is_computed_once(tmp_path: Path) -> None:
    """S12: by token ids, by text, with logprobs, and where the client has kept nothing: the sequences are adopted."""
    # The lease is longer than the three take one after the other on a busy machine.
    environment = {"FISSILE_LOG_LEVEL": "debug", "FISSILE_LEASE": "60s"}
    model = simulated_model(tmp_path / "model")
    with running_service(tmp_path, model, worker_options=OPTIONS, environment=environment) as service:
        port = free_port()
        arguments = ["router", "--port", str(port), "--worker", service.workers[0].address]
        other = Process("other", arguments, port, tmp_path / "other.log", environment)
        other.start()
        try:
            other.wait_serving()
            by_ids, by_text, nothing, likely = (request(i, TOKENS) for i in (11, 12, 13, 14))
            likely.output_options.logprobs = 1
            by_text.output_options.return_token_ids = False
            by_text.output_options.receipt.logits_every = 3
            calls = [service.stub.Generate(each, timeout=60) for each in (by_ids, by_text, nothing, likely)]
            got = read_until(calls[0], 20)
            parts = [next(calls[1]) for _ in range(5)]
            text, info = "".join(part.text for part in parts), parts[0].prompt_info
            next(calls[2])
            said = [entry for _ in range(5) for entry in next(calls[3]).logprobs]
            service.router.stop(signal.SIGKILL)
            behind(by_ids, got)
            behind(likely, [entry.token_id for entry in said])
            digest = pb.TextDigest(bytes=len(text.encode()), sha256=hashlib.sha256(text.encode()).digest())
            by_text.resume.answers.add(text=digest)
            by_text.resume.weights_digest, by_text.resume.numerics = info.weights_digest, info.numerics
            with client_of(other) as stub:
                rests = [generate(stub, each) for each in (by_ids, by_text, nothing)]
                last = list(stub.Generate(likely, timeout=60))
                undisturbed = [generate(stub, request(i, TOKENS)) for i in (11, 12, 13)]
                likely.ClearField("resume")
                whole = list(stub.Generate(likely, timeout=60))
        finally:
            other.stop()
            service.workers[0].stop()
    assert [*got, *rests[0].token_ids] == undisturbed[0].token_ids
    assert text + rests[1].text == undisturbed[1].text
    assert rests[2].token_ids == undisturbed[2].token_ids
    ends = [rest.finish for rest in rests if rest.finish is not None]
    assert [end.usage.completion_tokens for end in ends] == [TOKENS] * 3
    assert [end.attempts for end in ends] == [1] * 3
    # The receipt's digests begin with the answer, of which the client had a part.
    assert len(ends[1].receipt.logit_digests) == -(-TOKENS // 3)
    assert said + [entry for part in last for entry in part.logprobs] == [e for part in whole for e in part.logprobs]
    assert last[-1].finish.logprob == whole[-1].finish.logprob
    log = service.workers[0].log.read_text()
    assert log.count("sequence adopted") == 4
    # One for each answer, and one for each that was not disturbed.
    assert log.count("sequence ended") == 8
    assert other.log.read_text().count('"adopted": true') == 4
