"""Encodes requests to prompt tokens, with templates and tokenizers in threads beside the event loop.

Long texts have their own threads, so that short prompts do not wait behind them. Those threads have a lower priority
than the event loop's. A text is encoded in steps of about ten milliseconds. After each step another tenant may have its
turn, a text whose client has left is dropped, and a text that is too long is refused as soon as that is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
from array import array
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from fissile.v1 import inference_pb2 as pb

from common.constraints.check import GrammarChecker
from common.constraints.forms import GRAMMAR, JSON_SCHEMA, Constraint
from common.constraints.lark import HEADER
from common.errors import (
    InvalidFieldError,
    NoChatTemplateError,
    NoTokenizerError,
    PromptTooLongError,
    QueueFullError,
    TextTooLongError,
    UnservedByWorkersError,
)
from common.limits import MAX_TEXT_ANSWER_BYTES, MAX_UNCUT_TEXT_BYTES, TOKENIZE_THREADS
from common.params.sampling_checks import TokenSequences
from common.telemetry.ledger import Ledger
from common.telemetry.names import Stage
from common.telemetry.request_record import current_record
from common.text.template_sandbox import TemplateInputError
from common.text.tokenizer import (
    LongPieceError,
    Tokenizer,
    TokenizerError,
    bad_words_token_ids,
    check_text_ids,
    unmarked,
)
from common.wire.block_hash import GRANULE_BLOCKS, hash_chain, salt_root
from router.answers.channel_reader import ChannelTerms, Confinement
from router.answers.tools import template_tools
from router.model_registry import ServedModel
from router.prompts.conversation import reading_of, template_messages
from router.prompts.text_queue import TextJob, TextPool, TextQueue, ThreadTurn, ThreadTurns
from router.scheduling.admission import QUEUE_RETRY_S
from router.validation import check_prompt_length, check_roles, check_token_ids, template_arguments

T = TypeVar("T")
# Work that a thread runs in steps: each step, up to the next `yield`, is bounded.
Steps: TypeAlias = Generator[None, None, T]

# Up to this many given token ids are handled on the event loop: that takes less time than a change of threads.
_INLINE_TOKENS = 2048
_PIECE_TOKENS = 4096
_STEP_TOKENS = 16 * _PIECE_TOKENS
_BYTES_PER_ID = 4
# Number of models whose checked constraints are kept.
_MOST_CHECKERS = 16
# Size in bytes from which a text takes a thread more than about 20 ms.
LONG_TEXT: Final = 16_384
LONG_TEXT_NICE: Final = 10
# Fixed cost of a text, as the number of bytes that take the same time.
_TEXT_COST: Final = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt.

    Attributes:
        token_ids: uint32.
        chain_hash: hash of the last full block of the tokens; 0 without a full block.
        granules: names of the tokens' granules.
        reading: how answers are separated into channels; None for answers of content only.
    """

    token_ids: array[int]
    chain_hash: int
    granules: Sequence[int] = ()
    reading: ChannelTerms | None = None


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """A context with one continuation, and the index of the first token to score."""

    prompt: Prompt
    start: int


