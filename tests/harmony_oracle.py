"""Run by a Python that has openai-harmony: texts of answers as JSON on stdin, what the library makes of each on
stdout: its messages as [channel, recipient, text], or null where it refuses the text."""

from __future__ import annotations

import json
import sys

from openai_harmony import (
    HarmonyEncoding,
    HarmonyEncodingName,
    HarmonyError,
    Role,
    StreamableParser,
    load_harmony_encoding,
)


def messages(encoding: HarmonyEncoding, text: str) -> list[list[str | None]] | None:
    """The messages of an answer that `<|start|>assistant` has begun."""
    parser = StreamableParser(encoding, role=Role.ASSISTANT)
    try:
        for token in encoding.encode(text, allowed_special="all"):
            parser.process(token)
        parser.process_eos()
    except HarmonyError:
        return None
    return [
        [message.channel, message.recipient, "".join(part.text for part in message.content)]
        for message in parser.messages
    ]


if __name__ == "__main__":
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    json.dump([messages(encoding, text) for text in json.load(sys.stdin)], sys.stdout)
