"""Every name that telemetry uses: spans, attributes, events, metadata keys.

GenAI and RPC names are written out here, because the Python packages of both conventions are older.
"""

from __future__ import annotations

import enum
from typing import Final

TRACER: Final = "fissile"
METER: Final = "fissile"

# Metadata keys. The first two are W3C Trace Context; `traceresponse` is its response header (level 2 draft), which
# the router sends as trailing metadata: `00-<trace id>-<span id>-<flags>`.
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
TRACERESPONSE: Final = "traceresponse"
# Our entry in a trace state. It carries the operation, so that spans on both sides of the hop name the same one.
TRACESTATE_KEY: Final = "fissile"

# Metadata key by which a client asks for its request's engine steps in the trace; `0` and an empty value do not ask.
TRACE_STEPS: Final = "x-fissile-trace-steps"

# Spans. The router's span has the name of its RPC (`fissile.v1.InferenceService/Generate`).
WORKER_SPAN: Final = "worker.generate"
ATTEMPT_SPAN: Final = "attempt"
QUEUE_SPAN: Final = "queue"
TOKENIZE_SPAN: Final = "tokenize"
WAIT_SPAN: Final = "wait for worker"
PREFILL_SPAN: Final = "prefill"
DECODE_SPAN: Final = "decode"
STEP_SPAN: Final = "step"


class Stage(enum.StrEnum):
    """Stages of a request, in the order in which it usually passes them (docs/explanation/where-time-goes.md)."""

    PREPARE = "prepare"
    MODEL_WAIT = "model_wait"
    TOKENIZE_QUEUE = "tokenize_queue"
    TOKENIZE = "tokenize"
    OWN_QUEUE = "own_queue"
    QUEUE = "queue"
    GATE_HOLD = "gate_hold"
    PLACEMENT_WAIT = "placement_wait"
    WIRE = "wire"
    WORKER_QUEUE = "worker_queue"
    GRAMMAR_WAIT = "grammar_wait"
    PREFILL = "prefill"
    OTHERS_PREFILL = "others_prefill"
    DECODE = "decode"
    NEIGHBOURS = "neighbours"
    SPECULATION = "speculation"
    BETWEEN_STEPS = "between_steps"
    STALL = "stall"
    PREEMPTED = "preempted"
    RECOVERING = "recovering"
    DETOKENIZE = "detokenize"
    DELIVERY = "delivery"
    CLIENT_WAIT = "client_wait"
    # Time on a worker that did not report its parts.
    UNEXPLAINED = "unexplained"

    # In C: that of enum is written in Python, and took a third of a ledger's time.
    __hash__ = str.__hash__


# Events of the router's span.
SUBMITTED_EVENT: Final = "submitted"
FIRST_TOKEN_EVENT: Final = "first_token"

# RPC semantic conventions (release candidate of 2026-08). The worker's span has its outcome's status too.
RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.status_code"
PEER_ADDRESS: Final = "network.peer.address"
PEER_PORT: Final = "network.peer.port"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

# GenAI semantic conventions (development).
OPERATION: Final = "gen_ai.operation.name"
TEXT_COMPLETION: Final = "text_completion"
CHAT: Final = "chat"
SCORE: Final = "score"
EMBEDDINGS: Final = "embeddings"
RERANK: Final = "rerank"
PROVIDER: Final = "gen_ai.provider.name"
PROVIDER_FISSILE: Final = "fissile"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
REQUEST_STREAM: Final = "gen_ai.request.stream"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
OUTPUT_TYPE: Final = "gen_ai.output.type"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