def yield_to_loop() -> None:
    """Lowers the priority of the calling thread, so that the event loop's thread gets a core first.

    A thread that tokenizes a long text computes for hundreds of milliseconds, the loop for one. At equal priority the
    system would let the loop wait. Linux only, because other systems set the priority of the whole process.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + LONG_TEXT_NICE
        os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))


@dataclass(slots=True, eq=False)
class _Job(TextJob):
    """Steps to run in a thread, the future of their result, and what their call needs for its ledger."""

    steps: Steps[Any]
    result: asyncio.Future[Any]
    request_id: str
    ledger: Ledger
    turn: ThreadTurn | None = None


class PromptEncoder:
    """Encodes prompts in threads, in steps that tenants take in turn. A cancelled call drops its text.

    Args:
        queue: queue of texts, which bounds them and chooses the next one.
    """

    def __init__(self, queue: TextQueue) -> None:
        self._threads = {
            TextPool.SHORT: ThreadPoolExecutor(TOKENIZE_THREADS, "text"),
            TextPool.LONG: ThreadPoolExecutor(TOKENIZE_THREADS, "long-text", initializer=yield_to_loop),
        }
        self._queue = queue
        self._running = dict.fromkeys(TextPool, 0)
        self._turns = {pool: ThreadTurns() for pool in TextPool}
        self._closed = False
        # Checkers by tokenizer and end-of-sequence ids; the most recently used one is last.
        self._checkers: dict[tuple[str, frozenset[int]], GrammarChecker] = {}

    def __len__(self) -> int:
        """Number of texts that have not ended."""
        return len(self._queue)

    def close(self) -> None:
        """Ends the threads."""
        self._closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Sets the weights of tenants. Tenants that are not named have weight 1."""
        self._queue.set_weights(weights)

    async def for_generate(
        self, request: pb.GenerateRequest, model: ServedModel, tenant: str = "", cache_salt: bytes = b""
    ) -> Prompt:
        """Encodes the prompt of a request that passed `validation.check_generate`.

        Args:
            request: the request.
            model: the requested model.
            tenant: the tenant whose turn the text takes.
            cache_salt: the salt in force, which may differ from the request's own.

        Raises:
            ApiError: token ids outside the vocabulary, a prompt too long, no tokenizer, or too many requests wait.
        """
        if request.WhichOneof("prompt") == "text":
            tokenizer = _tokenizer_of(model)
            text, size = request.text, request.ByteSize()
            if size > LONG_TEXT:
                # Among the short texts, so that a client with too long a text is refused at once.
                await self._run(_check_fewest("text", tokenizer, text, model), size, tenant, TextPool.SHORT)
            return await self._run(_text_prompt("text", tokenizer, text, model, cache_salt), size, tenant)
        ids = request.token_ids.ids
        check_prompt_length("token_ids.ids", len(ids), model.max_model_len)
        if len(ids) <= _INLINE_TOKENS:
            return given_prompt(ids, model, cache_salt)
        return await self._run(_once(lambda: given_prompt(ids, model, cache_salt)), request.ByteSize(), tenant)

    async def for_chat(
        self, request: pb.ChatRequest, model: ServedModel, tenant: str = "", cache_salt: bytes = b""
    ) -> Prompt:
        """Encodes the prompt of a conversation that passed `validation.check_chat`. Arguments as in `for_generate`.

        Raises:
            ApiError: the template rejects the input, a prompt too long, no template, or too many requests wait.
        """
        return (await self._run(_chat_prompt(request, model, cache_salt), request.ByteSize(), tenant))[1]

    async def for_score(
        self, request: pb.ScoreRequest, model: ServedModel, tenant: str = "", cache_salt: bytes = b""
    ) -> list[ScorePrompt]:
        """Encodes the continuations of a request that passed `validation.check_score`. Arguments as in `for_generate`.

        Raises:
            ApiError: nothing to score, ids outside the vocabulary, a prompt too long, no tokenizer, or too many texts.
        """
        return await self._run(_score_prompts(request, model, cache_salt), request.ByteSize(), tenant)

    async def for_embed(
        self, request: pb.EmbedRequest, model: ServedModel, tenant: str = "", cache_salt: bytes = b""
    ) -> list[Prompt]:
        """Encodes the inputs of a request that passed `validation.check_embed`. Arguments as in `for_generate`.

        Raises:
            ApiError: ids outside the vocabulary, a prompt too long, no tokenizer, or too many texts.
        """
        return await self._run(_embed_prompts(request, model, cache_salt), request.ByteSize(), tenant)

    async def for_rerank(
        self, request: pb.RerankRequest, model: ServedModel, tenant: str = "", cache_salt: bytes = b""
    ) -> list[Prompt]:
        """Encodes the documents of a request that passed `validation.check_rerank`. Arguments as in `for_generate`.

        Raises:
            ApiError: a prompt too long, no tokenizer, or too many texts.
        """
        size = request.ByteSize() + len(request.documents) * len(request.query.encode())
        return await self._run(_rerank_prompts(request, model, cache_salt), size, tenant)

    async def render(self, request: pb.ChatRequest, model: ServedModel, tenant: str = "") -> pb.RenderPromptResponse:
        """Returns text and token ids of a conversation's prompt.

        Raises:
            ApiError: as `for_chat`, or the prompt does not fit in a message.
        """
        marked, prompt = await self._run(_chat_prompt(request, model, b""), request.ByteSize(), tenant)
        text = unmarked(marked)
        size = len(text.encode()) + _BYTES_PER_ID * len(prompt.token_ids)
        if size > MAX_TEXT_ANSWER_BYTES:
            raise TextTooLongError("messages", f"give a prompt of {size} bytes", f"at most {MAX_TEXT_ANSWER_BYTES}")
        return pb.RenderPromptResponse(text=text, token_ids=prompt.token_ids)

    async def echo(self, token_ids: Sequence[int], model: ServedModel, *, keep_special: bool, tenant: str = "") -> str:
        """Returns the text of a prompt, to send in front of its answers; empty for a model without a tokenizer.

        Raises:
            ApiError: too many requests wait, or the text does not fit in a message.
        """
        if model.text.tokenizer is None:
            return ""
        steps = _detokenized("output_options.echo", model.text.tokenizer, token_ids, skip_special=not keep_special)
        return await self._run(steps, _BYTES_PER_ID * len(token_ids), tenant)

    async def bad_words(self, words: Sequence[str], model: ServedModel, tenant: str = "") -> TokenSequences:
        """Token ids of words that an answer must not contain.

        Raises:
            ApiError: a word cannot be tokenized, no tokenizer, or too many requests wait.
        """
        tokenizer = _tokenizer_of(model)
        size = sum(len(word.encode()) for word in words)
        return await self._run(_once(lambda: bad_words_token_ids(words, tokenizer, model.vocab_size)), size, tenant)

    async def answer_grammar(
        self,
        constraint: Constraint | None,
        prompt: Prompt,
        model: ServedModel,
        *,
        is_message: bool,
        tenant: str = "",
        cache_salt: bytes = b"",
    ) -> str:
        """Returns the grammar that holds an answer to its constraint, tools and reasoning budget; "" for none.

        Args:
            constraint: constraint of the request; None for none.
            prompt: prompt of the answer.
            model: as in `grammar`.
            is_message: as in `grammar`.
            tenant: as in `grammar`.
            cache_salt: as in `grammar`.

        Raises:
            ApiError: as `grammar`, or workers serve no grammars.
        """
        confinement = None if prompt.reading is None else prompt.reading.confinement
        field = "sampling_params.constraint" if constraint is not None else confinement.field if confinement else ""
        if field and not model.serves_constraints:
            raise UnservedByWorkersError(field, model.name)

        def check(one: Constraint) -> Awaitable[str]:
            return self.grammar(one, model, is_message=is_message, tenant=tenant, cache_salt=cache_salt)

        own = "" if confinement is None else await _own_grammar(confinement, check)
        if constraint is None:
            return own
        grammar = await check(constraint)
        if confinement is None:
            return grammar
        return _headed(confinement.around(grammar.removeprefix(HEADER), own.removeprefix(HEADER)))

    async def grammar(
        self,
        constraint: Constraint,
        model: ServedModel,
        *,
        is_message: bool,
        tenant: str = "",
        cache_salt: bytes = b"",
    ) -> str:
        """Returns the grammar of a constraint in the form that workers get.

        Args:
            constraint: constraint of a request.
            model: the requested model.
            is_message: True if the answer's text drops the space that its first token may begin with.
            tenant: the tenant whose turn the check of a new constraint takes.
            cache_salt: salt of the request; only requests of the same salt share a checked constraint.

        Raises:
            ApiError: the constraint cannot be guaranteed, no tokenizer, or too many requests wait.
        """
        tokenizer = _tokenizer_of(model)
        checker = self._checker(model, tokenizer)
        space = is_message and tokenizer.hides_first_space
        if (known := checker.known(constraint, optional_space=space, salt=cache_salt)) is not None:
            return known
        steps = _once(lambda: checker.check(constraint, optional_space=space, salt=cache_salt))
        # Among the long texts, so that short prompts do not wait for a grammar that takes a second.
        size = sum(len(text.encode()) for text in constraint.texts)
        return await self._run(steps, size, tenant, TextPool.LONG)

    def _checker(self, model: ServedModel, tokenizer: Tokenizer) -> GrammarChecker:
        key = (model.tokenizer_sha256, model.eos_token_ids)
        checker = self._checkers.pop(key, None) or GrammarChecker(tokenizer.added_tokens, model.eos_token_ids)
        self._checkers[key] = checker
        while len(self._checkers) > _MOST_CHECKERS:
            del self._checkers[next(iter(self._checkers))]
        return checker

    async def tokenize(self, text: str, model: ServedModel, tenant: str = "") -> pb.TokenizeResponse:
        """Returns the token ids of `text` as Generate uses them, and their vocabulary entries.

        Raises:
            ApiError: no tokenizer, too many requests wait, or the answer does not fit in a message.
        """
        return await self._run(_tokenized(_tokenizer_of(model), text), len(text.encode()), tenant)

    async def detokenize(
        self, token_ids: Sequence[int], model: ServedModel, *, keep_special: bool, tenant: str = ""
    ) -> str:
        """Text of `token_ids`.

        Raises:
            ApiError: ids outside the vocabulary, no tokenizer, too many requests wait, or the text does not fit in a
                message.
        """
        tokenizer = _tokenizer_of(model)

        def work() -> Steps[str]:
            check_token_ids("token_ids", token_ids, model.vocab_size)
            yield
            return (yield from _detokenized("token_ids", tokenizer, token_ids, skip_special=not keep_special))

        return await self._run(work(), _BYTES_PER_ID * len(token_ids), tenant)

    async def _run(self, steps: Steps[T], size: int, tenant: str = "", pool: TextPool | None = None) -> T:
        """Runs `steps`, which hold `size` bytes, in threads. Cancelling the caller ends them."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        pool = pool or (TextPool.LONG if size > LONG_TEXT else TextPool.SHORT)
        record = current_record()
        job = _Job(tenant, size, pool, steps, result, record.request_id, record.ledger)
        for out in self._queue.add(job):
            assert isinstance(out, _Job)
            out.result.set_exception(QueueFullError(len(self._queue), QUEUE_RETRY_S))
        job.ledger.enter(Stage.TOKENIZE_QUEUE, asyncio.get_running_loop().time())
        self._dispatch(job.pool)
        try:
            return await result
        finally:
            # A job that runs ends in `_stepped`.
            self._queue.abandon(job)
            job.ledger.enter(Stage.PREPARE, asyncio.get_running_loop().time())

    def _dispatch(self, pool: TextPool) -> None:
        """Starts the next jobs of `pool` on its idle threads."""
        while self._running[pool] < TOKENIZE_THREADS and not self._closed:
            job = self._queue.next(pool)
            if job is None:
                return
            assert isinstance(job, _Job)
            self._running[pool] += 1
            self._account(job, asyncio.get_running_loop().time())
            done = asyncio.get_running_loop().run_in_executor(self._threads[pool], _step, job.steps)
            done.add_done_callback(functools.partial(self._stepped, job))

    def _account(self, job: _Job, now: float) -> None:
        """Notes that a job gets a thread, and blames the request that had the threads longest meanwhile."""
        turns = self._turns[job.pool]
        if (blame := turns.longest(job.ledger, now, job.request_id)) is not None:
            job.ledger.blame(Stage.TOKENIZE_QUEUE, blame)
        job.ledger.enter(Stage.TOKENIZE, now)
        job.turn = ThreadTurn(job.request_id, job.tenant, now)
        turns.add(job.turn)

    def _stepped(self, job: _Job, done: asyncio.Future[tuple[bool, Any]]) -> None:
        self._running[job.pool] -= 1
        if job.turn is not None:
            job.turn.ended = asyncio.get_running_loop().time()
        if done.cancelled() or job.result.done():
            # The caller was cancelled.
            done.cancelled() or done.exception()
            self._queue.end(job)
            job.result.cancel()
        elif (error := done.exception()) is not None:
            self._queue.end(job)
            job.result.set_exception(error)
        elif done.result()[0]:
            self._queue.end(job)
            job.result.set_result(done.result()[1])
        else:
            job.ledger.enter(Stage.TOKENIZE_QUEUE, asyncio.get_running_loop().time())
            self._queue.again(job)
        self._dispatch(job.pool)


@contextlib.contextmanager
def _of_field(path: str) -> Iterator[None]:
    """Renames the field of a grammar's error to `path`, the field that requires the grammar."""
    try:
        yield
    except InvalidFieldError as error:
        (violation,) = error.violations
        raise InvalidFieldError(path, violation.problem, violation.valid) from None


