"""Options of the commands that call a running router or worker, besides those of sampling."""

from __future__ import annotations

from typing import Final

import click

from common.params.names import PRIORITIES
from common.params.options.bench import BENCH_SERVE
from common.params.options.option import FILE, Option
from common.params.options.types import SHORTEST_S, Duration, ToolCommand

_ANSWERS: Final = ("generate", "chat")
_TEXTS: Final = ("embed", "rerank", "score")
# Commands that call one router: those of users, and those of operators.
_ONE_ROUTER: Final = ("verify", BENCH_SERVE, "models", "health")
_ADMIN: Final = (
    "workers", "cordon", "uncordon", "drain", "flush", "routing", "reload", "requests", "cancel", "info",
    "top", "steps",
)  # fmt: skip
_ALL: Final = (*_ANSWERS, *_TEXTS, *_ONE_ROUTER, *_ADMIN)
_WITHOUT_HEALTH: Final = tuple(command for command in _ALL if command != "health")
# Seconds that a probe of health waits by default.
PROBE_TIMEOUT_S: Final = 5.0

_CALLS: Final = (
    Option(
        "--address --router", "FISSILE_ADDRESS",
        "Addresses of one router or of several: an answer whose router is lost continues at the next one.",
        (*_ANSWERS, *_TEXTS), default="127.0.0.1:50051", parameter="addresses", metavar="HOST:PORT[,...]",
    ),
    Option(
        "--address --router", "FISSILE_ADDRESS", "Address of the router.",
        _ONE_ROUTER, default="127.0.0.1:50051", metavar="HOST:PORT",
    ),
    Option(
        "--admin-address", "FISSILE_ADMIN_ADDRESS",
        "Address of the router's AdminService, whose port is its --admin-port.",
        _ADMIN, default="127.0.0.1:50052", metavar="HOST:PORT",
    ),
    Option(
        "--model", "FISSILE_MODEL_NAME", "Model name. Default: the only model of the router.",
        (*_ANSWERS, *_TEXTS, BENCH_SERVE), default="",
    ),
)  # fmt: skip

_QUESTIONS: Final = (
    Option(
        "--chat/--text", "FISSILE_CHAT",
        "Send a chat or a plain text. Default: a chat if the model has a template.",
        ("generate",),
    ),
    Option("--system", "FISSILE_SYSTEM", "System message of a chat. Default: none.", _ANSWERS, default=""),
    Option("--request-id", "FISSILE_REQUEST_ID", "Id of the request. Default: a new one.", ("generate",), default=""),
    Option(
        "--tools", "FISSILE_TOOLS",
        "Tools that the model may call: JSON, a list of objects with name, description, parameters (a JSON Schema) and "
        "strict. Default: none.",
        ("chat",), FILE, parameter="tools_file", metavar="FILE",
    ),
    Option(
        "--tool-command", "FISSILE_TOOL_COMMAND",
        "Command to run as the tool NAME: it gets the arguments as JSON on standard input, and its output is the "
        "result. Runs on this machine, without a shell. Default: you type the result. Repeatable; one a line in the "
        "variable.",
        ("chat",), ToolCommand(), parameter="tool_commands", metavar="NAME=COMMAND", is_repeatable=True,
    ),
    Option(
        "--confirm/--no-confirm", "FISSILE_CONFIRM", "Ask before a command of --tool-command runs. Default: ask.",
        ("chat",), default=True, parameter="confirms",
    ),
    Option(
        "--history/--no-history", "FISSILE_HISTORY",
        "Keep your messages for later conversations, in fissile/chat_history of the folder XDG_STATE_HOME, which only "
        "you can read. Only on a terminal. Default: keep.",
        ("chat",), default=True, parameter="keeps_history",
    ),
    Option(
        "--offline", "FISSILE_OFFLINE",
        "Checkpoint to run in this process, without a router. --max-tokens is then 64 by default.",
        ("generate",), metavar="MODEL",
    ),
    Option(
        "--trace", "FISSILE_SHOW_TRACE", "Draw how long each stage of the request took.",
        ("generate",), default=False, parameter="has_waterfall", is_flag=True,
    ),
    Option(
        "--receipt", "FISSILE_RECEIPT",
        "Write the answer's receipt, with the request and the token ids, to FILE, for `fissile verify`.",
        ("generate",), FILE, metavar="FILE",
    ),
    Option(
        "--logits-every", "FISSILE_LOGITS_EVERY",
        "Digest the logits of every N-th token into the receipt; 0 is none.",
        ("generate",), click.IntRange(0), 0, metavar="N",
    ),
)  # fmt: skip

