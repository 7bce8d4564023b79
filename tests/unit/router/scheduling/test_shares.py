"""What tenants get of a router that is too busy: places in the queue, and work."""

from __future__ import annotations

import pytest

from tests.bench.router.shares import flood, shared_places


@pytest.mark.parametrize("a_per_s", [60, 200, 2000])
def test_flooding_tenant_takes_no_share_of_another(a_per_s: float) -> None:
    """R3: A fills the queue, however fast it asks; B, which asks for a tenth of the service, gets all of it at once."""
    seen = flood(a_per_s, seconds=10.0)
    assert (seen.refused["B"], seen.dropped["B"]) == (0, 0)
    assert seen.served["B"] >= 49
    # One request is being served, and one of A's may go before.
    assert max(seen.waits) <= 3 / 50
    assert seen.served["A"] + seen.served["B"] >= 499


def test_long_answers_and_long_prompts_get_equal_work() -> None:
    """R3: of tenants of equal weight the one with answers of 2000 tokens does not take all places."""
    had = shared_places({"long answers": (20, 2000), "long prompts": (2000, 20)})
    works = [each["work"] for each in had.values()]
    assert max(works) <= 1.15 * min(works)
