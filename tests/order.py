"""Order of test files: those that take long come first, so that no core waits at the end of a run spread by file.

A file that is not here comes after them. What a file takes shows in the durations that scripts/test.sh prints.
"""

from __future__ import annotations

import pytest

# Longest first, by seconds that pass.
LONGEST = (
    "tests/chaos/test_security.py",
    "tests/chaos/test_come_and_go.py",
    "tests/e2e/test_chat.py",
    "tests/e2e/test_lost_workers.py",
    "tests/e2e/test_command_line.py",
    "tests/e2e/test_embed.py",
    "tests/e2e/test_logprobs.py",
    "tests/e2e/test_chat_tools.py",
    "tests/chaos/test_ranks.py",
    "tests/e2e/test_heads.py",
    "tests/e2e/test_lengths_of_workers.py",
    "tests/e2e/test_held_calls.py",
    "tests/e2e/test_bad_json.py",
    "tests/chaos/test_m_malformed.py",
    "tests/e2e/test_admin.py",
    "tests/e2e/test_request_log.py",
    "tests/e2e/test_rolling_weights.py",
    "tests/e2e/test_contract.py",
    "tests/e2e/test_workers_come_and_go.py",
    "tests/e2e/test_worker_service.py",
    "tests/e2e/test_worker_process.py",
    "tests/e2e/test_router.py",
    "tests/e2e/test_router_dies.py",
    "tests/e2e/test_tools.py",
    "tests/e2e/test_constraints.py",
    "tests/e2e/test_concurrency.py",
    "tests/e2e/test_reasoning.py",
    "tests/e2e/test_tenants.py",
    "tests/e2e/test_router_metrics.py",
    "tests/e2e/test_kv_events.py",
    "tests/chaos/test_a_admission.py",
    "tests/e2e/test_router_ends.py",
    "tests/deploy/test_kubernetes.py",
    "tests/chaos/test_b_slow_clients.py",
    "tests/e2e/test_router_without_torch.py",
    "tests/e2e/test_receipts.py",
    "tests/chaos/test_c_cancelled.py",
    "tests/e2e/test_http_responses.py",
    "tests/e2e/test_speculation.py",
    "tests/e2e/test_http_messages.py",
    "tests/e2e/test_score.py",
    "tests/e2e/test_bench.py",
    "tests/e2e/test_parity_service.py",
    "tests/parity/test_draft_proposers.py",
    "tests/parity/test_equality.py",
    "tests/parity/test_models.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts tests in place by their files; the order within a file, and of the other files, stays."""
    rank = {path: i for i, path in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
