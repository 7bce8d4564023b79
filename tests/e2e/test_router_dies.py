"""A router's death as a client without a proxy sees it, and how it goes on at another router."""

from __future__ import annotations

import hashlib
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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


@pytest.mark.slow
def test_repeated_request_gives_same_tokens_at_another_router(tmp_path: Path) -> None:
    """The client gets a status without details after text; its repeated request begins with the same tokens."""
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


def came(parts: list[Any], index: int) -> tuple[str, list[int], list[pb.TokenLogprobs]]:
    """Text, token ids and logprobs of an answer in these messages."""
    mine = [part for part in parts if part.index == index]
    ids = [token for part in mine for token in part.token_ids]
    return "".join(part.text for part in mine), ids, [entry for part in mine for entry in part.logprobs]


@dataclass
class Broken:
    """A stream whose router dies: its request, how its client goes on, and what has come."""

    asked: pb.GenerateRequest
    by: str
    parts: list[Any] = field(default_factory=list)

    @property
    def indexes(self) -> range:
        return range(max(1, self.asked.sampling_params.n))

    @property
    def kept(self) -> list[Any]:
        """What its client has not thrown away."""
        return [] if self.by == "nothing" else self.parts

    def going_on(self) -> pb.GenerateRequest:
        """The request with which its client goes on."""
        again = pb.GenerateRequest()
        again.CopyFrom(self.asked)
        for index in self.indexes if self.kept else ():
            again.resume.numerics = self.parts[0].prompt_info.numerics
            text, ids, _ = came(self.parts, index)
            point = again.resume.answers.add(index=index)
            if self.by == "token_ids":
                point.token_ids.ids.extend(ids)
            else:
                point.text.bytes, point.text.sha256 = len(text.encode()), hashlib.sha256(text.encode()).digest()
        return again


def broken(i: int, by: str, n: int = 1, **options: Any) -> Broken:
    asked = request(i, TOKENS)
    asked.sampling_params.n = n
    asked.output_options.CopyFrom(pb.OutputOptions(return_token_ids=by != "text", **options))
    return Broken(asked, by)


def test_sequences_of_dead_router_are_adopted_and_computed_once(tmp_path: Path) -> None:
    """However much the client has received, the sequences are adopted and the answer continues unchanged."""
    # The lease is longer than their adoption takes on a busy machine.
    environment = {"FISSILE_LOG_LEVEL": "debug", "FISSILE_LEASE": "60s"}
    digests = pb.ReceiptOptions(logits_every=3)
    streams = [
        broken(11, "token_ids"),
        broken(12, "text", receipt=digests),
        broken(13, "nothing"),
        broken(14, "token_ids", logprobs=1, receipt=digests),
        broken(15, "token_ids", n=2),
    ]
    model = simulated_model(tmp_path / "model")
    with running_service(tmp_path, model, worker_options=OPTIONS, environment=environment) as service:
        port = free_port()
        arguments = ["router", "--port", str(port), "--worker", service.workers[0].address]
        other = Process("other", arguments, port, tmp_path / "other.log", environment)
        other.start()
        try:
            other.wait_serving()
            calls = [service.stub.Generate(each.asked, timeout=60) for each in streams]
            for each, call in zip(streams, calls, strict=True):
                each.parts = [next(call) for _ in range(9)]
            service.router.stop(signal.SIGKILL)
            with client_of(other) as stub, ThreadPoolExecutor(len(streams)) as pool:
                rests = list(pool.map(lambda each: list(stub.Generate(each.going_on(), timeout=60)), streams))
                wholes = list(pool.map(lambda each: list(stub.Generate(each.asked, timeout=60)), streams))
        finally:
            other.stop()
            service.workers[0].stop()
    for each, rest, whole in zip(streams, rests, wholes, strict=True):
        for index in each.indexes:
            assert came([*each.kept, *rest], index) == came(whole, index)
        ends, expected = ([part.finish for part in parts if part.HasField("finish")] for parts in (rest, whole))
        for end, wanted in zip(ends, expected, strict=True):
            assert (end.usage.completion_tokens, end.attempts, end.exact) == (TOKENS, 1, True)
            assert (end.logprob, end.receipt) == (wanted.logprob, wanted.receipt)
    log = service.workers[0].log.read_text()
    assert log.count("sequence adopted") == 6
    # One for each answer, and one for each that was not disturbed.
    assert log.count("sequence ended") == 12
    assert other.log.read_text().count('"adopted": true') == 5