async def _own_grammar(confinement: Confinement, check: Callable[[Constraint], Awaitable[str]]) -> str:
    """Returns the grammar of tools and reasoning; `check` compiles the grammar of a constraint."""
    if not confinement.grammar:
        return ""
    for path, schema in confinement.schemas:
        with _of_field(path):
            await check(Constraint(JSON_SCHEMA, (schema,)))
    with _of_field(confinement.field):
        return await check(Constraint(GRAMMAR, (confinement.grammar,)))


def _headed(grammar: str) -> str:
    return f"{HEADER}{grammar}\n"


def _step(steps: Steps[T]) -> tuple[bool, T | None]:
    """Runs `steps` up to the next `yield`. Returns True and the result if they ended there."""
    try:
        next(steps)
    except StopIteration as end:
        return True, end.value
    return False, None


def _once(work: Callable[[], T]) -> Steps[T]:
    return work()
    yield


def _tokenizer_of(model: ServedModel) -> Tokenizer:
    if model.text.tokenizer is None:
        raise NoTokenizerError(model.name)
    return model.text.tokenizer


def _check_fewest(path: str, tokenizer: Tokenizer, text: str, model: ServedModel) -> Steps[None]:
    """Refuses a long text that has more tokens than the model takes, by a lower bound of their number.

    Without it, a text that cannot be cut is encoded whole before it is refused, in a second for a megabyte.
    """
    if len(text) <= LONG_TEXT:
        return
    fewest = tokenizer.fewest_tokens(text, model.max_model_len)
    if fewest >= model.max_model_len:
        raise PromptTooLongError(path, fewest, model.max_model_len, at_least=True)
    yield


