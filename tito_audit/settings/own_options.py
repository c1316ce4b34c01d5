"""The options of single commands, first in their `--help`: what to write, where to look, what to show."""

from __future__ import annotations

from functools import partial
from typing import Final

from tito_audit.settings import readers, values
from tito_audit.settings.model import MaskBy, MaskStyle, Padding, RepairChoices, RepairSettings
from tito_audit.settings.option import FlagOnly, Option, numbered, under

_FORMS = "rows (training rows), calls, atropos_group, nemo_rl, nemo_rl_message_log, nemo_gym, slime or tito_sample"
_WRITERS = ("repair", "convert")

_of_repair = partial(Option, commands=("repair",), fills=RepairSettings, panel="Repairs")
_of_one_repair = partial(Option, commands=("repair",), fills=RepairChoices, panel="Repairs")
_of_show = partial(Option, commands=("show",))
_place = partial(_of_show, panel="Place", metavar="N", takes=int, least=0, flag_only=FlagOnly.PLACE)

_WRITING = under(
    "Output",
    Option(
        "to",
        f"What to write: {_FORMS}.",
        ("convert",),
        metavar="FORM",
        required=True,
        completes="forms",
        flag_only=FlagOnly.WRITTEN,
    ),
    Option(
        "out",
        "The file to write; for several logs, a folder.",
        _WRITERS,
        short="-o",
        metavar="OUT",
        helps={"convert": "The file to write: .jsonl, .json (.gz, .zst), .parquet, .arrow, .feather."},
        flag_only=FlagOnly.WRITTEN,
    ),
    _of_repair(
        "strategies",
        "Repairs to try, in this order: splice,mask. [default: all safe ones]",
        flag_name="with",
        metavar="NAMES",
        repeats=True,
        completes="repairs",
        reads=readers.names,
        key_takes=values.texts('a list of repairs in the order to try them, such as ["splice", "mask"]'),
        unset="all safe ones",
    ),
    _of_repair("unsafe", "Let unsafe repairs run as well.", takes=bool, flag_only=FlagOnly.SAFEGUARD),
    Option(
        "dry_run",
        "Report what would be repaired; write no log.",
        _WRITERS,
        takes=bool,
        helps={"convert": "Report what would be kept and what would be lost; write nothing."},
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "lossy",
        "Write the log even if something is lost, without what is listed as lost.",
        ("convert",),
        takes=bool,
        flag_only=FlagOnly.SAFEGUARD,
    ),
    Option(
        "diff", "Print each change; without -o, write no log.", ("repair",), takes=bool, flag_only=FlagOnly.PURPOSE
    ),
    Option(
        "worst",
        "Changed rows shown by --diff.",
        ("repair",),
        metavar="N",
        takes=int,
        least=0,
        default=20,
        panel="Reports",
    ),
    _of_repair(
        "quarantine",
        "Move rows that no repair could fix to this file, with the reason.",
        metavar="FILE",
        panel="Output",
        flag_only=FlagOnly.WRITTEN,
    ),
    Option(
        "force",
        "Replace existing files.",
        _WRITERS,
        takes=bool,
        helps={"convert": "Replace an existing file."},
        fills=RepairSettings,
        flag_only=FlagOnly.SAFEGUARD,
    ),
    Option(
        "force",
        "Overwrite keys that the file already sets to another value.",
        ("identify",),
        takes=bool,
        panel="Output",
        flag_only=FlagOnly.SAFEGUARD,
    ),
    _of_repair(
        "provenance",
        "Write a tito_audit column that names the repair of each fixed finding.",
        takes=bool,
        panel="Output",
        key_takes=values.FLAG,
        key_after="padding",
    ),
    _of_one_repair(
        "mask_by",
        "What mask takes out of the loss: the drifted tokens, their turn, or everything from the first drift on.",
        takes=MaskBy,
    ),
    _of_one_repair(
        "sentinel",
        "What normalize writes where a logprob is missing.",
        metavar="NUMBER|null",
        reads=readers.sentinel,
        key_takes=values.SENTINEL,
        unset="unchanged",
    ),
    _of_one_repair("mask_style", "How normalize writes loss masks.", takes=MaskStyle, unset="unchanged"),
    _of_one_repair("padding", "Where normalize puts padding.", takes=Padding, unset="unchanged"),
)

