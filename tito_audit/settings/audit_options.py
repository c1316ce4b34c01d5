"""The options of an audit: tokenizer and template, how the log is read, which rules run and what fails."""

from __future__ import annotations

from functools import partial
from typing import Final

from tito_audit.settings import readers, values
from tito_audit.settings.model import FailOn, GateSettings, Settings, ToolArguments
from tito_audit.settings.option import FlagOnly, Option, under

_AUDITS = ("scan", "repair", "show", "rescore")
_TEMPLATES = (*_AUDITS, "template")
_RENDERED = (*_TEMPLATES, "serve")
_JOINED = (*_AUDITS, "identify", "template")
_EVERY = ("scan", "repair", "convert", "show", "inspect", "identify", "template", "rescore")

_of_log = partial(Option, fills=Settings, per_log=True)
_codes = partial(
    _of_log,
    commands=_AUDITS,
    metavar="CODES",
    repeats=True,
    completes="codes",
    reads=readers.codes,
    codes=tuple,
    key_takes=values.CODES,
)
_of_gate = partial(Option, commands=("scan",), fills=GateSettings, panel="Gate")

_TEXT = under(
    "Tokenizer and template",
    _of_log(
        "tokenizer",
        "A folder with tokenizer.json, or a Hugging Face name; NAME@REVISION for a branch, tag or commit. Without "
        "one, rules that need it are skipped and counted.",
        (*_RENDERED, "inspect"),
        helps={"serve": "The folder of the model's tokenizer.json, or a Hugging Face name."},
        short="-t",
        metavar="DIR|NAME",
        key_takes=values.place_or_name("a folder with tokenizer.json, or a Hugging Face name"),
        unset="rules that need one are skipped",
    ),
    _of_log(
        "chat_template",
        "A Jinja file to use as the chat template.",
        _RENDERED,
        metavar="FILE",
        key_takes=values.path("the path of a Jinja file"),
        unset="the tokenizer's own",
    ),
    _of_log(
        "template_name",
        "Which of the tokenizer's named templates to use.",
        _RENDERED,
        metavar="NAME",
        key_takes=values.text("the name of one of the tokenizer's templates"),
        unset="the one called default",
    ),
    _of_log(
        "template_args",
        "An argument for the template, such as enable_thinking=false. JSON, else text. Repeatable.",
        _RENDERED,
        flag_name="template-arg",
        metavar="K=V",
        repeats=True,
        reads=readers.arguments,
        key_takes=values.ARGUMENTS,
        key_name="template-args",
    ),
    _of_log(
        "template_seconds",
        "Time limit for rendering one prompt.",
        _AUDITS,
        metavar="SECONDS",
        takes=float,
        least=0.01,
        key_takes=values.seconds("a number of seconds"),
    ),
    _of_log(
        "tool_arguments", "How tool-call arguments are passed to the template.", _RENDERED, takes=ToolArguments
    ),
    _of_log(
        "clock",
        "The date of the log, such as 2024-07-26, for templates that print it; recorded: the date in each prompt. "
        "[default: now]",
        _RENDERED,
        metavar="DATE|recorded",
        reads=readers.clock,
        key_takes=values.CLOCK,
        unset="now",
    ),
    _of_log(
        "sampled_roles",
        "A role that the model sampled; no other role counts as sampled. Repeatable. [default: assistant and "
        "other names for models]",
        ("scan", "repair", "convert", "show", "identify", "template", "rescore"),
        flag_name="sampled-role",
        metavar="ROLE",
        repeats=True,
        completes="sampled_roles",
        reads=readers.roles,
        key_takes=values.texts('a list of roles, such as ["agent", "planner"]'),
        key_name="sampled-roles",
        unset="assistant and other names for models",
    ),
    _of_log(
        "conventions",
        "How training rows were written: first=whole, first=prefill:N or first=left-out:N tokens of each answer; "
        "end=trained or end=untrained. Repeatable. [default: as each row shows]",
        _AUDITS,
        flag_name="convention",
        metavar="NAME=VALUE",
        repeats=True,
        reads=readers.conventions,
        key_takes=values.pairs('a table, such as {first = "prefill:1", end = "untrained"}'),
        key_name="conventions",
        unset="as each row shows",
    ),
    Option(
        "assume",
        "How far a column is off in every row that allows it: logprobs=+1 (one place late), mask=-1 (early). "
        "Repeatable. [default: only what a row proves]",
        _AUDITS,
        metavar="COLUMN=PLACES",
        repeats=True,
        reads=readers.assumed,
        fills=Settings,
        flag_only=FlagOnly.SAFEGUARD,
    ),
)

