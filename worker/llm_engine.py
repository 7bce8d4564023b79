"""Runs a model in this process, without a service: LLMEngine and its InputOutputProcessor.

Answers have the same tokens and text as those of Generate through router and worker. Real parameters are rounded to
float32. A missing seed is derived from the request id. The text continues the prompt's text. Stop strings are searched
in the text. The token that stops a sequence is counted and is not part of the text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from fissile.seed import derive_seed

from common.config import Config
from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.errors import DuplicateRequestError, InvalidFieldError, NoOutputHeadError, NoTokenizerError
from common.hub import HubError
from common.params.pooling import EMBED_PARAMS, LABELS, VECTORS, Pooling, Vectors, finished
from common.params.sampling_checks import TokenSequences
from common.params.sampling_masks import check_tokens_left
from common.params.sampling_params import SamplingParams
from common.params.step_defaults import PREFILL_SLICE_S, default_scheduling_policy, default_token_budget
from common.text.answer_text import AnswerText
from common.text.detokenizer import Detokenizer
from common.text.stop_strings import StopStrings
from common.text.tokenizer import Tokenizer, TokenizerError, bad_words_token_ids, check_text_ids
from common.wire.logprob_rows import TokenLogprobs, added, unpack
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig, ModelError
from worker.config.model_tokenizer import has_tokenizer, model_tokenizer
from worker.config.vector_config import checkpoint_pooling
from worker.engine.batch import Runner
from worker.engine.core import EngineCore, EngineDeadError
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import EndReason, Sequence
from worker.engine_factory import EngineOptions, build_engine
from worker.kv_pool import size_given_pool
from worker.model_download import model_folder
from worker.progress import Silence, StartProgress
from worker.ranks.topology import Topology
from worker.session import request_validation

log = structlog.get_logger(__name__)

Prompt = str | Seq[int]
# Sampling parameters of a request. A mapping may name some; the others are the model's defaults.
Given = SamplingParams | Mapping[str, Any] | None
# Pause when a step had neither a batch nor outputs.
_IDLE_WAIT_S: Final = 0.001
_PARAMS = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """Tokens and text that one step adds to one answer.

    The `text` of all parts together is the answer's text. Text that may still become a stop string or part of a
    character comes with a later part.

    Attributes:
        request_id: id of the request.
        index: index of the answer among the request's `n`.
        output_tokens: new token ids.
        text: new text.
        finished: True for the answer's last part.
        finish_reason: as in RequestOutput, or `stop_string`; None before the last part.
    """

    request_id: str
    index: int
    output_tokens: list[int]
    text: str
    finished: bool
    finish_reason: str | None


StreamCallback = Callable[[StreamOutput], None]


class EngineAnswer:
    """One live answer: its sequence, and the tokens and text so far.

    Attributes:
        stream_callback: called with each part; None for no calls.
        request_id: id of the request, shared by its `n` answers.
        seq: sequence in the engine.
        token_ids: tokens so far, without tokens behind a stop string.
        logprobs: logprobs of `token_ids`, if requested.
        prompt_logprobs: logprobs of the prompt from `prompt_logprobs_start` on, if requested.
        pooled: hidden states (float32) of an embedded prompt.
        text: text so far.
        finish_reason: as in RequestOutput, or `stop_string`; None before the end.
    """

    def __init__(
        self,
        request_id: str,
        seq: Sequence,
        detokenizer: Detokenizer | None,
        stream_callback: StreamCallback | None = None,
    ) -> None:
        params = seq.sampling_params
        self.stream_callback = stream_callback
        self.request_id = request_id
        self.seq = seq
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooled = b""
        self.text = ""
        self.finish_reason: str | None = None
        self._num_streamed = (0, 0)
        stops = StopStrings(params.stop_strings, params.include_stop_string) if params.stop_strings else None
        self._text = AnswerText(detokenizer, stops, params.min_tokens)

    def take(self, output: RequestOutput) -> None:
        """Adds the output of one step, up to the token that completes a stop string."""
        if self.finish_reason is not None:
            return
        new = output.output_tokens
        # The token that stops a sequence is counted and has no text.
        num_read = len(new) - (output.end_reason in (EndReason.EOS, EndReason.STOP_TOKEN))
        read = new if num_read == len(new) else new[:num_read]
        if self._text.is_plain:
            self.text += self._text.decode(read)
            self.token_ids += read
        else:
            for piece in self._text.push(read):
                self.token_ids += piece.token_ids
                self.text += piece.text
        if self._text.matched is None:
            self.token_ids += new[num_read:]
            if not output.finished:
                return
            self.text += self._text.flush().text
        self.finish_reason = output.finish_reason if self._text.matched is None else "stop_string"

    def take_logprobs(self, output: RequestOutput) -> None:
        """Adds logprobs of the prompt and of the tokens that `take` added."""
        params = self.seq.sampling_params
        if output.given is not None:
            self.prompt_logprobs += unpack(params.prompt_logprob_layout, output.given.rows)
        if output.logprobs:
            new = unpack(params.logprob_layout, output.logprobs)
            self.logprobs += new[: len(self.token_ids) - len(self.logprobs)]

    def next_part(self) -> StreamOutput:
        """Returns the tokens and text since the last part."""
        tokens, characters = self._num_streamed
        self._num_streamed = (len(self.token_ids), len(self.text))
        return StreamOutput(
            self.request_id,
            self.seq.choice,
            self.token_ids[tokens:],
            self.text[characters:],
            self.finish_reason is not None,
            self.finish_reason,
        )


class InputOutputProcessor:
    """Turns prompts into sequences, and finished answers into dictionaries.

    Args:
        tokenizer: the model's tokenizer; None if prompts are token ids and texts are empty.
        model_config: vocabulary size and generation defaults.
        block_size: tokens per KV block.
        eos_token_ids: the model's end-of-sequence ids.
        serves_grammars: True if the engine serves constraints.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model_config: ModelConfig,
        block_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        serves_grammars: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._checker = None
        if tokenizer is not None and serves_grammars:
            self._checker = GrammarChecker(tokenizer.added_tokens, eos_token_ids)
        self.model_config = model_config
        self.block_size = block_size
        self._eos_token_ids = eos_token_ids
        vocab_size = model_config.vocab_size
        # Ids below this one can be generated.
        self._num_ids = vocab_size if tokenizer is None else min(vocab_size, tokenizer.vocab_size)

    def sampling_params(self, given: Given, cache_salt: bytes = b"") -> SamplingParams:
        """Checks the parameters of a request; fills those that a mapping leaves out from `generation_config.json`.

        Args:
            given: parameters of a request.
            cache_salt: only requests of the same salt share a checked constraint.

        Raises:
            InvalidFieldError: a value is of another type or out of range, or a mapping names an unknown parameter.
        """
        if isinstance(given, SamplingParams):
            params = given
        else:
            if not isinstance(given, Mapping | None):
                raise InvalidFieldError("sampling_params", f"is {given!r}", "SamplingParams, a mapping or None")
            for name in given or {}:
                if name not in _PARAMS:
                    raise InvalidFieldError(f"sampling_params.{name}", "is unknown", ", ".join(sorted(_PARAMS)))
            params = replace(self.model_config.sampling_defaults, **(given or {}))
        if params.min_tokens > params.max_tokens:
            problem = f"is {params.min_tokens}"
            raise InvalidFieldError("sampling_params.min_tokens", problem, f"at most max_tokens, {params.max_tokens}")
        if params.bad_words:
            params = replace(params, bad_words_token_ids=self._bad_words_token_ids(params))
        if params.constraint is not None:
            params = replace(params, constraint=None, grammar=self._grammar(params.constraint, cache_salt))
        request_validation.check_ids(params, self.model_config.vocab_size)
        check_tokens_left(params, self._num_ids, self._eos_token_ids)
        return params

    def _bad_words_token_ids(self, params: SamplingParams) -> TokenSequences:
        """Forbidden token sequences: those of the bad words, and those given as ids."""
        if self.tokenizer is None:
            raise NoTokenizerError(self.model_config.architecture)
        of_words = bad_words_token_ids(params.bad_words, self.tokenizer, self.model_config.vocab_size)
        return tuple(dict.fromkeys((*of_words, *params.bad_words_token_ids)))

    def _grammar(self, constraint: Constraint, cache_salt: bytes) -> str:
        if self._checker is None:
            problem = "cannot be served: the model has no tokenizer or no end-of-sequence token, or constraints are off"
            raise InvalidFieldError("sampling_params.constraint", problem, "no constraint")
        return self._checker.check(constraint, optional_space=False, salt=cache_salt)

    def preprocess(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        arrive_time: float,
        stream_callback: StreamCallback | None = None,
    ) -> list[EngineAnswer]:
        """Builds the `n` answers of a request, each with its sequence.

        Raises:
            InvalidFieldError: an empty prompt, or a token id outside the vocabulary.
            NoTokenizerError: the request has text or stop strings, and the model has no tokenizer.
            NoOutputHeadError: the model has no output head, so it cannot generate.
        """
        if not self.model_config.generates:
            raise NoOutputHeadError(self.model_config.architecture)
        token_ids = self._encode(prompt)
        if params.stop_strings and self.tokenizer is None:
            raise NoTokenizerError(self.model_config.architecture)
        seed = derive_seed(request_id) if params.seed is None else params.seed
        return [
            EngineAnswer(
                request_id,
                Sequence(
                    token_ids,
                    self.block_size,
                    params,
                    seed=seed,
                    choice=choice,
                    arrive_time=arrive_time,
                    shares_prompt=params.n > 1,
                ),
                None if self.tokenizer is None else self.tokenizer.decode_stream(behind=token_ids),
                stream_callback,
            )
            for choice in range(params.n)
        ]

    def to_embed(self, prompt: Prompt, pooling: Pooling, arrive_time: float) -> EngineAnswer:
        """Builds an answer that collects only the vector of a prompt.

        Raises:
            ApiError: as `preprocess`.
        """
        token_ids = self._encode(prompt)
        seq = Sequence(token_ids, self.block_size, EMBED_PARAMS, arrive_time=arrive_time, pooling=pooling)
        return EngineAnswer(uuid.uuid4().hex, seq, None)

    def postprocess(self, answer: EngineAnswer) -> dict[str, Any]:
        """Converts a finished answer to a dictionary of JSON values; times in seconds.

        `ttft` is the time from arrival to the first token, `tpot` the mean time per token after it. If logprobs were
        requested, `logprobs` and `prompt_logprobs` are lists of dictionaries (`TokenLogprobs` with its `token_id`), one
        for each token, and `logprob` is the sum of the raw ones.
        """
        seq, count = answer.seq, len(answer.token_ids)
        first = seq.arrive_time if seq.first_token_time is None else seq.first_token_time
        leave = first if seq.leave_time is None else seq.leave_time
        return {
            "request_id": answer.request_id,
            "index": seq.choice,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "num_tokens_input": seq.num_prompt_tokens,
            "num_tokens_output": count,
            "seed": seq.seed,
            "ttft": first - seq.arrive_time,
            "tpot": (leave - first) / (count - 1) if count > 1 else 0.0,
            "latency": leave - seq.arrive_time,
            **_logprobs_of(answer),
        }

    def _encode(self, prompt: Prompt) -> list[int]:
        vocab_size = self.model_config.vocab_size
        if not isinstance(prompt, str):
            if not isinstance(prompt, Iterable):
                raise InvalidFieldError("prompt", f"is {prompt!r}", "a text, or a list of token ids")
            return [_checked_id(i, token_id, vocab_size) for i, token_id in enumerate(prompt)]
        if self.tokenizer is None:
            raise NoTokenizerError(self.model_config.architecture)
        try:
            token_ids = self.tokenizer.encode(prompt)
        except (TokenizerError, TypeError, UnicodeError) as error:
            raise InvalidFieldError("prompt", f"cannot be tokenized: {error}", "other text, or token ids") from None
        check_text_ids("prompt", token_ids, vocab_size)
        return token_ids


