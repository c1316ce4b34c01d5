"""REC002: a loss mask that does not fit its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.column import ColumnRole, MaskEncoding, expand
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._masks import has_shifted_column
from tito_audit.rules._words import counted, head

_IGNORED = -100


@rule("REC002", Severity.ERROR, headline="{n} with misaligned columns", needs=(Needs.ROW,))
def misfit_columns(evidence: Evidence) -> Iterator[Hit]:
    """The loss mask does not fit its tokens.

    ## What it finds
    A mask with more or fewer entries than the row or its response has tokens. A mask whose values are neither 0
    and 1, nor weights, nor -100 and ids (0, 2, 3 may count turns or segments; nothing says which of them are
    trained). A mask of labels whose entries are not the ids of their own tokens; the finding says if they are the
    ids one place further. Logprobs that do not fit belong to LPR501.

    ## Why it matters
    What a trainer does with such a row depends on how it pads and truncates: usually each entry lands on a
    neighbouring token. Labels that are one place off train every token to predict itself, or skip one.

    ## Example
    A mask one entry short:

    ```text
    error REC002 row 0:4
      `loss_mask` has 2 entries for 4 tokens; nothing says which token each entry belongs to
           0 │2 │4 │!│<|im_end|>│
          id  17 19 0 2002
      loss_mask  0  1
    ```

    ## Repair
    `splice` rebuilds the mask from the calls. `realign` moves labels back where the shift is provable. Otherwise
    fix the code that writes the mask.
    """
    row = evidence.rollout.training_row
    if row is None:
        return
    for column in row.columns:
        if column.role is not ColumnRole.LOSS_MASK:
            continue
        if column.alignment is None:
            message = f"`{column.name}` has {counted(len(column.values), 'entry', 'entries')} for "
            targets = has_shifted_column(row, ColumnRole.LOGPROBS)
            message += counted(len(row.token_ids) - targets, "target token" if targets else "token")
            if row.prompt_length:
                message += f" ({len(row.token_ids) - row.prompt_length} after the prompt)"
            message += "; nothing says which token each entry belongs to"
            yield Hit(Where.ROW, 0, len(row.token_ids), message, cause="mask length")
            continue
        if column.encoding is None:
            values, what = column.values, "are not numbers"
            if values.dtype.kind in "iuf" and len(values):
                finite = values[~np.isnan(values.astype(np.float64))]
                what = f"lie between {finite.min():g} and {finite.max():g}" if len(finite) else "are all null"
                what += ", some null" if 0 < len(finite) < len(values) else ""
            not_one = "they are not a mask of 0 and 1, of weights, or of -100 and ids"
            message = f"the values of `{column.name}` {what}; {not_one}"
            yield Hit(Where.ROW, 0, len(row.token_ids), message, cause="values are no mask")
        if column.encoding is not MaskEncoding.LABELS:
            continue
        full, values = len(row.token_ids), column.values.astype(np.int64)
        labels = expand(values, column.alignment, full=full, prompt_length=row.prompt_length, fill=_IGNORED)
        labelled = labels != _IGNORED
        wrong = labelled & (labels != row.token_ids)
        if not wrong.any():
            continue
        marked, slide = labelled.nonzero()[0], 0
        for by in (1, -1):  # every label is the id one place before it, or the one after it
            source = marked - by
            inside = (source >= 0) & (source < full)
            if not slide and inside.all() and np.array_equal(labels[marked], row.token_ids[source]):
                slide = by
        for start, end in [(int(marked[0]), int(marked[-1]) + 1)] if slide else trained_runs(wrong):
            count = int(wrong[start:end].sum())
            message = f"{counted(count, 'label')} of `{column.name}` {'is' if count == 1 else 'are'}"
            if slide:
                cause, side = f"labels slid by {slide:+d}", "before" if slide > 0 else "after"
                message += f" the id of the token one place {side} their own: the labels are off by {slide:+d}"
            else:
                cause = "labels of other tokens"
                message += " not the id of their token; mask and tokens were made from different sequences"
            tokens = head(evidence, row.token_ids[start:end])
            yield Hit(Where.ROW, start, end, message, cause=cause, recorded=tokens)
