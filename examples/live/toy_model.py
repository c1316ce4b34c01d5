"""A toy model that learns in half a minute to look up the weather, with unusual tokens.

Like a policy in training, it does not write as its tokenizer would: it learns texts in which some tokens are
written as two smaller ones, and tool calls have varying white space. So its samples drift as soon as a server
tokenizes them again.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parents[1] / "fixtures" / "tokenizers" / "toy_bpe"
CITIES = ("Oslo", "Paris", "Rome", "Lima", "Bergen", "Tokyo")
TURNS = 6
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ENDS = ("That was the last one: take a coat.", "All done: no umbrella is needed.")
STEPS, MORE, ROUNDS = 320, 100, 5
"""Steps of the first round and of each following round while the model makes mistakes, and the most rounds."""
BATCH, SEED = 4, 7
SPLIT, WITH_TOOLS = 0.1, 0.15
"""How often a token is written as two, and how often the (constant) tools come first."""
TRIPS, ENOUGH = 10, 0.95
"""How many trips are tried after a round, and the share of their turns that must be correct."""


def question(cities: list[str]) -> str:
    """The user's first question."""
    return f"Look up the weather for my trip. First: {cities[0]}."


def result(degrees: int, rest: list[str]) -> str:
    """The tool's result, and the next request."""
    return f"{degrees} degrees. " + (f"Next: {rest[0]}." if rest else "No more.")


def call(city: str, dice: random.Random) -> str:
    """A tool call as a model may write it: the same JSON with any spacing."""
    comma, colon = dice.choice([", ", ","]), dice.choice([": ", ":", " : "])
    return (
        f'<tool_call>\n{{"name"{colon}"weather"{comma}"arguments"{colon}{{"city"{colon}"{city}"}}}}\n</tool_call>'
    )


def asked(cities: list[str]) -> str:
    """The question as the template writes it, and the start of an answer."""
    return f"<|im_start|>user\n{question(cities)}<|im_end|>\n<|im_start|>assistant\n"


def told(degrees: int, rest: list[str]) -> str:
    """The tool's result as the template writes it after the end of a turn, and the start of an answer."""
    said = f"<tool_response>\n{result(degrees, rest)}\n</tool_response>"
    return f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"


def conversation(dice: random.Random) -> list[tuple[str, bool]]:
    """The texts of a conversation, each with whether the model writes it."""
    cities = dice.sample(CITIES, dice.choice((1, 2, 2, 3, 5)))
    parts = [(asked(cities), False)]
    for number, city in enumerate(cities):
        reply = told(dice.randint(-9, 30), cities[number + 1 :])
        parts += [(call(city, dice) + "<|im_end|>", True), (reply, False)]
    return [*parts, (dice.choice(ENDS) + "<|im_end|>", True)]


def right(answer: str, city: str | None) -> bool:
    """Whether an answer looks up this city or, without a city, ends the trip."""
    if city is None:
        return answer in ENDS
    try:
        said = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    except ValueError:
        return False
    return bool(said == {"name": "weather", "arguments": {"city": city}}) and answer.startswith("<tool_call>")


def build(folder: Path) -> Path:
    """The folder of the model, trained on first use."""
    stamp = folder / "taught.txt"
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == recipe:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _teach().save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    stamp.write_text(recipe)
    return folder


def _teach() -> Any:
    """A Qwen2 of 0.4 M weights, trained until its trips succeed."""
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    model, examples = _untaught(tokenizer), _examples(tokenizer)
    for number in range(ROUNDS):
        _learn(model, examples, MORE if number else STEPS, 0.5 if number else 1.0)
        share = _rehearsed(model, tokenizer, random.Random(SEED + number))
        print(f"correct turns: {share:.0%}", file=sys.stderr, flush=True)
        if share >= ENOUGH:
            return model
    raise SystemExit("the toy model failed to learn on this machine")


