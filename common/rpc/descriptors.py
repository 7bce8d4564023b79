"""File descriptors of a serving process: raises their limit, and keeps a reserve that callers' connections cannot take.

Without a reserve, callers could take all descriptors, and the process could not dial its workers, read its files or
reach its collector.
"""

from __future__ import annotations

import resource

import structlog

from common.limits import FEW_DESCRIPTORS, MAX_SIDE_CONNECTIONS, RESERVED_DESCRIPTORS, RESERVED_DESCRIPTORS_SHARE

log = structlog.get_logger(__name__)

# Cap for systems without a limit. Some code loops over all possible descriptors, so the number must stay small.
_UNLIMITED = 1 << 20


def raise_descriptor_limit() -> int:
    """Raises the descriptor limit as far as this process may. Returns the limit; warns if it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _UNLIMITED if hard == resource.RLIM_INFINITY else min(hard, _UNLIMITED)
    try:
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        # Some systems refuse the limit that they report.
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
    """Number of file descriptors that this process may open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, _UNLIMITED)


def max_connections() -> int:
    """Most connections that callers of one port may have; the reserve stays free."""
    number = descriptor_limit()
    reserved = max(RESERVED_DESCRIPTORS, number // RESERVED_DESCRIPTORS_SHARE)
    return max(number // 4, number - reserved)


def max_side_connections() -> int:
    """Most connections of a side port (operators, probes). They come out of the reserve."""
    return min(MAX_SIDE_CONNECTIONS, max(8, descriptor_limit() // 16))
