"""The table of all options, the source of flags, configuration keys, settings and docs.

`--help` lists the options of a command in the order of the table. `tito-audit config`, the schema and the docs
list the keys of `scan` first, then the other keys of each other command; `key_after` moves one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from tito_audit.settings import readers, values
from tito_audit.settings.model import (
    Encoder,
    Engine,
    FailOn,
    GateSettings,
    MaskBy,
    MaskStyle,
    Padding,
    RepairChoices,
    RepairSettings,
    RequiredLevel,
    RowKind,
    Settings,
    ToolArguments,
)
from tito_audit.settings.option import FlagOnly, Option, flag, in_panel, number_flag

_T = TypeVar("_T")
COMMANDS = (
    *("scan", "repair", "inspect", "show", "convert", "sft"),
    *("validate", "identify", "template", "conformance", "rescore", "serve", "view"),
)
"""The commands that read the configuration file."""

_AUDITS = ("scan", "repair", "show", "rescore", "view")
_RENDERED = (*_AUDITS, "convert", "sft", "template", "serve")
_JOINED = (*_AUDITS, "identify", "template")
_EVERY = tuple(name for name in COMMANDS if name not in ("conformance", "serve"))
_WRITERS = ("repair", "convert")

_of_log = partial(flag, fills=Settings, per_log=True)
_of_run = partial(flag, fills=Settings)
_of_gate = partial(flag, commands=("scan",), fills=GateSettings, panel="Gate")
_of_repair = partial(flag, commands=("repair",), fills=RepairSettings, panel="Repairs")
_of_one_repair = partial(flag, commands=("repair",), fills=RepairChoices, panel="Repairs")
_of_show = partial(flag, commands=("show",))
_of_serve = partial(flag, commands=("serve",), flag_only=FlagOnly.PURPOSE)
_place = partial(_of_show, panel="Place", metavar="N", takes=int, least=0, flag_only=FlagOnly.PLACE)
_of_conformance = partial(flag, commands=("conformance",))
_of_rescore = partial(flag, commands=("rescore",), flag_only=FlagOnly.PURPOSE)
_of_identify = partial(flag, commands=("identify",), repeats=True)
_report = partial(flag, "report", short="-r", panel="Reports", metavar="NAME[=FILE]", repeats=True)
_shape = partial(flag, "shape", flag_name="output-format", short="-f", takes=("text", "json"), default="text")
_printed = partial(flag, "output_format", short="-f", panel="Reports", metavar="NAME")
_codes = partial(
    _of_log,
    commands=_AUDITS,
    metavar="CODES",
    repeats=True,
    completes="codes",
    reads=readers.parse_codes,
    codes=tuple,
    key_takes=values.CODES,
)

_SERVING = in_panel(
    "Server",
    _of_serve("provider", metavar="KIND=WHERE", required=True)(
        "The model that samples: vllm=URL, sglang=URL, trl=URL or hf=PATH."
    ),
    _of_serve("log", metavar="FILE", required=True, flag_only=FlagOnly.WRITTEN)(
        "The log to append to: one line of JSON per answer."
    ),
    _of_serve("host", metavar="ADDRESS", default="127.0.0.1")("The address to listen on."),
    _of_serve("port", metavar="N", takes=int, least=0, default=8377)("The port to listen on; 0 for any free one."),
    _of_serve("model", metavar="NAME")("The model to ask for where a server has several. [default: its first]"),
    _of_serve("model_name", metavar="NAME")("The model name that agents see. [default: the provider's]"),
    _of_serve("tool_parser", metavar="NAME", default="auto", completes="parsers")(
        "The parser of tool calls: a name, none, server (vLLM's own parsers) or auto (what the chat template "
        "suggests)."
    ),
    _of_serve("reasoning_parser", metavar="NAME", default="auto", completes="parsers")(
        "The parser of reasoning: a name, none or auto (what the chat template suggests)."
    ),
    _of_serve("api_key", metavar="KEY")("A key that agents must send. [default: TITO_AUDIT_API_KEY]"),
    _of_serve("max_body", metavar="BYTES", takes=int, least=1, default=64 << 20)("The largest request body."),
    _of_serve("max_sessions", metavar="N", takes=int, least=1, default=4096)(
        "Sessions to keep in memory; beyond that, the one idle longest is dropped."
    ),
    _of_serve("idle", metavar="SECONDS", takes=float, least=0.01, default=3600.0)(
        "How long an idle session stays in memory; its calls stay in the log."
    ),
    _of_serve("grace", metavar="SECONDS", takes=float, least=0, default=10.0)(
        "How long calls may take to finish after Ctrl-C or SIGTERM."
    ),
    _of_serve("fsync", takes=bool)("Answer only once the line is synced to disk."),
    _of_serve("access_log", takes=bool)("Print a line for each request, without its content."),
    _of_serve("force", flag_name="allow-mismatch", aliases=("--force",), takes=bool, flag_only=FlagOnly.SAFEGUARD)(
        "Serve even if the server has another tokenizer."
    ),
)

_RESCORING = in_panel(
    "Model",
    _of_rescore("provider", metavar="KIND=WHERE", required=True)(
        "The model that scores: hf=PATH, vllm=URL, sglang=URL or trl=URL."
    ),
    flag("provider", ("repair",), metavar="KIND=WHERE", panel="Repairs", flag_only=FlagOnly.PURPOSE)(
        "The model that scores for --with rescore: hf=PATH, vllm=URL, sglang=URL or trl=URL."
    ),
    _of_rescore("model", metavar="NAME")("The model to ask for where a server has several. [default: its first]"),
    flag(
        "requests",
        ("rescore",),
        flag_name="jobs",
        panel="Running",
        short="-j",
        default=8,
        metavar="N",
        takes=int,
        least=1,
    )("How many requests to send at once."),
    _of_rescore("tolerance", metavar="NUMBER", takes=float, least=0, default=0.05)(
        "The largest mean absolute logprob difference that counts as agreement."
    ),
    _of_rescore("prompts", takes=bool)(
        "Score nothing: send each prompt back as ids and as messages, and report where the server's is another."
    ),
    _of_rescore("replay", metavar="N", takes=int, least=0, default=8)(
        "With --prompts, how many tokens of each greedy answer to sample again."
    ),
    _of_rescore("journal", metavar="FILE", flag_only=FlagOnly.WRITTEN)(
        "Keep every score in this file as soon as it is known. [default: OUT.scores, until OUT is written]"
    ),
    _of_rescore("resume", takes=bool)("Reuse the scores that an earlier run kept."),
    _of_rescore("out", short="-o", metavar="OUT", panel="Output", flag_only=FlagOnly.WRITTEN)(
        "Write a copy of the log with missing logprobs filled; for several logs, a folder."
    ),
    _of_rescore("unsafe", takes=bool, panel="Output", flag_only=FlagOnly.SAFEGUARD)(
        "With -o, replace logprobs that the log has; the old ones are kept in recorded_logprobs."
    ),
    _of_rescore("force", takes=bool, panel="Output", flag_only=FlagOnly.SAFEGUARD)("Replace existing files."),
    flag("worst", ("rescore",), panel="Reports", metavar="N", takes=int, least=0, default=10)(
        "How many findings to show with what they cost."
    ),
)

_IDENTIFYING = in_panel(
    "Tokenizer and template",
    _of_identify("tokenizers", flag_name="tokenizer", short="-t", metavar="DIR|NAME")(
        "A tokenizer that may have written the log: a folder with tokenizer.json, or a Hugging Face name. "
        "Repeatable. [default: the configured one, those that the log names, and those in the hub cache]"
    ),
    _of_identify("chat_templates", flag_name="chat-template", metavar="FILE")(
        "A Jinja file that may be the chat template, in addition to the tokenizer's own. Repeatable."
    ),
    flag("write", ("identify",), short="-w", metavar="FILE", panel="Output", flag_only=FlagOnly.WRITTEN)(
        "Add what was found to this configuration file."
    ),
)

_OF_TEMPLATES = in_panel(
    "Output",
    flag(
        "logs", ("template",), flag_name="log", metavar="LOG", panel="Input", repeats=True, flag_only=FlagOnly.READ
    )("A log whose first 64 rollouts are tried in addition to the built-in conversations. Repeatable."),
    flag("training", ("template",), metavar="FILE", flag_only=FlagOnly.WRITTEN)(
        "Write a variant of the template that keeps history as it was sampled, if its edits can be proved."
    ),
    flag("against", ("sft",), metavar="OTHER", panel="Tokenizer and template", flag_only=FlagOnly.READ)(
        "The template that writes prompts at inference: a Jinja file, or the tokenizer that has it. [default: the "
        "same]"
    ),
    flag("max_length", ("sft",), metavar="N", takes=int, least=1, panel="Input", flag_only=FlagOnly.PURPOSE)(
        "The maximum length that the trainer cuts rows at."
    ),
    flag("row", ("sft",), metavar="N", takes=int, least=0, panel="View", flag_only=FlagOnly.PLACE)(
        "The row to show as tokens, counted from 0. [default: the first]"
    ),
    flag("against", ("template",), metavar="OTHER", flag_only=FlagOnly.READ)(
        "Compare with another tokenizer's template or with a Jinja file."
    ),
    flag("force", ("template",), takes=bool, flag_only=FlagOnly.SAFEGUARD)("Replace an existing file."),
)

_CONFORMANCE = (
    *in_panel(
        "Tokenizer and template",
        _of_conformance("tokenizers", flag_name="tokenizer", short="-t", metavar="DIR|NAME", repeats=True)(
            "A tokenizer with its template: a folder with tokenizer.json, or a Hugging Face name. Repeatable."
        ),
        _of_conformance("chat_templates", flag_name="chat-template", metavar="FILE|DIR", repeats=True)(
            "A Jinja file, or a folder of them, tried with bytes and control tokens in place of a vocabulary. "
            "Repeatable."
        ),
        _of_conformance("installed", takes=bool, flag_only=FlagOnly.PURPOSE)(
            "Try the templates that installed packages ship: TRL, vLLM, SGLang, axolotl, LLaMA-Factory."
        ),
    ),
    *in_panel(
        "Output",
        _of_conformance("out", short="-o", metavar="DIR", flag_only=FlagOnly.WRITTEN)(
            "A folder for index.html, drift.jsonl, drift.parquet and badge.svg."
        ),
        _of_conformance("against", metavar="OLD", flag_only=FlagOnly.READ)(
            "The drift.jsonl of an earlier run: exit 1 if a cell got worse."
        ),
        _of_conformance("force", takes=bool, flag_only=FlagOnly.SAFEGUARD)("Replace existing files."),
    ),
)

_WRITING = in_panel(
    "Output",
    flag("to", ("convert",), metavar="FORM", required=True, completes="forms", flag_only=FlagOnly.WRITTEN)(
        "What to write: rows (training rows), calls, atropos_group, nemo_rl, nemo_rl_message_log, nemo_gym, slime "
        "or tito_sample; or a set for SFT: sft (labels), sft_assistant_masks or sft_completion_mask."
    ),
    flag("out", _WRITERS, short="-o", metavar="OUT", flag_only=FlagOnly.WRITTEN)(
        "The file to write; for several logs, a folder.",
        convert="The file to write: .jsonl, .json (.gz, .zst), .parquet, .arrow, .feather.",
    ),
    _of_repair(
        "strategies",
        flag_name="with",
        metavar="NAMES",
        repeats=True,
        completes="repairs",
        reads=readers.parse_names,
        key_takes=values.texts('a list of repairs in the order to try them, such as ["splice", "mask"]'),
        unset="all safe ones",
    )("Repairs to try, in this order: splice,mask. [default: all safe ones]"),
    _of_repair("unsafe", takes=bool, flag_only=FlagOnly.SAFEGUARD)("Let unsafe repairs run as well."),
    flag("dry_run", _WRITERS, takes=bool, flag_only=FlagOnly.PURPOSE)(
        "Report what would be repaired; write no log.",
        convert="Report what would be kept and what would be lost; write nothing.",
    ),
    flag("lossy", ("convert",), takes=bool, flag_only=FlagOnly.SAFEGUARD)(
        "Write the log even if something is lost, without what is listed as lost."
    ),
    flag("diff", ("repair",), takes=bool, flag_only=FlagOnly.PURPOSE)(
        "Print each change; without -o, write no log."
    ),
    flag("worst", ("repair",), metavar="N", takes=int, least=0, default=20, panel="Reports")(
        "Changed rows shown by --diff."
    ),
    _of_repair("quarantine", metavar="FILE", panel="Output", flag_only=FlagOnly.WRITTEN)(
        "Move rows that no repair could fix to this file, with the reason."
    ),
    flag("force", _WRITERS, takes=bool, fills=RepairSettings, flag_only=FlagOnly.SAFEGUARD)(
        "Replace existing files.", convert="Replace an existing file."
    ),
    flag("force", ("identify",), takes=bool, panel="Output", flag_only=FlagOnly.SAFEGUARD)(
        "Overwrite keys that the file already sets to another value."
    ),
    _of_repair("provenance", takes=bool, panel="Output", key_takes=values.FLAG, key_after="padding")(
        "Write a tito_audit column that names the repair of each fixed finding."
    ),
    _of_one_repair("mask_by", takes=MaskBy)(
        "What mask takes out of the loss: the drifted tokens, their turn, or everything from the first drift on."
    ),
    _of_one_repair(
        "sentinel",
        metavar="NUMBER|null",
        reads=readers.parse_sentinel,
        key_takes=values.SENTINEL,
        unset="unchanged",
    )("What normalize writes where a logprob is missing."),
    _of_one_repair("mask_style", takes=MaskStyle, unset="unchanged")("How normalize writes loss masks."),
    _of_one_repair("padding", takes=Padding, unset="unchanged")("Where normalize puts padding."),
)

_SHOWING = in_panel(
    "View",
    _place("row")("Row of the file, counted from 0; the same as LOG:ROW."),
    _place("item")("Which rollout of a row that holds several. [default: 0]"),
    _place("turn")("Show only this turn; the same as LOG:ROW:TURN."),
    _of_show("around", metavar="TOKENS|CODE|FINGERPRINT", repeats=True, flag_only=FlagOnly.PLACE, panel="Place")(
        "Show only the surroundings of a token (120, completion:12, row:5-9), or of the findings with a code or "
        "fingerprint. Repeatable."
    ),
    number_flag("nearby", ("show",), "a number of tokens", 0, flag_name="context", default=16)(
        "Tokens to show around each --around place and each finding."
    ),
    flag("ids", ("show", "sft"), takes=bool, key_takes=values.FLAG)("Show the id of each token below it."),
    _of_show("logprobs", takes=bool, key_takes=values.FLAG)("Show the logprob of each sampled token below it."),
    flag("full", ("show", "sft", "template"), takes=bool, key_takes=values.FLAG, key_after="rows")(
        "Show all tokens.", template="Show the evidence: answers, facts, changes, texts between messages."
    ),
    _of_show("as_json", flag_name="json", takes=bool, flag_only=FlagOnly.PURPOSE, hidden=True)(
        "Write one JSON object: every sequence and finding of the rollout."
    ),
    _of_show("no_pager", takes=bool, key_takes=values.FLAG)("Do not page long output through $PAGER or less."),
)

_VIEWING = in_panel(
    "Output",
    flag("out", ("view",), short="-o", metavar="DIR", required=True, flag_only=FlagOnly.WRITTEN)(
        "The folder of the site: a new one, or a site to update."
    ),
    flag("show_rows", ("view",), metavar="N", takes=int, least=0, default=100_000, flag_only=FlagOnly.PURPOSE)(
        "Show the first N rows of each log token by token; of the others, those that the html report would show."
    ),
)

_LOOKING_UP = in_panel(
    "Reports",
    number_flag(
        "rows", ("inspect",), "a number of rows", 1, short="-n", default=100, aliases=("--limit",), panel="Input"
    )("Rows to read."),
    _shape(("inspect", "validate", "config", "identify", "template", "conformance", "show", "sft", "explain"))(
        "A page to read, or one JSON object with everything.",
        config="Lines to read, or one JSON object with everything.",
        show="A page to read, or one JSON object: every sequence and finding of the rollout.",
    ),
    _shape(("list",), takes=("text", "json", "markdown"))(
        "A table to read, one JSON object, or a Markdown table."
    ),
    flag("schema", ("config",), takes=bool)(
        "Print the JSON schema of the configuration file, for editors; or of what is named instead of a log: "
        "record, report, rescore, rescore-prompts or validate."
    ),
    flag("markdown", ("list",), takes=bool, hidden=True)("Print a Markdown table."),
)

_TEXT = in_panel(
    "Tokenizer and template",
    _of_log(
        "tokenizer",
        (*_RENDERED, "inspect"),
        short="-t",
        metavar="DIR|NAME",
        key_takes=values.place_or_name("a folder with tokenizer.json, or a Hugging Face name"),
        unset="rules that need one are skipped",
    )(
        "A folder with tokenizer.json, or a Hugging Face name; NAME@REVISION for a branch, tag or commit. Without "
        "one, rules that need it are skipped and counted.",
        sft="A folder with tokenizer.json, or a Hugging Face name.",
        convert="The tokenizer for --to sft, which writes messages as ids: a folder with tokenizer.json, or a "
        "Hugging Face name.",
        serve="The folder of the model's tokenizer.json, or a Hugging Face name.",
    ),
    _of_log(
        "chat_template",
        _RENDERED,
        metavar="FILE",
        key_takes=values.path("the path of a Jinja file"),
        unset="the tokenizer's own",
    )("A Jinja file to use as the chat template."),
    _of_log(
        "template_name",
        _RENDERED,
        metavar="NAME",
        key_takes=values.text("the name of one of the tokenizer's templates"),
        unset="the one called default",
    )("Which of the tokenizer's named templates to use."),
    _of_log(
        "template_args",
        _RENDERED,
        flag_name="template-arg",
        metavar="K=V",
        repeats=True,
        reads=readers.parse_arguments,
        key_takes=values.ARGUMENTS,
        key_name="template-args",
    )("An argument for the template, such as enable_thinking=false. JSON, else text. Repeatable."),
    _of_log(
        "template_seconds",
        _AUDITS,
        metavar="SECONDS",
        takes=float,
        least=0.01,
        key_takes=values.SECONDS,
    )("Time limit for rendering one prompt."),
    _of_log("tool_arguments", _RENDERED, takes=ToolArguments)(
        "How tool-call arguments are passed to the template."
    ),
    _of_log(
        "clock", _RENDERED, metavar="DATE|recorded", reads=readers.parse_clock, key_takes=values.CLOCK, unset="now"
    )(
        "The date of the log, such as 2024-07-26, for templates that print it; recorded: the date in each prompt. "
        "[default: now]"
    ),
    _of_log(
        "sampled_roles",
        (*_JOINED, "convert", "sft"),
        flag_name="sampled-role",
        metavar="ROLE",
        repeats=True,
        completes="sampled_roles",
        reads=readers.parse_roles,
        key_takes=values.texts('a list of roles, such as ["agent", "planner"]'),
        key_name="sampled-roles",
        unset="assistant and other names for models",
    )(
        "A role that the model sampled; no other role counts as sampled. Repeatable. [default: assistant and "
        "other names for models]"
    ),
    _of_log(
        "conventions",
        _AUDITS,
        flag_name="convention",
        metavar="NAME=VALUE",
        repeats=True,
        reads=partial(readers.parse_pairs, example="end=untrained"),
        key_takes=values.pairs('a table, such as {first = "prefill:1", end = "untrained"}'),
        key_name="conventions",
        unset="as each row shows",
    )(
        "How training rows were written: first=whole, first=prefill:N or first=left-out:N tokens of each answer; "
        "end=trained or end=untrained. Repeatable. [default: as each row shows]"
    ),
    flag(
        "assume",
        _AUDITS,
        metavar="COLUMN=PLACES",
        repeats=True,
        reads=readers.parse_offsets,
        fills=Settings,
        flag_only=FlagOnly.SAFEGUARD,
    )(
        "How far a column is off in every row that allows it: logprobs=+1 (one place late), mask=-1 (early). "
        "Repeatable. [default: only what a row proves]"
    ),
)

_LOG = in_panel(
    "Input",
    _of_log(
        "format",
        _EVERY,
        metavar="NAME",
        completes="formats",
        key_takes=values.text('the name of a format, or "auto"'),
        unset="auto, row by row",
    )("The log's format, if detection gets it wrong; see `list formats`. [default: auto, row by row]"),
    _of_log(
        "columns",
        _EVERY,
        flag_name="map",
        metavar="OURS=THEIRS",
        repeats=True,
        reads=partial(readers.parse_pairs, example="token_ids=tokens"),
        key_takes=values.pairs('a table of our columns and the log\'s, such as {token_ids = "tokens"}'),
    )("Read a column under the log's name for it, such as token_ids=tokens. Repeatable."),
    _of_log(
        "rows_at",
        _EVERY,
        metavar="PATH",
        key_takes=values.text('a path, such as "data.rollouts"'),
        unset="each document or line is a row",
    )("Path to the rows inside each document or line, such as data.rollouts; * stands for each entry of a list."),
    _of_log(
        "messages",
        _JOINED,
        metavar="FILE",
        key_takes=values.path("the path of a file or folder, or a glob"),
        unset="the log's own",
    )("A file with the rollouts' messages, if the log has none; joined by id."),
    _of_log("tools", _JOINED, metavar="FILE|none", key_takes=values.TOOLS, unset="the log's own")(
        "A JSON array of tools for all rollouts, or rows with an id and tools; none renders without tools."
    ),
    _of_log(
        "on",
        _JOINED,
        metavar="KEY[=OTHER]",
        repeats=True,
        reads=readers.parse_join_columns,
        key_takes=values.pairs("a table of the log's columns and the other file's, such as {id = \"uid\"}"),
        unset="the first id that both have",
    )(
        "The column to join on, in the log and in the other file. Repeatable. [default: the first id that both "
        "have]"
    ),
    _of_log(
        "session",
        _EVERY,
        metavar="KEY",
        key_takes=values.text('a column or a path, such as "metadata.session_id"'),
        unset="a key that logs commonly have, else the history of the calls",
    )(
        "The column or path that names the conversation of a row that is one call, such as metadata.session_id. "
        "[default: a key that logs commonly have, else the history of the calls]"
    ),
    _of_log("kind", (*_AUDITS, "convert"), takes=RowKind)(
        "What training rows without calls are for: sft, judged by what the assistant wrote, or rl, by what was "
        "sampled. By default labels or assistant masks without logprobs tell."
    ),
    _of_log("join", _EVERY, takes=bool, key_takes=values.FLAG)(
        "Join rows that hold one call each into conversations."
    ),
)

_RULES = in_panel(
    "Rules",
    _codes("select", unset="all rules")("Rules to run, by code or prefix: TOK,TPL203. [default: all]"),
    _codes("extend_select")("More rules to run, unless a longer prefix in --ignore rules them out."),
    _codes("ignore")("Rules to skip, by code or prefix."),
    _of_log("fail_on", ("scan", "repair", "view"), takes=FailOn, panel="Gate")(
        "Exit 1 if a finding is at least this severe.",
        repair="Repair findings at least this severe; exit 1 if one is left.",
    ),
    _of_log("require_level", ("scan", "validate"), takes=RequiredLevel, panel="Gate", unset="any level")(
        "Fail unless every rollout has this level: L0 text, L1 ids, L2 mask and logprobs, L3 who sampled it, L4 "
        "all that a trainer needs."
    ),
    _of_gate(
        "max_rates",
        flag_name="max-rate",
        metavar="CODES=RATE",
        repeats=True,
        reads=readers.parse_rates,
        codes=readers.code_prefixes,
        key_takes=values.RATES,
        unset="each finding fails by itself",
    )(
        "Let findings of these rules pass up to a rate: TOK=0.001 (per generated token), TOK=0.1%, "
        "SEQ=0.5/rollout, ALL=0.01. Repeatable."
    ),
    _of_gate(
        "required",
        flag_name="require",
        metavar="CODES[=SHARE]",
        repeats=True,
        completes="codes",
        reads=readers.parse_requirements,
        codes=readers.code_prefixes,
        key_takes=values.REQUIREMENTS,
        unset="no rule has to cover anything",
    )("Fail unless these rules cover every rollout, or a share of them: LPR,SEQ or LPR=95%. Repeatable."),
    _of_gate(
        "min_audited",
        metavar="SHARE",
        takes=readers.parse_min_audited,
        key_takes=values.REQUIRED_SHARE,
        unset="any share",
    )("Fail unless at least this share of the rollouts is audited: 0.95 or 95%."),
    _of_gate(
        "baseline", metavar="FILE", key_takes=values.path("the path of a file"), unset="no findings are known"
    )("A file of known findings, which do not fail."),
    _of_gate("update_baseline", takes=bool, flag_only=FlagOnly.KNOWN)(
        "Rewrite the baseline: add what would fail, and with --notes the notes; drop what is fixed."
    ),
)

_RUNNING = in_panel(
    "Running",
    _report(("scan",), completes="reports", key_takes=values.REPORTS, key_after="jobs", unset="text")(
        "A report, to stdout or a file; `list reports` names them. Repeatable."
    ),
    _report(("repair",), completes="repair_reports")(
        "text or json, to stdout or a file. Repeatable. [default: text]"
    ),
    _report(("rescore",), completes="rescore_reports")(
        "text, json or html, to stdout or a file. Repeatable. [default: text]"
    ),
    _printed(
        ("scan",),
        completes="reports",
        key_takes=values.text("the name of a report"),
        key_after="report",
        unset="text",
    )("The report on stdout; everything else goes to stderr. [default: text]"),
    _printed(("repair",), completes="repair_reports")("The report on stdout: text or json. [default: text]"),
    _printed(("rescore",), completes="rescore_reports")(
        "The report on stdout: text, json or html. [default: text]"
    ),
    number_flag(
        "limit",
        ("scan", "validate", "identify", "rescore", "view"),
        "a number of rows",
        1,
        short="-n",
        panel="Input",
        fills=Settings,
        key_after="sample",
        unset="every row",
    )(
        "Stop after this many rows, counted over all logs.",
        identify="Rows to read, the first of each log. [default: 400]",
        view="Rows to audit, the first of each log.",
    ),
    _of_run(
        "sample",
        ("scan", "rescore", "view"),
        metavar="SHARE",
        takes=readers.parse_sample_share,
        panel="Input",
        key_takes=values.SHARE,
        unset="every row",
    )("Audit about this share of the rows, 0.05 or 5%: the same rows every time."),
    number_flag(
        "max_row_bytes",
        ("scan", "repair", "convert", "inspect", "validate", "identify", "template", "rescore", "view"),
        "a number of bytes",
        1,
        metavar="BYTES",
        panel="Input",
        fills=Settings,
    )("Report longer rows as REC001 instead of reading them."),
    _of_run(
        "trust_remote_code",
        ("scan", "repair", "show", "inspect", "identify", "template", "rescore", "serve", "view"),
        takes=bool,
        flag_only=FlagOnly.CODE,
    )("Let a tokenizer run its own Python code."),
    # The file is searched for once both are parsed, in this order.
    flag("no_config", (*_EVERY, "serve"), takes=bool, calls="read_no_file", flag_only=FlagOnly.READ)(
        "Read no configuration file."
    ),
    flag("config", (*_EVERY, "serve"), metavar="FILE", calls="read_file", flag_only=FlagOnly.READ)(
        "Read settings from this file. [default: tito-audit.toml or pyproject.toml, here or in a folder above]"
    ),
    number_flag(
        "jobs",
        ("scan", "repair", "view"),
        "a number of processes",
        1,
        short="-j",
        fills=Settings,
        unset="one per core",
    )("How many processes to use; the result is the same. [default: one per core]"),
    _of_run("engine", ("scan", "repair"), takes=Engine)(
        "Where to work: in processes on this machine, or in tasks of a Ray cluster, --jobs of them at once or one "
        "per CPU. The result is the same."
    ),
    _of_run(
        "address",
        ("scan", "repair"),
        metavar="HOST:PORT",
        key_takes=values.text("the address of a Ray cluster"),
        unset="RAY_ADDRESS, or auto, or local",
    )(
        "With --engine ray, the cluster: HOST:PORT, auto for the one on this machine, local for a new one. "
        "[default: $RAY_ADDRESS, or auto, or local]"
    ),
    flag("resume", ("scan", "repair"), takes=bool, flag_only=FlagOnly.PURPOSE)(
        "Skip logs that an earlier run finished and that have not changed since. The result is the same."
    ),
    flag("journal", ("scan", "repair"), metavar="FILE", flag_only=FlagOnly.WRITTEN)(
        "Record each finished log in this file. [default, with --resume: OUT.journal, beside what the run writes]"
    ),
    _of_run("encoder", ("scan", "repair", "rescore", "view"), takes=Encoder, key_after="sampled-roles")(
        "Which encoder runs first; tokenizers confirms every difference before it is reported. auto: fastokens "
        "for large logs."
    ),
    number_flag("worst", ("scan",), "a number of findings", 0, default=10, panel="Reports")(
        "Findings shown in full by the text report."
    ),
    flag("notes", ("scan", "repair"), takes=bool, fills=GateSettings, key_takes=values.FLAG, panel="Reports")(
        "Show notes in full on the page, with a table of all rules; otherwise it counts them.",
        repair="Also show the rules that found only notes.",
    ),
    flag("not_checked", ("scan",), takes=bool, key_takes=values.FLAG, panel="Reports")(
        "List everything that was not checked, with the reasons; otherwise the page names the most common."
    ),
    flag(
        "quiet",
        ("scan", "repair", "convert", "sft", "validate", "rescore", "view"),
        short="-q",
        takes=bool,
        key_takes=values.FLAG,
    )(
        "No progress line, and only the reports that you name.",
        convert="No progress line, and no list of what is kept.",
        view="No progress line, and no line about what was written.",
    ),
)

OPTIONS: Final[tuple[Option, ...]] = (
    *(*_SERVING, *_RESCORING, *_IDENTIFYING, *_OF_TEMPLATES, *_CONFORMANCE, *_WRITING, *_SHOWING),
    *(*_VIEWING, *_LOOKING_UP, *_TEXT, *_LOG, *_RULES, *_RUNNING),
)


def _options_by_key() -> dict[str, Option]:
    """Options with a key, by key, in the order that lists show; `key_after` moves one."""
    ordered = [option for option in _OF_FILE.values() if option.key_takes is not None and not option.key_after]
    for moved in (option for option in _OF_FILE.values() if option.key_takes is not None and option.key_after):
        before = next(at for at, option in enumerate(ordered) if option.key == moved.key_after)
        ordered.insert(before + 1, moved)
    return {option.key: option for option in ordered}


_OF_FILE: Final = {
    option.name: option
    for command in COMMANDS
    for option in OPTIONS
    if command in option.commands and (option.key_takes is not None or option.calls)
}
"""By name: options with a key, and those that say which file is read."""
KEYS: Final[Mapping[str, Option]] = _options_by_key()
"""The options that a configuration file may set, by key."""
FLAG_ONLY: Final[Mapping[str, FlagOnly]] = {
    option.flag[2:]: why for why in FlagOnly for option in OPTIONS if option.flag_only is why
}
"""Why a flag has no key, by flag without dashes."""


def options_of(command: str) -> tuple[Option, ...]:
    """The options that a command takes, in the order of its `--help`.

    `config` takes those of all others too: a short flag belongs to the first, and aliases are dropped.
    """
    own = [option for option in OPTIONS if command in option.commands]
    if command != "config":
        return tuple(own)
    flags = {option.flag for option in own}
    options, letters = [], {""}
    for option in (*own, *(option for option in _OF_FILE.values() if option.flag not in flags)):
        options.append(replace(option, short="" if option.short in letters else option.short, aliases=()))
        letters.add(option.short)
    return tuple(options)


def fill_settings(settings: type[_T], options: Mapping[str, Any]) -> _T:
    """A settings dataclass made of values by option name; a missing or None value leaves the field's default.

    SetupError names the flag whose value is invalid.
    """
    fields = {
        option.name: option.read(options[option.name])
        for option in OPTIONS
        if option.fills is settings and options.get(option.name) is not None
    }
    return settings(**fields)
