"""Tenants: which tenant a call belongs to, and the limits and rights of each.

The tenant is the value of a metadata key that the operator names; a call without it belongs to the tenant "".
Invariant: a tenant has an entry exactly while it has requests in flight.
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
        key: name of the metadata key with the tenant, lower case.
        weights: shares of tenants in the queue; a tenant without an entry has 1.
        concurrency: most requests in flight of a tenant without an entry in `concurrency_of`; 0 is no limit.
        concurrency_of: most requests in flight, by tenant.
        max_priority_of: highest priority class, by tenant; the entry "" is for tenants without one, and without it the
            router's default counts.
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
        """A copy with other limits by tenant; the entry "" is for tenants without one."""
        named = {tenant: limit for tenant, limit in concurrency.items() if tenant}
        return replace(
            self,
            weights=weights,
            concurrency=concurrency.get("", 0),
            concurrency_of=named,
            max_priority_of=max_priority,
        )

    def priority(self, requested: int, tenant: str, of_key: str, default: str) -> int:
        """The class of a request.

        Args:
            requested: the class that the request names; 0 for normal, or the caller's highest class if that is lower.
            tenant: the tenant of the call.
            of_key: highest class of the caller's API key; "" if the key has no limit.
            default: highest class if neither the key nor the tenant has a limit.

        Raises:
            PriorityNotAllowedError: the request names a higher class than the key or the tenant may use.
        """
        of_tenant = self.max_priority_of.get(tenant)
        limits = [PRIORITIES[name] for name in (of_key, of_tenant) if name]
        most = min(limits, default=PRIORITIES[self.max_priority_of.get("", default)])
        if requested > most:
            raise PriorityNotAllowedError(_proto_name(requested), _proto_name(most))
        return requested or min(NORMAL, most)

    def cache_salt(self, requested: str, tenant: str) -> bytes:
        """The salt of the prefix cache for a request. Answers do not depend on it.

        Args:
            requested: the salt that the request names.
            tenant: the tenant of the call.

        Returns:
            The requested salt. If tenants are isolated, a salt of the pair of tenant and requested salt: it is not
            UTF-8, so that no request can name it.
        """
        if not self.isolate:
            return requested.encode()
        name = tenant.encode()
        return _NO_UTF8 + hashlib.sha256(struct.pack("<I", len(name)) + name + requested.encode()).digest()


def _proto_name(priority: int) -> str:
    return f"PRIORITY_{CLASS_NAMES[priority].upper()}"


def tenant_of(metadata: Iterable[tuple[str, str | bytes]] | None, policy: TenantPolicy, bound: str = "") -> str:
    """The tenant of a call, "" if it names none.

    Args:
        metadata: of the call.
        policy: says which metadata key names the tenant, and whether an API key must be bound to it.
        bound: tenant that the caller's API key is bound to, "" for none.

    Raises:
        InvalidFieldError: the name is longer than MAX_TENANT_BYTES, or has control characters.
        PermissionDeniedError: the metadata names another tenant than the key's, or names one although the key is bound
            to none and the policy requires that.
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
    """Counts the requests in flight of each tenant."""

    def __init__(self, policy: TenantPolicy) -> None:
        self._policy = policy
        self._tenants: dict[str, _InFlight] = {}

    def set_policy(self, policy: TenantPolicy) -> None:
        """Replaces the limits. Requests in flight count, and none is ended."""
        self._policy = policy

    def __len__(self) -> int:
        """Number of tenants with requests in flight."""
        return len(self._tenants)

    def limit(self, tenant: str) -> int:
        """Most requests in flight of a tenant; 0 is no limit."""
        return self._policy.concurrency_of.get(tenant, self._policy.concurrency)

    def claim(self, tenant: str, *, has_place: bool = False) -> None:
        """Counts a new request of a tenant.

        Args:
            tenant: the tenant.
            has_place: True if the request replaces one that ends now, and so may exceed the limit.

        Raises:
            TenantLimitError: the tenant is at its limit; RetryInfo says when one of its requests is likely to end.
        """
        limit, has = self.limit(tenant), self._tenants.get(tenant, _InFlight())
        if limit and has.number >= limit and not has_place:
            soon_s = has.mean_s / limit if has.mean_s else _RETRY_S
            raise TenantLimitError(tenant, limit, min(max(soon_s, MIN_QUEUE_RETRY_S), MAX_QUEUE_RETRY_S))
        has.number += 1
        self._tenants[tenant] = has

    def release(self, tenant: str, took_s: float) -> None:
        """Ends the count of a request that was claimed `took_s` seconds ago."""
        has = self._tenants[tenant]
        has.number -= 1
        has.mean_s = took_s if not has.mean_s else has.mean_s + _NEWEST * (took_s - has.mean_s)
        if not has.number:
            del self._tenants[tenant]

    @contextlib.contextmanager
    def held(self, tenant: str, clock: Callable[[], float], *, has_place: bool = False) -> Iterator[None]:
        """Counts a request while the block runs; arguments and errors as of `claim`."""
        self.claim(tenant, has_place=has_place)
        began = clock()
        try:
            yield
        finally:
            self.release(tenant, clock() - began)