def _pieces(path: str, tokenizer: Tokenizer, text: str, *, allow_special: bool = False) -> Iterator[list[int]]:
    pieces = tokenizer.encode_pieces(text, allow_special=allow_special, most_bytes=MAX_UNCUT_TEXT_BYTES)
    return _with_errors(path, pieces)


def _with_errors(path: str, pieces: Iterator[list[int]]) -> Iterator[list[int]]:
    """Yields `pieces`; errors name the field `path`."""
    try:
        yield from pieces
    except LongPieceError as error:
        raise TextTooLongError(path, str(error)) from None
    except TokenizerError as error:
        raise InvalidFieldError(path, f"cannot be tokenized: {error}", "other text, or token_ids") from None


def _chat_prompt(request: pb.ChatRequest, model: ServedModel, cache_salt: bytes) -> Steps[tuple[str, Prompt]]:
    """Renders a conversation with the model's template and encodes it. Returns text and prompt."""
    tokenizer, template = _tokenizer_of(model), model.text.template
    if template is None:
        raise NoChatTemplateError(model.name)
    check_roles(request.messages, template.roles)
    tools = template_tools(request)
    text = template.prompt(template_messages(request, model.text.response_form), tools, **template_arguments(request))
    reading = reading_of(request, model, text, tools)
    prompt = yield from _text_prompt("messages", tokenizer, text, model, cache_salt, allow_special=True)
    return text, replace(prompt, reading=reading)


