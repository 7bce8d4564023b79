"""From request to prompt tokens, off the event loop: templates and tokenizers run in a small pool of threads."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from fissile.v1 import inference_pb2 as pb

from common.block_hash import hash_chain, salt_root
from common.errors import InvalidFieldError, NoChatTemplateError, NoTokenizerError, QueueFullError
from common.limits import MAX_QUEUED_REQUESTS, TOKENIZE_THREADS
from common.text.tokenizer import Tokenizer, TokenizerError
from router.model_registry import ServedModel
from router.prefix_index import GRANULE_BLOCKS
from router.queue import QUEUE_RETRY_S
from router.validation import check_prompt_length, check_token_ids, template_arguments

T = TypeVar("T")

# Checking and hashing so many given token ids takes less time than a change of threads is worth.
_INLINE_TOKENS = 2048
_PIECE_TOKENS = 4096
TEXT_THREAD_NICE: Final = 10


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids (uint32), the hash of the last full block of them (0 when there is none), and their granules' names."""

    token_ids: array[int]
    chain_hash: int
    granules: Sequence[int] = ()


def yield_to_loop() -> None:
    """Lets the event loop's thread go before the calling one where there are fewer cores than work.

    A thread that tokenizes computes for hundreds of milliseconds, the loop for one: at equal priority the system would
    let the loop wait. On Linux only: elsewhere a priority is that of the whole process.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + TEXT_THREAD_NICE
        os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))


class PromptEncoder:
    """Encodes prompts; at most `capacity` requests wait for a thread."""

    def __init__(self, capacity: int = MAX_QUEUED_REQUESTS) -> None:
        self._pool = ThreadPoolExecutor(TOKENIZE_THREADS, thread_name_prefix="text", initializer=yield_to_loop)
        self._capacity = capacity
        self._pending = 0

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def for_generate(self, request: pb.GenerateRequest, model: ServedModel) -> Prompt:
        """The prompt of a request that `validation.check_generate` let pass.

        Raises:
            ApiError: token ids outside the vocabulary, a prompt too long, no tokenizer, or too many requests wait.
        """
        salt = request.cache_salt
        if request.WhichOneof("prompt") == "text":
            tokenizer = _tokenizer_of(model)
            return await self._run(lambda: _prompt("text", _encode("text", tokenizer, request.text), model, salt))
        ids = request.token_ids.ids
        check_prompt_length("token_ids.ids", len(ids), model.max_model_len)
        if len(ids) <= _INLINE_TOKENS:
            return _given_prompt(ids, model, salt)
        return await self._run(lambda: _given_prompt(ids, model, salt))

    async def for_chat(self, request: pb.ChatRequest, model: ServedModel) -> Prompt:
        """The prompt of a conversation that `validation.check_chat` let pass.

        Raises:
            ApiError: the template rejects the input, a prompt too long, no template, or too many requests wait.
        """
        tokenizer, template = _tokenizer_of(model), model.text.template
        if template is None:
            raise NoChatTemplateError(model.name)
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        arguments = template_arguments(request)

        def work() -> Prompt:
            text = template.render(messages, **arguments)
            ids = _encode("messages", tokenizer, text, allow_special=True)
            return _prompt("messages", ids, model, request.cache_salt)

        return await self._run(work)

    async def tokenize(self, text: str, model: ServedModel) -> pb.TokenizeResponse:
        """Token ids of `text` as Generate would use them, and their vocabulary entries.

        Raises:
            ApiError: no tokenizer, or too many requests wait.
        """
        tokenizer = _tokenizer_of(model)

        def work() -> pb.TokenizeResponse:
            ids = _encode("text", tokenizer, text)
            response = pb.TokenizeResponse()
            # In pieces: while protobuf copies one, the event loop does not get the interpreter.
            for start in range(0, len(ids), _PIECE_TOKENS):
                piece = ids[start : start + _PIECE_TOKENS]
                response.token_ids.extend(piece)
                response.tokens.extend(tokenizer.token_strings(piece))
            return response

        return await self._run(work)

    async def detokenize(self, token_ids: Sequence[int], model: ServedModel, *, keep_special: bool) -> str:
        """Text of `token_ids`.

        Raises:
            ApiError: ids outside the vocabulary, no tokenizer, or too many requests wait.
        """
        tokenizer = _tokenizer_of(model)

        def work() -> str:
            check_token_ids("token_ids", token_ids, model.vocab_size)
            return tokenizer.decode(token_ids, skip_special=not keep_special)

        return await self._run(work)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._pending >= self._capacity:
            raise QueueFullError(self._pending, QUEUE_RETRY_S)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pending -= 1


def _tokenizer_of(model: ServedModel) -> Tokenizer:
    if model.text.tokenizer is None:
        raise NoTokenizerError(model.name)
    return model.text.tokenizer


def _encode(path: str, tokenizer: Tokenizer, text: str, *, allow_special: bool = False) -> list[int]:
    try:
        return tokenizer.encode(text, allow_special=allow_special)
    except TokenizerError as error:
        raise InvalidFieldError(path, f"can not be tokenized: {error}", "other text, or token_ids") from None


def _prompt(path: str, token_ids: Sequence[int], model: ServedModel, cache_salt: str) -> Prompt:
    check_prompt_length(path, len(token_ids), model.max_model_len)
    ids = _compact(token_ids)
    root = salt_root(model.weights_digest.encode(), cache_salt=cache_salt.encode(), seed=model.hash_seed)
    chain = hash_chain(ids, model.block_size, root=root, seed=model.hash_seed)
    return Prompt(ids, chain[-1] if chain else 0, chain[GRANULE_BLOCKS - 1 :: GRANULE_BLOCKS])


def _given_prompt(token_ids: Sequence[int], model: ServedModel, cache_salt: str) -> Prompt:
    check_token_ids("token_ids.ids", token_ids, model.vocab_size)
    return _prompt("token_ids.ids", token_ids, model, cache_salt)


def _compact(token_ids: Sequence[int]) -> array[int]:
    """Token ids that can be copied, cut and hashed without a loop over them.

    Each way is one call in C, which holds the interpreter: 100,000 ids of a list take 1.2 ms by `array`, 8 ms by numpy,
    those of a message 16 ms by `array` and 0.1 ms by numpy.
    """
    if isinstance(token_ids, list):
        return array("I", token_ids)
    return array("I", np.array(token_ids, dtype=np.uint32).tobytes())
