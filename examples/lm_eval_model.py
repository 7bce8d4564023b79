"""Models behind a router for lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), by `Score`.

With lm-evaluation-harness installed beside the stubs (`pip install lm-eval`, `protos/` on the PYTHONPATH):

    python examples/lm_eval_model.py --model fissile --model_args address=127.0.0.1:50051 --tasks hellaswag

Log-likelihoods are sums of raw logprobs in float64, the same to the bit however many calls run at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

try:
    from lm_eval.api.model import LM  # type: ignore[import-not-found,unused-ignore]
    from lm_eval.api.registry import register_model  # type: ignore[import-not-found,unused-ignore]
    from lm_eval.utils import get_rolling_token_windows  # type: ignore[import-not-found,unused-ignore]
except ModuleNotFoundError as missing:
    sys.exit(f"{__doc__}\nerror: {missing}")

T = TypeVar("T")
R = TypeVar("R")
# Of one call, as the contract says.
_MOST_CONTINUATIONS = 128
_MOST_STOPS = 16
# Put before a text if the model has no end-of-sequence token: Score then uses its beginning-of-sequence token, if
# any.
_NOTHING = -1


@register_model("fissile")  # type: ignore[misc,untyped-decorator,unused-ignore]
class FissileLM(LM):  # type: ignore[misc,unused-ignore]
    """A model behind a router.

    Args:
        address: HOST:PORT of the router.
        model: its name; "" for the only one.
        timeout_s: deadline of each call.
        num_calls: calls at a time.
        max_gen_toks: longest answer of a task that does not set one.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        model: str = "",
        timeout_s: float = 600.0,
        num_calls: int = 16,
        max_gen_toks: int = 256,
        **_: Any,
    ) -> None:
        super().__init__()
        self._stub = InferenceServiceStub(grpc.insecure_channel(address))
        self._timeout_s, self._num_calls, self._max_gen_toks = float(timeout_s), int(num_calls), int(max_gen_toks)
        self._model = self._stub.GetModel(pb.GetModelRequest(model=model), timeout=self._timeout_s).model
        if pb.CAPABILITY_LOGPROBS not in self._model.capabilities:
            raise ValueError(f"the workers of model {self._model.name!r} give no logprobs")

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Sum of the logprobs of each continuation after its context, and whether greedy decoding gives it."""
        by_context: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            by_context.setdefault(request.args[0], []).append(place)
        calls = [
            (context, places[first : first + _MOST_CONTINUATIONS])
            for context, places in by_context.items()
            for first in range(0, len(places), _MOST_CONTINUATIONS)
        ]
        found: dict[int, tuple[float, bool]] = {}

        def score(call: tuple[str, list[int]]) -> None:
            context, places = call
            scores = self._score_texts(context, [requests[place].args[1] for place in places])
            found.update((place, (score.logprob, score.greedy)) for place, score in zip(places, scores, strict=True))

        self._each(score, calls)
        return [found[place] for place in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's length."""

        def score(request: Any) -> float:
            ids = self._tokenize(request.args[0])
            # Some tokenizers put a beginning of sequence before every text.
            prefix = ids.pop(0) if self._has_prefix else next(iter(self._model.eos_token_ids), _NOTHING)
            # With the last token, which is predicted only, and one that Score generates.
            windows = get_rolling_token_windows(ids, prefix, self._model.max_model_len - 2, 1)
            return sum(
                self._score_tokens(
                    [token for token in [*given, predicted[-1]][: -len(predicted)] if token != _NOTHING], predicted
                ).logprob
                for given, predicted in windows
            )

        return self._each(score, requests)

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Answers up to one of the texts of `until`."""

        def generate(request: Any) -> str:
            context, given = request.args
            until = given.get("until", [])
            stops = [until] if isinstance(until, str) else list(until)
            sampling = pb.SamplingParams(
                temperature=given.get("temperature", 0.0) if given.get("do_sample", False) else 0.0,
                max_tokens=given.get("max_gen_toks", self._max_gen_toks),
                stop_strings=[stop for stop in stops if stop][:_MOST_STOPS],
                repetition_penalty=1.0,
            )
            asked = pb.GenerateRequest(model=self._model.name, text=context, sampling_params=sampling)
            return self._stub.GenerateOnce(asked, timeout=self._timeout_s).answers[0].text

        return self._each(generate, requests)

    def _each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The results of work on items, several at a time, in their order."""
        with ThreadPoolExecutor(self._num_calls) as threads:
            return list(threads.map(work, items))

    def _score_texts(self, context: str, continuations: list[str]) -> list[pb.Score]:
        asked = pb.ScoreRequest(
            model=self._model.name, continuations=[pb.TextOrTokens(text=text) for text in continuations]
        )
        if context:
            asked.context.text = context
        try:
            return list(self._stub.Score(asked, timeout=self._timeout_s).scores)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.OUT_OF_RANGE:
                raise
        return [self._score_cut(context, continuation) for continuation in continuations]

    def _score_cut(self, context: str, continuation: str) -> pb.Score:
        """A continuation of a context of which only the end fits into the model's length."""
        start, ids = len(self._tokenize(context.rstrip())), self._tokenize(context + continuation)
        cut = max(0, len(ids) - (self._model.max_model_len - 1))
        return self._score_tokens(ids[cut:start], ids[max(start, cut) :])

    def _score_tokens(self, context: list[int], continuation: list[int]) -> pb.Score:
        asked = pb.ScoreRequest(
            model=self._model.name, continuations=[pb.TextOrTokens(token_ids=pb.TokenIds(ids=continuation))]
        )
        if context:
            asked.context.token_ids.ids.extend(context)
        return self._stub.Score(asked, timeout=self._timeout_s).scores[0]

    def _tokenize(self, text: str) -> list[int]:
        if not text:
            return []
        asked = pb.TokenizeRequest(model=self._model.name, text=text)
        return list(self._stub.Tokenize(asked, timeout=self._timeout_s).token_ids)

    @cached_property
    def _has_prefix(self) -> bool:
        """True if the tokenizer puts a token before every text: two texts without a common letter begin alike."""
        return self._tokenize("a")[0] == self._tokenize("1")[0]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found,unused-ignore]

    cli_evaluate()
