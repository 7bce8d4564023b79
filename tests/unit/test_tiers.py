"""Tiers of tests: each test has one, CI runs them all, and each subject has real processes in the first."""

from __future__ import annotations

import ast
import re
from itertools import product
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A test with routers or workers as processes for each part of the promise.
REAL_PROCESSES: Final = {
    "a worker that is killed": "chaos/test_come_and_go.py::test_f1_killed_worker_costs_no_stream_a_token",
    "a worker that freezes": "chaos/test_come_and_go.py::test_f3_frozen_worker_is_given_up_and_taken_back",
    "a router that dies": "e2e/test_router_dies.py::test_sequences_of_dead_router_are_adopted_and_computed_once",
    "batches": "e2e/test_concurrency.py::test_concurrent_streams_equal_lone_streams",
    "preemption": "e2e/test_parity_service.py::test_greedy_equals_transformers",
    "the prefix cache": "e2e/test_kv_events.py::test_router_uses_cache_warmed_by_other_router",
    "lengths of workers": "e2e/test_lengths_of_workers.py::test_clients_see_effective_model_length",
    "sampling": "e2e/test_sampling.py::test_streams_equal_transformers",
    "log probabilities": "e2e/test_logprobs.py::test_lost_worker_changes_no_logprob",
    "drafts": "e2e/test_speculation.py::test_streams_with_killed_worker_equal_plain_engine",
    "grammars": "e2e/test_constraints.py::test_stream_broken_after_each_token_resumes",
    "tools": "e2e/test_held_calls.py::test_named_tool_choice_forces_strict_call",
    "vectors": "e2e/test_embed.py::test_lost_worker_changes_no_vector",
    "relevance": "e2e/test_heads.py::test_lost_worker_changes_no_relevance",
    "scores": "e2e/test_score.py::test_score_rpc_equals_library_bit_for_bit",
    "ranks": "chaos/test_ranks.py::test_two_ranks_give_same_tokens_as_one",
    "rolling weights": "e2e/test_rolling_weights.py::test_rolling_weights_under_load_fails_no_request",
    "receipts": "e2e/test_client_receipts.py",
    "keys and certificates": "chaos/test_security.py::test_streams_survive_a_killed_worker_and_new_certificates",
    "admission": "chaos/test_a_admission.py::test_a1_overload_is_refused_and_costs_no_goodput",
    "operators": "e2e/test_admin.py::test_cordoned_worker_gets_no_new_work_and_finishes_running",
    "traces": "e2e/test_trace.py::test_router_and_worker_spans_share_trace",
    "fissile serve": "e2e/test_command_line.py::test_serve_list_generate_and_stop",
    "fissile bench": "e2e/test_bench.py::test_closed_loops_through_router_and_workers",
}


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def expressions() -> list[str]:
    """The `pytest -m` expression of each make target."""
    default = re.search(r"PYTEST_MARK:-([^}]+)", (ROOT / "scripts" / "test.sh").read_text())
    assert default is not None
    return [default[1], *re.findall(r'PYTEST_MARK="?([\w ]+?)"? scripts/test.sh \$\(TESTS\)', makefile())]


def test_each_test_is_of_one_tier() -> None:
    assert len(expressions()) == 3
    for slow, long in product([False, True], repeat=2):
        chosen = [eval(expression, {"slow": slow, "long": long}) for expression in expressions()]
        assert chosen.count(True) == 1, (slow, long)


def test_every_test_folder_is_in_makefile() -> None:
    [line] = re.findall(r"^TESTS := (.*)$", makefile(), re.MULTILINE)
    assert makefile().count("scripts/test.sh $(TESTS)") == 3
    files = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    # Programs of other projects are downloaded by a target of their own.
    [peers] = re.findall(r"pytest .* tests/(\w+)$", makefile(), re.MULTILINE)
    assert {path.parts[0] for path in files} == {*line.split(), peers}


def test_ci_runs_all_test_tiers() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make ")] == [
        "make lint",
        "make test",
        "make test-slow",
        "make test-fresh",
    ]


@pytest.mark.parametrize("place", REAL_PROCESSES.values(), ids=REAL_PROCESSES)
def test_make_test_has_real_processes_for(place: str) -> None:
    path, _, name = place.partition("::")
    module = ast.parse((ROOT / "tests" / path).read_text())
    marks = [ast.unparse(node) for node in module.body if isinstance(node, ast.Assign)]
    assert not any(mark.startswith("pytestmark") and re.search(r"slow|long", mark) for mark in marks)
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    left = [
        test
        for test in tests
        if test.name.startswith(name or "test_")
        and not any(ast.unparse(mark) in ("pytest.mark.slow", "pytest.mark.long") for mark in test.decorator_list)
    ]
    assert left
