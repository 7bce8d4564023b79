"""Events, errors and facts of a worker as OpenEngine's messages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import grpc
from fissile.peers.openengine.v1 import openengine_pb2 as pb

from common.errors import ApiError
from common.limits import MAX_ANSWERS, MAX_REQUEST_BYTES, MAX_TOP_LOGPROBS
from common.params.names import ROLES
from common.wire.heads import OUTPUT_HEAD
from common.wire.logprob_rows import TokenLogprobs
from common.wire.protocol import DECODE_FEATURE, PREFILL_FEATURE
from worker.doors.door_request import (
    DoorEvent,
    DoorFinish,
    DoorLoad,
    DoorOutput,
    DoorPrompt,
    DoorRequest,
    DoorState,
    DoorUsage,
    FinishKind,
)
from worker.doors.openengine_requests import candidate_ids
from worker.engine.prefix_cache import BlockChange, StoredBlock
from worker.session.kv_session import KvSession
from worker.session.worker_info import WorkerFacts

REVISION: Final = 1
RELEASE: Final = "768a93c7b44e40f28c692ad0b471a8f2"
# Room in a message besides the tokens of its prompt.
_MESSAGE_ROOM: Final = 64 * 1024
_FINISHES: Final = {
    FinishKind.STOP: pb.FINISH_REASON_STOP,
    FinishKind.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishKind.ABORTED: pb.FINISH_REASON_CANCELLED,
}
_STATES: Final = {
    DoorState.STARTING: pb.HEALTH_STATE_STARTING,
    DoorState.READY: pb.HEALTH_STATE_READY,
    DoorState.CORDONED: pb.HEALTH_STATE_NOT_READY,
    DoorState.DRAINING: pb.HEALTH_STATE_DRAINING,
    DoorState.FAILED: pb.HEALTH_STATE_NOT_READY,
}
_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: pb.ERROR_CODE_INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE: pb.ERROR_CODE_INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED: pb.ERROR_CODE_UNSUPPORTED_FEATURE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: pb.ERROR_CODE_OVERLOADED,
    grpc.StatusCode.CANCELLED: pb.ERROR_CODE_CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: pb.ERROR_CODE_CANCELLED,
}
# The worker ends or its engine failed; another worker can run the same request.
_LOST: Final = frozenset({grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE})
_HASH_BYTES: Final = 8
_ROLES: Final = {PREFILL_FEATURE: pb.ENGINE_ROLE_PREFILL, DECODE_FEATURE: pb.ENGINE_ROLE_DECODE}


class OpenEngineEncoder:
    """Writes the events of one request.

    Args:
        request_id: of the request.
        response: the wanted logprobs.
        token_text: returns the text of a token.
        session: of a request for a prefill, which ends with this session instead of an answer; else None.
    """

    def __init__(
        self,
        request_id: str,
        response: pb.ResponseOptions,
        token_text: Callable[[int], str],
        session: KvSession | None = None,
    ) -> None:
        self._request_id = request_id
        self._session = session
        self._token_text = token_text
        self._wants_prompt = response.return_prompt_logprobs
        self._prompt_start = response.prompt_logprob_start
        self._output_ids = candidate_ids(response.output_candidates)
        self._prompt_ids = candidate_ids(response.prompt_candidates)
        # Ids whose logprobs rows have, in their order.
        self._given = list(dict.fromkeys([*self._output_ids, *self._prompt_ids]))

    def responses(self, event: DoorEvent) -> Iterator[pb.GenerateResponse]:
        """The messages of one event; a finish is a message of its own.

        Raises:
            ApiError: the prompt's tokens do not fit in a message.
        """
        if self._session is not None:
            yield from self._prefill(event, self._session)
            return
        if isinstance(event, DoorPrompt):
            if self._wants_prompt:
                yield self._prompt(event)
            return
        if event.token_ids or event.text:
            yield self._made(token=self._tokens(event))
        if event.finish is not None:
            yield self._made(finished=_finished(event.index, event.finish))

    def error(self, error: ApiError, state: DoorState, usage: DoorUsage) -> pb.GenerateResponse:
        """The last message of a request that failed at a worker in `state`."""
        return self._made(error=engine_error(error, state), usage=usage_message(usage))

    def _prefill(self, event: DoorEvent, session: KvSession) -> Iterator[pb.GenerateResponse]:
        """The messages of an event of a prefill: its token is no part of the answer, and its end is the session."""
        if isinstance(event, DoorPrompt) or event.finish is None:
            return
        if event.finish.kind is FinishKind.ABORTED:
            yield self._made(finished=_finished(event.index, event.finish))
        else:
            yield self._made(prefill_ready=pb.PrefillReady(kv_session=_session_ref(session)))

    def _made(self, **event: object) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=self._request_id, **event)  # type: ignore[arg-type]

    def _prompt(self, event: DoorPrompt) -> pb.GenerateResponse:
        start = min(self._prompt_start, event.logprobs_start)
        known = {event.logprobs_start + i: row for i, row in enumerate(event.logprobs)}
        tokens = [
            self._token(token_id, known.get(i), self._prompt_ids)
            for i, token_id in enumerate(event.token_ids[start:], start)
        ]
        response = self._made(prompt=pb.PromptOutput(tokens=tokens))
        if (size := response.ByteSize()) > MAX_REQUEST_BYTES - _MESSAGE_ROOM:
            message = f"response.prompt_logprob_start leaves logprobs of {size} bytes, which fit in no message"
            raise ApiError(grpc.StatusCode.OUT_OF_RANGE, message, reason="TOO_LONG")
        return response

    def _tokens(self, event: DoorOutput) -> pb.TokenOutput:
        rows: Sequence[TokenLogprobs | None] = event.logprobs or [None] * len(event.token_ids)
        pairs = zip(event.token_ids, rows, strict=True)
        tokens = [self._token(token_id, row, self._output_ids) for token_id, row in pairs]
        return pb.TokenOutput(output_index=event.index, tokens=tokens, text=event.text)

    def _token(self, token_id: int, row: TokenLogprobs | None, ids: Sequence[int]) -> pb.TokenInfo:
        info = pb.TokenInfo(token_id=token_id, token=self._token_text(token_id))
        if row is None:
            return info
        info.logprob, info.rank = row.logprob, row.rank
        for rank, (other, logprob) in enumerate(row.top, 1):
            info.candidates.add(token_id=other, logprob=logprob, token=self._token_text(other), rank=rank)
        given = dict(zip(self._given, row.given, strict=True))
        for other in ids:
            info.candidates.add(token_id=other, logprob=given[other], token=self._token_text(other))
        return info


def usage_message(usage: DoorUsage) -> pb.Usage:
    """Tokens of a request."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_prompt_tokens=usage.cached_tokens,
    )


