"""A chat template, compiled once and run within limits."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from tito_audit.errors import RenderError, SetupError
from tito_audit.render.facts import Facts, Known, LookedFor, read_facts
from tito_audit.render.globals import GENERATION, TemplateRefused, has_generation
from tito_audit.render.limits import Budget, LimitReached, TimeUp, alarm, charged, give_up, is_given_up, let_go
from tito_audit.tokens.cache import StoredTokenizer

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes

    from tito_audit.render.arguments import TemplateArguments
    from tito_audit.render.fast.render import FastTemplate
    from tito_audit.render.sandbox import ChatEnvironment
    from tito_audit.render.traced import TemplateTracer

TIME_LIMIT = 3.0
"""Seconds one rendering may take."""
SIZE_LIMIT = 64 * 1024 * 1024
"""Characters one rendering may write."""
SOURCE_LIMIT = 256 * 1024
"""Characters of a template; the longest published ones have a tenth of it."""
_LONGEST_REASON = 500
_SPARE = 200
"""A template counts as compilable in later runs if it compiles this many frames deeper in the stack."""
_OPENERS = 64
"""For how many sets of variables the generation prompt is remembered."""
_T = TypeVar("_T")


class Template:
    """A chat template, compiled on its first run. Not thread-safe."""

    def __init__(
        self, source: str, where: str, *, time_limit: float, size_limit: int, store: StoredTokenizer | None = None
    ) -> None:
        self.source = source
        self._where = where
        self._time_limit = time_limit
        self._size_limit = size_limit
        self._known = Known(source, (time_limit, size_limit), store)
        self._tools: Sequence[Any] = ()
        self._tools_key: bytes | None = None
        self._last_plain: list[Any] = []
        self._openers: dict[str, str] = {}
        self.memo: dict[Hashable, Any] = {}

    @property
    def is_known(self) -> bool:
        """Whether an earlier run has shown that it compiles."""
        return self._known.facts is not None

    def load(self) -> None:
        """Compile it now; SetupError if it is not valid Jinja."""
        self._reference  # noqa: B018 - kept from now on

    def plain_tools(self, tools: Sequence[Any], plain: Callable[[Any], Any]) -> list[Any]:
        """The tools in plain form, converted once: most rows of a log have the same tools."""
        if tools is not self._tools:
            plain_form = plain(list(tools))
            try:
                key = marshal.dumps(plain_form, 2)  # tells 1, 1.0 and True apart
            except ValueError:  # nested too deep
                key = None
            if key is None or key != self._tools_key:
                self._last_plain, self._tools_key = plain_form, key
            self._tools = tools if isinstance(tools, tuple) else ()
        return self._last_plain

    def run(self, variables: Mapping[str, Any]) -> str:
        """What the template writes for these variables; RenderError, in one line, if it fails."""
        return self._reference.run(variables)

    def generation(self, variables: Mapping[str, Any], text: str) -> list[tuple[int, int]] | None:
        """The ranges of its `text` that it writes inside `{% generation %}`; None if it has none, or they are
        unknown."""
        if not has_generation(self.source) or any(mark in text for mark in GENERATION):
            return None
        environment = self._reference.environment
        environment.marks_generation = True
        try:
            marked = self.run(variables)
        finally:
            environment.marks_generation = False
        opened, closed = GENERATION
        ranges: list[tuple[int, int]] = []
        at = 0
        plain: list[str] = []
        for piece in marked.split(opened):
            inside, mark, after = piece.partition(closed)
            if bool(mark) != bool(plain) or closed in after:
                return None
            if mark:
                ranges.append((at, at + len(inside)))
            plain += [inside, after]
            at += len(inside) + len(after)
        return ranges if "".join(plain) == text else None

    @cached_property
    def fast(self) -> FastTemplate | None:
        """The template in a faster engine; None if only the reference environment can run it."""
        if self._facts is None or not self._facts.minijinja_safe:
            return None
        from tito_audit.render.fast.render import open_fast

        try:
            with alarm(self._time_limit):
                return open_fast(self.source, self._facts)
        except TimeUp:
            return None

    def tracer(self) -> TemplateTracer:
        """The same template, tracing which of its tags writes what."""
        from tito_audit.render.traced import TemplateTracer

        return TemplateTracer(self.source, self._time_limit, self._size_limit)

    @property
    def looked_for(self) -> LookedFor | None:
        """What it looks for in texts; None if its output may depend on something else."""
        return self._facts.looked_for if self._facts is not None else None

    @cached_property
    def arguments(self) -> TemplateArguments:
        """The arguments that it reads; none if it cannot be parsed."""
        from tito_audit.render.arguments import TemplateArguments, arguments_of

        try:
            with alarm(self._time_limit):
                return arguments_of(self._reference.environment.parse(self.source))
        except (Exception, TimeUp):  # too deep or too large to parse again
            return TemplateArguments()

    def opener(self, variables: Mapping[str, Any]) -> str | None:
        """What a generation prompt adds after any messages; "" if it fails; None if this may depend on the
        messages.

        `variables` are all but the messages.
        """
        if self._facts is None or self._facts.opener_names is None:
            return None
        key, text = self._known.opener(variables)
        if text is not None:
            return text
        if self._opener is None:
            return None
        written = True
        try:
            text = self._opener.run(variables)
        except RenderError:
            text, written = "", False
        if key is not None:
            # A printed global may contain its address, which differs from run to run.
            bare = self._opener.environment.globals.keys().isdisjoint(self._facts.opener_names)
            self._known.add_opener(key, text, lasting=written and bare and self._reference.has_spare)
        return text

    def opener_after_user(self, variables: Mapping[str, Any]) -> str:
        """What a generation prompt adds after a user message, "" if nothing or unknown; rendered once."""
        fixed = self.opener(variables)
        if fixed is not None:
            return fixed
        key = repr(sorted(variables.items(), key=itemgetter(0)))
        if key not in self._openers:
            conversation = {**variables, "messages": [{"role": "user", "content": "x"}]}
            try:
                closed = self.run({**conversation, "add_generation_prompt": False})
                opened = self.run({**conversation, "add_generation_prompt": True})
            except RenderError:
                closed = opened = ""
            if len(self._openers) >= _OPENERS:
                self._openers.clear()
            self._openers[key] = opened[len(closed) :] if opened.startswith(closed) else ""
        return self._openers[key]

    @cached_property
    def _facts(self) -> Facts | None:
        """What reading the template shows; None if it cannot be parsed again."""
        if self._known.facts is None:
            try:
                facts, self._opener_tree = self._read()
            except (Exception, TimeUp):  # too deep or too large to parse again
                return None
            self._known.note(facts, lasting=self._reference.has_spare)
        return self._known.facts

    def _read(self) -> tuple[Facts, nodes.Template | None]:
        with alarm(self._time_limit):
            return read_facts(self._reference.environment.parse(self.source))

    @cached_property
    def _opener_tree(self) -> nodes.Template | None:
        return self._read()[1]

    @cached_property
    def _opener(self) -> _Reference | None:
        """The part of the template that writes the generation prompt; None if it cannot be compiled."""
        environment = self._reference.environment
        try:
            tree = self._opener_tree
            if tree is None:
                return None
            with alarm(self._time_limit):
                compiled = environment.from_string(tree)
        except (Exception, TimeUp):
            return None
        return _Reference(self.source, compiled, environment, self._time_limit, self._size_limit, has_spare=False)

    @cached_property
    def _reference(self) -> _Reference:
        return _compiled(self.source, self._where, self._time_limit, self._size_limit)


class _Reference:
    """A template in the reference environment."""

    def __init__(
        self,
        source: str,
        compiled: jinja2.Template,
        environment: ChatEnvironment,
        time_limit: float,
        size_limit: int,
        *,
        has_spare: bool,
    ) -> None:
        self.environment = environment
        self.has_spare = has_spare
        """Whether it would also have compiled deeper in the stack."""
        self._source = source
        self._compiled = compiled
        self._time_limit = time_limit
        self._size_limit = size_limit
        self._timed_out = False

    def run(self, variables: Mapping[str, Any]) -> str:
        """What the template writes for these variables; RenderError, in one line, if it fails."""
        if self._timed_out or is_given_up(self._source, self._time_limit):
            # Otherwise a looping template would use up the time limit for every prompt: hours for a log.
            raise RenderError(self._too_slow())
        budget = Budget(self._size_limit, self._time_limit, variables)
        self.environment.budget = budget
        pieces: list[str] = []
        written = 0
        try:
            with charged(self._source, self._time_limit, variables), alarm(self._time_limit, variables):
                for piece in self._compiled.generate(variables):
                    written += len(piece)
                    budget.written(written)
                    budget.spend(len(piece))
                    pieces.append(piece)
            return "".join(pieces)
        except TimeUp as error:
            let_go(error)
            self._timed_out = True
            give_up(self._source, self._time_limit)
            reason = self._too_slow()
        except Exception as error:  # a template can raise anything
            # Why a rendering failed, on one line, with the line of the template's innermost frame if known.
            line, trace = None, error.__traceback__
            while trace is not None:
                # Jinja replaces each frame of compiled template code with one that has this variable.
                if "__jinja_exception__" in trace.tb_frame.f_globals:
                    line = trace.tb_lineno
                trace = trace.tb_next
            place = "chat template" if line is None else f"chat template, line {line}"
            if isinstance(error, TemplateRefused | LimitReached):
                reason = f"{place}: {_bounded(' '.join(str(error).split()))}"
            else:
                reason = f"{place}: {_one_line(error)}"
            let_go(error)
        finally:
            budget.close()
        # Raised here, so that it does not keep the template's values alive.
        raise RenderError(reason)

    def _too_slow(self) -> str:
        if not self._timed_out:
            return "chat template: too slow or too large for what it is given; it is not run again"
        return f"chat template: not finished after {self._time_limit:g} seconds; it is not run again"


def compile_template(
    source: str,
    where: str,
    *,
    time_limit: float = TIME_LIMIT,
    size_limit: int = SIZE_LIMIT,
    store: StoredTokenizer | None = None,
) -> Template:
    """A template ready to run; SetupError, naming its origin `where`, when it is not valid Jinja.

    If the store knows that it compiles, compiling waits until it is run.
    """
    template = Template(source, where, time_limit=time_limit, size_limit=size_limit, store=store)
    if not template.is_known:
        template.load()
    return template


def _compiled(source: str, where: str, time_limit: float, size_limit: int) -> _Reference:
    import jinja2

    from tito_audit.render.sandbox import ChatEnvironment

    environment = ChatEnvironment(Budget(size_limit, time_limit))
    has_spare = True
    try:
        if len(source) > SOURCE_LIMIT:
            raise ValueError(f"it has {len(source):,} characters, past the limit of {SOURCE_LIMIT:,}")
        with alarm(time_limit):
            try:
                compiled = _deeper(_SPARE, lambda: environment.from_string(source))
            except RecursionError:
                compiled, has_spare = environment.from_string(source), False
    except TimeUp:
        reason = f"it was not compiled after {time_limit:g} seconds"
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
        reason = _one_line(error)
    else:
        return _Reference(source, compiled, environment, time_limit, size_limit, has_spare=has_spare)
    raise SetupError(
        f"{where}: the chat template cannot be used ({reason}).\n"
        "Without it no messages can be re-rendered.\n"
        "Fix the template, or pass another one with --chat-template FILE."
    )


def _deeper(frames: int, call: Callable[[], _T]) -> _T:
    """What `call` returns when it is called this many frames deeper in the stack."""
    return _deeper(frames - 1, call) if frames else call()


def _one_line(error: BaseException) -> str:
    return _bounded(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
