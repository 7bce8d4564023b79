"""A worker's description and load, as protos for routers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fissile.worker.v1 import worker_pb2 as wpb

from common.config import Config
from common.params.config_parts import SpeculativeConfig
from common.params.pooling import Pooling
from common.wire.heads import OUTPUT_HEAD, Head, worker_head, worker_pooling
from common.wire.peer_numbers import as_uint32, as_uint64
from common.wire.protocol import EMBED_FEATURE, LOGPROBS_FEATURE, PROTO_MINOR
from worker.config.vector_config import RelevanceTokens
from worker.engine.outputs import EngineLoad
from worker.session.kv_session import NO_SHARED_KV, SharedKv
from worker.session.sequence_builder import EngineLimits


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The worker's description. Fields that need a loaded model have a default."""

    worker_id: str
    instance_id: str
    model: str
    architecture: str
    tokenizer_sha256: str
    version: str
    block_size: int
    hash_seed: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 0
    total_blocks: int = 0
    weights_digest: str = ""
    numerics: str = ""
    kernels: str = ""
    dtype: str = ""
    tp_size: int = 1
    prefix_caching: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    hidden_size: int = 0
    default_pooling: Pooling | None = None
    relevance_tokens: RelevanceTokens | None = None
    head: Head = OUTPUT_HEAD
    num_labels: int = 0
    grammar_engine: str = ""
    speculation: SpeculativeConfig | None = None
    role: str = ""
    shared_kv: SharedKv = NO_SHARED_KV

    def loaded(self, config: Config, model: Mapping[str, str], shared_kv: SharedKv = NO_SHARED_KV) -> WorkerFacts:
        """The description of a worker whose model is loaded.

        Args:
            config: with the KV cache's size.
            model: `weights_digest`, `numerics`, `kernels`, `dtype`, `grammar_engine`.
            shared_kv: the KV tiers that it shares with other workers.
        """
        return replace(
            self,
            max_model_len=config.max_model_len,
            total_blocks=config.num_kvcache_blocks,
            tp_size=config.tensor_parallel_size,
            weights_digest=model["weights_digest"],
            numerics=model["numerics"],
            kernels=model["kernels"],
            dtype=model["dtype"],
            grammar_engine=model["grammar_engine"],
            speculation=config.speculative_config,
            shared_kv=shared_kv,
        )

    @property
    def engine_limits(self) -> EngineLimits:
        """Limits that sequences are checked against."""
        return EngineLimits(
            self.vocab_size,
            self.max_model_len,
            self.block_size,
            self.hash_seed,
            weights_digest=self.weights_digest,
            eos_token_ids=self.eos_token_ids,
            model=self.model,
            head=self.head,
            num_labels=self.num_labels,
        )

    def _features(self) -> list[str]:
        features = [LOGPROBS_FEATURE, EMBED_FEATURE] if self.head == OUTPUT_HEAD else [EMBED_FEATURE]
        return [*features, self.role] if self.role else features

    def limits_proto(self) -> wpb.Limits:
        """Limits of the worker, for Welcome."""
        return wpb.Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def to_proto(
        self, state: wpb.WorkerState.ValueType, drafts: Iterable[tuple[int, int]] = ()
    ) -> wpb.GetWorkerResponse:
        """The description as a proto.

        Args:
            state: of the worker.
            drafts: verified and accepted drafts since the start, by their position after a token.
        """
        tokens = self.relevance_tokens
        return wpb.GetWorkerResponse(
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            proto_minor=PROTO_MINOR,
            state=state,
            model=self.model,
            architecture=self.architecture,
            weights_digest=self.weights_digest,
            tokenizer_sha256=self.tokenizer_sha256,
            numerics=self.numerics,
            block_size=self.block_size,
            hash_seed=self.hash_seed,
            limits=self.limits_proto(),
            vocab_size=self.vocab_size,
            total_blocks=self.total_blocks,
            kernels=self.kernels,
            dtype=self.dtype,
            tp_size=self.tp_size,
            version=self.version,
            eos_token_ids=sorted(self.eos_token_ids),
            features=self._features(),
            hidden_size=self.hidden_size,
            default_pooling=worker_pooling(self.default_pooling),
            relevance_tokens=None if tokens is None else wpb.RelevanceTokens(yes=tokens.yes, no=tokens.no),
            head=worker_head(self.head),
            num_labels=self.num_labels,
            grammar_engine=self.grammar_engine,
            drafts=[wpb.DraftCounts(verified=verified, accepted=accepted) for verified, accepted in drafts],
            speculation=_speculation(self.speculation),
            kv_stores=self.shared_kv.stores,
        )


def _speculation(config: SpeculativeConfig | None) -> wpb.Speculation | None:
    if config is None:
        return None
    return wpb.Speculation(method=config.method, num_speculative_tokens=config.num_speculative_tokens)


def load_proto(
    report: EngineLoad | None,
    fleet_oldest_age_s: float,
    fleet_tokens: int,
    intake: wpb.Intake.ValueType = wpb.INTAKE_OPEN,
) -> wpb.Load:
    """The load as a proto; empty before the engine has started."""
    load = wpb.Load(fleet_oldest_age_ms=_milliseconds(fleet_oldest_age_s), fleet_tokens=fleet_tokens, intake=intake)
    if report is None:
        return load
    load.decoding_seqs = report.decoding_seqs
    load.waiting_seqs = report.waiting_seqs
    load.waiting_tokens = report.waiting_tokens
    load.room_tokens = report.room_tokens
    load.room_seqs = report.room_seqs
    load.free_blocks = report.free_blocks
    load.total_blocks = report.total_blocks
    load.last_prompt_latency_us = as_uint64(report.last_prompt_latency_s * 1e6)
    load.prefill_rate = report.prefill_rate
    load.prefill_samples = report.prefill_samples
    load.memory_rate = report.memory_rate
    return load


def _milliseconds(seconds: float) -> int:
    """Rounded up: 0 means that nothing waits, so the youngest age is 1."""
    return 0 if seconds <= 0 else max(1, as_uint32(seconds * 1000))
