"""Makes commands from functions and the table of options; the parameters of a function are its arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Optional

import typer

from tito_audit.cli import _complete, _options
from tito_audit.cli._options import Options
from tito_audit.errors import SetupError
from tito_audit.settings.option import Option
from tito_audit.settings.options import options_of
from tito_audit.settings.values import LARGEST


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that passes a function its arguments, and the options of a command as `options`."""

    def command_of(run: Callable[..., None]) -> Callable[..., None]:
        options = {option.name: option for option in options_of(name)}

        def call(context: typer.Context, **parsed: Any) -> None:
            values = {}
            for each, option in options.items():
                # A word for a choice, a list for a flag that repeats.
                value, several = parsed.pop(each), option.repeats and option.fills is None
                values[each] = (value or []) if several else getattr(value, "value", value)
            run(Options(context, values), **parsed)

        kind = inspect.Parameter.KEYWORD_ONLY
        context = inspect.Parameter("context", kind, annotation=typer.Context)
        _, *arguments = inspect.signature(run, eval_str=True).parameters.values()
        flags = [_parameter(option, name) for option in options.values()]
        parameters = [context, *(each.replace(kind=kind) for each in arguments), *flags]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__doc__ = run.__doc__
        return call

    return command_of


def _parameter(option: Option, command: str) -> inspect.Parameter:
    kind: Any
    kind, parser = (option.takes, None) if isinstance(option.takes, type) else (float, option.takes)
    if isinstance(option.takes, tuple):
        kind, parser = StrEnum("Word", {word: word for word in option.takes}), None
    default = inspect.Parameter.empty if option.required else option.default
    if option.repeats:
        kind = list[kind]
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
        # What Typer calls with the parsed value.
        callback=getattr(_options, option.calls) if option.calls else _finite if option.takes is float else None,
        is_eager=bool(option.calls),
        hidden=option.hidden,
        rich_help_panel=option.panel or None,
    )
    annotation = Optional[kind] if default is None else kind  # noqa: UP045 - `kind` is a value
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, flag]
    )


def _finite(flag: typer.CallbackParam, number: float | None) -> float | None:
    if number is not None and not math.isfinite(number):
        raise SetupError(f"{flag.opts[0]} {number}: it takes a finite number.")
    return number
