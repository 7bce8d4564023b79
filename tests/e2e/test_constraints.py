"""Answers that are confined to a form, through router and workers: what comes is valid, whatever happens meanwhile."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.constraints.library import ENGINE
from router.api.tenants import TENANT_KEY, TenantPolicy
from tests.covering import slow_but
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, bench, collect, detail, error_of, request
from tests.e2e.service import Service, chat, generate, running_service
from tests.unit.router.support import EOS
from worker.llm_engine import LLMEngine

DEMO = Path(__file__).parents[2] / "deploy" / "demo" / "checkpoint"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = "[a-z]{3,8}(-[0-9]{2}){1,3}"
GRAMMAR = 'start: "once" (" " word){2,6} "."\nword: /[a-z]{2,6}/'
CONSTRAINTS = {
    "json_schema": pb.Constraint(json_schema=json.dumps(SCHEMA)),
    "json_object": pb.Constraint(json_object=True),
    "regex": pb.Constraint(regex=REGEX),
    "grammar": pb.Constraint(grammar=GRAMMAR),
    "choices": pb.Constraint(choices=pb.Choices(texts=["yes", "no"])),
}
PROMPT = "Tell me a story."


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("service"), DEMO, workers=2) as service:
        yield service


def asking(constraint: pb.Constraint, text: str = PROMPT, **params: Any) -> pb.GenerateRequest:
    given = {"max_tokens": 200, "seed": 5, "temperature": 0.8, **params}
    made = pb.GenerateRequest(text=text, sampling_params=pb.SamplingParams(constraint=constraint, **given))
    made.output_options.return_token_ids = True
    return made


def check_text(form: str, text: str) -> None:
    """Asserts that a finished answer satisfies its constraint, by something else than what confined it."""
    if form == "json_schema":
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
    elif form == "json_object":
        assert isinstance(json.loads(text), dict)
    elif form == "choices":
        assert text in ("yes", "no")
    else:
        assert re.fullmatch(REGEX if form == "regex" else r"once( [a-z]{2,6}){2,6}\.", text)


@pytest.mark.proto_field(
    "SamplingParams.constraint",
    "Constraint.json_schema",
    "Constraint.json_object",
    "Constraint.regex",
    "Constraint.grammar",
    "Constraint.choices",
    "Choices.texts",
    "StopDetail.constraint",
)
def test_finished_answers_satisfy_their_constraints(service: Service) -> None:
    finished = set()
    for form, constraint in CONSTRAINTS.items():
        for seed in range(2):
            # Any object seldom ends.
            given = asking(constraint, seed=seed, max_tokens=30 if form == "json_object" else 200)
            answer = generate(service.stub, given)
            assert answer.finish is not None
            if answer.finish.reason == pb.FINISH_REASON_STOP:
                assert answer.finish.stop.constraint or answer.finish.stop.HasField("eos_token_id")
                check_text(form, answer.text)
                finished.add(form)
            asked = pb.ChatRequest(sampling_params=given.sampling_params)
            asked.messages.add(role="user", content="Hi")
            said = chat(service.stub, asked)
            if said.finish is not None and said.finish.reason == pb.FINISH_REASON_STOP:
                check_text(form, said.text)
    assert finished >= CONSTRAINTS.keys() - {"json_object"}


def test_several_answers_in_one_message(service: Service) -> None:
    asked = asking(CONSTRAINTS["regex"], n=3)
    response = service.stub.GenerateOnce(asked, timeout=60)
    assert len(response.answers) == 3
    for answer in response.answers:
        check_text("regex", answer.text)
    assert response.answers[0].text == generate(service.stub, asking(CONSTRAINTS["regex"])).text


def test_embeddings_equal_library(service: Service) -> None:
    """The same tokens from `LLMEngine`, whose constraints are mappings."""
    given = [{"json_schema": SCHEMA}, {"regex": REGEX}, {"grammar": GRAMMAR}, {"choices": ["yes", "no"]}]
    params = [{"constraint": one, "max_tokens": 200, "seed": 5, "temperature": 0.8} for one in given]
    expected = LLMEngine(DEMO).generate([PROMPT] * len(given), params)
    for form, answer in zip(("json_schema", "regex", "grammar", "choices"), expected, strict=True):
        assert generate(service.stub, asking(CONSTRAINTS[form])).token_ids == answer["token_ids"]


@pytest.mark.parametrize("form", slow_but({"regex", "choices"}, ["json_schema", "regex", "choices"]))
def test_stream_broken_after_each_token_resumes(form: str, service: Service) -> None:
    whole = generate(service.stub, asking(CONSTRAINTS[form]))

    def rest(have: int) -> list[int]:
        asked = asking(CONSTRAINTS[form])
        asked.request_id = f"{form}-{have}"
        asked.resume.answers.add(index=0).token_ids.ids.extend(whole.token_ids[:have])
        return generate(service.stub, asked).token_ids

    with ThreadPoolExecutor(4) as pool:
        rests = list(pool.map(rest, range(1, len(whole.token_ids))))
    assert rests == [whole.token_ids[have:] for have in range(1, len(whole.token_ids))]


def test_constraint_complete_at_max_tokens_ends_with_stop(service: Service) -> None:
    """This also holds if a client resumes with all tokens. With a smaller max_tokens the answer ends by its length."""
    whole = generate(service.stub, asking(CONSTRAINTS["choices"]))
    for count, reason in ((len(whole.token_ids), pb.FINISH_REASON_STOP), (1, pb.FINISH_REASON_LENGTH)):
        asked = asking(CONSTRAINTS["choices"], max_tokens=count)
        answer = generate(service.stub, asked)
        assert answer.token_ids == whole.token_ids[:count]
        asked.request_id = f"full-{count}"
        asked.resume.answers.add(index=0).token_ids.ids.extend(answer.token_ids)
        again = generate(service.stub, asked)
        assert again.token_ids == []
        for one in (answer, again):
            assert one.finish is not None
            assert one.finish.reason == reason
            assert one.finish.stop.constraint == (reason == pb.FINISH_REASON_STOP)


@pytest.mark.slow
def test_killed_worker_changes_no_token(tmp_path: Path) -> None:
    """Streams of both workers continue at the other one in the middle of their documents, unconstrained ones too."""
    long = pb.Constraint(grammar='start: "[" number ("," number){99} "]"\nnumber: /[1-9][0-9]{1,2}/')
    asked = [asking(long, seed=seed, max_tokens=500) for seed in range(6)]
    plain = asking(long, max_tokens=300)
    plain.sampling_params.ClearField("constraint")
    plain.sampling_params.ignore_eos = True
    asked.append(plain)
    with running_service(tmp_path, DEMO, workers=2) as service:
        expected = [generate(service.stub, one) for one in asked]
        assert [len(json.loads(answer.text)) for answer in expected[:-1]] == [100] * 6
        calls = [service.stub.Generate(one, timeout=60) for one in asked]
        firsts = [next(call) for call in calls]
        service.workers[0].stop(signal.SIGKILL)
        for call, first, whole in zip(calls, firsts, expected, strict=True):
            parts = [first, *call]
            assert [token for part in parts for token in part.token_ids] == whole.token_ids
            assert parts[-1].finish.exact


async def test_only_workers_with_same_grammar_library_get_constraints() -> None:
    """Other workers serve unconstrained requests; if no worker can, the error names the field."""
    end = {"eos_token_ids": [EOS]}
    able = FakeWorker(FILES, worker_id="able", description={"grammar_engine": ENGINE, **end})
    other = FakeWorker(FILES, worker_id="other", description={"grammar_engine": "another 1.0", **end})
    constraint = {"constraint": pb.Constraint(regex="[a-z]+")}
    async with bench(able, other) as b:
        for _ in range(6):
            await collect(b.stub.Generate(request(params=constraint)))
        assert (len(able.submitted), len(other.submitted)) == (6, 0)
        assert all(one.params.grammar.endswith("start: /[a-z]+/\n") for one in able.submitted)
        for _ in range(6):
            await collect(b.stub.Generate(request()))
        assert other.submitted
        assert not any(one.params.grammar for one in other.submitted)
        model = await b.stub.GetModel(pb.GetModelRequest())
        assert pb.CAPABILITY_CONSTRAINTS in model.model.capabilities
    async with bench(FakeWorker(FILES, description=end)) as b:
        error = await error_of(b.stub.Generate(request(params=constraint)))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "sampling_params.constraint" in str(error.details())
        model = await b.stub.GetModel(pb.GetModelRequest())
        assert pb.CAPABILITY_CONSTRAINTS not in model.model.capabilities


async def test_isolated_tenants_find_no_constraint_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With isolation the router checks a constraint once per tenant, without it once for all tenants."""
    known, found = GrammarChecker.known, list[bool]()

    def watched(self: GrammarChecker, constraint: Constraint, *, optional_space: bool, salt: bytes = b"") -> str | None:
        result = known(self, constraint, optional_space=optional_space, salt=salt)
        found.append(result is not None)
        return result

    for isolate, expected in ((True, [False, True, False, True]), (False, [False, True, True, True])):
        able = FakeWorker(FILES, worker_id="able", description={"grammar_engine": ENGINE, "eos_token_ids": [EOS]})
        async with bench(able, tenants=TenantPolicy(isolate=isolate)) as b:
            hits = []
            for tenant in ("alice", "alice", "bob", "bob"):
                with monkeypatch.context() as patch:
                    patch.setattr(GrammarChecker, "known", watched)
                    found.clear()
                    asked = request(params={"constraint": pb.Constraint(regex="[a-z]+")})
                    await collect(b.stub.Generate(asked, metadata=((TENANT_KEY, tenant),)))
                hits.append(found[0])
            assert hits == expected
            assert len({record.cache_salt for record in able.submitted}) == 1 + isolate