# Our own attributes.
WORKER_ID: Final = "fissile.worker.id"
TENANT: Final = "fissile.tenant"
KEY: Final = "fissile.key.name"
# Id of a sequence on a worker, in hexadecimal as in log lines. `gen_ai.response.id` is the request's id.
RID: Final = "fissile.rid"
ATTEMPTS: Final = "fissile.attempts"
ATTEMPT_NUMBER: Final = "fissile.attempt.number"
ATTEMPT_TOKENS: Final = "fissile.attempt.tokens"
ATTEMPT_LOSS: Final = "fissile.attempt.loss"
AUDIT_RESULT: Final = "fissile.audit.result"
# Of each stage: milliseconds in it; the request that cost most of it, that request's tenant, and how much it cost.
STAGE_MS: Final = "fissile.stage.{}_ms"
BLAME_REQUEST: Final = "fissile.blame.{}.request"
BLAME_TENANT: Final = "fissile.blame.{}.tenant"
BLAME_MS: Final = "fissile.blame.{}.cost_ms"
PLACEMENT_REASON: Final = "fissile.placement.reason"
PLACEMENT_CANDIDATES: Final = "fissile.placement.candidates"
PLACEMENT_CACHED_TOKENS: Final = "fissile.placement.cached_tokens"
PLACEMENT_ESTIMATE: Final = "fissile.placement.estimate_ms"
ERROR_REASON: Final = "fissile.error.reason"
DECODE_STEPS: Final = "fissile.decode.steps"
DECODE_MEAN_BATCH: Final = "fissile.decode.mean_batch"
DECODE_PREEMPTIONS: Final = "fissile.decode.preemptions"
DECODE_DRAFTS: Final = "fissile.decode.drafts"
DECODE_ACCEPTED: Final = "fissile.decode.drafts_accepted"
STEP_NUMBER: Final = "fissile.step.number"
STEP_SEQUENCES: Final = "fissile.step.sequences"
STEP_PREFILLS: Final = "fissile.step.prefills"
STEP_TOKENS: Final = "fissile.step.tokens"
STEP_OWN_TOKENS: Final = "fissile.step.own_tokens"
STEP_FORWARD: Final = "fissile.step.forward_ms"
STEP_FREE_BLOCKS: Final = "fissile.step.free_blocks"
STEP_WAITING: Final = "fissile.step.waiting"
END_REASON: Final = "fissile.end_reason"
KV_TIER: Final = "fissile.kv_tier"
TIER_RESULT: Final = "fissile.tier_result"
DRAFT_METHOD: Final = "fissile.draft.method"
DRAFT_POSITION: Final = "fissile.draft.position"
# Method name of drafts that are forced grammar text. Other drafts have the method of the speculative config.
GRAMMAR_DRAFTS: Final = "grammar"

# Metrics of a worker's engine. The Gateway API Inference Extension requires the first three of a model server
# (TotalRunningRequests, TotalQueuedRequests, KVCacheUtilization), and allows two more (NumGPUBlocks, BlockSize).
ENGINE_RUNNING: Final = "fissile.engine.sequences.running"
ENGINE_MAX_RUNNING: Final = "fissile.engine.sequences.max"
ENGINE_WAITING: Final = "fissile.engine.sequences.waiting"
ENGINE_KV_USAGE: Final = "fissile.engine.kv_cache.usage"
ENGINE_KV_BLOCKS: Final = "fissile.engine.kv_cache.blocks"
ENGINE_KV_BLOCK_SIZE: Final = "fissile.engine.kv_cache.block_size"
ENGINE_STEPS: Final = "fissile.engine.steps"
ENGINE_STEP_TOKENS: Final = "fissile.engine.step.tokens"
ENGINE_ENDED: Final = "fissile.engine.sequences.ended"
ENGINE_TIER_BLOCKS: Final = "fissile.engine.kv_tiers.blocks"
ENGINE_PREEMPTIONS: Final = "fissile.engine.preemptions"
ENGINE_NAN_ROWS: Final = "fissile.engine.nan_rows"
ENGINE_PROMPT_TOKENS: Final = "fissile.engine.tokens.prompt"
ENGINE_CACHED_TOKENS: Final = "fissile.engine.tokens.prompt_cached"
ENGINE_GENERATED_TOKENS: Final = "fissile.engine.tokens.generated"
ENGINE_DRAFT_TOKENS: Final = "fissile.engine.tokens.draft"
ENGINE_ACCEPTED_TOKENS: Final = "fissile.engine.tokens.draft_accepted"

# Metrics of every process: losses of its observers and long-lived tasks.
PROCESS_LOGS_DROPPED: Final = "fissile.logs.dropped"
PROCESS_TELEMETRY_FAILED: Final = "fissile.telemetry.failed"
PROCESS_TASKS_FAILED: Final = "fissile.tasks.failed"

# Metric of a facade: routers whose metrics it has.
FACADE_ROUTERS: Final = "fissile_http_routers"

