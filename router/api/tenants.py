"""Tenants: the one a call is for, how much of the router each may hold at a time, and how high its priority may be.

A tenant is the value of a metadata key that the operator names; calls without it are those of the tenant "". Invariant:
a tenant is remembered while it has requests in flight, and no longer.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from common.errors import PermissionDeniedError, PriorityNotAllowedError, TenantLimitError
from common.limits import MAX_QUEUE_RETRY_S, MAX_TENANT_BYTES, MIN_QUEUE_RETRY_S
from common.params.names import PRIORITIES
from common.wire.ids import check_id
from router.scheduling.queued_request import CLASS_NAMES, NORMAL

TENANT_KEY = "x-fissile-tenant"
_NO_UTF8 = b"\xff"
_RETRY_S = 1.0
# Weight of the newest duration in the mean.
_NEWEST = 0.2


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """Limits and rights of the tenants.

    Attributes:
        key: name of the metadata that says who the tenant is, lower case.
        weights: share in the queue of tenants that are not like the others, which have 1.
        concurrency: most requests in flight of each tenant; 0 is no limit.
        concurrency_of: the same, of tenants that are not like the others.
        max_priority_of: highest class, by name, that the requests of a tenant may be of; "" is for each of the others,
            and where that is absent the router's default counts.
        require_bound: whether a tenant's name counts only if the caller's API key is bound to it.
        isolate: whether tenants share no prefix cache, whatever salts their requests name.
    """

    key: str = TENANT_KEY
    weights: Mapping[str, float] = field(default_factory=dict)
    concurrency: int = 0
    concurrency_of: Mapping[str, int] = field(default_factory=dict)
    max_priority_of: Mapping[str, str] = field(default_factory=dict)
    require_bound: bool = False
    isolate: bool = False

    def with_limits(
        self, weights: Mapping[str, float], concurrency: Mapping[str, int], max_priority: Mapping[str, str]
    ) -> TenantPolicy:
        """Other limits by tenant, of which "" is for each of the others."""
        named = {tenant: limit for tenant, limit in concurrency.items() if tenant}
        return replace(
            self,
            weights=weights,
            concurrency=concurrency.get("", 0),
            concurrency_of=named,
            max_priority_of=max_priority,
        )

    def priority(self, asked: int, tenant: str, of_key: str, default: str) -> int:
        """The class of a request.

        Args:
            asked: what it asks for, 0 when it does not: normal, or the highest class that the caller may have if that
                is lower.
            tenant: who it is for.
            of_key: highest class that the caller's API key may ask for; empty when it does not say.
            default: the same where neither the key nor the tenant says.

        Raises:
            PriorityNotAllowedError: it asks for a higher class than the key, or the tenant, may have.
        """
        of_tenant = self.max_priority_of.get(tenant)
        said = [PRIORITIES[name] for name in (of_key, of_tenant) if name]
        most = min(said, default=PRIORITIES[self.max_priority_of.get("", default)])
        if asked > most:
            raise PriorityNotAllowedError(_proto_name(asked), _proto_name(most))
        return asked or min(NORMAL, most)

    def cache_salt(self, asked: str, tenant: str) -> bytes:
        """The salt of the prefix cache that is in force for a request; what is generated does not depend on it.

        Args:
            asked: the salt that the request names.
            tenant: who it is for.

        Returns:
            That salt; where tenants are isolated, one for each pair of tenant and salt, which is none that a request
            could name: it is not UTF-8.
        """
        if not self.isolate:
            return asked.encode()
        name = tenant.encode()
        return _NO_UTF8 + hashlib.sha256(struct.pack("<I", len(name)) + name + asked.encode()).digest()


def _proto_name(priority: int) -> str:
    return f"PRIORITY_{CLASS_NAMES[priority].upper()}"


def tenant_of(metadata: Iterable[tuple[str, str | bytes]] | None, policy: TenantPolicy, bound: str = "") -> str:
    """The tenant of a call, "" when its metadata names none.

    Args:
        metadata: of the call.
        policy: which entry of it says who the tenant is, and whether that is enough.
        bound: tenant of the caller's API key, which its metadata cannot change; empty for a key of no tenant.

    Raises:
        InvalidFieldError: the name is longer than MAX_TENANT_BYTES, or has control characters.
        PermissionDeniedError: the metadata names another tenant than the key's, or one for a key of no tenant where
            that does not count.
    """
    key = policy.key
    value = next((value for name, value in metadata or () if name == key), "")
    text = value if isinstance(value, str) else value.decode("utf-8", "replace")
    check_id(f"metadata {key}", text, MAX_TENANT_BYTES)
    if bound and text not in ("", bound):
        raise PermissionDeniedError(
            "TENANT_MISMATCH", f"metadata {key} is {text!r}; the API key is of tenant {bound!r}"
        )
    if text and not bound and policy.require_bound:
        raise PermissionDeniedError(
            "TENANT_NOT_BOUND", f"metadata {key} is {text!r}; only a call with an API key of that tenant may name it"
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

    def claim(self, tenant: str, *, has_place: bool = False) -> None:
        """Counts a request in; one that takes over from another, which ends now, `has_place`.

        Raises:
            TenantLimitError: the tenant has as many as it may; RetryInfo says when one of them is likely to have ended.
        """
        limit, has = self.limit(tenant), self._tenants.get(tenant, _InFlight())
        if limit and has.number >= limit and not has_place:
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
    def held(self, tenant: str, clock: Callable[[], float], *, has_place: bool = False) -> Iterator[None]:
        """Counts a request in for as long as the block runs, as `claim`."""
        self.claim(tenant, has_place=has_place)
        began = clock()
        try:
            yield
        finally:
            self.release(tenant, clock() - began)
