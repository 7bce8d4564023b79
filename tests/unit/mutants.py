"""Mutants: the service with one rule replaced by a wrong one, by editing the source of one function.

`tests/unit/test_mutants.py` shows that the trap's test fails against each.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Final

import pytest

from common.text.detokenizer import Detokenizer
from kernels import sampling
from worker.engine import postprocessor, stop_rules
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.block_manager import BlockManager
from worker.engine.executor import ThreadExecutor
from worker.engine.integrity import IntegrityError
from worker.engine.lifecycle import Lifecycle
from worker.engine.postprocessor import Postprocessor
from worker.engine.prefill_meter import PrefillMeter
from worker.engine.prefix_cache import PrefixCache
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.sequence_queue import SequenceQueue, SequenceSet
from worker.engine.speculation.drafter import Drafter
from worker.engine.step import Step, StepLimits
from worker.engine.stop_rules import StopRules
from worker.model.model_runner import ModelRunner
from worker.session.intake import Inbox

# How a test says that something is wrong. A mutant that only breaks what it touches (a TypeError, a KeyError) does not
# show that the test looks at the rule.
OBJECTIONS: Final = (AssertionError, IntegrityError, pytest.fail.Exception)


@dataclass(frozen=True)
class Mutant:
    """`old` in the source of `owner.name` becomes `new`."""

    trap: str
    owner: type | ModuleType
    name: str
    old: str
    new: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The engine is the mutant as long as the block runs."""
        original = inspect.getattr_static(self.owner, self.name)
        setattr(self.owner, self.name, self._mutate(original))
        try:
            yield
        finally:
            setattr(self.owner, self.name, original)

    def _mutate(self, original: Any) -> Any:
        function = _function(original)
        source = textwrap.dedent(inspect.getsource(function))
        if self.old not in source:
            raise ValueError(f"{self.trap}: {self.old!r} is not in {self.name}")
        found: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(code, f"<mutant {self.trap}>", "exec"), vars(sys.modules[function.__module__]), found)
        mutant = found[self.name]
        if isinstance(mutant, cached_property):
            mutant.attrname = self.name
        return mutant


def assert_noticed(mutant: Mutant, life: Callable[[int], None], seeds: Iterable[int]) -> None:
    """Fails unless a life of one of these seeds objects to the mutant."""
    with mutant.applied():
        for seed in seeds:
            try:
                life(seed)
            except OBJECTIONS:
                return
    pytest.fail(f"{mutant.trap} goes unnoticed")


def _function(original: Any) -> Any:
    """What a property calls."""
    if isinstance(original, cached_property):
        return original.func
    return original.fget if isinstance(original, property) else original


_STATUS = "seq.status = SequenceStatus.RUNNING"