def _untaught(tokenizer: Any) -> Any:
    """A model with random weights."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    ends = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"), "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def _learn(model: Any, examples: Iterator[tuple[list[int], list[int]]], steps: int, speed: float) -> None:
    """Train some steps; matrices with Muon, with which such a small model learns twice as fast."""
    import torch

    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name]
    others = [one for name, one in model.named_parameters() if one.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=0.02 * speed, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=0.01 * speed, betas=(0.9, 0.98), weight_decay=0.01)
    rates = [
        torch.optim.lr_scheduler.OneCycleLR(one, one.defaults["lr"], steps, pct_start=0.1, cycle_momentum=False)
        for one in (muon, adam)
    ]
    model.train()
    for _ in range(steps):
        _loss(model, [next(examples) for _ in range(BATCH)]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in (muon, adam, *rates):
            one.step()
        model.zero_grad()
    model.eval()


def _loss(model: Any, batch: list[tuple[list[int], list[int]]]) -> Any:
    """The loss on what the model should have written."""
    import torch

    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for _, row in batch])[:, 1:]
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    learned = labels != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learned]), labels[learned])


def _rehearsed(model: Any, tokenizer: Any, dice: random.Random) -> float:
    """The share of correct turns in some trips, run in a batch."""
    trips = [dice.sample(CITIES, TURNS - 1) for _ in range(TRIPS)]
    texts = [_head(tokenizer) + asked(cities) for cities in trips]
    talks = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    correct = 0
    for turn in range(TURNS):
        answers = _sampled(model, talks)
        for talk, answer, cities in zip(talks, answers, trips, strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            correct += right(text, cities[turn] if turn < len(cities) else None)
            talk += answer + tokenizer.encode(
                told(dice.randint(-9, 30), cities[turn + 1 :]), add_special_tokens=False
            )
    return correct / TRIPS / TURNS


def _sampled(model: Any, talks: list[list[int]]) -> list[list[int]]:
    """The model's answers, each up to the end of its turn."""
    import torch

    config = model.generation_config
    longest = max(map(len, talks))
    ids = torch.tensor([[config.pad_token_id] * (longest - len(talk)) + talk for talk in talks])
    there = torch.tensor([[0] * (longest - len(talk)) + [1] * len(talk) for talk in talks])
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 80}
    answers = model.generate(ids, attention_mask=there, **sampling)[:, longest:].tolist()
    end = config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in answers]


def _head(tokenizer: Any) -> str:
    """The part of the prompt that describes the tools."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tools=TOOLS, tokenize=False)
    return str(text[: text.index("<|im_start|>user")])


def _examples(tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Endless ids and labels of conversations; only what the model writes is learned, with unusual tokens."""
    dice, own, head = random.Random(SEED), _OwnTokens(tokenizer), _head(tokenizer)
    while True:
        ids: list[int] = []
        labels: list[int] = []
        tools = [(head, False)] if dice.random() < WITH_TOOLS else []
        for text, written in [*tools, *conversation(dice)]:
            new = tokenizer.encode(text, add_special_tokens=False)
            new = [small for token in new for small in own(token, dice)] if written else new
            ids += new
            labels += new if written else [-100] * len(new)
        yield ids, labels


class _OwnTokens:
    """Sometimes writes a token as two that spell the same, always the same two."""

    def __init__(self, tokenizer: Any) -> None:
        self.entries: dict[str, int] = tokenizer.get_vocab()
        controls = tokenizer.added_tokens_decoder
        self.pieces = {number: piece for piece, number in self.entries.items() if number not in controls}

    def __call__(self, token: int, dice: random.Random) -> list[int]:
        piece = self.pieces.get(token, "")
        cuts = [at for at in range(1, len(piece)) if {piece[:at], piece[at:]} <= self.entries.keys()]
        if not cuts or dice.random() > SPLIT:
            return [token]
        at = cuts[len(cuts) // 2]
        return [self.entries[piece[:at]], self.entries[piece[at:]]]


if __name__ == "__main__":
    began = time.perf_counter()
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/live/model"))
    print(f"taught in {time.perf_counter() - began:.0f} s", file=sys.stderr)
