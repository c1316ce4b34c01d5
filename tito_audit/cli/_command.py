"""Makes commands from functions and the table of options; a function's parameters are the options it uses
itself.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Optional

import typer

from tito_audit.cli import _complete, _given
from tito_audit.cli._given import Given
from tito_audit.errors import SetupError
from tito_audit.settings.option import Option
from tito_audit.settings.options import options_of
from tito_audit.settings.values import LARGEST


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that passes a function the options of a command: its parameters, and all of them as `given`."""

    def made(run: Callable[..., None]) -> Callable[..., None]:
        declared = inspect.signature(run, eval_str=True).parameters
        options = {option.name: option for option in options_of(name)}
        arguments = [one for one in declared.values() if one.name not in options and one.name != "given"]

        def call(context: typer.Context, **parsed: Any) -> None:
            values = {each: _value(options[each], one) for each, one in parsed.items() if each in options}
            named = {each: value for each, value in (parsed | values).items() if each in declared}
            run(**named, **({"given": Given(context, values)} if "given" in declared else {}))

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        flags = [_parameter(option, name) for option in options.values()]
        arguments = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in arguments]
        call.__signature__ = inspect.Signature([context, *arguments, *flags])  # type: ignore[attr-defined]
        call.__doc__ = run.__doc__
        return call

    return made


def _value(option: Option, parsed: Any) -> Any:
    """The parsed value for the function: a word for a choice, a list for a flag that repeats."""
    return (parsed or []) if option.repeats and option.fills is None else getattr(parsed, "value", parsed)


def _parameter(option: Option, command: str) -> inspect.Parameter:
    """An option as a parameter for Typer."""
    kind, parser = _type_of(option)
    default = inspect.Parameter.empty if option.required else option.default
    if option.repeats:
        kind = list[kind]  # type: ignore[valid-type]
    elif isinstance(option.takes, tuple) and default is not None:
        default = kind(default)
    flag = typer.Option(
        *option.declared,
        metavar=option.metavar,
        help=option.help_for(command),
        min=option.least,
        max=LARGEST if option.takes is int else None,
        parser=parser,
        autocompletion=getattr(_complete, option.completes) if option.completes else None,
        callback=_callback_of(option),
        is_eager=bool(option.calls),
        hidden=option.hidden,
        rich_help_panel=option.panel or None,
    )
    annotation = Optional[kind] if default is None else kind  # noqa: UP045 - `kind` is a value
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, flag]
    )


def _callback_of(option: Option) -> Callable[..., Any] | None:
    """What Typer calls with the parsed value."""
    if option.calls:
        called: Callable[..., Any] = getattr(_given, option.calls)
        return called
    return _number if option.takes is float else None


def _number(flag: typer.CallbackParam, given: float | None) -> float | None:
    if given is not None and not math.isfinite(given):
        raise SetupError(f"{flag.opts[0]} {given}: it takes a finite number.")
    return given


def _type_of(option: Option) -> tuple[Any, Callable[[str], Any] | None]:
    """The type and the parser of a value, for Typer."""
    if isinstance(option.takes, tuple):
        return StrEnum("Word", {word: word for word in option.takes}), None
    return (option.takes, None) if isinstance(option.takes, type) else (float, option.takes)
