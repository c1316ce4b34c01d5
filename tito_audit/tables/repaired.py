"""What a repair offers besides iterating: a line about it, and a notebook's display."""

from __future__ import annotations

from tito_audit.reports import notebook_comparison, notebook_error, verdict_line
from tito_audit.summary import Summary


class ShownRepairs:
    """A repair that can be displayed. Displaying never runs it, since that may write files."""

    before: Summary
    after: Summary
    _ended = False

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self._ended:
            return f"<{name}: not run yet>"
        return f"<{name}: before: {verdict_line(self.before)} | after: {verdict_line(self.after)}>"

    def _repr_html_(self) -> str:
        """What a notebook displays: the verdict before and after, and the findings of each rule."""
        if not self._ended:
            return notebook_error(f"{type(self).__name__}: not run yet", "Iterate it, or read `repaired`.")
        return notebook_comparison(self.before, self.after)
