"""The tenant of a call, its priority and its cache salt."""

from __future__ import annotations

import grpc
import pytest

from common.errors import ApiError, TenantLimitError
from common.limits import MAX_CACHE_SALT_BYTES
from router.api.tenants import TENANT_KEY, TenantLimits, TenantPolicy, tenant_of
from router.scheduling.queued_request import HIGH, LOW, NORMAL

NAMED = [("other", "x"), (TENANT_KEY, "gold")]


@pytest.mark.parametrize(
    ("metadata", "bound", "tenant"),
    [
        (None, "", ""),
        ([], "", ""),
        (NAMED, "", "gold"),
        ([], "gold", "gold"),
        (NAMED, "gold", "gold"),
        ([(TENANT_KEY, b"gold")], "gold", "gold"),
        ([(TENANT_KEY, "")], "gold", "gold"),
    ],
)
def test_tenant_is_taken_from_key_or_metadata(
    metadata: list[tuple[str, str | bytes]] | None, bound: str, tenant: str
) -> None:
    assert tenant_of(metadata, TenantPolicy(), bound) == tenant


def test_tenant_metadata_key_is_configurable() -> None:
    policy = TenantPolicy("k")
    assert tenant_of((*NAMED, ("k", "me")), policy) == "me"
    assert tenant_of(NAMED, policy) == ""
    with pytest.raises(ApiError, match="metadata k has 200 bytes; valid: at most 128"):
        tenant_of((("k", "x" * 200),), policy)


def test_metadata_can_not_change_the_tenant_of_a_key() -> None:
    with pytest.raises(ApiError, match=f"metadata {TENANT_KEY} is 'gold'; the API key is of tenant 'silver'") as caught:
        tenant_of(NAMED, TenantPolicy(), "silver")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.PERMISSION_DENIED, "TENANT_MISMATCH")


def test_tenant_name_without_key_is_refused_when_required() -> None:
    """A caller that invents a tenant for each call would get all their shares."""
    strict = TenantPolicy(require_bound=True)
    assert tenant_of([], strict) == tenant_of([(TENANT_KEY, "")], strict) == ""
    assert tenant_of(NAMED, strict, "gold") == "gold"
    with pytest.raises(ApiError, match="is 'gold'; only a call with an API key of that tenant may name it") as caught:
        tenant_of(NAMED, strict)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.PERMISSION_DENIED, "TENANT_NOT_BOUND")


@pytest.mark.parametrize(
    ("of_tenants", "of_key", "default", "most"),
    [
        ({}, "", "high", HIGH),
        ({}, "", "normal", NORMAL),
        ({"": "low"}, "", "high", LOW),
        ({"": "high"}, "", "normal", HIGH),
        ({"gold": "high"}, "", "normal", HIGH),
        ({"gold": "low", "": "high"}, "", "high", LOW),
        ({"other": "high"}, "", "normal", NORMAL),
        ({}, "high", "normal", HIGH),
        ({"": "normal"}, "high", "normal", HIGH),
        ({"gold": "normal"}, "high", "normal", NORMAL),
        ({"gold": "high"}, "low", "normal", LOW),
    ],
)
def test_highest_priority_is_lower_of_key_and_tenant(
    of_tenants: dict[str, str], of_key: str, default: str, most: int
) -> None:
    """The operator sets the highest priority; if key and tenant both have one, the lower applies."""
    policy = TenantPolicy(max_priority_of=of_tenants)
    for asked in (LOW, NORMAL, HIGH):
        if asked <= most:
            assert policy.priority(asked, "gold", of_key, default) == asked
            continue
        with pytest.raises(ApiError, match=r"priority is PRIORITY_.*; valid: at most PRIORITY_") as caught:
            policy.priority(asked, "gold", of_key, default)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PRIORITY_NOT_ALLOWED")
        assert caught.value.violations[0].path == "priority"
    assert policy.priority(0, "gold", of_key, default) == min(most, NORMAL)


def test_isolated_tenants_have_unforgeable_salts() -> None:
    """Regression: only salts chosen, or forgotten, by clients separated the prefixes of tenants."""
    policy = TenantPolicy(isolate=True)
    asked = [("", ""), ("", "ab"), ("ab", ""), ("a", "b"), ("a", "bc"), ("ab", "c"), ("é", "s"), ("", "és")]
    salts = {policy.cache_salt(salt, tenant) for tenant, salt in asked}
    assert len(salts) == len(asked)
    assert policy.cache_salt("bc", "a") == TenantPolicy(isolate=True, require_bound=True).cache_salt("bc", "a")
    for salt in salts:
        assert len(salt) <= MAX_CACHE_SALT_BYTES
        with pytest.raises(UnicodeDecodeError):
            salt.decode()
    assert TenantPolicy().cache_salt("é", "a") == "é".encode()
    assert policy.with_limits({}, {}, {}).isolate


def test_requests_in_flight_are_limited_per_tenant() -> None:
    limits = TenantLimits(TenantPolicy(concurrency=2, concurrency_of={"vip": 0, "one": 1}))
    limits.claim("a")
    limits.claim("a")
    with pytest.raises(TenantLimitError) as caught:
        limits.claim("a")
    assert caught.value.retry_after_s == 1.0
    limits.claim("b")
    limits.claim("one")
    with pytest.raises(TenantLimitError):
        limits.claim("one")
    for _ in range(10):
        limits.claim("vip")
    limits.release("a", took_s=8.0)
    limits.claim("a")
    with pytest.raises(TenantLimitError) as caught:
        limits.claim("a")
    assert caught.value.retry_after_s == 4.0
    limits.release("one", 1.0)
    limits.claim("one")
    limits.release("one", 1.0)
    assert len(limits) == 3