async def test_bad_constraint_error_names_its_place() -> None:
    worker = FakeWorker(FILES, description={"grammar_engine": ENGINE, "eos_token_ids": [EOS]})
    async with bench(worker) as b:
        for constraint, said in (
            (pb.Constraint(), "sampling_params.constraint is empty"),
            (pb.Constraint(json_object=False), "json_object is False"),
            (pb.Constraint(json_schema='{"items": {"not": {}}}'), "at /items: 'not' is not supported"),
            (pb.Constraint(regex="a("), "character 2: unclosed group"),
            (pb.Constraint(grammar="start: b\nb: c"), "line 2, column 4"),
            (pb.Constraint(choices=pb.Choices()), "choices.texts has 0 entries"),
            (pb.Constraint(regex="a" * 70_000), "at most 65536 bytes"),
        ):
            error = await error_of(b.stub.Generate(request(params={"constraint": constraint})))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in str(error.details())
            (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
            assert violation.field.startswith("sampling_params.constraint")
        assert not worker.submitted
        await b.empty()


async def test_failed_constraint_has_status() -> None:
    worker = FakeWorker(FILES, description={"grammar_engine": ENGINE, "eos_token_ids": [EOS]})
    async with bench(worker) as b:
        worker.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_CONSTRAINT_FAILED, message="too much work")
        error = await error_of(b.stub.Generate(request(params={"constraint": pb.Constraint(regex="a+")})))
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too much work")
        assert detail(error, error_details_pb2.ErrorInfo).reason == "CONSTRAINT_FAILED"
        worker.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_CONSTRAINT)
        parts = await collect(b.stub.Generate(request(params={"constraint": pb.Constraint(regex="a+")})))
        assert parts[-1].finish.stop.constraint
        assert parts[-1].finish.reason == pb.FINISH_REASON_STOP