MUTANTS = [
    Mutant(
        "t01", Scheduler, "_prefill", "chunk(seq.num_tokens - start, step.budget)", "chunk(seq.num_tokens, step.budget)"
    ),
    Mutant("t02", PrefixCache, "_hittable", "seq.num_reusable_tokens", "seq.num_tokens"),
    Mutant("t03", BlockManager, "can_allocate", "seq.num_blocks - in_use", "seq.num_blocks"),
    Mutant("t03", BlockManager, "can_allocate", "seq.num_blocks - in_use", "seq.num_blocks - len(cached)"),
    Mutant("t04", StepLimits, "chunk", "return budget if", "return 0 if"),
    Mutant("t05", Scheduler, "validate", "seq.num_prompt_tokens >= self.limits.max_model_len", "False"),
    Mutant("t06", StepLimits, "__init__", "pool_tokens < self.max_model_len", "False"),
    Mutant("t07", Scheduler, "_has_place", "len(self.running)", "len(step.seqs)"),
    Mutant(
        "t08",
        Scheduler,
        "_fill",
        "self._num_prefill_steps >= self.limits.max_consecutive_prefill_steps",
        "False",
    ),
    Mutant("t09", Scheduler, "_prefill", "step.has_preempted or ", ""),
    Mutant(
        "t10",
        Scheduler,
        "_prefill",
        "lifecycle.num_growing):\n            break",
        "lifecycle.num_growing):\n            continue",
    ),
    Mutant("t11", Scheduler, "_open_gate", "while self.gated:", "if self.gated:"),
    Mutant("t12", PrefillMeter, "note", "batch.total_tokens_num_prefill == 0", "False"),
    Mutant("t13", Inbox, "_draft", "record.more, now, deadline", "record.more, now + 10.0, deadline"),
    Mutant("t14", Scheduler, "add_group", "is_gated=False", "is_gated=True"),
    Mutant("t14", Lifecycle, "end", "(self.waiting if seq in self.waiting else self.gated).remove(seq)", "pass"),
    Mutant(
        "t15",
        BlockManager,
        "can_append",
        "self._blocks_needed(seq, num_new_tokens) <= len(self.free_block_ids)",
        "len(self.free_block_ids) >= (len(seq) % self.block_size == 1)",
    ),
    Mutant(
        "t16",
        BlockManager,
        "can_append",
        "self._blocks_needed(seq, num_new_tokens) <= len(self.free_block_ids)",
        "len(self.free_block_ids) >= (len(seq) % self.block_size == 1)",
    ),
    Mutant("t17", PrefixCache, "forget", "del self.hash_to_block_id[block.hash]", "pass"),
    Mutant("t18", ScheduledBatch, "block_tables", "table[: -(-end // size)]", "table"),
    Mutant(
        "t19",
        Lifecycle,
        "start",
        _STATUS,
        f"{_STATUS}; seq.num_computed_tokens = seq.num_tokens; self.block_manager.publish(seq); "
        "seq.num_computed_tokens = seq.num_cached_tokens",
    ),
    Mutant("t20", BlockManager, "publish", "seq.num_computed_tokens", "min(seq.num_tokens, seq.num_slots)"),
    Mutant("t21", BlockManager, "_claim", "block.ref_count += 1", "block.ref_count += 1; block.reset()"),
    Mutant("t22", BlockManager, "deallocate", "reversed(seq.block_table)", "seq.block_table"),
    Mutant("t23", PrefixCache, "find", "block.parent == parent and ", ""),
    Mutant("t24", Scheduler, "_prefill", "seq.num_tokens - start", "seq.num_prompt_tokens - start"),
    Mutant(
        "t25",
        Postprocessor,
        "_take_row",
        "if seq.is_finished:\n        return",
        "if seq.status is not SequenceStatus.RUNNING:\n        return",
    ),
    Mutant("t26", Step, "count_in_flight", "seq.num_placeholder += 1", "seq.num_placeholder += 1; seq.append_token(2)"),
    Mutant(
        "t27",
        Postprocessor,
        "_append",
        "seq.append_token(token_id)",
        "seq.last_token == 2 and seq.token_ids.pop(); seq.append_token(token_id)",
    ),
    Mutant(
        "t28",
        Step,
        "count_in_flight",
        "seq.num_placeholder += 1",
        "seq.num_placeholder += seq.type is SequenceType.DECODE",
    ),
    Mutant("t29", ScheduledBatchOutput, "req_ids", "list(self.token_ids)", "[*self.token_ids, -1]"),
    Mutant(
        "t29",
        Postprocessor,
        "_take_row",
        "fwd_output.token_ids.get(seq.id, ())",
        "fwd_output.token_ids[seq.id] if seq.id in fwd_output.req_ids else ()",
    ),
    Mutant("t30", Scheduler, "_decode", "running.last()", "running.first()"),
    Mutant("t31", ScheduledBatch, "_take_rows", "end >= len(s.token_ids) + s.num_placeholder", "True"),
    Mutant("t32", Sequence, "__init__", "next(_ids) if id is None else id", "id or next(_ids)"),
    Mutant(
        "t33",
        Postprocessor,
        "_take_decodes",
        "(num_drafts, num_accepted))",
        "(num_drafts, max(0, num_accepted + 1 - num_drafts)))",
    ),
    Mutant("t34", Postprocessor, "_append", "stop is not None", "False"),
    Mutant("t35", stop_rules, "_sequence_stop", "0 < len(stop) <= num_output and", "0 < len(stop) and"),
    Mutant("t36", StopRules, "_token_stop", "in params.stop_token_ids", "in () if params.ignore_eos else ()"),
    Mutant("t37", StopRules, "_token_stop", "EndReason.EOS, token", "EndReason.STOP_TOKEN, token"),
    Mutant("t38", Postprocessor, "_append", "if token_ids and", "if len(token_ids) == 1 and"),
    Mutant("t39", sampling, "_sample_unfiltered", "counter[rows] for", "counter[rows][:1] for"),
    Mutant(
        "t40",
        Detokenizer,
        "push",
        'self._decode(b"".join([self._piece(id) for id in ids if id not in self._skip]), final=False)',
        '"".join(self._piece(id).decode("utf-8", "replace") for id in ids if id not in self._skip)',
    ),
    Mutant("t41", Postprocessor, "_take_row", "if seq.is_finished:", "if False:"),
    Mutant("t42", ThreadExecutor, "__init__", "max_workers=1", "max_workers=2"),
    Mutant(
        "t43",
        SequenceSet,
        "__iter__",
        "chain.from_iterable(seqs.values() for seqs in self._classes.values())",
        "iter(set(chain.from_iterable(seqs.values() for seqs in self._classes.values())))",
    ),
    Mutant("t44", Scheduler, "abort", "self.lifecycle.emit_end(seq, [], stop, message=message)", "pass"),
    Mutant("t45", ModelRunner, "prepare_model", "np.zeros((2, padded), np.int64)", "np.full((2, padded), -1)"),
]

