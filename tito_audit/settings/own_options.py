"""The options of single commands: what is written, where to look, how it is shown. They begin their `--help`."""

from __future__ import annotations

from typing import Final, get_args

from tito_audit.settings import readers, values
from tito_audit.settings.model import MaskBy, MaskStyle, Padding, RepairChoices, RepairSettings
from tito_audit.settings.option import FlagOnly, Option

__all__ = ["OWN_OPTIONS"]

_FORMS = "rows (training rows), calls, atropos_group, nemo_rl, nemo_rl_message_log, nemo_gym, slime or tito_sample"
_WRITERS = ("repair", "convert")

_WRITING = (
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
    Option(
        "strategies",
        "Repairs, in the order to try them: splice,mask. [default: all safe]",
        ("repair",),
        flag_name="with",
        metavar="NAMES",
        repeats=True,
        completes="repairs",
        fills=RepairSettings,
        reads=readers.names,
        key_takes=values.texts('a list of repairs in the order to try them, as ["splice", "mask"]'),
        unset="all safe ones",
    ),
    Option(
        "unsafe",
        "Let unsafe repairs run as well.",
        ("repair",),
        takes=bool,
        fills=RepairSettings,
        flag_only=FlagOnly.SAFEGUARD,
    ),
    Option(
        "dry_run",
        "Say what would be done; write no log.",
        _WRITERS,
        takes=bool,
        helps={"convert": "Say what would be carried and what lost; write nothing."},
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "lossy",
        "Write what can be carried, and leave out what is listed as lost.",
        ("convert",),
        takes=bool,
        flag_only=FlagOnly.SAFEGUARD,
    ),
    Option(
        "diff",
        "Print each change; without -o write no log.",
        ("repair",),
        takes=bool,
        flag_only=FlagOnly.PURPOSE,
    ),
    Option("worst", "Changed rows shown by --diff.", ("repair",), metavar="N", takes=int, least=0, default=20),
    Option(
        "quarantine",
        "Where rows go that no repair cured, with the reason.",
        ("repair",),
        metavar="FILE",
        fills=RepairSettings,
        flag_only=FlagOnly.WRITTEN,
    ),
    Option(
        "force",
        "Replace files that are there already.",
        _WRITERS,
        takes=bool,
        helps={"convert": "Replace a file that is there already."},
        fills=RepairSettings,
        flag_only=FlagOnly.SAFEGUARD,
    ),
    Option(
        "provenance",
        "Write a tito_audit column that says what was cured by what.",
        ("repair",),
        takes=bool,
        fills=RepairSettings,
        key_takes=values.FLAG,
        key_after="padding",
    ),
    Option(
        "mask_by",
        "What mask takes out of the loss: the drifted tokens, the turn, or all after.",
        ("repair",),
        takes=get_args(MaskBy),
        fills=RepairChoices,
        key_takes=values.one_of(*get_args(MaskBy)),
    ),
    Option(
        "sentinel",
        "What normalize writes where there is no logprob.",
        ("repair",),
        metavar="NUMBER|null",
        fills=RepairChoices,
        reads=readers.sentinel,
        key_takes=values.SENTINEL,
        unset="as it is",
    ),
    Option(
        "mask_style",
        "How normalize writes loss masks.",
        ("repair",),
        takes=get_args(MaskStyle),
        fills=RepairChoices,
        key_takes=values.one_of(*get_args(MaskStyle)),
        unset="as it is",
    ),
    Option(
        "padding",
        "Where normalize puts padding.",
        ("repair",),
        takes=get_args(Padding),
        fills=RepairChoices,
        key_takes=values.one_of(*get_args(Padding)),
        unset="as it is",
    ),
)

_SHOWING = (
    Option(
        "row",
        "Row of the file, counted from 0; as LOG:ROW.",
        ("show",),
        metavar="N",
        takes=int,
        least=0,
        flag_only=FlagOnly.PLACE,
    ),
    Option(
        "item",
        "Rollout of a row that holds several. [default: 0]",
        ("show",),
        metavar="N",
        takes=int,
        least=0,
        flag_only=FlagOnly.PLACE,
    ),
    Option(
        "turn",
        "Show this turn only; as LOG:ROW:TURN.",
        ("show",),
        metavar="N",
        takes=int,
        least=0,
        flag_only=FlagOnly.PLACE,
    ),
    Option(
        "around",
        "Show only the neighbourhood of a token (120, completion:12, row:5-9), or of the findings of a code or "
        "with a fingerprint. Repeatable.",
        ("show",),
        metavar="TOKENS|CODE|FINGERPRINT",
        repeats=True,
        flag_only=FlagOnly.PLACE,
    ),
    Option(
        "nearby",
        "Tokens shown around each place of --around and each finding.",
        ("show",),
        flag_name="context",
        metavar="N",
        takes=int,
        least=0,
        default=16,
        key_takes=values.number("a number of tokens"),
    ),
    Option("ids", "Show the id of each token beneath it.", ("show",), takes=bool, key_takes=values.FLAG),
    Option(
        "logprobs",
        "Show the logprob of each sampled token beneath it.",
        ("show",),
        takes=bool,
        key_takes=values.FLAG,
    ),
    Option("full", "Leave no tokens out.", ("show",), takes=bool, key_takes=values.FLAG, key_after="rows"),
    Option(
        "as_json",
        "Write one JSON object: every sequence and finding of the rollout.",
        ("show",),
        flag_name="json",
        takes=bool,
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "no_pager",
        "Never call a pager; else $PAGER or less shows a long page.",
        ("show",),
        takes=bool,
        key_takes=values.FLAG,
    ),
)

_LOOKING_UP = (
    Option(
        "rows",
        "Rows to look at.",
        ("inspect",),
        short="-n",
        metavar="N",
        takes=int,
        least=1,
        default=100,
        key_takes=values.count("a number of rows"),
    ),
    Option(
        "shape",
        "A page for people, or one object with all of it.",
        ("inspect", "config"),
        flag_name="output-format",
        short="-f",
        takes=("text", "json"),
        default="text",
        helps={"config": "Lines for people, or one object with all of it."},
    ),
    Option("schema", "Print the JSON schema of the file instead, for editors.", ("config",), takes=bool),
    Option("markdown", "Print a Markdown table.", ("list",), takes=bool),
)

OWN_OPTIONS: Final = (*_WRITING, *_SHOWING, *_LOOKING_UP)
