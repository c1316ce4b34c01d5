"""Every key that a configuration file may have, and every flag that none sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tito_audit.settings.file import _values as values
from tito_audit.settings.file._values import Kind

__all__ = ["COMMAND_LINE_ONLY", "EXTEND", "KEYS", "OVERRIDES", "PATHS", "Key"]

EXTEND = "extend"
OVERRIDES = "overrides"
PATHS = "paths"

COMMAND_LINE_ONLY: Mapping[str, str] = {
    **dict.fromkeys(("config", "no-config"), "it says which file is read"),
    **dict.fromkeys(("out", "quarantine", "to"), "it names what one run writes"),
    **dict.fromkeys(("dry-run", "diff", "json"), "it says what one run is made for"),
    **dict.fromkeys(("row", "item", "turn", "around"), "it names what one run looks at"),
    "update-baseline": "it makes what was found known, which one run does on purpose",
    "trust-remote-code": "it lets code run, which a file that lies in a folder must not decide",
    **dict.fromkeys(
        ("unsafe", "force", "lossy"), "it gives up a safeguard, which should be seen where it is done"
    ),
}
"""Flags that no file sets, and why."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key that the file may have."""

    name: str
    """The long flag, or the table that stands for a flag that repeats."""
    kind: Kind
    unset: str = ""
    """What holds where nobody says, for people; "" where the flag has a value of its own then."""
    parameter: str = ""
    """Name of the parameter of the commands; "" for the name itself, with underscores."""
    per_log: bool = False
    """Whether it may differ from log to log, and so stand in an override."""
    only: tuple[str, ...] = ()
    """The commands that it holds for, where others mean something else by the flag; () for all that have it."""

    @property
    def target(self) -> str:
        """The parameter of the commands that it sets."""
        return self.parameter or self.name.replace("-", "_")


_SCAN = ("scan",)

KEYS: Mapping[str, Key] = {
    key.name: key
    for key in (
        Key(
            "tokenizer",
            values.place_or_name("a folder with tokenizer.json, or a Hugging Face name"),
            "rules that need one are skipped",
            per_log=True,
        ),
        Key("chat-template", values.path("the path of a Jinja file"), "the tokenizer's own", per_log=True),
        Key(
            "template-name",
            values.text("the name of one of the tokenizer's templates"),
            "the one called default",
            per_log=True,
        ),
        Key("template-args", values.ARGUMENTS, parameter="template_arg", per_log=True),
        Key("template-seconds", values.seconds("a number of seconds"), per_log=True),
        Key("tool-arguments", values.one_of("auto", "object", "string"), per_log=True),
        Key(
            "sampled-roles",
            values.texts('a list of roles, as ["agent", "planner"]'),
            "assistant and other names of models",
            per_log=True,
        ),
        Key("encoder", values.one_of("auto", "fastokens", "tokenizers")),
        Key("format", values.text('the name of a format, or "auto"'), "auto, row by row", per_log=True),
        Key(
            "map",
            values.pairs('a table of our columns and the log\'s, as {token_ids = "tokens"}'),
            parameter="columns",
            per_log=True,
        ),
        Key("rows-at", values.text('a path, as "data.rollouts"'), "the rows of the file", per_log=True),
        Key("messages", values.path("the path of a file, a folder or a pattern"), "the log's own", per_log=True),
        Key("tools", values.path("the path of a file"), "the log's own", per_log=True),
        Key(
            "on",
            values.pairs("a table of the log's columns and the other file's, as {id = \"uid\"}"),
            "the first id that both have",
            per_log=True,
        ),
        Key("select", values.CODES, "all rules", per_log=True),
        Key("extend-select", values.CODES, per_log=True),
        Key("ignore", values.CODES, per_log=True),
        Key("fail-on", values.one_of("error", "warning", "note", "never"), per_log=True),
        Key("max-rate", values.RATES, "findings fail one by one"),
        Key("baseline", values.path("the path of a file"), "no finding is known"),
        Key("sample", values.SHARE, "every row"),
        Key("limit", values.count("a number of rows"), "every row"),
        Key("max-row-bytes", values.count("a number of bytes")),
        Key("jobs", values.count("a number of processes"), "one a core"),
        Key("report", values.REPORTS, "text", only=_SCAN),
        Key("output-format", values.text("the name of a report"), "text", only=_SCAN),
        Key("worst", values.number("a number of findings"), only=_SCAN),
        Key("quiet", values.FLAG),
        Key(
            "with",
            values.texts('a list of repairs in the order to try them, as ["splice", "mask"]'),
            "all safe ones",
            "strategies",
        ),
        Key("mask-by", values.one_of("span", "turn", "first-divergence")),
        Key("sentinel", values.SENTINEL, "as it is"),
        Key("mask-style", values.one_of("labels", "binary", "float", "bool"), "as it is"),
        Key("padding", values.one_of("none", "left", "right"), "as it is"),
        Key("provenance", values.FLAG),
        Key("rows", values.count("a number of rows")),
        Key("full", values.FLAG),
        Key("context", values.number("a number of tokens"), parameter="nearby"),
        Key("ids", values.FLAG),
        Key("logprobs", values.FLAG),
        Key("no-pager", values.FLAG),
    )
}
"""Every key that a file may have beside `extend` and `overrides`, by name."""
