"""What the router itself does per token and per long prompt, without gRPC: `python -m tests.bench.router.pipeline`.

In one process, no sockets: a worker's frame for all streams is parsed and applied, and each stream's part is taken and
put into its message. Then the calls in C that a prompt of 100,000 tokens goes through: each of them holds the
interpreter, and with it the event loop, from its beginning to its end. The least of many rounds, which a busy machine
disturbs little.
"""

from __future__ import annotations

import json
import random
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import MAX_FRAME_TOKENS
from common.params.sampling_params import SamplingParams
from common.text.answer_text import AnswerText
from common.text.tokenizer import Tokenizer
from common.wire.block_hash import hash_chain
from router.answers.stream_assembly import StreamAssembly
from router.api.responses import fill_response
from router.requests.stream import RequestStream, RoutedRequest, WritePacer
from router.scheduling.queued_request import QueuedRequest
from router.validation import check_generate
from router.workers.session_state import RouterSession, Submission
from tests.bench.router.bed import VOCAB_SIZE, Row, bench_model, parser, prompts, show

PROMPT = array("I", [1, 2, 3])


def least_us(work: Callable[[], object], rounds: int) -> float:
    """Shortest time of a call, microseconds."""
    taken: list[int] = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        work()
        taken.append(time.perf_counter_ns() - began)
    return min(taken) / 1000


class Streams:
    """So many streams on one link."""

    def __init__(self, tokenizer: Tokenizer, count: int, *, token_ids: bool) -> None:
        self._random = random.Random(0)
        self._position = len(PROMPT)
        self._link = RouterSession("bench", 5.0)
        self._streams = [_stream(tokenizer, i, token_ids=token_ids) for i in range(count)]
        self._messages = [pb.GenerateResponse(request_id="0" * 32) for _ in range(count)]
        submissions = [
            Submission(wpb.SubmitSequence(rid=1 + i), PROMPT, stream) for i, stream in enumerate(self._streams)
        ]
        self._link.submit(1, submissions)

    def next_frame(self) -> bytes:
        """The worker's frame with one more token for each."""
        count = len(self._streams)
        step = wpb.StepOutput(
            rid=range(1, 1 + count),
            first_pos=[self._position] * count,
            n=[1] * count,
            token_ids=self._random.choices(range(1, VOCAB_SIZE), k=count),
        )
        self._position += 1
        return wpb.SessionResponse(step_output=step).SerializeToString()

    def apply(self, frame: bytes) -> None:
        self._link.apply(wpb.SessionResponse.FromString(frame).step_output, 1.0)

    def answer(self) -> None:
        for stream, message in zip(self._streams, self._messages, strict=True):
            part = stream.assembly.next_chunk()
            assert part is not None
            fill_response(message, part, stream, time.monotonic, has_info=part.start is not None)
            message.SerializeToString()


def _stream(tokenizer: Tokenizer, key: int, *, token_ids: bool) -> RequestStream:
    params = SamplingParams(max_tokens=10**6)
    request = RoutedRequest("m", "m", PROMPT, params, seed=0, chain_hash=0, arrival=0.0)
    assembly = StreamAssembly(len(PROMPT), text=AnswerText(tokenizer.decode_stream()), return_token_ids=token_ids)
    return RequestStream(QueuedRequest(key, "m", len(PROMPT), 0.0), request, assembly, lambda *_: None, WritePacer())


def token_rows(tokenizer: Tokenizer, counts: Sequence[int], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for count in counts:
        for token_ids in (False, True):
            streams = Streams(tokenizer, count, token_ids=token_ids)
            applied, answered = [], []
            for _ in range(rounds):
                frame = streams.next_frame()
                applied.append(least_us(partial(streams.apply, frame), 1))
                answered.append(least_us(streams.answer, 1))
            rows.append(
                {
                    "streams": count,
                    "token ids asked for": token_ids,
                    "apply us/token": min(applied) / count,
                    "answer us/token": min(answered) / count,
                }
            )
    return rows


def prompt_rows(tokenizer: Tokenizer, tokens: int, rounds: int) -> list[Row]:
    """The calls of a long prompt, and on which thread they are."""
    text = json.loads(prompts(tokens).read_text("utf-8"))[0]
    request = pb.GenerateRequest(text=text).SerializeToString()
    encoding = tokenizer._plain.encode_batch_fast([text], add_special_tokens=False)[0]
    ids = list(encoding.ids)
    given = pb.TokenIds(ids=ids)
    compact = array("I", ids)
    frame = compact[:MAX_FRAME_TOKENS]
    calls: tuple[tuple[str, str, Callable[[], object]], ...] = (
        ("loop", "parse the request", lambda: pb.GenerateRequest.FromString(request)),
        ("loop", "check it", lambda: check_generate(pb.GenerateRequest.FromString(request))),
        ("text", "ids of the encoding", lambda: encoding.ids),
        ("text", "ids to an array", lambda: array("I", ids)),
        ("text", "given ids to an array", lambda: array("I", np.array(given.ids, dtype=np.uint32).tobytes())),
        ("text", "hash chain (gives the interpreter up in between)", lambda: hash_chain(compact, 16)),
        ("loop", "one frame of 16,384", lambda: wpb.Extend(token_ids=frame.tolist()).SerializeToString()),
    )
    return [{"thread": thread, "call": name, "ms": least_us(work, rounds) / 1000} for thread, name, work in calls]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024])
    options.add_argument("--tokens", type=int, default=100_000, help="of the long prompt")
    options.add_argument("--rounds", type=int, default=200)
    args = options.parse_args()
    tokenizer = Tokenizer.from_folder(bench_model())
    show(token_rows(tokenizer, args.streams, args.rounds), as_json=args.json)
    show(prompt_rows(tokenizer, args.tokens, max(1, args.rounds // 10)), as_json=args.json, tokens=args.tokens)


if __name__ == "__main__":
    main()