def _session_ref(session: KvSession) -> pb.KvSessionRef:
    ref = pb.KvSessionRef(
        session_id=session.session_id, transfer_backend=_backend(session.stores), dp_rank=session.dp_rank
    )
    ref.attributes_struct.update(
        {"stores": list(session.stores), "root": session.root, "num_blocks": session.num_blocks}
    )
    return ref


def _backend(stores: Iterable[str]) -> str:
    """Kinds of tiers, such as `redis`."""
    return ",".join(store.partition(":")[0] for store in stores)


def _finished(index: int, finish: DoorFinish) -> pb.GenerationFinished:
    message = pb.GenerationFinished(output_index=index, reason=_FINISHES[finish.kind])
    if finish.eos_token_id is not None:
        message.stop_match.eos_token_id = finish.eos_token_id
    elif finish.stop_token_id is not None:
        message.stop_match.stop_token_id = finish.stop_token_id
    elif finish.stop_string is not None:
        message.stop_match.stop_text = finish.stop_string
    elif finish.kind is FinishKind.STOP:
        message.message = "the guide is complete"
    return message


def engine_error(error: ApiError, state: DoorState) -> pb.EngineError:
    """A failure of an accepted request at a worker in `state`."""
    is_lost = error.code in _LOST
    code = _CODES.get(error.code, pb.ERROR_CODE_INTERNAL)
    if is_lost and state is DoorState.DRAINING:
        code = pb.ERROR_CODE_DRAINING
    return pb.EngineError(code=code, message=error.message, retryable=is_lost or error.retry_after_s is not None)