def _score_prompts(request: pb.ScoreRequest, model: ServedModel, cache_salt: bytes) -> Steps[list[ScorePrompt]]:
    """Encodes the context with each continuation, as one text each.

    Blanks at the end of the context belong to the continuation: tokenizers encode a word with its leading blank.
    """
    is_text = request.continuations[0].WhichOneof("form") == "text"
    context = request.context.text.rstrip()
    before = list(request.context.token_ids.ids)
    if is_text and context:
        before = yield from _text_ids("context.text", context, model)
    found: list[ScorePrompt] = []
    for i, continuation in enumerate(request.continuations):
        path = f"continuations[{i}]"
        if is_text:
            ids = yield from _text_ids(f"{path}.text", request.context.text + continuation.text, model)
        else:
            check_token_ids(f"{path}.token_ids.ids", continuation.token_ids.ids, model.vocab_size)
            ids = [*before, *continuation.token_ids.ids]
        found.append(_score_prompt(path, ids, len(before), model, cache_salt))
        yield
    return found


def _embed_prompts(request: pb.EmbedRequest, model: ServedModel, cache_salt: bytes) -> Steps[list[Prompt]]:
    found: list[Prompt] = []
    step = _TextStep()
    for i, one in enumerate(request.inputs):
        path = f"inputs[{i}]"
        if one.WhichOneof("form") == "text":
            path = f"{path}.text"
            found.append((yield from _text_prompt(path, _tokenizer_of(model), one.text, model, cache_salt)))
        else:
            path, ids = f"{path}.token_ids.ids", one.token_ids.ids
            check_prompt_length(path, len(ids), model.max_model_len)
            check_token_ids(path, ids, model.vocab_size)
            found.append(_prompt(path, ids, model, cache_salt))
        if step.is_over(one.ByteSize()):
            yield
    return found


