"""Admits calls: finds a call's tenant, priority and cache salt, and bounds the tenant's calls in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from common.rpc.auth import caller
from router.api.in_flight import InFlightCall, InFlightCalls
from router.api.rpc_scope import Context
from router.api.shutdown import OpenCalls
from router.api.tenants import TenantLimits, TenantPolicy, tenant_of
from router.validation import check_priority


class CallAdmission:
    """Admits the calls of one router.

    Args:
        policy: limits and rights of the tenants.
        open_calls: all calls of the router, which end with it.
        clock: monotonic seconds.
        has_keys: True if callers show API keys: then high priority needs a key or a tenant that allows it.

    Attributes:
        calls: the calls that run requests on workers.
        open_calls: all calls.
    """

    def __init__(
        self, policy: TenantPolicy, open_calls: OpenCalls, clock: Callable[[], float], *, has_keys: bool
    ) -> None:
        self.calls = InFlightCalls()
        self.open_calls = open_calls
        self._policy = policy
        self._tenant_limits = TenantLimits(policy)
        self._clock = clock
        # A caller with a key is known, and gets what the operator allowed it; without keys all callers are alike.
        self._default_max_priority = "normal" if has_keys else "high"

    def set_policy(self, policy: TenantPolicy) -> None:
        """Replaces limits and rights from now on."""
        self._policy = policy
        self._tenant_limits.set_policy(policy)

    def tables(self) -> dict[str, int]:
        """Entries of every table that grows with requests or tenants."""
        return {"request_ids": len(self.calls), "tenants_in_flight": len(self._tenant_limits)}

    def tenant(self, context: Context) -> str:
        """The tenant of a call.

        Raises:
            ApiError: its name is invalid, or the caller may not use it.
        """
        return tenant_of(context.invocation_metadata(), self._policy, caller.get().tenant)

    def priority(self, requested: int, tenant: str) -> int:
        """The priority class of a request.

        Args:
            requested: the class that the request names, 0 for none.
            tenant: the tenant of the call.

        Raises:
            ApiError: there is no such class, or the caller may not ask for it.
        """
        check_priority(requested)
        return self._policy.priority(requested, tenant, caller.get().max_priority, self._default_max_priority)

    def cache_salt(self, requested: str, tenant: str) -> bytes:
        """The salt of the prefix cache for a request that names the salt `requested`."""
        return self._policy.cache_salt(requested, tenant)

    @contextlib.contextmanager
    def held(self, call: InFlightCall, *, takes_over: bool = False) -> Iterator[None]:
        """Holds the id of a call and its tenant's place for the block; a drain waits for the call.

        Raises:
            ApiError: the id is taken, or the tenant has as many calls as it may.
        """
        with (
            self.open_calls.held(),
            self.calls.held(call, takes_over=takes_over) as took_over,
            self._tenant_limits.held(call.tenant, self._clock, has_place=took_over),
        ):
            yield

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets the end of the router interrupt the block; a drain waits for it."""
        with self.open_calls.held(), self.open_calls.interruptible():
            yield

    @contextlib.contextmanager
    def tenant_held(self, context: Context) -> Iterator[str]:
        """Counts a call among those of its tenant, whose name the block gets."""
        tenant = self.tenant(context)
        with self._tenant_limits.held(tenant, self._clock):
            yield tenant
