"""What TRL appends for results of tools: `python trl_suffix_writer.py ASKED`, as JSON.

ASKED is a JSON file: for each folder with a tokenizer, a list of lists of messages. It prints for each of these
the ids that `GRPOTrainer._get_tool_suffix_ids` gives, or null where it raises.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

from transformers import AutoTokenizer
from trl import GRPOTrainer


def suffix(tokenizer: Any, messages: list[Any]) -> list[int] | None:
    """The ids that TRL appends."""
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        chat_template=tokenizer.chat_template,
        chat_template_kwargs={},
        _is_vlm=False,
        _tokenizer=tokenizer,
    )
    try:
        return list(GRPOTrainer._get_tool_suffix_ids(trainer, messages))
    except Exception:
        return None


def main(path: str) -> None:
    answers = {}
    for folder, turns in json.loads(Path(path).read_text(encoding="utf-8")).items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        answers[folder] = [suffix(tokenizer, messages) for messages in turns]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
