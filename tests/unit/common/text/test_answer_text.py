"""AnswerText: the router's streams and LLMEngine's answers have the same text for the same tokens."""

from __future__ import annotations

from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.params.sampling_params import SamplingParams
from common.text.answer_text import AnswerText
from common.text.stop_strings import StopStrings
from router.answers.stream_assembly import StreamAssembly
from tests.unit.common.text.continuations import Continuation, continuations
from tests.unit.router.support import end
from worker.engine.outputs import End, RequestOutput
from worker.engine.sequence import EndReason, Sequence
from worker.llm_engine import EngineAnswer

ENDS = {
    EndReason.LENGTH: wpb.END_REASON_LENGTH,
    EndReason.EOS: wpb.END_REASON_EOS,
    EndReason.STOP_TOKEN: wpb.END_REASON_STOP_TOKEN,
}


def router_answer(
    asked: Continuation, min_tokens: int, include: bool, reason: EndReason
) -> tuple[str, list[int], str | None]:
    stops = StopStrings(asked.stops, include) if asked.stops else None
    text = AnswerText(asked.tokenizer.decode_stream(behind=asked.prompt), stops, min_tokens)
    stream = StreamAssembly(len(asked.prompt), text=text)
    for i, run in enumerate(asked.runs):
        is_last = i == len(asked.runs) - 1
        last = end(1, stream.num_tokens + len(run), ENDS[reason]) if is_last else None
        stream.append(stream.num_tokens, run, now=0.0, end=last)
    chunk = stream.next_chunk()
    assert chunk is not None
    assert chunk.ending is not None
    stop = chunk.ending.stop
    is_stop_string = stop is not None and stop.WhichOneof("matched") == "stop_string"
    return chunk.text, list(stream.token_ids), "stop_string" if is_stop_string else None


def engine_answer(
    asked: Continuation, min_tokens: int, include: bool, reason: EndReason
) -> tuple[str, list[int], str | None]:
    params = SamplingParams(
        max_tokens=100, min_tokens=min_tokens, stop_strings=asked.stops, include_stop_string=include
    )
    detokenizer = asked.tokenizer.decode_stream(behind=asked.prompt)
    answer = EngineAnswer("r", Sequence(asked.prompt, 4, params), detokenizer)
    for i, run in enumerate(asked.runs):
        is_last = i == len(asked.runs) - 1
        ended = End(0, reason) if is_last else None
        answer.take(RequestOutput(1, list(run), finished=is_last, finish_reason="end" if is_last else None, end=ended))
    return answer.text, answer.token_ids, "stop_string" if answer.finish_reason == "stop_string" else None


@settings(max_examples=300)
@given(asked=continuations(), min_tokens=st.integers(0, 6), include=st.booleans(), reason=st.sampled_from([*ENDS]))
def test_router_and_engine_give_the_same_text(
    asked: Continuation, min_tokens: int, include: bool, reason: EndReason
) -> None:
    assert router_answer(asked, min_tokens, include, reason) == engine_answer(asked, min_tokens, include, reason)


@settings(max_examples=200)
@given(asked=continuations(), min_tokens=st.integers(0, 6))
def test_pieces_per_token_add_up_to_the_text_of_runs(asked: Continuation, min_tokens: int) -> None:
    made = []
    for per_token in (False, True):
        stops = StopStrings(asked.stops, include=False) if asked.stops else None
        text = AnswerText(asked.tokenizer.decode_stream(), stops, min_tokens, is_read_per_token=per_token)
        pieces = [piece for run in asked.runs if text.matched is None for piece in text.push(run)]
        pieces += [] if text.matched is not None else [text.flush()]
        if per_token:
            assert all(len(piece.token_ids) == 1 for piece in pieces if piece.token_ids)
        made.append(
            ("".join(piece.text for piece in pieces), [i for piece in pieces for i in piece.token_ids], text.matched)
        )
    assert made[0] == made[1]