# Faults that no seed has, for the oracle (tests/unit/worker/engine/test_oracle.py).
FAULTS = [
    Mutant("preempted-to-the-back", Lifecycle, "preempt", "self.waiting.appendleft(seq)", "self.waiting.append(seq)"),
    Mutant("admitted-in-flight", Scheduler, "_prefill", "if seq.num_inflight_tokens:", "if False:"),
    Mutant("no-followers", PrefixCache, "hashes_in", "found = self.hashes(seq)[start", "found = [][start"),
    Mutant("salts-ignored", PrefixCache, "root", "if not cache_salt:", "if True:"),
    Mutant("blocks-lost", BlockManager, "deallocate", "reversed(seq.block_table)", "reversed(seq.block_table[1:])"),
    Mutant("over-budget", StepLimits, "chunk", "remaining <= budget", "remaining <= budget + 1"),
    Mutant("drafts-in-flight", Scheduler, "_goes_on", "seq.awaits_output or ", ""),
    Mutant("drafts-in-flight-unsaid", Drafter, "ask", "if self._is_deferred:", "if False:"),
    Mutant("steered-ones-go-on", Drafter, "_needs_no_output", ">= seq.steered_until", ">= 0"),
    Mutant("late-drafts-behind-the-end", Drafter, "_proposed", "seq.num_placeholder + seq.num_inflight_drafts", "1"),
    Mutant("late-drafts-without-slots", Drafter, "_fit", "+ 1 + count > seq.num_slots", "+ count > seq.num_slots"),
    Mutant("late-drafts-twice", Postprocessor, "_take_drafts", "if not seq.num_placeholder:", "if True:"),
    Mutant("drafts-in-flight-kept", Postprocessor, "_take_decodes", "num_inflight_drafts -= num_drafts", "type"),
    Mutant("end-within-drafts-not-foreseen", Scheduler, "_goes_on", " + seq.num_inflight_drafts", ""),
    Mutant("end-not-foreseen", Scheduler, "_goes_on", ">= seq.length_limit", "> seq.length_limit"),
    Mutant("rejected-kept", Postprocessor, "_take_row", " - self._count_rejected(seq, verified, token_ids)", ""),
    Mutant("growth-missed", Scheduler, "_decode", ">= seq.num_slots", "> seq.num_slots"),
    Mutant("stop-missed", Sequence, "may_end", "token_id in self.stopping_ids or ", ""),
    Mutant("length-missed", Sequence, "may_end", " or len(self.token_ids) >= self.length_limit", ""),
    Mutant("stop-in-decodes-missed", Postprocessor, "_take_decodes", "token_id in seq.stopping_ids", "False"),
    Mutant(
        "stop-in-drafts-missed",
        Postprocessor,
        "_take_decodes",
        "drafts and not seq.stopping_ids",
        "False and not seq.stopping_ids",
    ),
    Mutant("length-in-decodes-missed", Postprocessor, "_take_decodes", "len(own) + len(sampled) >=", "0 >="),
    Mutant("rejected-published", Postprocessor, "_take_decodes", "computed += num_accepted", "computed += num_drafts"),
    Mutant("columns-kept", Lifecycle, "_leave", "self._decoding = None", "pass"),
    Mutant("discarded-kept", Postprocessor, "discard", "seq.num_inflight_tokens -= num_scheduled", "pass"),
    Mutant("equal-block-not-held", BlockManager, "_go_on_with", "self._claim(present)", "pass"),
    Mutant("drafts-forgotten", BlockManager, "_blocks_needed", "num_new_tokens - seq", "1 - seq"),
    Mutant(
        "preempted-for-nothing",
        Scheduler,
        "_decode",
        "RUNNING and not self.block_manager.can_append(seq)",
        "RUNNING and not self.block_manager.can_append(seq, 2 * seq.block_size)",
    ),
    Mutant("never-cached", BlockManager, "publish", "self._publish_next(seq, chain)", "break"),
    Mutant("newest-evicted", BlockManager, "_take", "popitem(last=False)", "popitem(last=True)"),
    Mutant("cached-before-vacant", BlockManager, "_release", "not block.is_cached", "False"),
    Mutant("tails-die-first", BlockManager, "_release", "not block.is_cached", "block.hash is None"),
    Mutant("tails-not-awaited", PrefixCache, "hashes_in", "if tail is not None", "if False"),
    Mutant("tails-found-too-late", PrefixCache, "forget", "del self._tails[block.tail]", "pass"),
    Mutant("tails-of-any-prefix", PrefixCache, "_tail", "return node, ", "return 0, "),
    Mutant("copies-forgotten", Step, "build", "block_copies=self.block_copies", "block_copies=[]"),
    Mutant("copies-not-undone", postprocessor, "_forget_copy", "==", "<"),
    Mutant("source-taken-first", BlockManager, "allocate", "BlockCopy(tail,", "BlockCopy(seq.block_table[0],"),
    Mutant("passed-by-others", SequenceQueue, "appendleft", "last=False", "last=True"),
    Mutant("prompts-starve", Scheduler, "_prefill_share", "return min(share, unfinished)", "return 0"),
    Mutant("chunks-uncut", PrefillMeter, "step_cost", "of(0, self._max_tokens)", "of(0, self._max_tokens) * 2"),
    Mutant(
        "lowest-class-first",
        SequenceSet,
        "__iter__",
        "in self._classes.values()",
        "in reversed(self._classes.values())",
    ),
]
