"""Checks a door's request with the model's tokenizer: prompt to token ids, given parameters to SamplingParams.

The adapter calls slow methods in a thread. The result does not depend on the door, so that the
same request has the same tokens through every one of them, and through the router.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.errors import InvalidFieldError, NoTokenizerError, PromptTooLongError, TextTooLongError
from common.limits import MAX_ANSWERS, MAX_CACHE_SALT_BYTES, MAX_PROMPT_TEXT_BYTES, MAX_UNCUT_TEXT_BYTES
from common.params.sampling_params import SamplingParams
from common.text.answer_text import AnswerText
from common.text.stop_strings import StopStrings
from common.text.tokenizer import LongPieceError, Tokenizer, TokenizerError, check_text_ids
from worker.config.model_config import ModelConfig
from worker.doors.door_request import DoorRequest
from worker.llm_engine import InputOutputProcessor
from worker.session.kv_session import may_have_blocks, prompt_name
from worker.session.request_validation import check_token_ids
from worker.session.worker_info import WorkerFacts

# Parameters of a request whose answer another request has.
_PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)
# Given token ids of a request that needs no thread: checking them takes less time than a change of threads.
_INLINE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request.

    Attributes:
        token_ids: of the prompt.
        params: as the engine takes them, without a seed.
        kv_name: name of the prompt's blocks (`prompt_name`) for a request with or for a KV session, else empty.
        expects_kv: True if the worker may find the blocks of the request's session.
    """

    token_ids: array[int]
    params: SamplingParams
    kv_name: bytes = b""
    expects_kv: bool = False


class DoorText:
    """The text side of one model. Threads may share it.

    Args:
        tokenizer: of the model; None if prompts are token ids and texts are empty.
        model_config: vocabulary size and generation defaults.
        facts: the worker's description, with the model loaded.
    """

    def __init__(self, tokenizer: Tokenizer | None, model_config: ModelConfig, facts: WorkerFacts) -> None:
        self.tokenizer = tokenizer
        self.facts = facts
        self._io = InputOutputProcessor(
            tokenizer,
            model_config,
            facts.block_size,
            facts.eos_token_ids,
            serves_grammars=bool(facts.grammar_engine),
        )

    @staticmethod
    def is_quick(request: DoorRequest) -> bool:
        """True if `prepare` takes less than a millisecond."""
        is_short = not isinstance(request.prompt, str) and len(request.prompt) <= _INLINE_TOKENS
        return is_short and not request.params.get("constraint") and not request.params.get("bad_words")

    def prepare(self, request: DoorRequest) -> PreparedRequest:
        """Checks a request, and makes its prompt and its parameters. A new constraint takes up to a second.

        Raises:
            ApiError: a field is out of range, or cannot be served; named as in DoorRequest and SamplingParams.
        """
        token_ids = self.prompt_ids(request.prompt)
        salt = salt_bytes(request.cache_salt)
        room = self.facts.max_model_len - len(token_ids)
        most = max(room, request.params.get("min_tokens", 0))
        params = self._io.sampling_params({"max_tokens": most, **request.params}, cache_salt=salt)
        if params.n > MAX_ANSWERS:
            raise InvalidFieldError("n", f"is {params.n}", f"1 to {MAX_ANSWERS}")
        if params.stop_strings and self.tokenizer is None:
            raise NoTokenizerError(self.facts.model)
        if params.max_tokens > room:
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        if params.prompt_logprobs is not None and params.prompt_logprobs_start > len(token_ids):
            problem = f"is {params.prompt_logprobs_start}"
            raise InvalidFieldError("prompt_logprobs_start", problem, f"at most {len(token_ids)}, the prompt's tokens")
        shared = self.facts.shared_kv
        if not request.is_context_only and request.session is None:
            return PreparedRequest(token_ids, params)
        name = prompt_name(shared.root, salt, token_ids, self.facts.block_size)
        if request.session is None:
            return PreparedRequest(token_ids, _PREFILL, name)
        return PreparedRequest(token_ids, params, name, may_have_blocks(request.session, shared, name))

    def prompt_ids(self, prompt: str | Sequence[int]) -> array[int]:
        """The token ids of a prompt.

        Raises:
            ApiError: it is empty, too long, or cannot be tokenized.
        """
        if isinstance(prompt, str):
            token_ids = self._encoded(prompt)
        else:
            check_token_ids("token_ids", prompt, self.facts.vocab_size)
            token_ids = array("I", prompt)
        path = "text" if isinstance(prompt, str) else "token_ids"
        if not token_ids:
            raise InvalidFieldError(path, "is empty", "at least one token")
        if len(token_ids) >= self.facts.max_model_len:
            raise PromptTooLongError(path, len(token_ids), self.facts.max_model_len)
        return token_ids

    def answer_text(self, request: DoorRequest, prepared: PreparedRequest) -> AnswerText:
        """The decoder of one answer, which continues the prompt's text."""
        params, tokenizer = prepared.params, self.tokenizer
        if tokenizer is None or not (request.returns_text or params.stop_strings):
            return AnswerText(None)
        skip = not request.keeps_special_tokens
        detokenizer = tokenizer.decode_stream(skip_special=skip, behind=prepared.token_ids)
        stops = StopStrings(params.stop_strings, params.include_stop_string) if params.stop_strings else None
        return AnswerText(detokenizer, stops, params.min_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text, for display beside its logprob; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def _encoded(self, text: str) -> array[int]:
        if self.tokenizer is None:
            raise NoTokenizerError(self.facts.model)
        most, size = self.facts.max_model_len, len(text.encode("utf-8", "replace"))
        if size > MAX_PROMPT_TEXT_BYTES:
            raise TextTooLongError("text", f"has {size} bytes", f"at most {MAX_PROMPT_TEXT_BYTES}")
        if (fewest := self.tokenizer.fewest_tokens(text, most)) >= most:
            raise PromptTooLongError("text", int(fewest), most, at_least=True)
        token_ids = array("I")
        try:
            for piece in self.tokenizer.encode_pieces(text, most_bytes=MAX_UNCUT_TEXT_BYTES):
                token_ids.extend(piece)
                if len(token_ids) >= most:
                    raise PromptTooLongError("text", len(token_ids), most, at_least=True)
        except LongPieceError as error:
            raise TextTooLongError("text", str(error)) from None
        except TokenizerError as error:
            raise InvalidFieldError("text", f"cannot be tokenized: {error}", "other text, or token ids") from None
        check_text_ids("text", token_ids, self.facts.vocab_size)
        return token_ids


def salt_bytes(cache_salt: str) -> bytes:
    """A cache salt as the engine takes it.

    Raises:
        InvalidFieldError: it is too long.
    """
    salt = cache_salt.encode("utf-8", "replace")
    if len(salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidFieldError("cache_salt", f"has {len(salt)} bytes", f"at most {MAX_CACHE_SALT_BYTES} bytes")
    return salt
