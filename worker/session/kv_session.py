"""KV sessions: how a prefill worker tells a decode worker where the blocks of a prompt are. Pure.

A block's name in a KV tier is a digest of all that its bytes depend on, so the name of the last full block identifies
the whole prompt. A session is that name, and the tiers that have the blocks. No worker holds memory for a session:
the tiers evict blocks as they evict all others. A block that is gone is computed again.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Final, NamedTuple

from common.errors import InvalidFieldError
from worker.engine.tier_lookups import next_name, salted_name

_SUFFIX_BYTES = 8


class SharedKv(NamedTuple):
    """The KV tiers that a worker shares with others.

    Attributes:
        stores: kind and digest of the place of each tier (`worker/kv_tiers/tier_option.py`); empty without any.
        root: name before the first block of prompts without a salt: workers with one root compute the same blocks.
    """

    stores: tuple[str, ...]
    root: bytes


NO_SHARED_KV: Final = SharedKv((), b"")


class KvSession(NamedTuple):
    """The blocks of one prompt, as one prefill has named them.

    Attributes:
        session_id: name of the prompt's last full block, and a suffix that tells requests with equal prompts apart.
        stores: of the worker that computed the blocks (SharedKv).
        root: hex of the worker's root.
        num_blocks: full blocks of the prompt.
        dp_rank: data-parallel rank of the worker.
    """

    session_id: str
    stores: tuple[str, ...] = ()
    root: str = ""
    num_blocks: int = 0
    dp_rank: int = 0


def prompt_name(root: bytes, salt: bytes, token_ids: array[int], block_size: int) -> bytes:
    """Name of a prompt's last full block, or of its salt without one."""
    name, size = salted_name(root, salt), block_size
    for start in range(0, len(token_ids) // size * size, size):
        name = next_name(name, token_ids[start : start + size].tobytes())
    return name


def new_session(shared: SharedKv, name: bytes, num_blocks: int, request_id: str, dp_rank: int) -> KvSession:
    """The session of a computed prompt.

    Args:
        shared: tiers of this worker.
        name: of the prompt (`prompt_name`).
        num_blocks: full blocks of the prompt.
        request_id: of the prefill.
        dp_rank: of this worker.
    """
    suffix = hashlib.blake2b(request_id.encode("utf-8", "replace"), digest_size=_SUFFIX_BYTES).hexdigest()
    return KvSession(f"{name.hex()}-{suffix}", shared.stores, shared.root.hex(), num_blocks, dp_rank)


def may_have_blocks(session: KvSession, shared: SharedKv, name: bytes) -> bool:
    """True if this worker can find the blocks of a session: same weights and numerics, and a tier in common.

    Args:
        session: as a peer sent it.
        shared: tiers of this worker.
        name: of the prompt that came with the session (`prompt_name`).

    Raises:
        InvalidFieldError: the session is of another prompt, or of another cache salt.
    """
    if session.root != shared.root.hex() or not set(session.stores) & set(shared.stores):
        return False
    if not session.session_id.startswith(f"{name.hex()}-"):
        problem = "names the blocks of another prompt or cache salt"
        raise InvalidFieldError("session.session_id", problem, "the session of this prompt")
    return True
