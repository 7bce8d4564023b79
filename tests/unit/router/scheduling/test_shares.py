"""Shares of tenants in an overloaded router: places in the queue, and work."""

from __future__ import annotations

import pytest

from tests.bench.router.shares import flood, shared_places


@pytest.mark.parametrize("a_per_s", [60, 200, 2000])
def test_flooding_tenant_takes_no_share_of_another(a_per_s: float) -> None:
    """A fills the queue at any rate; B asks for a tenth of the service and gets all of it at once."""
    seen = flood(a_per_s, seconds=10.0)
    assert (seen.refused["B"], seen.dropped["B"]) == (0, 0)
    assert seen.served["B"] >= 49
    # One request is running, and one of A's may be first.
    assert max(seen.waits) <= 3 / 50
    assert seen.served["A"] + seen.served["B"] >= 499


def test_long_answers_and_long_prompts_get_equal_work() -> None:
    """Of tenants with equal weight, the one with answers of 2000 tokens does not get all places."""
    had = shared_places({"long answers": (20, 2000), "long prompts": (2000, 20)})
    works = [each["work"] for each in had.values()]
    assert max(works) <= 1.15 * min(works)
