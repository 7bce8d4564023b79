"""Who a call is for, and how much of the router each may have at a time.

A tenant is the value of a metadata key that the operator names; calls without it are those of the tenant "". Invariant:
a tenant is remembered while it has requests in flight, and no longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from common.errors import InvalidFieldError, PermissionDeniedError, TenantLimitError
from common.limits import MAX_QUEUE_RETRY_S, MAX_TENANT_BYTES, MIN_QUEUE_RETRY_S

TENANT_KEY = "x-fissile-tenant"
_RETRY_S = 1.0
# Weight of the newest duration in the mean.
_NEWEST = 0.2


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What tenants get.

    Attributes:
        key: name of the metadata that says who the tenant is, lower case.
        weights: share in the queue of tenants that are not like the others, which have 1.
        concurrency: most requests in flight of each tenant; 0 is no limit.
        concurrency_of: the same, of tenants that are not like the others.
    """

    key: str = TENANT_KEY
    weights: Mapping[str, float] = field(default_factory=dict)
    concurrency: int = 0
    concurrency_of: Mapping[str, int] = field(default_factory=dict)


def tenant_policy(key: str, weights: Mapping[str, float], concurrency: Mapping[str, int]) -> TenantPolicy:
    """The policy from limits by tenant, of which "" is for each of the others."""
    named = {tenant: limit for tenant, limit in concurrency.items() if tenant}
    return TenantPolicy(key, weights, concurrency.get("", 0), named)


def tenant_of(metadata: Iterable[tuple[str, str | bytes]] | None, key: str, bound: str = "") -> str:
    """The tenant of a call, "" when its metadata names none.

    Args:
        metadata: of the call.
        key: name of the entry that says who the tenant is.
        bound: tenant of the caller's API key, which its metadata can not change; empty for a key of no tenant.

    Raises:
        InvalidFieldError: the name is longer than MAX_TENANT_BYTES.
        PermissionDeniedError: the metadata names another tenant than the key's.
    """
    value = next((value for name, value in metadata or () if name == key), "")
    text = value if isinstance(value, str) else value.decode("utf-8", "replace")
    if len(text.encode()) > MAX_TENANT_BYTES:
        raise InvalidFieldError(f"metadata {key}", f"has {len(text.encode())} bytes", f"at most {MAX_TENANT_BYTES}")
    if bound and text not in ("", bound):
        raise PermissionDeniedError(
            "TENANT_MISMATCH", f"metadata {key} is {text!r}; the API key is of tenant {bound!r}"
        )
    return bound or text


@dataclass(slots=True)
class _InFlight:
    number: int = 0
    mean_s: float = 0.0


class TenantLimits:
    """Counts the requests of each tenant from their validation to their end."""

    def __init__(self, policy: TenantPolicy) -> None:
        self._policy = policy
        self._tenants: dict[str, _InFlight] = {}

    def set_policy(self, policy: TenantPolicy) -> None:
        """Other limits from now on; requests in flight count, and none is ended."""
        self._policy = policy

    def __len__(self) -> int:
        """Number of tenants with requests in flight."""
        return len(self._tenants)

    def limit(self, tenant: str) -> int:
        """Most requests in flight; 0 is no limit."""
        return self._policy.concurrency_of.get(tenant, self._policy.concurrency)

    def claim(self, tenant: str) -> None:
        """Counts a request in.

        Raises:
            TenantLimitError: the tenant has as many as it may; RetryInfo says when one of them is likely to have ended.
        """
        limit, has = self.limit(tenant), self._tenants.get(tenant, _InFlight())
        if limit and has.number >= limit:
            soon_s = has.mean_s / limit if has.mean_s else _RETRY_S
            raise TenantLimitError(tenant, limit, min(max(soon_s, MIN_QUEUE_RETRY_S), MAX_QUEUE_RETRY_S))
        has.number += 1
        self._tenants[tenant] = has

    def release(self, tenant: str, took_s: float) -> None:
        """Counts a request out that was counted in `took_s` seconds ago."""
        has = self._tenants[tenant]
        has.number -= 1
        has.mean_s = took_s if not has.mean_s else has.mean_s + _NEWEST * (took_s - has.mean_s)
        if not has.number:
            del self._tenants[tenant]

    @contextlib.contextmanager
    def held(self, tenant: str, clock: Callable[[], float]) -> Iterator[None]:
        """Counts a request in for as long as the block runs."""
        self.claim(tenant)
        began = clock()
        try:
            yield
        finally:
            self.release(tenant, clock() - began)
