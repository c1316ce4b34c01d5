"""REC011: a log whose prompts were written with other template arguments than are given or stated."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule("REC011", Severity.ERROR)
def written_otherwise(evidence: Evidence) -> Iterator[Hit]:
    """The prompts were written with other template arguments than are given or stated.

    ## What it finds
    Before the audit, the first prompts of a log (up to 16, three at least) are rendered with the template and its
    arguments. If more than a fifth of them come out wrong, other arguments of the template, another date, no
    tools, arguments of tool calls as text, and the tokenizer's other templates are tried. The log was written with
    what gives the prompts exactly, token by token: three quarters of them, or all where half were right as given.
    One finding of the log says so (`where` is `log`) in place of the same finding in every row: TPL210 if only the
    date differs (a note), TPL212 if only the tools do, else this one; a warning, or an error where the rows state
    otherwise. The log is then audited with what was found, so that all else in it shows. A pipe cannot be read
    twice, so it is not looked at. `--ignore REC011` audits the log with the arguments as given.

    ## Why it matters
    The trainer renders with one set of arguments what the sampler saw with another. Every prompt then differs in
    the same place, such as a reasoning block that is opened or closed, and every logprob belongs to another
    context.

    ## Example
    ```text
    the prompts of this log were written with enable_thinking=false: that gives 16 of the first 16 prompts
    exactly, the settings as given none; the log is audited with it; pass -t Qwen/Qwen3-8B --template-arg
    enable_thinking=false
    ```

    ## Repair
    None: nothing is wrong with the ids. Pass the flags that the finding names, to the trainer as well; where rows
    state other arguments than were used (`chat_template_kwargs`), log the ones that were.
    """
    return iter(())