def engine_role(role: str) -> pb.EngineRole.ValueType:
    """A worker's role in the protocol's terms."""
    return _ROLES.get(role, pb.ENGINE_ROLE_AGGREGATED)


def check_role(request: DoorRequest, role: str) -> None:
    """Checks that a worker of a role serves such a request.

    Raises:
        ApiError: it does not: prefill workers compute prompts alone, and sessions are for decode workers.
    """
    problem = ""
    if request.is_context_only != (role == PREFILL_FEATURE):
        problem = "extra.request_type must be context_only at prefill workers, and nowhere else"
    elif request.session is not None and role != DECODE_FEATURE:
        problem = "kv.session is for decode workers"
    if problem:
        message = f"{problem}; this worker's role is {role or ROLES[0]}"
        raise ApiError(grpc.StatusCode.FAILED_PRECONDITION, message)


def server_info(facts: WorkerFacts, dp_rank: int, dp_size: int) -> pb.ServerInfo:
    """The engine's description, with the model loaded."""
    info = pb.ServerInfo(
        engine_name="fissile",
        engine_version=facts.version,
        engine_role=engine_role(facts.role),
        instance_id=facts.instance_id,
        supported_models=[facts.model],
        parallelism=pb.ParallelismInfo(
            tensor_parallel_size=facts.tp_size,
            pipeline_parallel_size=1,
            data_parallel_size=dp_size,
            data_parallel_rank=dp_rank,
            data_parallel_start_rank=dp_rank,
            decode_context_parallel_size=1,
        ),
        kv_connector=_connector(facts),
        schema_revision=REVISION,
        minimum_client_revision=REVISION,
        schema_release=RELEASE,
        capacity=pb.DeploymentCapacity(
            kv_block_size=facts.block_size,
            total_kv_blocks=facts.total_blocks,
            max_running_requests=facts.max_num_seqs,
            max_batched_tokens=facts.max_num_batched_tokens,
            max_loras=0,
        ),
    )
    info.extra.update({"numerics": facts.numerics, "weights_digest": facts.weights_digest, "dtype": facts.dtype})
    return info


def _connector(facts: WorkerFacts) -> pb.KvConnectorInfo:
    """The tiers that the worker shares with others."""
    stores = facts.shared_kv.stores
    if not stores:
        return pb.KvConnectorInfo(enabled=False)
    return pb.KvConnectorInfo(
        enabled=True,
        transfer_backend=_backend(stores),
        supported_protocols=[store.partition(":")[0] for store in stores],
        supports_remote_prefill=True,
        supports_decode_pull=True,
        supports_abort_cleanup=True,
        supports_drain=True,
        schema_version=1,
    )


def model_info(facts: WorkerFacts, folder: str, *, has_tokenizer: bool) -> pb.ModelInfo:
    """The model's description.

    Args:
        facts: of the worker, with the model loaded.
        folder: of the checkpoint.
        has_tokenizer: whether prompts may be text.
    """
    info = pb.ModelInfo(
        model_id=facts.model,
        served_model_name=facts.model,
        served_model_aliases=[folder],
        max_context_length=facts.max_model_len,
        max_output_tokens=facts.max_model_len - 1,
        supports_text_input=has_tokenizer,
        supports_token_ids_input=True,
        supports_lora=False,
        supports_multimodal=False,
    )
    if facts.head == OUTPUT_HEAD:
        info.generation.CopyFrom(_capabilities(facts))
    return info


