"""The options of commands that talk to a model or a server: `rescore` and `serve`."""

from __future__ import annotations

from functools import partial
from typing import Final

from tito_audit.settings.option import FlagOnly, Option, under

_RESCORING = under(
    "Model",
    Option(
        "provider",
        "The model that scores: hf=PATH, vllm=URL or sglang=URL.",
        ("rescore",),
        metavar="KIND=WHERE",
        required=True,
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "provider",
        "The model that scores for --with rescore: hf=PATH, vllm=URL or sglang=URL.",
        ("repair",),
        metavar="KIND=WHERE",
        panel="Repairs",
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "model",
        "The model to ask for where a server has several. [default: its first]",
        ("rescore",),
        metavar="NAME",
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "requests",
        "How many requests to send at once.",
        ("rescore",),
        panel="Running",
        flag_name="jobs",
        short="-j",
        metavar="N",
        takes=int,
        least=1,
        default=8,
    ),
    Option(
        "tolerance",
        "The largest mean absolute logprob difference that counts as agreement.",
        ("rescore",),
        metavar="NUMBER",
        takes=float,
        least=0,
        default=0.05,
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "journal",
        "Keep every score in this file as soon as it is known. [default: OUT.scores, until OUT is written]",
        ("rescore",),
        metavar="FILE",
        flag_only=FlagOnly.WRITTEN,
    ),
    Option(
        "resume",
        "Reuse the scores that an earlier run kept.",
        ("rescore",),
        takes=bool,
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "out",
        "Write a copy of the log with missing logprobs filled; for several logs, a folder.",
        ("rescore",),
        short="-o",
        metavar="OUT",
        panel="Output",
        flag_only=FlagOnly.WRITTEN,
    ),
    Option(
        "unsafe",
        "With -o, replace logprobs that the log has; the old ones are kept in recorded_logprobs.",
        ("rescore",),
        takes=bool,
        panel="Output",
        flag_only=FlagOnly.SAFEGUARD,
    ),
    Option(
        "force",
        "Replace existing files.",
        ("rescore",),
        takes=bool,
        panel="Output",
        flag_only=FlagOnly.SAFEGUARD,
    ),
    Option(
        "worst",
        "How many findings to show with what they cost.",
        ("rescore",),
        panel="Reports",
        metavar="N",
        takes=int,
        least=0,
        default=10,
    ),
)

_of_serve = partial(Option, commands=("serve",), flag_only=FlagOnly.PURPOSE)

_SERVING = under(
    "Server",
    _of_serve(
        "provider",
        "The model that samples: vllm=URL, sglang=URL or hf=PATH.",
        metavar="KIND=WHERE",
        required=True,
    ),
    _of_serve(
        "log",
        "The log to append to: one line of JSON per answer.",
        metavar="FILE",
        required=True,
        flag_only=FlagOnly.WRITTEN,
    ),
    _of_serve("host", "The address to listen on.", metavar="ADDRESS", default="127.0.0.1"),
    _of_serve("port", "The port to listen on; 0 for any free one.", metavar="N", takes=int, least=0, default=8377),
    _of_serve("model", "The model to ask for where a server has several. [default: its first]", metavar="NAME"),
    _of_serve("model_name", "The model name that agents see. [default: the provider's]", metavar="NAME"),
    _of_serve(
        "tool_parser",
        "The parser of tool calls: a name, none, server (vLLM's own parsers) or auto (what the chat template "
        "suggests).",
        metavar="NAME",
        default="auto",
        completes="parsers",
    ),
    _of_serve(
        "reasoning_parser",
        "The parser of reasoning: a name, none or auto (what the chat template suggests).",
        metavar="NAME",
        default="auto",
        completes="parsers",
    ),
    _of_serve("api_key", "A key that agents must send. [default: TITO_AUDIT_API_KEY]", metavar="KEY"),
    _of_serve("max_body", "The largest request body.", metavar="BYTES", takes=int, least=1, default=64 << 20),
    _of_serve(
        "max_sessions",
        "Sessions to keep in memory; beyond that, the one idle longest is dropped.",
        metavar="N",
        takes=int,
        least=1,
        default=4096,
    ),
    _of_serve(
        "idle",
        "How long an idle session stays in memory; its calls stay in the log.",
        metavar="SECONDS",
        takes=float,
        least=0.01,
        default=3600.0,
    ),
    _of_serve(
        "grace",
        "How long calls may take to finish after Ctrl-C or SIGTERM.",
        metavar="SECONDS",
        takes=float,
        least=0,
        default=10.0,
    ),
    _of_serve("fsync", "Answer only once the line is synced to disk.", takes=bool),
    _of_serve("access_log", "Print a line for each request, without its content.", takes=bool),
    _of_serve(
        "force",
        "Serve even if the server has another tokenizer.",
        flag_name="allow-mismatch",
        aliases=("--force",),
        takes=bool,
        flag_only=FlagOnly.SAFEGUARD,
    ),
)

LIVE_OPTIONS: Final = (*_SERVING, *_RESCORING)
