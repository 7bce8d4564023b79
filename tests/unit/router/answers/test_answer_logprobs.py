"""Each delivered token has one logprob, for any framing of the output and any kind of end."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import EngineError
from common.limits import MAX_MESSAGE_LOGPROBS
from common.params.logprobs import LogprobLayout
from common.params.sampling_params import SamplingParams
from common.text.answer_text import AnswerText
from common.text.stop_strings import StopStrings
from common.wire.logprob_rows import rows_table, unpack
from router.answers.answer_logprobs import AnswerLogprobs
from router.answers.stream_assembly import StreamAssembly
from router.answers.stream_chunk import Echo, StreamChunk
from tests.unit.router.support import end, small_tokenizer

TOKENIZER = small_tokenizer()
PROMPT = [*range(20)]
LENGTH = wpb.END_REASON_LENGTH
PARAMS = SamplingParams(logprobs=1, prompt_logprobs=0, prompt_logprobs_start=5)


def value(position: int) -> float:
    """The logprob of the token at a position."""
    return -float(np.float32(1 / (position + 3)))


def rows(first: int, count: int, layout: LogprobLayout) -> bytes:
    own = np.array([value(first + i) for i in range(count)], np.float32)
    ids, top = np.full((count, layout.top), 7), np.zeros((count, layout.top), np.float32)
    return rows_table(layout, own, np.ones(count, np.int64), ids, top, np.zeros((count, 0), np.float32)).tobytes()


def assembly(params: SamplingParams = PARAMS, *stops: str, given: int = 0, echo: Echo | None = None) -> StreamAssembly:
    made = StreamAssembly(
        len(PROMPT),
        text=AnswerText(TOKENIZER.decode_stream(), StopStrings(stops, False) if stops else None),
        return_token_ids=True,
        echo=echo,
        logprobs=AnswerLogprobs(params, PROMPT, len(PROMPT) + given),
    )
    if given:
        made.resume_behind([300] * given)
    return made


def drain(stream: StreamAssembly) -> list[StreamChunk]:
    parts = []
    while (part := stream.next_chunk()) is not None:
        parts.append(part)
        if part.ending is not None:
            break
    return parts


def logprobs_of(parts: list[StreamChunk]) -> list[float]:
    found = [part.logprobs.generated for part in parts if part.logprobs and part.logprobs.generated]
    return [entry.logprob for run in found for entry in unpack(run.layout, run.rows)]


def positions(first: int, count: int) -> list[float]:
    return [value(first + i) for i in range(count)]


def test_each_token_has_logprob_after_prompt_logprobs() -> None:
    stream, rnd = assembly(), random.Random(4)
    for first in (5, 9, 9, 7, 17):
        count = min(8, len(PROMPT) - first)
        stream.append_given_logprobs(first, rows(first, count, PARAMS.prompt_logprob_layout))
    assert stream.next_chunk() is None
    parts: list[StreamChunk] = []
    ids, at = TOKENIZER.encode("hello, hello"), 0
    while at < len(ids):
        run = ids[at : at + rnd.randint(1, 3)]
        logprobs = rows(20 + at, len(run), PARAMS.logprob_layout)
        at += len(run)
        stream.append(20 + at - len(run), run, 0.0, end(1, 20 + at, LENGTH) if at == len(ids) else None, logprobs)
        if rnd.random() < 0.5:
            parts += drain(stream)
    parts += drain(stream)
    assert parts[0].logprobs is not None
    assert parts[0].logprobs.prompt is not None
    prompt = parts[0].logprobs.prompt
    assert list(prompt.token_ids) == PROMPT[5:]
    assert [entry.logprob for entry in unpack(prompt.layout, prompt.rows)] == positions(5, 15)
    assert parts[0].text == ""
    assert parts[0].start is not None
    assert logprobs_of(parts) == positions(20, len(ids))
    for part in parts:
        assert part.logprobs is not None
        generated = part.logprobs.generated
        assert part.token_ids == (() if generated is None else generated.token_ids)
    total = 0.0
    for number in positions(20, len(ids)):
        total += number
    assert stream.logprobs is not None
    assert stream.logprobs.total == total


def test_stop_string_drops_logprobs_with_their_tokens() -> None:
    params = SamplingParams(logprobs=0)
    stream = assembly(params, "ll")
    ids = TOKENIZER.encode("hello, hello")
    stream.append(20, ids, 0.0, None, rows(20, len(ids), params.logprob_layout))
    parts = drain(stream)
    kept = sum(len(part.token_ids) for part in parts)
    assert 0 < kept < len(ids)
    assert logprobs_of(parts) == positions(20, kept)
    assert parts[-1].ending is not None
    assert parts[-1].ending.reason == pb.FINISH_REASON_STOP
    assert stream.logprobs is not None
    assert stream.logprobs.total == pytest.approx(sum(positions(20, kept)))


@pytest.mark.parametrize("size", [1, 700, MAX_MESSAGE_LOGPROBS, 5000])
@pytest.mark.parametrize("echo", [None, Echo("say ", PROMPT)])
def test_logprobs_beyond_message_bound_are_split_with_their_text(size: int, echo: Echo | None) -> None:
    """A client with some of them resumes after their ids and receives exactly the rest of the text."""
    params = SamplingParams(logprobs=0)
    count = 2 * MAX_MESSAGE_LOGPROBS + 5
    ids = (TOKENIZER.encode("hélloé") * count)[:count]

    def parts_of(stream: StreamAssembly, have: int = 0) -> list[StreamChunk]:
        for at in range(have, count, size):
            run = ids[at : at + size]
            ended = end(1, 20 + count, LENGTH) if at + size >= count else None
            stream.append(20 + at, run, 0.0, ended, rows(20 + at, len(run), params.logprob_layout))
        return drain(stream)

    stream = assembly(params, echo=echo)
    parts = parts_of(stream)
    texts = [part.text for part in parts]
    assert "".join(texts) == ("" if echo is None else echo.text) + TOKENIZER.decode(ids)
    assert [i for part in parts for i in part.token_ids] == ([] if echo is None else PROMPT) + ids
    assert [part.ending is None for part in parts] == [True] * (len(parts) - 1) + [False]
    assert [part.start is None for part in parts] == [False] + [True] * (len(parts) - 1)
    assert stream.unread.taken == count
    assert logprobs_of(parts) == positions(20, count)
    have = 0
    for i, part in enumerate(parts[:-1], start=1):
        assert part.logprobs is not None
        assert part.logprobs.generated is not None
        assert len(part.logprobs.generated.token_ids) <= MAX_MESSAGE_LOGPROBS
        have += len(part.logprobs.generated.token_ids)
        again = assembly(params)
        again.resume_behind(ids[:have])
        assert "".join([*texts[:i], *(part.text for part in parts_of(again, have))]) == "".join(texts)


def test_prompt_logprobs_restart_on_new_worker_and_resume_by_count() -> None:
    params = SamplingParams(logprobs=0, prompt_logprobs=0, prompt_logprobs_start=20)
    stream = assembly(params, given=4)
    stream.append_given_logprobs(20, rows(20, 3, params.prompt_logprob_layout))
    stream.begin_attempt()
    stream.append_given_logprobs(20, rows(20, 4, params.prompt_logprob_layout))
    ids = TOKENIZER.encode("hey")
    stream.append(24, ids, 0.0, end(1, 24 + len(ids), LENGTH), rows(24, len(ids), params.logprob_layout))
    # Output of an earlier attempt.
    stream.begin_attempt()
    stream.append_given_logprobs(20, rows(20, 4, params.prompt_logprob_layout))
    parts = drain(stream)
    assert all(part.logprobs is not None and part.logprobs.prompt is None for part in parts)
    assert logprobs_of(parts) == positions(24, len(ids))
    total = 0.0
    for number in positions(20, 4 + len(ids)):
        total += number
    assert stream.logprobs is not None
    assert stream.logprobs.total == total


@pytest.mark.parametrize("case", ["none", "too few", "of the prompt", "a gap"])
def test_worker_omitting_logprobs_fails_stream(case: str) -> None:
    stream = assembly()
    stream.worker_id = "w7"
    if case == "a gap":
        stream.append_given_logprobs(6, rows(6, 14, PARAMS.prompt_logprob_layout))
    elif case != "of the prompt":
        stream.append_given_logprobs(5, rows(5, 15, PARAMS.prompt_logprob_layout))
    sent = {"none": 0, "too few": 1}.get(case, 2)
    stream.append(20, [40, 41], 0.0, None, rows(20, sent, PARAMS.logprob_layout))
    with pytest.raises(EngineError, match="w7 sends no logprobs"):
        drain(stream)
