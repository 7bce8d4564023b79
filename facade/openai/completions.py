"""`POST /v1/completions`: prompts to calls of Generate, and their events to chunks or to a whole completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fissile.client import Delta, Event, Finished, Result
from fissile.client.progress import Progress
from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError
from common.limits import MAX_PROMPTS_AT_ONCE
from facade.http.bodies import TokenIdList, UInt32, decode
from facade.http.errors import HttpError
from facade.http.parts import fissile_facts
from facade.http.runner import AnswerPlan
from facade.http.sse import data_frame
from facade.openai.logprobs import LogprobForm
from facade.openai.sampling import (
    DONE,
    NAMES,
    AnswerBody,
    UsageSum,
    call_arguments,
    error_body,
    finish_reason,
    sampling_params,
    stop_reason,
)

_NAMES: Final = {**NAMES, "text": "prompt", "token_ids": "prompt", "output_options.logprobs": "logprobs"}
# OpenAI's default for this endpoint, which vLLM has too.
_DEFAULT_MAX_TOKENS: Final = 16


class CompletionBody(AnswerBody, kw_only=True):
    """The fields of a completion that are served."""

    # A text, texts, token ids, or lists of token ids.
    prompt: str | list[str | UInt32 | TokenIdList] | None = None
    prompt_token_ids: TokenIdList | None = None
    echo: bool | None = None
    logprobs: UInt32 | None = None
    suffix: str | None = None


def parse(body: bytes, created: int) -> AnswerPlan:
    """The calls for a body, one for each prompt.

    Args:
        body: JSON.
        created: Unix seconds.

    Raises:
        ApiError: a field is invalid, or not served.
    """
    given = decode(body, CompletionBody)
    if given.suffix:
        raise InvalidFieldError("suffix", "is set", "no suffix: text is continued at its end alone")
    prompts = _prompts(given)
    output = pb.OutputOptions()
    if given.logprobs is not None:
        output.logprobs, output.token_bytes = given.logprobs, True
        if given.echo:
            output.prompt_logprobs = given.logprobs
    if given.echo:
        output.echo = True
    limit = _DEFAULT_MAX_TOKENS if given.max_tokens is None else given.max_tokens
    arguments = {**call_arguments(given, output), "sampling_params": sampling_params(given, limit)}
    return AnswerPlan(prompts, False, arguments, CompletionEncoder(given, created), bool(given.stream), _NAMES)


def _prompts(given: CompletionBody) -> list[str | list[int]]:
    if (given.prompt is None) == (given.prompt_token_ids is None):
        raise InvalidFieldError("prompt", "is missing" if given.prompt is None else "is set twice", "one prompt")
    if given.prompt_token_ids is not None:
        return [given.prompt_token_ids]
    prompt: Any = given.prompt
    return prompts_of(prompt, "prompt")


def prompts_of(prompt: str | list[Any], path: str, most: int = MAX_PROMPTS_AT_ONCE) -> list[str | list[int]]:
    """The prompts of a field that is a text, token ids, or a list of either.

    Raises:
        InvalidFieldError: the list is empty, too long or mixed.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(each) for each in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) != 1:
        problem = "is mixed" if kinds else "is empty"
        raise InvalidFieldError(path, problem, "a text, texts, token ids, or lists of token ids")
    if len(prompt) > most:
        raise InvalidFieldError(path, f"has {len(prompt)} entries", f"at most {most}")
    return [*prompt]