def _capabilities(facts: WorkerFacts) -> pb.GenerationCapabilities:
    logprobs = pb.LogprobCapabilities(
        supported=True,
        candidate_selection_modes=[
            pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N,
            pb.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS,
        ],
        max_top_n=MAX_TOP_LOGPROBS,
    )
    modes = [
        pb.GUIDED_DECODING_MODE_JSON_SCHEMA,
        pb.GUIDED_DECODING_MODE_REGEX,
        pb.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
        pb.GUIDED_DECODING_MODE_CHOICE,
        pb.GUIDED_DECODING_MODE_JSON_OBJECT,
    ]
    has_grammars = bool(facts.grammar_engine)
    return pb.GenerationCapabilities(
        prompt_logprobs=logprobs,
        output_logprobs=logprobs,
        guided_decoding=pb.GuidedDecodingCapabilities(supported=has_grammars, modes=modes if has_grammars else []),
        max_num_sequences=MAX_ANSWERS,
        supports_priority=True,
        supports_stop_in_output=True,
        supports_cache_salt=True,
        supports_prefix_cache_bypass=True,
    )


def load_info(
    facts: WorkerFacts, load: DoorLoad | None, now_ns: int, dp_rank: int | None, num_sessions: int
) -> pb.LoadInfo:
    """The engine's load.

    Args:
        facts: of the worker.
        load: None before the engine runs, which leaves the numbers absent.
        now_ns: wall clock.
        dp_rank: rank to name; None for none.
        num_sessions: running requests with a KV session.
    """
    info = pb.LoadInfo(instance_id=facts.instance_id, timestamp_unix_nanos=now_ns)
    if load is None:
        return info
    shared: dict[str, Any] = {
        "running_requests": load.running_seqs,
        "queued_requests": load.waiting_seqs,
        "used_kv_blocks": load.used_blocks,
        "total_kv_blocks": load.total_blocks,
        "prefill_batch_size": load.running_seqs - load.decoding_seqs,
        "decode_batch_size": load.decoding_seqs,
    }
    info.MergeFrom(pb.LoadInfo(active_kv_sessions=num_sessions, waiting_tokens=load.waiting_tokens, **shared))
    if dp_rank is not None:
        info.ranks.add(data_parallel_rank=dp_rank, **shared)
    return info


def health_state(state: DoorState) -> pb.HealthState.ValueType:
    """State of the worker."""
    return _STATES[state]


def kv_events(changes: Iterable[BlockChange], block_size: int) -> Iterator[pb.KvEvent]:
    """Changes of the cache, in order; blocks that follow each other share an event."""
    event = pb.KvEvent()
    last: int | None = None
    for change in changes:
        if isinstance(change, StoredBlock):
            if not event.HasField("block_stored") or change.parent != last:
                if event.WhichOneof("event") is not None:
                    yield event
                event = pb.KvEvent()
                event.block_stored.block_size = block_size
                event.block_stored.medium = pb.STORAGE_MEDIUM_GPU
                if change.parent is not None:
                    event.block_stored.parent_block_hash.CopyFrom(_block_hash(change.parent))
            event.block_stored.block_hashes.append(_block_hash(change.hash))
            event.block_stored.token_ids.extend(change.token_ids)
            last = change.hash
        else:
            if not event.HasField("block_removed"):
                if event.WhichOneof("event") is not None:
                    yield event
                event = pb.KvEvent()
                event.block_removed.medium = pb.STORAGE_MEDIUM_GPU
            event.block_removed.block_hashes.append(_block_hash(change))
    if event.WhichOneof("event") is not None:
        yield event


def _block_hash(value: int) -> pb.KvBlockHash:
    return pb.KvBlockHash(value=value.to_bytes(_HASH_BYTES, "big"), encoding="int64")
