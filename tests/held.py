"""The command with slow workers: `python -m tests.held SECONDS ARGUMENTS...`.

Each task takes a worker process so many seconds more, so that a test finds the run at work on any machine.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tito_audit.cli import main
from tito_audit.run import workers

if __name__ == "__main__":
    seconds, answered = float(sys.argv.pop(1)), workers.answer_task

    def slowly(work: Any, task: Any) -> bytes:
        time.sleep(seconds)
        return answered(work, task)

    workers.answer_task = slowly
    main()
