"""A chat template, compiled once and run within limits."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from tito_audit.errors import RenderError, SetupError
from tito_audit.render.facts import Facts, StoredFacts, TextConditions, read_facts
from tito_audit.render.globals import GENERATION, TemplateRefused, has_generation
from tito_audit.render.limits import (
    Budget,
    LimitReached,
    TimeUp,
    alarm,
    count_waste,
    free_frames,
    is_too_slow,
    mark_too_slow,
)
from tito_audit.tokens.cache import StoredTokenizer

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes

    from tito_audit.render.arguments import TemplateArguments
    from tito_audit.render.fast.render import FastTemplate
    from tito_audit.render.sandbox import ChatEnvironment
    from tito_audit.render.tracer import TemplateTracer

TIME_LIMIT = 3.0
"""Seconds one rendering may take."""
SIZE_LIMIT = 64 * 1024 * 1024
"""Characters one rendering may write."""
SOURCE_LIMIT = 256 * 1024
"""Characters of a template; the longest published ones have a tenth of that."""
_MAX_REASON = 500
_SPARE_FRAMES = 200
"""A template is sure to compile in later runs if it compiles this many frames deeper in the stack."""
_MAX_PROMPTS = 64
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
        self._stored = StoredFacts(source, (time_limit, size_limit), store)
        self._tools: Sequence[Any] = ()
        self._tools_key: bytes | None = None
        self._last_plain: list[Any] = []
        self._prompts_after_user: dict[str, str] = {}
        self.memo: dict[Hashable, Any] = {}

    @property
    def is_known_to_compile(self) -> bool:
        """Whether an earlier run found that it compiles."""
        return self._stored.facts is not None

    def load(self) -> None:
        """Compile it now; SetupError if it is not valid Jinja."""
        self._reference  # noqa: B018 - kept from now on

    def convert_tools(self, tools: Sequence[Any], plain: Callable[[Any], Any]) -> list[Any]:
        """The tools in plain JSON types; kept, since most rows of a log have the same tools."""
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
        """The text for these variables; RenderError, in one line, if the template fails."""
        return self._reference.run(variables)

    def generation_ranges(self, variables: Mapping[str, Any], text: str) -> list[tuple[int, int]] | None:
        """The ranges of its `text` inside `{% generation %}`; None without such tags, or if unknown."""
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
        """The template in minijinja; None if only the reference environment can run it."""
        if self._facts is None or not self._facts.minijinja_safe:
            return None
        from tito_audit.render.fast.render import compile_fast

        try:
            with alarm(self._time_limit):
                return compile_fast(self.source, self._facts)
        except TimeUp:
            return None

    def tracer(self) -> TemplateTracer:
        """A copy of the template that traces which of its tags writes what."""
        from tito_audit.render.tracer import TemplateTracer

        return TemplateTracer(self.source, self._time_limit, self._size_limit)

    @property
    def text_conditions(self) -> TextConditions | None:
        """What it tests texts for; None if it may depend on texts in another way."""
        return self._facts.text_conditions if self._facts is not None else None

    @cached_property
    def arguments(self) -> TemplateArguments:
        """The arguments that it reads; none if it cannot be parsed."""
        from tito_audit.render.arguments import TemplateArguments, find_arguments

        try:
            with alarm(self._time_limit):
                return find_arguments(self._reference.environment.parse(self.source))
        except (Exception, TimeUp):  # too deep or too large to parse again
            return TemplateArguments()

    def fixed_generation_prompt(self, variables: Mapping[str, Any]) -> str | None:
        """The generation prompt after any messages; "" if writing it fails; None if it may depend on the messages.

        `variables` are all except the messages.
        """
        if self._facts is None or self._facts.generation_prompt_variables is None:
            return None
        key, text = self._stored.find_generation_prompt(variables)
        if text is not None:
            return text
        if self._generation_prompt is None:
            return None
        written = True
        try:
            text = self._generation_prompt.run(variables)
        except RenderError:
            text, written = "", False
        if key is not None:
            # A global may be printed with its address, which differs from run to run.
            names = self._facts.generation_prompt_variables
            lasting = self._generation_prompt.environment.globals.keys().isdisjoint(names)
            lasting = lasting and written and self._reference.has_spare
            self._stored.add_generation_prompt(key, text, lasting=lasting)
        return text

    def generation_prompt_after_user(self, variables: Mapping[str, Any]) -> str:
        """The generation prompt after a user message; "" if there is none or it is unknown."""
        fixed = self.fixed_generation_prompt(variables)
        if fixed is not None:
            return fixed
        key = repr(sorted(variables.items(), key=itemgetter(0)))
        if key not in self._prompts_after_user:
            conversation = {**variables, "messages": [{"role": "user", "content": "x"}]}
            try:
                closed = self.run({**conversation, "add_generation_prompt": False})
                opened = self.run({**conversation, "add_generation_prompt": True})
            except RenderError:
                closed = opened = ""
            if len(self._prompts_after_user) >= _MAX_PROMPTS:
                self._prompts_after_user.clear()
            self._prompts_after_user[key] = opened[len(closed) :] if opened.startswith(closed) else ""
        return self._prompts_after_user[key]

    @cached_property
    def _facts(self) -> Facts | None:
        """What static analysis of the template shows; None if it cannot be parsed again."""
        if self._stored.facts is None:
            try:
                facts, self._generation_prompt_tree = self._read_facts()
            except (Exception, TimeUp):  # too deep or too large to parse again
                return None
            self._stored.add_facts(facts, lasting=self._reference.has_spare)
        return self._stored.facts

    def _read_facts(self) -> tuple[Facts, nodes.Template | None]:
        with alarm(self._time_limit):
            return read_facts(self._reference.environment.parse(self.source))

    @cached_property
    def _generation_prompt_tree(self) -> nodes.Template | None:
        return self._read_facts()[1]

    @cached_property
    def _generation_prompt(self) -> _CompiledTemplate | None:
        """The part of the template that writes the generation prompt; None if it cannot be compiled."""
        environment = self._reference.environment
        try:
            tree = self._generation_prompt_tree
            if tree is None:
                return None
            with alarm(self._time_limit):
                compiled = environment.from_string(tree)
        except (Exception, TimeUp):
            return None
        limits = self._time_limit, self._size_limit
        return _CompiledTemplate(self.source, compiled, environment, *limits, has_spare=False)

    @cached_property
    def _reference(self) -> _CompiledTemplate:
        import jinja2

        from tito_audit.render.sandbox import ChatEnvironment

        source, limits = self.source, (self._time_limit, self._size_limit)
        environment = ChatEnvironment(Budget(self._size_limit, self._time_limit))
        has_spare = True
        try:
            if len(source) > SOURCE_LIMIT:
                raise ValueError(f"it has {len(source):,} characters, past the limit of {SOURCE_LIMIT:,}")
            with alarm(self._time_limit):
                try:
                    compiled = _call_deeper(_SPARE_FRAMES, lambda: environment.from_string(source))
                except RecursionError:
                    compiled, has_spare = environment.from_string(source), False
            return _CompiledTemplate(source, compiled, environment, *limits, has_spare=has_spare)
        except TimeUp:
            reason = f"it was not compiled after {self._time_limit:g} seconds"
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}"
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
            reason = _describe_error(error)
        raise SetupError(
            f"{self._where}: the chat template cannot be used ({reason}).\n"
            "Without it no messages can be re-rendered.\n"
            "Fix the template, or pass another one with --chat-template FILE."
        )


class _CompiledTemplate:
    """A template compiled by the reference environment."""

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
        """Whether it also compiles `_SPARE_FRAMES` deeper in the stack."""
        self._source = source
        self._compiled = compiled
        self._time_limit = time_limit
        self._size_limit = size_limit
        self._timed_out = False

    def run(self, variables: Mapping[str, Any]) -> str:
        """The text for these variables; RenderError, in one line, if the template fails."""
        if self._timed_out or is_too_slow(self._source, self._time_limit):
            # A looping template would use up the time limit for each prompt: hours for a log.
            raise RenderError(self._too_slow())
        budget = Budget(self._size_limit, self._time_limit, variables)
        self.environment.budget = budget
        pieces: list[str] = []
        written = 0
        try:
            with count_waste(self._source, self._time_limit, variables), alarm(self._time_limit, variables):
                for piece in self._compiled.generate(variables):
                    written += len(piece)
                    budget.check_output(written)
                    budget.spend(len(piece))
                    pieces.append(piece)
            return "".join(pieces)
        except TimeUp as error:
            free_frames(error)
            self._timed_out = True
            mark_too_slow(self._source, self._time_limit)
            reason = self._too_slow()
        except Exception as error:  # a template can raise anything
            # The error on one line, with the line of the template's innermost frame if known
            line, trace = None, error.__traceback__
            while trace is not None:
                # Jinja replaces each frame of compiled template code with one that has this variable.
                if "__jinja_exception__" in trace.tb_frame.f_globals:
                    line = trace.tb_lineno
                trace = trace.tb_next
            place = "chat template" if line is None else f"chat template, line {line}"
            if isinstance(error, TemplateRefused | LimitReached):
                reason = f"{place}: {_shorten(' '.join(str(error).split()))}"
            else:
                reason = f"{place}: {_describe_error(error)}"
            free_frames(error)
        finally:
            budget.close()
        # Outside of `except`, so that the error does not keep the template's values alive
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
    """A template ready to run; SetupError, naming its origin `where`, if it is not valid Jinja.

    It is compiled now, unless the store says that it compiles: then on its first run.
    """
    template = Template(source, where, time_limit=time_limit, size_limit=size_limit, store=store)
    if not template.is_known_to_compile:
        template.load()
    return template


def _call_deeper(frames: int, call: Callable[[], _T]) -> _T:
    """The result of `call`, called this many frames deeper in the stack."""
    return _call_deeper(frames - 1, call) if frames else call()


def _describe_error(error: BaseException) -> str:
    return _shorten(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"
