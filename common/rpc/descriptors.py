"""File descriptors of a process that serves: as many as the system gives, and some that callers never get.

A process whose descriptors are all taken by connections of callers could not dial its own workers, read its files or
write to its collector.
"""

from __future__ import annotations

import resource

import structlog

from common.limits import FEW_DESCRIPTORS, MAX_SIDE_CONNECTIONS, RESERVED_DESCRIPTORS, RESERVED_DESCRIPTORS_SHARE

log = structlog.get_logger(__name__)

# More than a process of ours can use, and still quickly done for what looks at each possible descriptor.
_UNLIMITED = 1 << 20


def raise_descriptor_limit() -> int:
    """Takes as many descriptors as this process may have by itself. Returns their number; warns when they are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _UNLIMITED if hard == resource.RLIM_INFINITY else min(hard, _UNLIMITED)
    try:
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        # Some systems say more than they give.
        log.debug("descriptor limit not raised", limit=soft, hard=hard)
    number = descriptor_limit()
    if number < FEW_DESCRIPTORS:
        log.warning(
            f"few file descriptors: at most {max_connections()} connections; raise the hard limit of open files"
            " (`ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of containers)",
            limit=number,
        )
    return number


def descriptor_limit() -> int:
    """Number of file descriptors that this process may have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, _UNLIMITED)


def max_connections() -> int:
    """Number of connections that the callers of one port may have: what the process itself needs is left."""
    number = descriptor_limit()
    reserved = max(RESERVED_DESCRIPTORS, number // RESERVED_DESCRIPTORS_SHARE)
    return max(number // 4, number - reserved)


def max_side_connections() -> int:
    """The same of a port beside the main one: of operators, of probes. They come out of the reserve."""
    return min(MAX_SIDE_CONNECTIONS, max(8, descriptor_limit() // 16))
