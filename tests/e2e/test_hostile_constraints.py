"""Hostile constraints beside another client's streams, through router and worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from common.constraints.forms import Constraint
from tests.e2e.service import Service, generate, running_service
from tests.e2e.test_constraints import DEMO, asking
from tests.unit.common.constraints.test_check import HOSTILE

NEIGHBOUR_TOKENS = 400


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("service"), DEMO, workers=1) as service:
        yield service


def neighbour(seed: int) -> pb.GenerateRequest:
    made = asking(pb.Constraint(), seed=seed, max_tokens=NEIGHBOUR_TOKENS, ignore_eos=True)
    made.sampling_params.ClearField("constraint")
    return made


def message_of(given: Any) -> pb.Constraint:
    constraint, made = Constraint.of(given), pb.Constraint()
    setattr(made, constraint.form, constraint.texts[0])
    return made


def outcome_of(service: Service, given: Any) -> str:
    """Status of a hostile request; a fault names its field."""
    try:
        # All are checked at once, which takes minutes on a busy machine.
        generate(service.stub, asking(message_of(given), max_tokens=8), timeout=300.0)
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        assert status is not None
        found = error_details_pb2.BadRequest()
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            assert any(packed.Unpack(found) for packed in status.details)
            assert found.field_violations[0].field.startswith("sampling_params.constraint")
        return str(error.code().name)
    return "OK"


@pytest.mark.slow
def test_hostile_constraints_leave_a_neighbour_alone(service: Service) -> None:
    """All hostile constraints run at once beside streams of a neighbour, whose tokens stay the same and which do not
    wait for all of them."""
    expected = [generate(service.stub, neighbour(seed)).token_ids for seed in range(3)]
    counts = list[int]()
    with ThreadPoolExecutor(len(HOSTILE)) as pool:
        futures = [pool.submit(outcome_of, service, given) for given in HOSTILE.values()]
        seed = 0
        while not all(future.done() for future in futures):
            tokens, beside = list[int](), 0
            for part in service.stub.Generate(neighbour(seed % 3)):
                tokens += part.token_ids
                beside += len(part.token_ids) * (not all(future.done() for future in futures))
            assert tokens == expected[seed % 3]
            counts.append(beside)
            seed += 1
        outcomes = {name: future.result() for name, future in zip(HOSTILE, futures, strict=True)}
    # One that is checked with everything else at once still gets its tokens.
    assert sum(counts) > len(HOSTILE)
    assert set(outcomes.values()) <= {"INVALID_ARGUMENT", "OK", "RESOURCE_EXHAUSTED"}, outcomes
    assert sum(outcome == "INVALID_ARGUMENT" for outcome in outcomes.values()) > len(HOSTILE) / 3
    for process in (service.router, *service.workers):
        assert process.running.poll() is None
        assert process.is_serving()
    assert service.wait_idle().decoding_seqs == 0
    good = generate(service.stub, asking(pb.Constraint(json_schema=json.dumps({"enum": ["a"]}))))
    assert good.text == '"a"'