def _logprobs_of(answer: EngineAnswer) -> dict[str, Any]:
    params, prompt = answer.seq.sampling_params, answer.seq.prompt_token_ids
    found: dict[str, Any] = {}
    if params.logprobs is not None:
        found["logprobs"] = _with_ids(answer.token_ids, answer.logprobs)
        found["logprob"] = added(0.0, (entry.raw for entry in answer.logprobs))
    if params.prompt_logprobs is not None:
        found["prompt_logprobs"] = _with_ids(prompt[params.prompt_logprobs_start :], answer.prompt_logprobs)
    return found


def _with_ids(token_ids: Seq[int], entries: Seq[TokenLogprobs]) -> list[dict[str, Any]]:
    return [{"token_id": token, **asdict(entry)} for token, entry in zip(token_ids, entries, strict=False)]


def _checked_id(place: int, token_id: object, vocab_size: int) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= int(token_id) < vocab_size:
        raise InvalidFieldError(f"token_ids[{place}]", f"is {token_id!r}", f"an id from 0 to {vocab_size - 1}")
    return int(token_id)


class LLMEngine:
    """Runs a model in this process, with the same engine as the service's workers.

    Usage::

        from worker.llm_engine import LLMEngine

        engine = LLMEngine("deploy/demo/checkpoint")
        [answer] = engine.generate(["Tell me a story."], {"max_tokens": 20})
        print(answer["text"], answer["finish_reason"])
        engine.close()

    Either `generate` a list of prompts, or `add_request` at any time and `step` while `has_unfinished`, or both.
    One thread owns an LLMEngine. With `tensor_parallel_size` the model runs in ranks: processes that end with `close`,
    or with the thread that created the engine.

    Args:
        model: a checkpoint folder or `org/name[@revision]` on the Hugging Face Hub, run with prefix caching and a step
            size for CPUs; or a Config whose `model` is one.
        runner: replaces the model, for tests; the Config must then have `num_kvcache_blocks`. Requests may have
            constraints if the runner has `grammars`.
        clock: returns monotonic seconds.

    Raises:
        ModelError: the checkpoint cannot be downloaded or cannot be served.
        TokenizerError: the checkpoint's tokenizer cannot be used.
        InvalidFieldError: the Config does not fit the model or the memory.
        RankLostError: a rank ended while it loaded.
    """

    def __init__(
        self, model: str | Path | Config, *, runner: Runner | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        config = model if isinstance(model, Config) else default_config(model)
        config = replace(config, model=_folder(config.model, weights=runner is None))
        model_config = ModelConfig.from_folder(config.model)
        config = with_special_tokens(config, model_config)
        engines = config.parallel_config.data_parallel_size
        if engines > 1:
            raise InvalidFieldError("parallel_config.data_parallel_size", f"is {engines}", "1 here: run workers")
        if runner is None:
            self.core = _loaded_engine(config, model_config, clock)
        else:
            config = size_given_pool(config, model_config)
            self.core = EngineCore(config, runner, clock, grammars=getattr(runner, "grammars", None))
        tokenizer = model_tokenizer(config.model) if has_tokenizer(config.model) else None
        self.config = config = self.core.config
        self.io = InputOutputProcessor(
            tokenizer,
            model_config,
            config.kv_cache_block_size,
            config.eos_token_ids,
            serves_grammars=self.core.serves_grammars,
        )
        self._clock = clock
        # The same live answers by sequence and by request.
        self._live: dict[int, EngineAnswer] = {}
        self._requests: dict[str, list[EngineAnswer]] = {}
        self._finished: list[EngineAnswer] = []

    def close(self) -> None:
        """Ends the ranks; the engine cannot be used afterwards. May be called twice."""
        self.core.close()

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: Given = None,
        *,
        request_id: str | None = None,
        stream_callback: StreamCallback | None = None,
    ) -> str:
        """Adds one request, which the next steps compute. Returns its id.

        Args:
            prompt: text or token ids.
            sampling_params: parameters; those that a mapping leaves out come from `generation_config.json`.
            request_id: id that the seed is derived from if the parameters have none; random if None.
            stream_callback: called within `step` with each part of the request's answers.

        Raises:
            ApiError: the prompt, a parameter or the id is not valid; the request was not added.
        """
        if request_id:
            _check_request_id(request_id)
        answers = self._preprocess(prompt, sampling_params, request_id or uuid.uuid4().hex, stream_callback)
        for answer in answers:
            self.core.validate(answer.seq)
        for answer in answers:
            self.core.add_request(answer.seq)
        self._begin(answers)
        return answers[0].request_id

    def step(self) -> list[dict[str, Any]]:
        """Computes one batch. Returns the answers that ended, in the form of `InputOutputProcessor.postprocess`.

        Raises:
            EngineDeadError: the model failed; all requests are lost, and this engine is unusable.
            Exception: a callback raised it; the other callbacks were called, and its request is aborted.
        """
        self._step()
        finished, self._finished = self._finished, []
        return [self.io.postprocess(answer) for answer in finished]

    def has_unfinished(self) -> bool:
        """True if `step` has answers to compute or to return."""
        return bool(self._live or self._finished)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; the next `step` returns its answers. Returns False if the request is not live."""
        return sum(self.core.abort(answer.seq.id) for answer in self._requests.get(request_id, ())) > 0

    def generate(
        self,
        prompts: Seq[Prompt],
        sampling_params: Given | Seq[Given] = None,
        *,
        request_ids: Seq[str] | None = None,
        stream_callback: StreamCallback | None = None,
    ) -> list[dict[str, Any]]:
        """Answers all prompts, batched. Returns `n` dictionaries for each (`InputOutputProcessor.postprocess`).

        Args:
            prompts: texts, or lists of token ids.
            sampling_params: parameters of all prompts, or one entry for each. Those that a mapping leaves out come from
                `generation_config.json`.
            request_ids: ids that the seeds are derived from if the parameters have none; random if None.
            stream_callback: called with each part of each answer.

        Raises:
            ApiError: a prompt, a parameter or an id is not valid; no request has run.
            EngineDeadError: the model failed; this engine is unusable.
            Exception: the callback raised it; all these requests are aborted.
        """
        prompts = _listed("prompts", prompts)
        every = _for_each(sampling_params, len(prompts))
        ids = [uuid.uuid4().hex for _ in prompts] if request_ids is None else _listed("request_ids", request_ids)
        _require_one_each("request_ids", ids, len(prompts))
        for request_id in ids:
            _check_request_id(request_id)
        _refuse_twice(ids)
        answers = [
            answer
            for prompt, given, request_id in zip(prompts, every, ids, strict=True)
            for answer in self._preprocess(prompt, given, request_id, stream_callback)
        ]
        self._run(answers)
        return [self.io.postprocess(answer) for answer in answers]

    def embed(
        self,
        prompts: Seq[Prompt],
        pooling: Pooling | None = None,
        *,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[Vectors]:
        """Turns prompts into vectors, float32, batched.

        Args:
            prompts: texts, or lists of token ids.
            pooling: `last` or `mean`; None for the checkpoint's own, else `last`.
            dimensions: number of leading elements to keep; None for all.
            normalize: True for vectors of length 1.

        Raises:
            ApiError: a prompt or an argument is not valid; no request has run.
            ModelError: the model's output for a prompt is not a number.
            EngineDeadError: the model failed; this engine is unusable.
        """
        own = checkpoint_pooling(self.config.model) if pooling is None else pooling
        if own is None or own not in VECTORS:
            raise InvalidFieldError("pooling", f"is {own!r}", " or ".join(VECTORS))
        size = self.io.model_config.hidden_size
        if dimensions is not None and not 1 <= dimensions <= size:
            raise InvalidFieldError("dimensions", f"is {dimensions!r}", f"1 to {size}")
        return [finished(states, dimensions or size, normalize=normalize) for states in self._pooled(prompts, own)]

    def classify(self, prompts: Seq[Prompt]) -> list[Vectors]:
        """Returns the classifier's logits for each prompt, float32, batched; for `...ForSequenceClassification`.

        The logits are those of the last token, without softmax or a logistic function.

        Args:
            prompts: texts, or lists of token ids.

        Raises:
            ApiError: a prompt is not valid; no request has run.
            ModelError: the checkpoint has no classifier, or the model's output for a prompt is not a number.
            EngineDeadError: the model failed; this engine is unusable.
        """
        config = self.io.model_config
        if not config.num_labels:
            raise ModelError(
                f"{config.architecture} has no classifier; one that ends with ForSequenceClassification has"
            )
        return [np.frombuffer(labels, "<f4") for labels in self._pooled(prompts, LABELS)]

    def _pooled(self, prompts: Seq[Prompt], pooling: Pooling) -> list[bytes]:
        answers = [self.io.to_embed(prompt, pooling, self._clock()) for prompt in _listed("prompts", prompts)]
        self._run(answers)
        if not all(answer.pooled for answer in answers):
            raise ModelError(f"{self.config.model} gives no numbers for a prompt")
        return [answer.pooled for answer in answers]

    def _preprocess(
        self, prompt: Prompt, given: Given, request_id: str, stream_callback: StreamCallback | None
    ) -> list[EngineAnswer]:
        if request_id in self._requests:
            raise DuplicateRequestError(request_id)
        params = self.io.sampling_params(given)
        return self.io.preprocess(prompt, params, request_id, self._clock(), stream_callback)

    def _run(self, answers: list[EngineAnswer]) -> None:
        self.core.add_group(answer.seq for answer in answers)
        self._begin(answers)
        try:
            for answer in answers:
                while answer.finish_reason is None:
                    self._step()
        finally:
            # After an interrupt such as Ctrl-C nothing may continue in the next call. `step` returns only answers of
            # `add_request`.
            for answer in answers:
                self.core.abort(answer.seq.id)
                self._end(answer)
            mine = {answer.seq.id for answer in answers}
            self._finished = [answer for answer in self._finished if answer.seq.id not in mine]

    def _begin(self, answers: list[EngineAnswer]) -> None:
        for answer in answers:
            self._live[answer.seq.id] = answer
            self._requests.setdefault(answer.request_id, []).append(answer)

    def _end(self, answer: EngineAnswer) -> None:
        """Removes a live answer; no-op for any other."""
        if self._live.pop(answer.seq.id, None) is None:
            return
        siblings = self._requests[answer.request_id]
        siblings.remove(answer)
        if not siblings:
            del self._requests[answer.request_id]

    def _step(self) -> None:
        num_steps = self.core.num_steps
        try:
            outputs = self.core.step().outputs
        except EngineDeadError:
            for answer in list(self._live.values()):
                self.core.abort(answer.seq.id)
                self._end(answer)
            raise
        if not outputs and self.core.num_steps == num_steps:
            # Threads that read KV tiers or compile grammars hardly run beside a loop that never waits.
            time.sleep(_IDLE_WAIT_S)
        # A sequence that a stop string ended has one more output, which is ignored.
        grown = [(self._live[out.request_id], out) for out in outputs if out.request_id in self._live]
        for answer, output in grown:
            self._take(answer, output)
        _stream([answer for answer, output in grown if output.output_tokens or output.finished], self._abort)

    def _take(self, answer: EngineAnswer, output: RequestOutput) -> None:
        answer.take(output)
        answer.take_logprobs(output)
        answer.pooled = answer.pooled or output.pooled
        if answer.finish_reason is not None:
            self._end(answer)
            self._finished.append(answer)
            self.core.abort(answer.seq.id)

    def _abort(self, answer: EngineAnswer) -> None:
        self.core.abort(answer.seq.id)


def _listed(name: str, values: object) -> list[Any]:
    if isinstance(values, str):
        raise InvalidFieldError(name, "is one string", "a list")
    if not isinstance(values, Iterable):
        raise InvalidFieldError(name, f"is {values!r}", "a list")
    return list(values)


def _check_request_id(request_id: object) -> None:
    """Refuses an id that no seed can be derived from."""
    if not isinstance(request_id, str):
        raise InvalidFieldError("request_id", f"is {request_id!r}", "a string")
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise InvalidFieldError("request_id", f"is not text: {error.reason}", "a string that UTF-8 holds") from None


def _refuse_twice(request_ids: Seq[str]) -> None:
    seen: set[str] = set()
    for request_id in request_ids:
        if request_id in seen:
            raise DuplicateRequestError(request_id)
        seen.add(request_id)


def _stream(answers: Iterable[EngineAnswer], on_error: Callable[[EngineAnswer], None]) -> None:
    """Calls all callbacks, even if one raises, and raises the first error."""
    errors: list[Exception] = []
    for answer in answers:
        if answer.stream_callback is None:
            continue
        try:
            answer.stream_callback(answer.next_part())
        except Exception as error:
            answer.stream_callback = None
            on_error(answer)
            errors.append(error)
    if errors:
        raise errors[0]


def default_config(folder: str | Path) -> Config:
    """Returns the default configuration of a checkpoint."""
    return Config(
        model=str(folder),
        enable_prefix_caching=True,
        max_num_batched_tokens=default_token_budget(
            Config.kernels, is_simulated=False, max_num_seqs=Config.max_num_seqs
        ),
        scheduling_policy=default_scheduling_policy(Config.kernels, is_simulated=False),
        prefill_slice_s=PREFILL_SLICE_S,
    )


def _folder(model: str, *, weights: bool) -> str:
    try:
        return str(model_folder(model, weights=weights))
    except HubError as error:
        raise ModelError(str(error)) from None


def _loaded_engine(config: Config, model_config: ModelConfig, clock: Callable[[], float]) -> EngineCore:
    """Loads the model into an engine, with ranks if configured, and reports the progress of ranks."""
    topology = Topology(config.tensor_parallel_size)
    progress = StartProgress() if topology.has_ranks else Silence()
    core = build_engine(EngineOptions(config, model_config, topology=topology), progress, clock).core
    max_model_len, models_own = core.config.max_model_len, model_config.max_position_embeddings
    if max_model_len < models_own:
        log.info("model length lowered", max_model_len=max_model_len, models_own=models_own)
    return core


def _for_each(params: Given | Seq[Given], count: int) -> list[Given]:
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    every = _listed("sampling_params", params)
    _require_one_each("sampling_params", every, count)
    return every


def _require_one_each(name: str, values: Seq[Any], count: int) -> None:
    if len(values) != count:
        raise InvalidFieldError(name, f"has {len(values)} entries", f"{count}, one for each prompt")