class CompletionEncoder:
    """Makes the chunks of a completion, or the whole one. The choices of prompt i begin at i * n.

    Args:
        body: the request.
        created: Unix seconds.
    """

    def __init__(self, body: CompletionBody, created: int) -> None:
        self._body = body
        self._created = created
        self._n = max(1, body.n or 1)
        self._form = LogprobForm(as_ids=bool(body.return_tokens_as_token_ids))
        self._usage = UsageSum()
        self._head: dict[str, Any] = {}
        self._progress: dict[int, Progress] = {}
        # By choice: characters of its text so far. A choice is missing until its first chunk.
        self._lengths: dict[int, int] = {}

    def begin(self, number: int, progress: Progress) -> bytes:
        """Takes id and fingerprint of the first call."""
        self._progress[number] = progress
        if not self._head:
            self._head = self._facts(progress.request_id, progress.prompt_info)
        return b""

    def event(self, number: int, event: Event) -> bytes:
        """The chunk of an event."""
        index = number * self._n + event.index
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if isinstance(event, Finished):
            self._usage.add(number, event.finish.usage)
            choice |= self._ending(event.finish)
        else:
            choice["text"] = event.text
            if self._body.return_token_ids:
                choice["token_ids"] = event.token_ids
        if index not in self._lengths:
            self._lengths[index] = 0
            choice |= self._prompt(self._progress[number].prompt_info, self._progress[number].prompt_logprobs)
            if self._body.logprobs is not None and self._body.echo:
                prompt = self._progress[number].prompt_logprobs
                entries = event.logprobs if isinstance(event, Delta) else ()
                choice["logprobs"] = self._columns(index, [*prompt, *entries], _first(choice["text"], prompt))
                return data_frame(self._chunk([choice]))
        if isinstance(event, Delta) and self._body.logprobs is not None:
            choice["logprobs"] = self._columns(index, event.logprobs)
        return data_frame(self._chunk([choice]))

    def end(self) -> bytes:
        """The chunk of usage, if the request asks for it, and the end mark."""
        if not self._body.has_usage:
            return DONE
        return data_frame({**self._chunk([]), "usage": self._usage.fields}) + DONE

    def failure(self, error: HttpError) -> bytes:
        """The event that OpenAI's clients raise as an error."""
        return data_frame(error_body(error))

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any]:
        """The completion."""
        choices = []
        for number, result in enumerate(results):
            for answer in result.answers:
                assert answer.finish is not None
                self._usage.add(number, answer.finish.usage)
            for place, answer in enumerate(self._body.choices_of(result.answers)):
                assert answer.finish is not None
                index = number * self._n + place
                choice: dict[str, Any] = {"index": index, "text": answer.text, "logprobs": None}
                if self._body.logprobs is not None:
                    self._lengths[index] = 0
                    prompt = result.prompt_logprobs if self._body.echo else ()
                    first = _first(answer.text, prompt) if self._body.echo else None
                    choice["logprobs"] = self._columns(index, [*prompt, *answer.logprobs], first)
                if self._body.return_token_ids:
                    choice["token_ids"] = answer.token_ids
                choices.append(
                    {
                        **choice,
                        **self._ending(answer.finish),
                        **self._prompt(result.prompt_info, result.prompt_logprobs),
                    }
                )
        head = self._facts(results[0].request_id, results[0].prompt_info)
        return {**head, "choices": choices, "usage": self._usage.fields}

    def _columns(self, index: int, entries: Sequence[pb.TokenLogprobs], first: str | None = None) -> dict[str, Any]:
        columns, self._lengths[index] = self._form.columns(
            entries, self._lengths[index], first, has_top=bool(self._body.logprobs)
        )
        return columns

    def _prompt(self, info: pb.PromptInfo | None, logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        """Facts about the prompt that the request asks for."""
        facts: dict[str, Any] = {}
        if self._body.return_token_ids and info is not None:
            facts["prompt_token_ids"] = [*info.token_ids]
        if self._body.prompt_logprobs is not None:
            facts["prompt_logprobs"] = self._form.of_prompt(logprobs)
        return facts

    def _ending(self, finish: pb.Finish) -> dict[str, Any]:
        return {
            "finish_reason": finish_reason(finish),
            "stop_reason": stop_reason(finish),
            "fissile": fissile_facts(finish),
        }

    def _facts(self, request_id: str, info: pb.PromptInfo | None) -> dict[str, Any]:
        return {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model,
            "system_fingerprint": (info.numerics if info is not None else "") or None,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        return {**chunk, "usage": None} if self._body.has_usage else chunk


def _first(text: str, prompt: Sequence[pb.TokenLogprobs]) -> str:
    """Text of the prompt's first token, which has no entry: the beginning of the echo before the second token."""
    rest = b"".join(entry.token_bytes for entry in prompt).decode("utf-8", "replace")
    return text[: max(0, text.find(rest))]