_LOG = under(
    "Input",
    _of_log(
        "format",
        "The log's format, if detection gets it wrong; see `list formats`. [default: auto, row by row]",
        _EVERY,
        metavar="NAME",
        completes="formats",
        key_takes=values.text('the name of a format, or "auto"'),
        unset="auto, row by row",
    ),
    _of_log(
        "columns",
        "Read a column under the log's name for it, such as token_ids=tokens. Repeatable.",
        _EVERY,
        flag_name="map",
        metavar="OURS=THEIRS",
        repeats=True,
        reads=readers.columns,
        key_takes=values.pairs('a table of our columns and the log\'s, such as {token_ids = "tokens"}'),
    ),
    _of_log(
        "rows_at",
        "Path to the rows inside each document or line, such as data.rollouts; * stands for each entry of a list.",
        _EVERY,
        metavar="PATH",
        key_takes=values.text('a path, such as "data.rollouts"'),
        unset="each document or line is a row",
    ),
    _of_log(
        "messages",
        "A file with the rollouts' messages, if the log has none; joined by id.",
        _JOINED,
        metavar="FILE",
        key_takes=values.path("the path of a file or folder, or a glob"),
        unset="the log's own",
    ),
    _of_log(
        "tools",
        "A JSON array of tools for all rollouts, or rows with an id and tools; none renders without tools.",
        _JOINED,
        metavar="FILE|none",
        key_takes=values.TOOLS,
        unset="the log's own",
    ),
    _of_log(
        "on",
        "The column to join on, in the log and in the other file. Repeatable. [default: the first id that both "
        "have]",
        _JOINED,
        metavar="KEY[=OTHER]",
        repeats=True,
        reads=readers.join_columns,
        key_takes=values.pairs("a table of the log's columns and the other file's, such as {id = \"uid\"}"),
        unset="the first id that both have",
    ),
    _of_log(
        "session",
        "The column or path that names the conversation of a row that is one call, such as metadata.session_id. "
        "[default: a key that logs commonly have, else the history of the calls]",
        _EVERY,
        metavar="KEY",
        key_takes=values.text('a column or a path, such as "metadata.session_id"'),
        unset="a key that logs commonly have, else the history of the calls",
    ),
    _of_log(
        "join",
        "Join rows that hold one call each into conversations.",
        _EVERY,
        takes=bool,
        key_takes=values.FLAG,
    ),
)

_RULES = under(
    "Rules",
    _codes("select", "Rules to run, by code or prefix: TOK,TPL203. [default: all]", unset="all rules"),
    _codes("extend_select", "More rules to run, unless a longer prefix in --ignore rules them out."),
    _codes("ignore", "Rules to skip, by code or prefix."),
    _of_log(
        "fail_on",
        "Exit 1 if a finding is at least this severe.",
        ("scan", "repair"),
        takes=FailOn,
        panel="Gate",
        helps={"repair": "Repair findings at least this severe; exit 1 if one is left."},
    ),
    _of_gate(
        "max_rates",
        "Let findings of these rules pass up to a rate: TOK=0.001 (per generated token), TOK=0.1%, "
        "SEQ=0.5/rollout, ALL=0.01. Repeatable.",
        flag_name="max-rate",
        metavar="CODES=RATE",
        repeats=True,
        reads=readers.rates,
        codes=readers.prefixes,
        key_takes=values.RATES,
        unset="each finding fails by itself",
    ),
    _of_gate(
        "required",
        "Fail unless these rules cover every rollout, or a share of them: LPR,SEQ or LPR=95%. Repeatable.",
        flag_name="require",
        metavar="CODES[=SHARE]",
        repeats=True,
        completes="codes",
        reads=readers.requirements,
        codes=readers.prefixes,
        key_takes=values.REQUIREMENTS,
        unset="no rule has to cover anything",
    ),
    _of_gate(
        "min_audited",
        "Fail unless at least this share of the rollouts is audited: 0.95 or 95%.",
        metavar="SHARE",
        takes=readers.min_audited,
        key_takes=values.REQUIRED_SHARE,
        unset="any share",
    ),
    _of_gate(
        "baseline",
        "A file of known findings, which do not fail.",
        metavar="FILE",
        key_takes=values.path("the path of a file"),
        unset="no findings are known",
    ),
    _of_gate(
        "update_baseline",
        "Rewrite the baseline: add what would fail, drop what is fixed.",
        takes=bool,
        flag_only=FlagOnly.KNOWN,
    ),
)

AUDIT_OPTIONS: Final = (*_TEXT, *_LOG, *_RULES)
