"""A router's death as a client without a proxy sees it, and how it goes on at another router."""

from __future__ import annotations

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