def _rerank_prompts(request: pb.RerankRequest, model: ServedModel, cache_salt: bytes) -> Steps[list[Prompt]]:
    tokenizer, template = _tokenizer_of(model), model.text.rerank_template
    if model.pairs_texts:
        return (yield from _pair_prompts(request, tokenizer, model, cache_salt))
    assert template is not None
    before = [{"role": "system", "content": request.instruction}] if request.instruction else []
    before.append({"role": "query", "content": request.query})
    found: list[Prompt] = []
    step = _TextStep()
    for i, document in enumerate(request.documents):
        path = f"documents[{i}]"
        try:
            text = template.prompt([*before, {"role": "document", "content": document}])
        except TemplateInputError as error:
            raise InvalidFieldError(path, error.violations[0].problem, error.violations[0].valid) from None
        found.append((yield from _text_prompt(path, tokenizer, text, model, cache_salt, allow_special=True)))
        if step.is_over(len(text)):
            yield
    return found


def _pair_prompts(
    request: pb.RerankRequest, tokenizer: Tokenizer, model: ServedModel, cache_salt: bytes
) -> Steps[list[Prompt]]:
    """Encodes query and document as the tokenizer encodes a pair of texts."""
    if request.instruction:
        problem = "is given, and the prompts of this model are query and document alone"
        raise InvalidFieldError("instruction", problem, "none, or a chat template with the roles query and document")
    first = tokenizer.encode_pair_pieces(request.query, is_first=True, most_bytes=MAX_UNCUT_TEXT_BYTES)
    query: list[int] = []
    for ids in _with_errors("query", first):
        query += ids
        if len(query) >= model.max_model_len:
            raise PromptTooLongError("query", len(query), model.max_model_len, at_least=True)
        yield
    found: list[Prompt] = []
    step = _TextStep()
    for i, document in enumerate(request.documents):
        path = f"documents[{i}]"
        second = tokenizer.encode_pair_pieces(document, is_first=False, most_bytes=MAX_UNCUT_TEXT_BYTES)
        found.append((yield from _pieces_prompt(path, _with_errors(path, second), model, cache_salt, query)))
        if step.is_over(len(document)):
            yield
    return found


class _TextStep:
    """Groups many short texts into one step."""

    def __init__(self) -> None:
        self._left = LONG_TEXT

    def is_over(self, size: int) -> bool:
        """True if the step ends after this text of `size` bytes, which is counted."""
        self._left -= size + _TEXT_COST
        if self._left > 0:
            return False
        self._left = LONG_TEXT
        return True


def _text_ids(path: str, text: str, model: ServedModel) -> Steps[list[int]]:
    """Encodes a text; refuses it if the model has no room for its tokens."""
    tokenizer, ids = _tokenizer_of(model), list[int]()
    yield from _check_fewest(path, tokenizer, text, model)
    for piece in _pieces(path, tokenizer, text):
        ids += piece
        if len(ids) >= model.max_model_len:
            raise PromptTooLongError(path, len(ids), model.max_model_len, at_least=True)
        yield
    return ids


def _score_prompt(path: str, ids: list[int], start: int, model: ServedModel, cache_salt: bytes) -> ScorePrompt:
    tokenizer = model.text.tokenizer
    bos = None if tokenizer is None else tokenizer.bos_token_id
    if not start:
        # The first token has no probability unless a token precedes it.
        ids, start = ids if bos is None or ids[:1] == [bos] else [bos, *ids], 1
    if start >= len(ids):
        raise InvalidFieldError(path, "has no token that can be scored", "a longer continuation, or a context")
    return ScorePrompt(_prompt(path, ids, model, cache_salt), start)


