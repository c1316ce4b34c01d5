"""What TRL makes of chat data before SFT: `python trl_sft_writer.py JOB OUT`, by a Python that has TRL and torch.

Not a test: tests run it with another Python. JOB is a JSON file, `{"tokenizer": FOLDER, "template": NAME, "kind":
"messages" | "assistant" | "completion", "rows": [...]}`: `NAME` is a file of TRL's `trl/chat_templates`, null for
the tokenizer's own. OUT gets one JSON line for each row that `SFTTrainer._prepare_dataset` keeps: `input_ids`,
`labels`. With `"load": true` OUT gets the batch that TRL's collator makes of them instead.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false")


def prepared(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows as TRL tokenizes them."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

    folder = Path(job["tokenizer"])
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {name: _plain(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=config.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: value for name, value in special.items() if value is not None},
    )
    source = None
    if job["template"] is not None:
        source = _source(job["template"])
    arguments = SimpleNamespace(
        dataset_num_proc=None,
        assistant_only_loss=job["kind"] == "assistant",
        dataset_text_field="text",
        max_length=job.get("max_length"),
        truncation_mode="keep_start",
        shuffle_dataset=False,
    )
    trainer = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=source,
        completion_only_loss=job["kind"] == "completion",
        _is_vlm=False,
    )
    # A list of rows, not a table: keys that only some messages have stay away from the others.
    dataset = Dataset.from_list(job["rows"])
    dataset = SFTTrainer._prepare_dataset(trainer, dataset, tokenizer, arguments, False, None, "train")
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in dataset]
    if not job.get("load"):
        return rows
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
    return [{name: values.tolist() for name, values in batch.items()}]


def _source(name: str) -> str:
    (package,) = find_spec("trl").submodule_search_locations  # type: ignore[union-attr, misc]
    return (Path(package) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _plain(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def main(job: str, out: str) -> None:
    """Write the rows; or print a template of TRL's: `--template NAME`."""
    if job == "--template":
        print(_source(out), end="")
        return
    with Path(out).open("w", encoding="utf-8") as file:
        for row in prepared(json.loads(Path(job).read_text(encoding="utf-8"))):
            file.write(json.dumps(row) + "\n")
    print(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
