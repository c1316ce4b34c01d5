"""Runs a writer beside this file once for each line of arguments: `python serve.py SCRIPT`.

What a framework imports takes far longer than what its writer does, so one process answers all that a process of
tests asks of it. A line in is a JSON list of arguments, a line out what the script printed, and its traceback or
null.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback


def main(script: str) -> None:
    """Answer until there is nothing more to read; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        sys.argv = [script, *json.loads(line)]
        error = None
        with io.StringIO() as out:
            try:
                with contextlib.redirect_stdout(out):
                    runpy.run_path(script, run_name="__main__")
            except (Exception, SystemExit):
                error = traceback.format_exc()
            answers.write(json.dumps([out.getvalue(), error]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
