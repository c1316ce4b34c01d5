"""An ordinary agent: the `openai` client, a tool and a loop. Only `base_url` says which server it uses.

python examples/live/agent.py http://127.0.0.1:8377/v1
"""

from __future__ import annotations

import random
import sys
from typing import Any

from openai import OpenAI
from toy_model import CITIES, TOOLS, TURNS, question, result


def travel(client: OpenAI, model: str, trip: int) -> list[str]:
    """A trip of six turns, in which the model looks up the weather in five cities; returns its answers."""
    dice = random.Random(trip)
    cities = dice.sample(CITIES, TURNS - 1)
    messages: list[Any] = [{"role": "user", "content": question(cities)}]
    said = []
    for turn in range(TURNS):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=80, seed=100 * trip + turn
        )
        message = answer.choices[0].message
        messages.append(message)
        calls = [f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or []]
        said.append(" ".join([message.content or "", *calls]).strip())
        told = result(dice.randint(-9, 30), cities[turn + 1 :])
        if message.tool_calls:
            messages += [{"role": "tool", "tool_call_id": call.id, "content": told} for call in message.tool_calls]
        else:
            messages.append({"role": "user", "content": told})
    return said


def main(base_url: str, trips: int = 3) -> None:
    """Run some trips and print the first."""
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    first, *_ = [travel(client, model, trip) for trip in range(trips)]
    for number, line in enumerate(first, 1):
        print(f"  turn {number}: {line}")


if __name__ == "__main__":
    main(sys.argv[1])