def _text_prompt(
    path: str, tokenizer: Tokenizer, text: str, model: ServedModel, cache_salt: bytes, *, allow_special: bool = False
) -> Steps[Prompt]:
    yield from _check_fewest(path, tokenizer, text, model)
    pieces = _pieces(path, tokenizer, text, allow_special=allow_special)
    return (yield from _pieces_prompt(path, pieces, model, cache_salt))


def _pieces_prompt(
    path: str, pieces: Iterable[list[int]], model: ServedModel, cache_salt: bytes, before: Sequence[int] = ()
) -> Steps[Prompt]:
    """Builds a prompt of the ids `before` and the encoded pieces."""
    tokenizer = _tokenizer_of(model)
    ids: list[int] = [*before]
    for number, piece in enumerate(pieces):
        if number:
            yield
        ids += piece
        if len(ids) >= model.max_model_len:
            raise PromptTooLongError(path, len(ids), model.max_model_len, at_least=True)
    if tokenizer.vocab_size > model.vocab_size:
        check_text_ids(path, ids, model.vocab_size)
    return _prompt(path, ids, model, cache_salt)


def _tokenized(tokenizer: Tokenizer, text: str) -> Steps[pb.TokenizeResponse]:
    response, size = pb.TokenizeResponse(), 0
    for ids in _pieces("text", tokenizer, text):
        # In pieces, because protobuf holds the interpreter while it copies a piece.
        for start in range(0, len(ids), _PIECE_TOKENS):
            piece = ids[start : start + _PIECE_TOKENS]
            part = pb.TokenizeResponse(token_ids=piece, tokens=tokenizer.token_strings(piece))
            size += part.ByteSize()
            if size > MAX_TEXT_ANSWER_BYTES:
                raise TextTooLongError("text", f"has tokens of more than {MAX_TEXT_ANSWER_BYTES} bytes to send")
            response.MergeFrom(part)
        yield
    return response


def _detokenized(path: str, tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special: bool) -> Steps[str]:
    stream, parts, size = tokenizer.decode_stream(skip_special=skip_special), list[str](), 0
    for start in range(0, len(token_ids), _PIECE_TOKENS):
        parts.append(stream.push(token_ids[start : start + _PIECE_TOKENS]))
        size += len(parts[-1].encode())
        if size > MAX_TEXT_ANSWER_BYTES:
            raise TextTooLongError(path, f"stand for more than {MAX_TEXT_ANSWER_BYTES} bytes of text")
        if start % _STEP_TOKENS == 0:
            yield
    return "".join([*parts, stream.flush()])


def _prompt(path: str, token_ids: Sequence[int], model: ServedModel, cache_salt: bytes) -> Prompt:
    check_prompt_length(path, len(token_ids), model.max_model_len)
    ids = _compact(token_ids)
    root = salt_root(model.weights_digest.encode(), cache_salt=cache_salt, seed=model.hash_seed)
    chain = hash_chain(ids, model.block_size, root=root, seed=model.hash_seed)
    return Prompt(ids, chain[-1] if chain else 0, chain[GRANULE_BLOCKS - 1 :: GRANULE_BLOCKS])


def given_prompt(token_ids: Sequence[int], model: ServedModel, cache_salt: bytes) -> Prompt:
    """Builds the prompt of token ids.

    Raises:
        ApiError: ids outside the vocabulary, or a prompt too long.
    """
    check_token_ids("token_ids.ids", token_ids, model.vocab_size)
    return _prompt("token_ids.ids", token_ids, model, cache_salt)


def _compact(token_ids: Sequence[int]) -> array[int]:
    """Packs token ids, so that they can be copied, cut and hashed without a loop in Python.

    Both ways are one call in C that holds the interpreter. For 100,000 ids in a list `array` takes 1.2 ms and numpy
    8 ms; for ids in a message `array` takes 16 ms and numpy 0.1 ms.
    """
    if isinstance(token_ids, list):
        return array("I", token_ids)
    return array("I", np.array(token_ids, dtype=np.uint32).tobytes())
