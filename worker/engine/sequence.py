"""State of a sequence in the engine."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from common.params.pooling import MEAN, Pooling
from common.params.sampling_params import SamplingParams
from worker.engine.pooling import PooledStates
from worker.engine.sequence_ledger import SequenceLedger
from worker.engine.speculation.draft_rates import DraftHistory

_ids = itertools.count()


class SequenceStatus(enum.Enum):
    """Stage of a sequence."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()
    EXIT_ENGINE = enum.auto()


class Priority(enum.IntEnum):
    """Priority class: higher ones are computed first, lower ones are preempted first."""

    LOW = 1
    NORMAL = 2
    HIGH = 3


class SequenceType(enum.Enum):
    """Kind of the sequence's last scheduled step."""

    DUMMY = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()


class EndReason(enum.Enum):
    """Why a sequence ended; the router derives finish reason and status from it."""

    EOS = enum.auto()
    STOP_TOKEN = enum.auto()
    STOP_SEQUENCE = enum.auto()
    LENGTH = enum.auto()
    CANCELLED = enum.auto()
    DEADLINE = enum.auto()
    ERROR = enum.auto()
    NOT_A_NUMBER = enum.auto()
    CONSTRAINT = enum.auto()
    CONSTRAINT_FAILED = enum.auto()
    INVALID = enum.auto()


