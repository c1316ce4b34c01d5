"""A chat template, compiled once and run within limits."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tito_audit.errors import RenderError, SetupError
from tito_audit.render.limits import Budget, LimitReached, TimeUp, alarm

if TYPE_CHECKING:
    import jinja2

    from tito_audit.render.fast import FastTemplate
    from tito_audit.render.sandbox import ChatEnvironment

__all__ = ["SIZE_LIMIT", "TIME_LIMIT", "Template", "compile_template"]

TIME_LIMIT = 10.0
"""Seconds one rendering may take."""
SIZE_LIMIT = 64 * 1024 * 1024
"""Characters one rendering may write."""
_LONGEST_REASON = 500
_MOST_OPENERS = 256
_ABSENT = object()
_PLAIN = frozenset((object, str, bool, int, type(None)))
"""Types whose equal values are written alike."""


class Template:
    """A compiled chat template. Not to be run by two threads at once."""

    def __init__(
        self,
        source: str,
        compiled: jinja2.Template,
        environment: ChatEnvironment,
        *,
        time_limit: float,
        size_limit: int,
    ) -> None:
        self.source = source
        self._compiled = compiled
        self._environment = environment
        self._time_limit = time_limit
        self._size_limit = size_limit
        self._timed_out = False
        self._openers: dict[tuple[object, ...], str] = {}
        self._tools: Sequence[Any] = ()
        self._said_tools: bytes | None = None
        self._plain_tools: list[Any] = []

    def kept(self, tools: Sequence[Any], plain: Callable[[Any], Any]) -> list[Any]:
        """The tools in plain form, made once for tools that come again: a log has the same ones for many texts."""
        if tools is not self._tools:
            found = plain(list(tools))
            said = _exactly(found)
            if said is None or said != self._said_tools:
                self._plain_tools, self._said_tools = found, said
            self._tools = tools if isinstance(tools, tuple) else ()
        return self._plain_tools

    @cached_property
    def fast(self) -> FastTemplate | None:
        """The template in a faster engine; None if only the reference environment can be trusted with it."""
        from tito_audit.render.fast import open_fast

        try:
            with alarm(self._time_limit):
                return open_fast(self.source)
        except TimeUp:
            return None

    def opener(self, given: Mapping[str, Any]) -> str | None:
        """What a generation prompt adds behind any messages, "" if it cannot; None if the messages may decide it.

        `given` are the variables beside the messages.
        """
        if self._opener is None:
            return None
        template, names = self._opener
        values = [given.get(name, _ABSENT) for name in names]
        kinds = tuple(map(type, values))
        key = (*kinds, *values) if _PLAIN.issuperset(kinds) else None
        if key is not None and key in self._openers:
            return self._openers[key]
        try:
            text = template.run(given)
        except RenderError:
            text = ""
        if key is not None and len(self._openers) < _MOST_OPENERS:
            self._openers[key] = text
        return text

    @cached_property
    def _opener(self) -> tuple[Template, tuple[str, ...]] | None:
        """The part of the template that writes the generation prompt, and the names that decide it."""
        from tito_audit.render.opener import opener_of

        try:
            with alarm(self._time_limit):
                found = opener_of(self._environment.parse(self.source))
                compiled = self._environment.from_string(found[0]) if found is not None else None
        except (Exception, TimeUp):  # a source too deep or too large to be read once more
            return None
        if found is None or compiled is None:
            return None
        part = Template(
            self.source,
            compiled,
            self._environment,
            time_limit=self._time_limit,
            size_limit=self._size_limit,
        )
        return part, found[1]

    def run(self, variables: Mapping[str, Any]) -> str:
        """What the template writes for these variables; RenderError, in one line, if it writes nothing."""
        if self._timed_out:
            # A template that loops would otherwise cost the whole limit once a prompt, hours for a log.
            raise RenderError(self._too_slow())
        budget = Budget(self._size_limit, self._time_limit)
        self._environment.budget = budget
        pieces: list[str] = []
        written = 0
        try:
            with alarm(self._time_limit):
                for piece in self._compiled.generate(variables):
                    written += len(piece)
                    if written > self._size_limit:
                        raise LimitReached(f"the template writes more than {self._size_limit:,} characters")
                    budget.spend(len(piece))
                    pieces.append(piece)
        except TimeUp:
            self._timed_out = True
            raise RenderError(self._too_slow()) from None
        except Exception as error:  # a template can raise whatever Python can
            raise RenderError(_reason(error)) from error
        return "".join(pieces)

    def _too_slow(self) -> str:
        return f"chat template: not finished after {self._time_limit:g} seconds; it is not run again"


def compile_template(
    source: str, where: str, *, time_limit: float = TIME_LIMIT, size_limit: int = SIZE_LIMIT
) -> Template:
    """A template ready to run; SetupError, naming `where` it came from, when it is no Jinja."""
    import jinja2

    from tito_audit.render.sandbox import ChatEnvironment

    environment = ChatEnvironment(Budget(size_limit, time_limit))
    try:
        with alarm(time_limit):
            compiled = environment.from_string(source)
    except TimeUp:
        reason = f"it was not compiled after {time_limit:g} seconds"
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
        reason = _one_line(error)
    else:
        return Template(source, compiled, environment, time_limit=time_limit, size_limit=size_limit)
    raise SetupError(
        f"{where}: the chat template cannot be used ({reason}).\n"
        "Without it no messages can be rendered again.\n"
        "Mend the template, or pass another one with --chat-template FILE."
    )


def _exactly(value: Any) -> bytes | None:
    """Bytes that tell a value of plain types from every other, 1 from 1.0 and True; None if it is too deep."""
    try:
        return marshal.dumps(value, 2)
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    """Why a rendering failed, on one line with the template's line where it is known."""
    from tito_audit.render.sandbox import Refused

    line = _template_line(error)
    place = "chat template" if line is None else f"chat template, line {line}"
    if isinstance(error, Refused | LimitReached):
        return f"{place}: {_bounded(' '.join(str(error).split()))}"
    return f"{place}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return _bounded(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


def _template_line(error: Exception) -> int | None:
    """The line of the template in the innermost of its frames."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        # Jinja puts a frame of its own making in place of each frame of compiled template code.
        if "__jinja_exception__" in trace.tb_frame.f_globals:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
