"""The requests in flight, as operators see them: neither prompts nor answers."""

from __future__ import annotations

from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb

from common.rpc.durations import to_duration
from common.telemetry.request_record import shown
from router.api.in_flight import InFlightCall, InFlightCalls
from router.api.pages import page_of
from router.requests.stream import RequestStream

DEFAULT_PAGE = 100


def list_requests(calls: InFlightCalls, request: apb.ListRequestsRequest, now: float) -> apb.ListRequestsResponse:
    """One page of the requests in flight, oldest first; `now` in monotonic seconds.

    Raises:
        InvalidFieldError: a page size or a page token that is not valid.
    """
    wanted = [call for call in calls if not request.tenant or call.tenant == request.tenant]
    # Ids of calls grow with time, and sort as text by their length first.
    keys = [f"{call.number:020d}" for call in wanted]
    page, following = page_of(wanted, keys, request.page_size, request.page_token, DEFAULT_PAGE)
    return apb.ListRequestsResponse(requests=[_described(call, now) for call in page], next_page_token=following)


def _described(call: InFlightCall, now: float) -> apb.InFlightRequest:
    running = next((stream for stream in call.streams if not stream.assembly.is_closed), None)
    return apb.InFlightRequest(
        request_id=shown(call.request_id),
        tenant=shown(call.tenant),
        model=shown(call.model),
        method=call.method,
        priority=pb.Priority.ValueType(call.priority),
        state=_state(call),
        age=to_duration(now - call.arrived),
        prompt_tokens=call.prompt_tokens,
        output_tokens=sum(stream.assembly.delivered for stream in call.streams),
        worker_id="" if running is None or running.session is None else running.assembly.worker_id,
        attempts=max((len(stream.attempts) for stream in call.streams), default=0),
        trace_id=call.trace_id,
    )


def _state(call: InFlightCall) -> apb.RequestState.ValueType:
    """The state of the answer that has come furthest."""
    return max((_state_of(stream) for stream in call.streams), default=apb.REQUEST_STATE_PREPARING)


def _state_of(stream: RequestStream) -> apb.RequestState.ValueType:
    # Tokens that a client brings of a broken stream have not come here.
    if stream.assembly.first_token_time is not None:
        return apb.REQUEST_STATE_STREAMING
    return apb.REQUEST_STATE_QUEUED if stream.session is None else apb.REQUEST_STATE_SUBMITTED
