"""HTTP requests that no client would send, as bytes: a good request of each endpoint with something wrong."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

# In every prompt: no log may have it.
MARK: Final = "Wollongong"
_TEXT: Final = f"say {MARK}"
_SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {"a": {"type": "string"}}}
_FUNCTION: Final = {"name": "look", "description": "looks", "parameters": _SCHEMA}
_SAMPLING: Final[dict[str, Any]] = {
    "model": "m",
    "max_tokens": 20,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "n": 1,
    "stop": ["zzz"],
    "stop_token_ids": [200],
    "bad_words": ["yyy"],
    "logit_bias": {"65": 1.0},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "user": "u",
    "metadata": {"a": "b"},
    "receipt": False,
    "priority": "normal",
}
_CALL: Final = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": "b"}'}}
# A good body of each endpoint that has one.
GOOD: Final[Mapping[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        **_SAMPLING,
        "messages": [
            {"role": "system", "content": _TEXT},
            {"role": "user", "content": [{"type": "text", "text": _TEXT}]},
            {"role": "assistant", "content": None, "reasoning_content": _TEXT, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": _TEXT},
            {"role": "user", "content": _TEXT},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "chat_template_kwargs": {"enable_thinking": True},
        "response_format": {"type": "text"},
    },
    "/v1/completions": {**_SAMPLING, "prompt": [_TEXT, _TEXT], "echo": False},
    "/v1/responses": {
        "model": "m",
        "instructions": _TEXT,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _TEXT}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": _TEXT}]},
            {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": _TEXT},
        ],
        "tools": [{"type": "function", **_FUNCTION, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "store": False,
        "include": [],
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 20,
        "system": [{"type": "text", "text": _TEXT, "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": _TEXT},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": _TEXT, "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": "b"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": _TEXT}]},
        ],
        "tools": [{"name": "look", "description": "looks", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["zzz"],
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": _TEXT}], "system": _TEXT},
    "/v1/embeddings": {"model": "m", "input": [_TEXT, _TEXT], "encoding_format": "float", "user": "u"},
    "/v1/rerank": {"model": "m", "query": _TEXT, "documents": [_TEXT, {"text": _TEXT}], "top_n": 1},
    "/tokenize": {"model": "m", "prompt": _TEXT, "return_token_strs": True},
    "/detokenize": {"model": "m", "tokens": [65, 66]},
}
GOOD_GETS: Final = ("/v1/models", "/v1/models/m", "/health", "/version")

# JSON as it is written, also such that Python does not write.
_RAW_VALUES: Final = (
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "1e39",
    "-1e400",
    "NaN",
    "Infinity",
    "1" * 400,
    "18446744073709551616",
    "4294967296",
    "-9223372036854775809",
    '""',
    '"hi"',
    '"' + "x" * 5000 + '"',
    r'"\ud800"',
    r'"\udc00\ud800"',
    r'"\u0000"',
    r'"\u001b[31m"',
    r'"\x41"',
    '"\x01"',
    '"é😀"',
    "[]",
    "{}",
    "[[]]",
    "[null]",
    '[1, "a", null]',
    '{"a": 1, "a": 2}',
    '{"type": "text"}',
    '{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}',
    '{"role": "user", "content": 7}',
    "[" * 400 + "]" * 400,
    "[" * 100_000,
    '{"a":' * 3000 + "1" + "}" * 3000,
)
_HEADERS: Final = (
    b"content-type: text/plain",
    b"content-type: application/x-www-form-urlencoded",
    b"content-encoding: gzip",
    b"accept: text/html",
    b"authorization: Basic \xff\xfe",
    b"authorization: Bearer " + b"k" * 9000,
    b"authorization: Bearer a\tb",
    b"x-api-key: \xe9\xe9",
    b"x-request-timeout-ms: soon",
    b"x-request-timeout-ms: -1",
    b"x-request-timeout-ms: 99999999999999999999",
    b"x-envoy-expected-rq-timeout-ms: 1e3",
    b"x-request-id: " + b"a" * 500,
    b"x-request-id: a b\tc",
    b"traceparent: 00-00-00-zz",
    b"traceparent: 00-" + b"5" * 32 + b"-" + b"7" * 16 + b"-01",
    b"tracestate: " + b"," * 700,
    b"x-fissile-tenant: \xc3\xa9",
    b"x-fissile-tenant: " + b"t" * 500,
    b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==",
    b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"expect: 100-continue",
    b"expect: the-unexpected",
    b"te: trailers, deflate;q=0.5",
    b"range: bytes=0-1",
    b"origin: https://elsewhere.example.com",
    b"cookie: " + b"a=b; " * 500,
)
_METHODS: Final = (b"GET", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"OPTIONS", b"TRACE", b"BREW", b"post")
_TARGETS: Final = (
    b"/",
    b"//v1/chat/completions",
    b"/v1/chat/completions/",
    b"/v1//chat/completions",
    b"/v1/chat/completions?stream=true&a=%ff",
    b"/v1/%63hat/completions",
    b"/v1/chat%2fcompletions",
    b"/v1/models/%00",
    b"/v1/models/%ff%fe",
    b"/v1/models/%zz",
    b"/v1/models/" + b"x" * 4000,
    b"/v1/models/../../etc/passwd",
    b"/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    b"/v1/models/%1b%5b31m",
    b"/v1/models/",
    b"/V1/MODELS",
    b"/admin",
    b"/docs",
    b"/openapi.json",
    b"*",
    b"http://elsewhere.example.com/v1/models",
    b"elsewhere.example.com:443",
    b"/v1/models#a",
)
_NOT_HTTP: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + b"\x00" * 60,
    b"\x00" * 64 + b"\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /v1/models\r\n\r\n",
    b"GET  /v1/models HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\n : b\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\na: b\x00c\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\na: b\r\n folded\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n",
)


@dataclass(frozen=True, slots=True)
class HttpCase:
    """Bytes for one connection.

    Attributes:
        kind: what is wrong.
        path: of a good request.
        pieces: are sent one after the other.
        num_responses: that have to come; 0 where the server may close without one.
        ends: True if the client says afterwards that it sends no more.
        body: the JSON text of a single well-formed request; None otherwise.
    """

    kind: str
    path: str
    pieces: Sequence[bytes]
    num_responses: int = 1
    ends: bool = False
    body: bytes | None = None


def request_bytes(
    path: str | bytes, body: bytes, *headers: bytes, method: bytes = b"POST", is_last: bool = True
) -> bytes:
    """A well-formed request."""
    target = path.encode() if isinstance(path, str) else path
    lines = [method + b" " + target + b" HTTP/1.1", b"host: test", *headers]
    lines += [b"connection: close"] if is_last else []
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""]) + body


class HttpMangler:
    """Draws requests, of each kind and for each endpoint in turn.

    Args:
        draw: where chance comes from.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._number = 0
        self._kinds: Sequence[Callable[[str], HttpCase]] = (
            *(self._value, self._value, self._value, self._field, self._bytes, self._bytes, self._header, self._header),
            *(self._method, self._target, self._chunks, self._length, self._pipeline, self._flood, self._drip),
            *(self._half_closed, self._no_http, self._large),
        )

    def next(self) -> HttpCase:
        """The next request."""
        paths = [*GOOD]
        kind = self._kinds[self._number % len(self._kinds)]
        path = paths[self._number // len(self._kinds) % len(paths)]
        self._number += 1
        return kind(path)

    def _case(self, kind: str, path: str, body: bytes, *headers: bytes) -> HttpCase:
        return HttpCase(kind, path, [request_bytes(path, body, *headers)], body=body)

    def _good(self, path: str) -> bytes:
        body = copy.deepcopy(GOOD[path])
        if path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"):
            body["stream"] = self._draw.random() < 0.5
        return json.dumps(body).encode()

    def _value(self, path: str) -> HttpCase:
        """Other values at up to two places."""
        body = json.loads(self._good(path))
        raws = self._draw.sample(_RAW_VALUES, self._draw.choice((1, 1, 2)))
        for i in range(len(raws)):
            holder, key = self._draw.choice(_places(body))
            holder[key] = f"@@{i}@@"
        text = json.dumps(body)
        for i, raw in enumerate(raws):
            text = text.replace(f'"@@{i}@@"', raw)
        return self._case("value", path, text.encode("utf-8", "surrogatepass"))

    def _field(self, path: str) -> HttpCase:
        """A field that is missing, unknown, twice there, or misspelled."""
        body = json.loads(self._good(path))
        holder, key = self._draw.choice([(h, k) for h, k in _places(body) if isinstance(h, dict)])
        change = self._draw.choice(("missing", "unknown", "twice", "misspelled"))
        if change == "missing":
            del holder[key]
        elif change == "misspelled":
            holder[f"{key}s"] = holder.pop(key)
        else:
            unknown = self._draw.choice(("thing", "logprobs", "prompt_logprobs", "\x00", "a" * 3000, "", "$", "`"))
            holder["@@0@@" if change == "twice" else unknown] = 1
        return self._case(change, path, json.dumps(body).replace("@@0@@", str(key)).encode())

    def _bytes(self, path: str) -> HttpCase:
        """Bytes that are no JSON, or no UTF-8."""
        good, draw = self._good(path), self._draw
        at = draw.randrange(len(good))
        change = draw.choice(
            (
                good[:at],
                good[:at] + draw.randbytes(draw.choice((1, 4))) + good[at:],
                good[:at] + good[at + draw.randint(1, 9) :],
                good[:at] + b"\xff\xfe\xc0\x80" + good[at:],
                good + draw.choice((b"}", b"[]", b"\x00", b" ", good)),
                b"\xef\xbb\xbf" + good,
                good.decode().encode("utf-16"),
                draw.randbytes(200),
                draw.choice((b"", b"null", b"[]", b'"x"', b"7", b"{", b"{}", b"[" * 100_000, b'{"a":' * 100_000)),
                b"[" + good + b"]",
            )
        )
        return self._case("bytes", path, change)

    def _header(self, path: str) -> HttpCase:
        """One or two headers that are wrong or unusual."""
        return self._case("header", path, self._good(path), *self._draw.sample(_HEADERS, self._draw.choice((1, 2))))

    def _method(self, path: str) -> HttpCase:
        method, target = self._draw.choice(_METHODS), self._draw.choice((path, *GOOD_GETS))
        return HttpCase("method", target, [request_bytes(target, self._good(path), method=method)])

    def _target(self, path: str) -> HttpCase:
        target, method = self._draw.choice(_TARGETS), self._draw.choice((b"GET", b"POST", b"CONNECT"))
        return HttpCase("target", "", [request_bytes(target, self._good(path), method=method)])

    def _chunks(self, path: str) -> HttpCase:
        """A chunked body, mostly a wrong one."""
        good = self._good(path)
        whole = b"%x\r\n%b\r\n" % (len(good), good)
        end = b"0\r\n\r\n"
        chunks, num_responses = self._draw.choice(
            (
                (whole + end, 1),
                (b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in good) + end, 1),
                (whole + b"0\r\nx-trailer: a\r\n\r\n", 1),
                (b"zz\r\n" + good + end, 1),
                (b"-5\r\n" + good + end, 1),
                (b"ffffffffffffffffff\r\n" + good, 0),
                (b"%x\r\n%bxx\r\n" % (len(good), good) + end, 1),
                (b"5\n" + good, 0),
                (whole, 0),
                (b"", 0),
            )
        )
        framing = self._draw.choice((b"chunked", b"chunked", b"chunked", b"gzip, chunked", b"chunked, chunked", b"x"))
        head = b"POST %b HTTP/1.1\r\nhost: test\r\nconnection: close\r\n" % path.encode()
        more = self._draw.choice((b"", b"", b"content-length: 3\r\n"))
        encoded = head + more + b"transfer-encoding: " + framing + b"\r\n\r\n" + chunks
        if framing != b"chunked":
            num_responses = 1
        return HttpCase("chunks", path, [encoded], num_responses, ends=not num_responses)

    def _length(self, path: str) -> HttpCase:
        """A Content-Length that is no number, too small, too large, or there twice."""
        good = self._good(path)
        lengths, num_responses = self._draw.choice(
            (
                ([b"-1"], 1),
                ([b"abc"], 1),
                ([b"1e3"], 1),
                ([b"0x10"], 1),
                ([b"+5"], 1),
                ([b"5, 6"], 1),
                ([b"5", b"6"], 1),
                ([b"9" * 400], 1),
                ([b"1"], 1),
                ([b"0"], 1),
                ([b"%d" % (len(good) + 10)], 0),
                ([], 1),
            )
        )
        lines = [b"POST %b HTTP/1.1" % path.encode(), b"host: test", b"connection: close"]
        lines += [b"content-length: " + length for length in lengths]
        # One piece: a server that has closed the connection resets it for a later one, and the response is lost.
        return HttpCase("length", path, [b"\r\n".join([*lines, b"", good])], num_responses, ends=not num_responses)

    def _pipeline(self, path: str) -> HttpCase:
        """Several requests at once; the last one may be none."""
        good = [request_bytes(path, self._good(path), is_last=False) for _ in range(self._draw.randint(1, 4))]
        last = self._draw.choice((request_bytes("/version", b"", method=b"GET"), b"no request\r\n\r\n"))
        return HttpCase("pipeline", path, [b"".join([*good, last])], len(good) + 1)

    def _flood(self, path: str) -> HttpCase:
        """Many headers, or large ones."""
        count, size = self._draw.choice(((2000, 4), (90, 10), (1, 20_000), (1, 300_000), (20, 3000)))
        headers = [b"x-%d: %b" % (i, b"f" * size) for i in range(count)]
        return HttpCase("flood", path, [request_bytes(path, self._good(path), *headers)], 0)

    def _drip(self, path: str) -> HttpCase:
        """A good request in small pieces."""
        whole = request_bytes(path, self._good(path))
        size = self._draw.choice((7, 40))
        return HttpCase("drip", path, [whole[i : i + size] for i in range(0, len(whole), size)])

    def _half_closed(self, path: str) -> HttpCase:
        """A client that ends its side, with a whole request or a part of one."""
        whole = request_bytes(path, self._good(path))
        at = self._draw.choice((len(whole), self._draw.randrange(len(whole))))
        return HttpCase("half closed", path, [whole[:at]], 0, ends=True)

    def _no_http(self, path: str) -> HttpCase:
        """Bytes of another protocol, and heads that are not valid."""
        return HttpCase("no HTTP", "", [self._draw.choice((*_NOT_HTTP, self._draw.randbytes(300)))], 0, ends=True)

    def _large(self, path: str) -> HttpCase:
        """A large text, a few of them too large for a body."""
        body = copy.deepcopy(GOOD[path])
        size = self._draw.choice((100_000, 200_000, 200_000, 17 << 20))
        holder, key = self._draw.choice([(h, k) for h, k in _places(body) if isinstance(h[k], str)])
        holder[key] = "é" * (size // 2)
        data = json.dumps(body, ensure_ascii=False).encode()
        # A connection that is reset while the client still sends has no response.
        return HttpCase("large", path, [request_bytes(path, data)], 0 if size > 16 << 20 else 1, body=data)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every value within a body, as the object or list that holds it, and its key."""
    found: list[tuple[Any, Any]] = []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        found += [(value, key), *_places(each)]
    return found