_OF_TEXTS: Final = (
    Option(
        "--file", "FISSILE_FILE",
        "Read texts from FILE, one per line; - is standard input. Default: the arguments, or standard input if there "
        "are none.",
        _TEXTS, metavar="FILE",
    ),
    Option(
        "--json-lines", "FISSILE_JSON_LINES", "Read each line as a JSON string, which may hold line breaks.",
        _TEXTS, default=False, is_flag=True,
    ),
    Option(
        "--priority", "FISSILE_PRIORITY",
        "Which requests go first when there is a queue; low is for work that can wait. Default: normal, or the highest "
        "that the caller may use.",
        _TEXTS, click.Choice(tuple(PRIORITIES)),
    ),
    Option(
        "--pooling", "FISSILE_POOLING",
        "State that becomes the vector: the last token's, or the mean of all. Default: the checkpoint's own.",
        ("embed",), click.Choice(("last", "mean")),
    ),
    Option("--normalize/--no-normalize", "FISSILE_NORMALIZE", "Scale vectors to length 1.", ("embed",), default=True),
    Option(
        "--dimensions", "FISSILE_DIMENSIONS",
        "Keep the first so many numbers of a vector, before it is normalized. Default: all.",
        ("embed",), click.IntRange(1),
    ),
    Option(
        "--format", "FISSILE_FORMAT",
        "Form of the output: a JSON object per text and line, one JSON object, or the file of a NumPy array.",
        ("embed",), click.Choice(("lines", "json", "npy")), "lines", "form",
    ),
    Option(
        "--top", "FISSILE_TOP", "Print the best N alone. Default: all.", ("rerank",), click.IntRange(1), metavar="N",
    ),
    Option(
        "--instruction", "FISSILE_INSTRUCTION",
        'What makes a document relevant, such as "Given a question, find its answer". Default: the model\'s own.',
        ("rerank",), default="",
    ),
    Option(
        "--context", "FISSILE_CONTEXT",
        "Text that they continue; blanks at its end count to them. Default: none, so whole texts are scored.",
        ("score",),
    ),
    Option(
        "--tokens", "FISSILE_TOKENS", "Print the logprob of each token too.",
        ("score",), default=False, parameter="has_tokens", is_flag=True,
    ),
    Option(
        "--request", "FISSILE_REQUEST",
        "JSON of the GenerateRequest or ChatRequest, with the id that it had. Default: the one in RECEIPT.",
        ("verify",), FILE, metavar="FILE",
    ),
    Option(
        "--worker", "FISSILE_WORKER", "Worker to run it on. Default: any of the numerics class.",
        ("verify",), default="",
    ),
)  # fmt: skip