class Sequence:
    """One answer to a request: its tokens, blocks and times.

    `num_computed_tokens` drives everything: each step moves it toward `num_tokens`, and prefill, chunk, cache hit,
    decode and re-prefill are the same case. Invariants between steps: `0 <= num_cached_tokens <= num_computed_tokens
    < num_tokens` while unfinished, and `len(block_table) * block_size >= num_computed_tokens`.

    `token_ids` holds real tokens only. Steps in flight are counted, without placeholder tokens: they compute
    `num_inflight_tokens` tokens, of which `num_inflight_drafts` are drafts that may be rejected, and `num_placeholder`
    of them will return output. `num_tokens`, `num_blocks` and `last_block_num_tokens` are derived from the tokens.

    The scheduler looks at every running sequence in every step, so some fields are kept instead of derived. The block
    manager sets `num_slots` with the block table, and `publish_at` with each published block. StopRules and Lifecycle
    set `length_limit`, `stopping_ids` and `may_grow`.

    Args:
        token_ids: the prompt, followed by the tokens of an earlier attempt.
        block_size: tokens per KV block.
        sampling_params: validated parameters.
        stop_token_sequences: token sequences that end the generation.
        stream_callback: called with each RequestOutput of this sequence, in process only.
        id: unique id, 0 included; made when None.
        num_prompt_tokens: length of the prompt; the whole of `token_ids` when None.
        seed: seed of the random numbers (uint64).
        choice: index of the answer, part of the random numbers' counter.
        arrive_time: monotonic seconds on this machine.
        deadline: monotonic seconds after which the sequence ends; None for never.
        hash_root: parent hash of the first block, None without salt and adapter (docs/explanation/determinism.md).
        priority: priority class.
        cache_salt: sequences of different salts share no blocks, even if their `hash_root` collides.
        block_hashes: hashes of the first full blocks (common/wire/block_hash.py), if known; the prefix cache adds more.
        packed_ids: the first tokens as uint32, if known; the prefix cache adds more.
        may_return: True if it may return to its router when its first step is late (rule S9).
        logits_every: the logits of every n-th generated token are digested; 0 for none.
        shares_prompt: True if the request has several answers; their prompt is computed once.
        reads_cache: False to compute every token, even cached ones.
        pooling: how hidden states become a vector; None for a sequence that generates. An embedded sequence ends with
            one token, which has no meaning.
    """

    __slots__ = (
        "_distinct_prompt_ids",
        "arrive_time",
        "awaits_output",
        "block_hashes",
        "block_size",
        "block_table",
        "cache_salt",
        "choice",
        "compiling",
        "deadline",
        "draft_history",
        "expects_kv",
        "first_scheduled_time",
        "first_token_time",
        "hash_root",
        "held_until",
        "id",
        "kv_names",
        "leave_reason",
        "leave_time",
        "ledger",
        "length_limit",
        "logits_every",
        "logprobs_from",
        "may_grow",
        "may_return",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_given_tokens",
        "num_inflight_drafts",
        "num_inflight_tokens",
        "num_missed",
        "num_placeholder",
        "num_prompt_tokens",
        "num_slots",
        "packed_ids",
        "pooled",
        "pooling",
        "preempted_at",
        "priority",
        "publish_at",
        "reads_cache",
        "sampling_params",
        "seed",
        "shares_prompt",
        "spec_token_ids",
        "status",
        "steered_until",
        "stop_strings",
        "stop_token_sequences",
        "stopping_ids",
        "stream_callback",
        "tail_hash",
        "token_ids",
        "type",
        "waits_for_kv",
        "work_before",
    )

    def __init__(
        self,
        token_ids: list[int],
        block_size: int,
        sampling_params: SamplingParams | None = None,
        stop_token_sequences: list[list[int]] | None = None,
        stream_callback: Callable[[Any], None] | None = None,
        id: int | None = None,
        *,
        num_prompt_tokens: int | None = None,
        seed: int = 0,
        choice: int = 0,
        arrive_time: float = 0.0,
        deadline: float | None = None,
        hash_root: int | None = None,
        cache_salt: bytes = b"",
        priority: Priority = Priority.NORMAL,
        block_hashes: list[int] | None = None,
        packed_ids: bytes = b"",
        may_return: bool = False,
        logits_every: int = 0,
        shares_prompt: bool = False,
        reads_cache: bool = True,
        pooling: Pooling | None = None,
    ) -> None:
        self.id = next(_ids) if id is None else id
        self.token_ids = list(token_ids)
        self.block_size = block_size
        self.num_prompt_tokens = len(self.token_ids) if num_prompt_tokens is None else num_prompt_tokens
        # Length of the prompt and the output of earlier attempts.
        self.num_given_tokens = len(self.token_ids)
        self._take_params(sampling_params if sampling_params is not None else SamplingParams())
        if stop_token_sequences:
            self.stop_token_sequences = stop_token_sequences
        self.stream_callback = stream_callback
        self.seed = seed
        self.choice = choice
        self.hash_root = hash_root
        self.cache_salt = cache_salt
        self.block_hashes = [] if block_hashes is None else block_hashes
        self.packed_ids = bytearray(packed_ids)
        # Names of the first full blocks in KV tiers (tier_lookups.py); empty without tiers.
        self.kv_names: list[bytes] = []
        # Length and hash of the tail that the prefix cache looked up last.
        self.tail_hash: tuple[int, int] | None = None
        self.priority = priority
        self.may_return = may_return
        self.logits_every = logits_every
        self.shares_prompt = shares_prompt
        self.reads_cache = reads_cache
        self.pooling = pooling
        self.pooled = None if pooling is None else PooledStates(pooling)
        self.arrive_time = arrive_time
        self.ledger = SequenceLedger(arrive_time)
        self.deadline = deadline
        self._distinct_prompt_ids: npt.NDArray[np.int64] | None = None
        self._begin()

    def _take_params(self, params: SamplingParams) -> None:
        """Sets the fields that follow from the parameters and the given tokens."""
        self.sampling_params = params
        # Number of tokens, prompt included, at which it ends at the latest.
        self.length_limit = self.num_prompt_tokens + params.max_tokens
        # Ids that may end it as its newest token (`may_end`).
        self.stopping_ids = frozenset(params.stop_token_ids)
        # Penalties, a bias or masks change its logits while it has fewer tokens than this.
        self.steered_until = math.inf if params.steers else self.num_prompt_tokens + params.min_tokens
        self.stop_strings = params.stop_strings
        self.stop_token_sequences = [list(s) for s in params.stop_token_sequences]
        # First given position whose logprob is still wanted; tokens before it may come from the cache.
        wants_known = params.prompt_logprobs is not None and params.prompt_logprobs_start < self.num_given_tokens
        self.logprobs_from: float = params.prompt_logprobs_start if wants_known else math.inf

    def _begin(self) -> None:
        """Initializes the fields that the engine fills in."""
        self.status = SequenceStatus.WAITING
        self.type = SequenceType.DUMMY
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.num_inflight_tokens = 0
        self.num_inflight_drafts = 0
        self.num_placeholder = 0
        # Times of its preemptions, monotonic seconds.
        self.preempted_at: tuple[float, ...] = ()
        self.block_table: list[int] = []
        # Tokens that the block table has room for.
        self.num_slots = 0
        # Number of computed tokens at which the next block is full and can be published.
        self.publish_at = math.inf
        # True if it runs and may need further blocks.
        self.may_grow = False
        # Drafts of the runner behind the newest token; and number of tokens that its draft model has not computed.
        self.spec_token_ids: list[int] = []
        self.num_missed = 0
        self.draft_history: DraftHistory | None = None
        # True while it has to wait for output in flight that makes or verifies its drafts.
        self.awaits_output = False
        self.first_scheduled_time: float | None = None
        # Time at which it last waited for a prefix that another sequence computes.
        self.held_until = -math.inf
        self.first_token_time: float | None = None
        # Steps scheduled and tokens emitted by the engine before the first token.
        self.work_before = (0, 0)
        self.leave_time: float | None = None
        self.leave_reason = ""
        # True if another worker has computed its prompt, whose blocks may still be on their way to the KV tiers.
        self.expects_kv = False
        # True until KV tiers have said which of its blocks they have; False without tiers.
        self.waits_for_kv = False
        # Compilation of its grammar, which precedes its first step; None without a grammar, or when it is done.
        self.compiling: Future[object] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def next_position(self) -> int:
        """First position that no step has computed or computes now, if all drafts in flight are accepted."""
        return self.num_computed_tokens + self.num_inflight_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Number of tokens that may come from the prefix cache.

        The last token may not, since its logits are wanted; nor tokens whose logits give wanted logprobs of given
        tokens; nor any token for a mean of hidden states, or for a request that bypasses the cache.
        """
        if self.pooling == MEAN or not self.reads_cache:
            return 0
        return int(min(len(self.token_ids), self.logprobs_from)) - 1

    @property
    def num_blocks(self) -> int:
        """Number of blocks for `num_tokens` tokens."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        """Number of tokens in the last of `num_blocks` blocks."""
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 is greedy."""
        return self.sampling_params.temperature

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens to generate."""
        return self.sampling_params.max_tokens

    @property
    def ignore_eos(self) -> bool:
        """True if the model's end-of-sequence ids are ignored."""
        return self.sampling_params.ignore_eos

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def distinct_prompt_ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids of the prompt, ascending; computed once."""
        if self._distinct_prompt_ids is None:
            self._distinct_prompt_ids = np.unique(np.array(self.prompt_token_ids, np.int64))
        return self._distinct_prompt_ids

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def output_tokens(self) -> list[int]:
        """The output of this attempt."""
        return self.token_ids[self.num_given_tokens :]

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that came from the prefix cache."""
        return self.num_cached_tokens // self.block_size

    @property
    def waits_for_grammar(self) -> bool:
        """True if its grammar is still being compiled."""
        return self.compiling is not None and not self.compiling.done()

    @property
    def is_finished(self) -> bool:
        """True if the sequence has ended."""
        return self.status is SequenceStatus.FINISHED

    def may_end(self, token_id: int) -> bool:
        """True if `token_id`, its newest token, may end it; StopRules.check then decides."""
        return token_id in self.stopping_ids or len(self.token_ids) >= self.length_limit

    def append_token(self, token_id: int) -> None:
        """Appends one sampled token."""
        self.token_ids.append(token_id)
