"""What verl appends for new messages: `python verl_suffix_writer.py ASKED`, as JSON.

ASKED is a JSON file: for each folder with a tokenizer, a list of lists of messages. It prints for each of these
the ids that verl's agent loops append (`ToolAgentLoop`: the separator of turns, and the messages alone without
the system prompt), or null where that raises; and as `"FOLDER texts"` the ids of the texts in `TEXTS`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

from transformers import AutoTokenizer
from verl.utils.tokenizer import chat_template
from verl.utils.tokenizer.tokenizer import normalize_token_ids

TEXTS = ("What is the weather?", "  two\n\n  spaces  ")


def suffix(tokenizer: Any, messages: list[Any]) -> list[int] | None:
    """The ids that verl appends."""
    try:
        system = chat_template.initialize_system_prompt(tokenizer)
        separator = chat_template.initialize_turn_separator(tokenizer)
        alone = chat_template.apply_chat_template(tokenizer, messages, add_generation_prompt=True)
    except Exception:
        return None
    return [*separator, *normalize_token_ids(alone)[len(system) :]]


def main(path: str) -> None:
    answers: dict[str, Any] = {}
    for folder, turns in json.loads(Path(path).read_text(encoding="utf-8")).items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        answers[folder] = [suffix(tokenizer, messages) for messages in turns]
        answers[f"{folder} texts"] = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
