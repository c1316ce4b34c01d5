"""REC011: a log whose prompts were rendered with other template arguments than are given or stated."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule(
    "REC011",
    Severity.ERROR,
    of_log=True,
    headline="{n} written with other template arguments",
    when=Occasion.NEVER,
)
def written_otherwise(evidence: Evidence) -> Iterator[Hit]:
    """The prompts were rendered with other template arguments.

    ## What it finds
    Before the audit, the first prompts of a log (up to 16, at least three) are rendered with the template and its
    arguments. If more than a fifth of them come out wrong, other arguments of the template, another date, no
    tools, arguments of tool calls as text, and the tokenizer's other templates are tried. What reproduces the
    prompts exactly, token by token, is what the log was written with: three quarters of them, or all of them where
    half were right as given. A single finding for the whole log says so (`where` is `log`), instead of the same
    finding in every row: TPL210 if only the date differs (a note), TPL212 if only the tools do, else this one; a
    warning, or an error where the rows state otherwise. The log is then audited with what was found, so that
    everything else in it shows. A log from a pipe is not checked, as it cannot be read twice. `--ignore REC011`
    audits the log with the arguments as given.

    ## Why it matters
    The trainer renders with one set of arguments what the sampler saw with another. Every prompt then differs in
    the same place, such as a reasoning block that is opened or closed, and every logprob belongs to another
    context.

    ## Example
    Prompts rendered with `enable_thinking=false`, audited without it:

    ```text
    warning REC011 the whole log
      the prompts of this log were rendered with enable_thinking=false: 4 of the first 4 prompts
      match exactly that way, none as given; the log is audited that way; pass -t toy_bpe
      --template-arg enable_thinking=false
    ```

    ## Repair
    None is needed: nothing is wrong with the ids. Pass the flags that the finding names, to the trainer as well;
    where rows state other arguments than were used (`chat_template_kwargs`), log the ones that were used.
    """
    return iter(())