_SHOWING = under(
    "View",
    _place("row", "Row of the file, counted from 0; the same as LOG:ROW."),
    _place("item", "Which rollout of a row that holds several. [default: 0]"),
    _place("turn", "Show only this turn; the same as LOG:ROW:TURN."),
    _of_show(
        "around",
        "Show only the surroundings of a token (120, completion:12, row:5-9), or of the findings with a code or "
        "fingerprint. Repeatable.",
        metavar="TOKENS|CODE|FINGERPRINT",
        repeats=True,
        flag_only=FlagOnly.PLACE,
        panel="Place",
    ),
    numbered(
        "nearby",
        "Tokens to show around each --around place and each finding.",
        ("show",),
        "a number of tokens",
        0,
        flag_name="context",
        default=16,
    ),
    _of_show("ids", "Show the id of each token below it.", takes=bool, key_takes=values.FLAG),
    _of_show("logprobs", "Show the logprob of each sampled token below it.", takes=bool, key_takes=values.FLAG),
    _of_show("full", "Show all tokens.", takes=bool, key_takes=values.FLAG, key_after="rows"),
    _of_show(
        "as_json",
        "Write one JSON object: every sequence and finding of the rollout.",
        flag_name="json",
        takes=bool,
        flag_only=FlagOnly.PURPOSE,
        hidden=True,
    ),
    _of_show(
        "no_pager",
        "Do not page long output through $PAGER or less.",
        takes=bool,
        key_takes=values.FLAG,
    ),
)

_IDENTIFYING = under(
    "Tokenizer and template",
    Option(
        "tokenizers",
        "A tokenizer that may have written the log: a folder with tokenizer.json, or a Hugging Face name. "
        "Repeatable. [default: the configured one, those that the log names, and those in the hub cache]",
        ("identify",),
        flag_name="tokenizer",
        short="-t",
        metavar="DIR|NAME",
        repeats=True,
    ),
    Option(
        "chat_templates",
        "A Jinja file that may be the chat template, in addition to the tokenizer's own. Repeatable.",
        ("identify",),
        flag_name="chat-template",
        metavar="FILE",
        repeats=True,
    ),
    Option(
        "write",
        "Add what was found to this configuration file.",
        ("identify",),
        short="-w",
        metavar="FILE",
        panel="Output",
        flag_only=FlagOnly.WRITTEN,
    ),
)

_TEMPLATES = under(
    "Input",
    Option(
        "logs",
        "A log whose first 64 rollouts are tried in addition to the built-in conversations. Repeatable.",
        ("template",),
        flag_name="log",
        metavar="LOG",
        repeats=True,
        flag_only=FlagOnly.READ,
    ),
)

_OF_TEMPLATES = under(
    "Output",
    Option(
        "training",
        "Write a variant of the template that keeps history as it was sampled, if its edits can be proved.",
        ("template",),
        metavar="FILE",
        flag_only=FlagOnly.WRITTEN,
    ),
    Option(
        "against",
        "Compare with another tokenizer's template or with a Jinja file.",
        ("template",),
        metavar="OTHER",
        flag_only=FlagOnly.READ,
    ),
    Option("force", "Replace an existing file.", ("template",), takes=bool, flag_only=FlagOnly.SAFEGUARD),
)

_LOOKING_UP = under(
    "Reports",
    numbered(
        "rows",
        "Rows to read.",
        ("inspect",),
        "a number of rows",
        1,
        short="-n",
        default=100,
        aliases=("--limit",),
        panel="Input",
    ),
    Option(
        "shape",
        "A page to read, or one JSON object with everything.",
        ("inspect", "config", "identify", "template", "show", "explain"),
        flag_name="output-format",
        short="-f",
        takes=("text", "json"),
        default="text",
        helps={
            "config": "Lines to read, or one JSON object with everything.",
            "show": "A page to read, or one JSON object: every sequence and finding of the rollout.",
        },
    ),
    Option(
        "shape",
        "A table to read, one JSON object, or a Markdown table.",
        ("list",),
        flag_name="output-format",
        short="-f",
        takes=("text", "json", "markdown"),
        default="text",
    ),
    Option("schema", "Print the JSON schema of the configuration file, for editors.", ("config",), takes=bool),
    Option("markdown", "Print a Markdown table.", ("list",), takes=bool, hidden=True),
)

OWN_OPTIONS: Final = (*_IDENTIFYING, *_TEMPLATES, *_OF_TEMPLATES, *_WRITING, *_SHOWING, *_LOOKING_UP)