_OPERATORS: Final = (
    Option("--watch/--no-watch", "FISSILE_WATCH", "Repeat until Ctrl-C.", ("workers",), None, False, "watching"),
    Option(
        "--interval", "FISSILE_WATCH_INTERVAL", "Refresh interval of --watch.", ("workers",), Duration(0.1), 1.0,
    ),
    Option(
        "--interval", "FISSILE_TOP_INTERVAL", "Time between two frames.", ("top",), Duration(0.1), 1.0,
    ),
    Option(
        "--once", "FISSILE_TOP_ONCE",
        "Print one frame as text and end; rates are of one --interval. For pipes.",
        ("top",), default=False, is_flag=True,
    ),
    Option(
        "--count", "FISSILE_WATCH_COUNT", "Number of refreshes of --watch; 0 is endless.",
        ("workers",), click.IntRange(0), 0,
    ),
    Option(
        "--evict/--no-evict", "FISSILE_EVICT",
        "Also move running requests to other workers of the same numerics class; clients do not notice.",
        ("cordon",), default=False,
    ),
    Option(
        "--deadline", "FISSILE_DRAIN_DEADLINE",
        "Longest time for requests that no other worker can take; 0s: the worker's own --drain-timeout.",
        ("drain",), Duration(0, 86_400), 0.0,
    ),
    Option(
        "--if-version", "FISSILE_IF_VERSION", "Change it only if it still has this version; 0 changes any version.",
        ("routing",), click.IntRange(0), 0, metavar="N",
    ),
    Option(
        "--tenant", "FISSILE_TENANT", "Show those of this tenant only.", ("requests",), default="", metavar="NAME",
    ),
    Option(
        "--last", "FISSILE_STEPS_LAST", "Number of steps to show, at most as many as the worker remembers.",
        ("steps",), click.IntRange(1), 20, metavar="N",
    ),
    Option(
        "--request", "FISSILE_STEPS_REQUEST",
        "Show only the steps that computed the request with this id. Default: all steps.",
        ("steps",), default="", parameter="request_id", metavar="ID",
    ),
    Option(
        "--file", "FISSILE_STEPS_FILE",
        "Show the steps of FILE in place of a worker's: a dump, or the output of --json.",
        ("steps",), FILE, parameter="dump", metavar="FILE",
    ),
    Option("--tenant", "FISSILE_TENANT", "Tenant of the request.", ("cancel",), default="", metavar="NAME"),
    Option(
        "--tenant", "FISSILE_TENANT",
        "Tenant of the key's calls. Default: the calls may name any tenant in their metadata.",
        ("keys new",), default="",
    ),
    Option(
        "--role", "FISSILE_ROLE",
        "Methods that the key may call: infer is requests to models; admin-read and admin-write are AdminService. "
        "Repeatable.",
        ("keys new",), click.Choice(("infer", "admin-read", "admin-write")), ("infer",), "roles", is_repeatable=True,
    ),
    Option(
        "--max-priority", "FISSILE_MAX_PRIORITY",
        "Highest priority class that the key's calls may ask for. Default: as the router's --tenant-max-priority says.",
        ("keys new",), click.Choice(tuple(PRIORITIES)),
    ),
    Option(
        "--service", "FISSILE_HEALTH_SERVICE",
        "Health service: readiness (it takes work), liveness (the process answers), or the full name of a gRPC "
        "service.",
        ("health",), default="readiness", metavar="NAME", may_be_empty=True,
    ),
)  # fmt: skip

_CREDENTIALS: Final = (
    Option(
        "--tls/--no-tls", "FISSILE_TLS",
        "Connect with TLS, trusting the public CAs unless --tls-ca names others, or in plain text. Default: TLS with "
        "--tls-ca, else plain text.",
        _ALL,
    ),
    Option("--tls-ca", "FISSILE_TLS_CA", "CAs of the server, PEM; connects with TLS.", _ALL, FILE, metavar="FILE"),
    Option(
        "--tls-name", "FISSILE_TLS_NAME", "Name in the server's certificate. Default: the host of its address.",
        _ALL, default="",
    ),
    Option(
        "--client-cert", "FISSILE_CLIENT_CERT", "Certificate chain to show to the server, PEM (mTLS).",
        _ALL, FILE, metavar="FILE",
    ),
    Option(
        "--client-key", "FISSILE_CLIENT_KEY", "Private key of --client-cert, PEM, not encrypted.",
        _ALL, FILE, metavar="FILE",
    ),
    Option(
        "--api-key", "FISSILE_API_KEY",
        "API key for the router. Better set by the variable: other users of this machine can see command lines.",
        _WITHOUT_HEALTH, default="", metavar="KEY",
    ),
    Option(
        "--timeout", "FISSILE_TIMEOUT", "Deadline of the whole call.",
        tuple(command for command in _WITHOUT_HEALTH if command not in (BENCH_SERVE, "top")), Duration(SHORTEST_S),
        600.0,
    ),
    Option(
        "--timeout", "FISSILE_TOP_TIMEOUT", "How long to wait for the router's answer before it counts as gone.",
        ("top",), Duration(SHORTEST_S), 5.0,
    ),
    Option(
        "--timeout", "FISSILE_TIMEOUT", "Deadline of each request; one that exceeds it counts as failed.",
        (BENCH_SERVE,), Duration(SHORTEST_S), 600.0,
    ),
    Option(
        "--timeout", "FISSILE_HEALTH_TIMEOUT", "How long to wait for the answer.",
        ("health",), Duration(SHORTEST_S), PROBE_TIMEOUT_S,
    ),
    Option(
        "--json", "FISSILE_JSON", "Print JSON.",
        (
            *("generate", "rerank", "score", "verify", "models", "workers", "flush", "routing", "reload", "requests"),
            *("steps", "info", "keys new", "config show", "version", "list", "rm"),
        ),
        default=False, parameter="as_json", is_flag=True,
    ),
)  # fmt: skip

CLIENTS: Final = (*_CALLS, *_QUESTIONS, *_OF_TEXTS, *_OPERATORS)
CREDENTIALS: Final = _CREDENTIALS
"""Rows of this file."""