# Metrics of a router: histograms of the GenAI conventions for servers, and our own.
SERVER_DURATION: Final = "gen_ai.server.request.duration"
SERVER_TTFT: Final = "gen_ai.server.time_to_first_token"
SERVER_TPOT: Final = "gen_ai.server.time_per_output_token"
ROUTER_STAGE_DURATION: Final = "fissile.router.stage.duration"
ROUTER_LOOP_LAG: Final = "fissile.router.loop.lag"
ROUTER_IN_FLIGHT: Final = "fissile.router.requests.in_flight"
ROUTER_FAILED: Final = "fissile.router.requests.failed"
ROUTER_PROMPT_TOKENS: Final = "fissile.router.tokens.prompt"
ROUTER_CACHED_TOKENS: Final = "fissile.router.tokens.prompt_cached"
ROUTER_GENERATED_TOKENS: Final = "fissile.router.tokens.generated"
ROUTER_FINISHED: Final = "fissile.router.answers.finished"
ROUTER_LOST: Final = "fissile.router.attempts.lost"
ROUTER_AUDITS: Final = "fissile.router.audits"
ROUTER_KV_DIGESTS: Final = "fissile.router.kv_digests"
ROUTER_KV_DISPUTES: Final = "fissile.router.kv_disputes"
ROUTER_QUEUED: Final = "fissile.router.queue.requests"
ROUTER_OLDEST_AGE: Final = "fissile.router.queue.oldest_age"
ROUTER_WORKERS: Final = "fissile.router.workers"
ROUTER_LANES: Final = "fissile.router.lanes"
ROUTER_RELEASES: Final = "fissile.router.releases"
ROUTER_RELEASED: Final = "fissile.router.requests.released"
ROUTER_ADOPTED: Final = "fissile.router.requests.adopted"
ROUTER_UNADOPTED: Final = "fissile.router.requests.unadopted"
ROUTER_TABLES: Final = "fissile.router.tables"
ROUTER_CONFIG_VERSION: Final = "fissile.router.config.version"
MODEL_WAITING: Final = "fissile.router.model.waiting"
MODEL_RUNNING: Final = "fissile.router.model.running"
MODEL_KV_USAGE: Final = "fissile.router.model.kv_cache.usage"
MODEL_KV_BLOCKS: Final = "fissile.router.model.kv_cache.blocks"
WORKER_UP: Final = "fissile.router.worker.up"
WORKER_TTFT: Final = "fissile.router.worker.time_to_first_token"
WORKER_TPOT: Final = "fissile.router.worker.time_per_output_token"
WORKER_RUNNING: Final = "fissile.router.worker.running"
WORKER_QUEUED: Final = "fissile.router.worker.queued"
WORKER_OUTSTANDING: Final = "fissile.router.worker.outstanding_tokens"
WORKER_REPORT_AGE: Final = "fissile.router.worker.report_age"
WORKER_KV_USAGE: Final = "fissile.router.worker.kv_cache.usage"
# Attributes of the router's metrics.
WORKER_ADDRESS: Final = "fissile.worker.address"
FAULT: Final = "fissile.fault"
STAGE: Final = "fissile.stage"
PRIORITY: Final = "fissile.priority"
WORKER_STATE: Final = "fissile.worker.state"
LANE_STATE: Final = "fissile.lane.state"
TABLE: Final = "fissile.table"
KV_BLOCK_SIZE: Final = "fissile.kv_cache.block_size"
SIGNAL: Final = "fissile.signal"
TASK: Final = "fissile.task"

# vLLM's names for the same figures, which autoscalers, endpoint pickers and dashboards know. OpenTelemetry refuses the
# colon, so only scrapers get these.
VLLM_MODEL: Final = "model_name"
VLLM_REASON: Final = "finished_reason"
VLLM_WAITING: Final = "vllm:num_requests_waiting"
VLLM_RUNNING: Final = "vllm:num_requests_running"
VLLM_KV_USAGE: Final = "vllm:kv_cache_usage_perc"
VLLM_CACHE_CONFIG: Final = "vllm:cache_config_info"
VLLM_PROMPT_TOKENS: Final = "vllm:prompt_tokens"
VLLM_GENERATION_TOKENS: Final = "vllm:generation_tokens"
VLLM_CACHE_QUERIES: Final = "vllm:prefix_cache_queries"
VLLM_CACHE_HITS: Final = "vllm:prefix_cache_hits"
VLLM_PREEMPTIONS: Final = "vllm:num_preemptions"
VLLM_DRAFT_TOKENS: Final = "vllm:spec_decode_num_draft_tokens"
VLLM_ACCEPTED_TOKENS: Final = "vllm:spec_decode_num_accepted_tokens"
VLLM_SUCCESS: Final = "vllm:request_success"
VLLM_TTFT: Final = "vllm:time_to_first_token_seconds"
VLLM_TPOT: Final = "vllm:request_time_per_output_token_seconds"
VLLM_LATENCY: Final = "vllm:e2e_request_latency_seconds"
