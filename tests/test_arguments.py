"""What is read off a chat template about its arguments."""

from __future__ import annotations

import pytest

from tests.tables import table
from tito_audit.render.arguments import Argument, TemplateArguments
from tito_audit.render.template import compile_template


def arguments(source: str) -> TemplateArguments:
    return compile_template(source, "a test").arguments


def argument(source: str) -> Argument:
    """The only argument of a template."""
    (only,) = arguments(source).arguments
    return only


def test_an_argument_is_a_variable_that_is_read_before_it_is_set() -> None:
    source = (
        "{% if thinking is defined %}{{ bos_token }}{% endif %}"
        "{% for message in messages %}{% set content = message.content %}{{ content }}{{ loop.index }}{% endfor %}"
        "{% if messages %}{% set first = messages[0] %}{% else %}{% set first = 1 %}{% endif %}{{ first }}"
        "{% macro m(x, y=padding) %}{{ x }}{{ y }}{{ caller }}{% endmacro %}{{ m(1) }}"
        "{% with a = 1 %}{{ a }}{% endwith %}{{ tools }}{{ documents }}{% if add_generation_prompt %}x{% endif %}"
    )
    assert [entry.name for entry in arguments(source).arguments] == ["thinking", "padding"]


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("{% if x is defined and x is false %}a{% endif %}", (False, True)),
        ("{% if not x %}a{% endif %}", (True, False)),
        ("{% if x is defined %}a{% endif %}", (True, False)),
        ("{% if x == 'a' or 'b' == x %}a{% endif %}", ("a", "b")),
        ("{% if x.lower() in ['low', 'high'] %}a{% endif %}", ("low", "high")),
        ("{% set m = {'low': 1, 'high': 2} %}{{ m[x] }}", ("low", "high")),
        (
            "{% if 'browser' in x and 'python' in x %}a{% endif %}",
            (["browser"], ["python"], ["browser", "python"]),
        ),
        ("{% for y in x %}{% if y == 'browser' %}a{% endif %}{% endfor %}", (["browser"],)),
        ("{% if x %}{{ x | reject('equalto', 'python') | join(', ') }}{% endif %}", (["python"],)),
        ("{% if x | default(true) %}a{% endif %}", (True, False)),
        ("{% set y = x or 'mid' %}{% if y == 'top' %}a{% endif %}", ("mid", "top")),
        ("{% set ns = namespace(v=x) %}{% if ns.v == 'top' %}a{% endif %}", ("top",)),
        ("{% if x > 3 %}a{% endif %}", (3, 4, 2)),
        ("{% if x is none %}a{% endif %}", (None,)),
        ("{% macro m(v) %}{% if v == 'in' %}a{% endif %}{% endmacro %}{{ m(x) }}", ("in",)),
    ],
)
def test_the_values_that_a_template_tells_apart_are_found(source: str, values: tuple[object, ...]) -> None:
    told_apart = argument(source).values
    assert sorted(map(repr, told_apart)) == sorted(map(repr, values))


@pytest.mark.parametrize(*table(__file__, "an_argument_is_written_if_its_value_gets_into_the_prompt"))
def test_an_argument_is_written_if_its_value_gets_into_the_prompt(source: str, written: bool) -> None:
    assert argument(source).written is written


def test_defaults_are_found_with_the_format_of_a_date() -> None:
    source = (
        "{% if date_string is not defined %}{% if strftime_now is defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}"
        "{% endif %}{% endif %}{{ date_string }}"
    )
    result = arguments(source)
    expected = Argument(
        "date_string", ("26 Jul 2024",), written=True, default="26 Jul 2024", clock_format="%d %b %Y"
    )
    assert result == TemplateArguments((expected,), reads_clock=True, clock_formats=("%d %b %Y",))
    assert result.named("date_string") == expected
    assert result.named("thinking") is None


def test_a_template_that_reads_nothing_has_no_arguments() -> None:
    source = "{% for message in messages %}{{ eos_token }}{{ message.content }}{% endfor %}"
    assert arguments(source) == TemplateArguments()
