"""`tito-audit inspect`: the columns of a log, its format and why, and a mapping to paste."""

from __future__ import annotations

from tito_audit.cli._options import Options, find_one_log
from tito_audit.cli._outputs import print_result
from tito_audit.inspect import as_object, inspect_log, mapping_lines, page_lines


def inspect(options: Options, log: str) -> None:
    """Show what a log holds."""
    settings = options.settings()
    file = find_one_log(log)
    settings = settings.at(file)
    vocabulary = None
    if settings.tokenizer is not None:
        from tito_audit.tokens.load import load_tokenizer

        vocabulary = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code).vocabulary
    inspection = inspect_log(file, options.rows, settings, vocabulary)
    page = page_lines(inspection, vocabulary)
    paste = mapping_lines(inspection, options.reading_flags()) if inspection.columns else ()
    print_result(options.shape, lambda: as_object(inspection, vocabulary), page, paste, options.config_notice())
