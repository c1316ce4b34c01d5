"""Faults in what a template writes."""

from __future__ import annotations

import numpy as np

from benchmarks.faults.draft import ENDS, Draft, fault


@fault("TPL201", "TPL206")
def prompt_without_template(draft: Draft) -> bool:
    """A first prompt of plain concatenated texts."""
    start = draft.runs()[0][0]
    texts = [message["content"] for message in draft.messages if message["role"] in ("system", "user")][:2]
    draft.replace(0, start, draft.kit.ids("\n".join(texts)), sampled=False)
    return True


@fault("TPL202")
def line_break_doubled(draft: Draft) -> bool:
    """An extra line break between two messages."""
    spots = np.flatnonzero(draft.ids[: draft.runs()[0][0]] == draft.end).tolist()
    if not spots:
        return False
    draft.replace(spots[-1] + 1, spots[-1] + 1, draft.kit.ids("\n"), sampled=False)
    return True


@fault("TPL203", "TPL202")
def arguments_written_anew(draft: Draft) -> bool:
    """A tool call whose arguments have other white space than the sampled ones."""
    said = [call["function"] for one in draft.answers() for call in one.get("tool_calls") or ()]
    if not said:
        return False
    runs = [run for run, one in zip(draft.runs(), draft.answers(), strict=True) if one.get("tool_calls")]
    spaces = [at for start, stop in runs for at in range(start, stop) if _is(draft, at, b'":')]
    if not spaces:
        return False
    draft.replace(spaces[-1] + 1, spaces[-1] + 1, draft.kit.ids("  "), sampled=True)
    return True


def _is(draft: Draft, at: int, data: bytes) -> bool:
    return bool(draft.kit.vocabulary.token_bytes(int(draft.ids[at])) == data)


@fault("TPL204", calls=False)
def reasoning_that_is_stripped(draft: Draft) -> bool:
    """Sampled reasoning of an earlier answer that the template leaves out today."""
    answers, runs = draft.answers(), draft.runs()
    after = draft.messages[draft.messages.index(answers[0]) :]
    if not any(message["role"] == "user" for message in after):
        return False
    answers[0]["reasoning_content"] = "Let us see."
    thought = draft.kit.ids("<think>\nLet us see.\n</think>\n\n")
    draft.replace(runs[0][0], runs[0][0], thought, sampled=True)
    return True


@fault("TPL205", "TPL299", calls=False)
def reasoning_that_is_inserted(draft: Draft) -> bool:
    """An empty reasoning block that the template writes and that was never sampled."""
    thought = draft.kit.ids("<think>\n\n</think>\n\n")
    start, stop = draft.runs()[-1]
    low = max(0, start - len(thought))
    for at in range(low, stop - len(thought)):
        if draft.ids[at : at + len(thought)].tolist() == thought:
            draft.replace(at, at + len(thought), [], sampled=False)
            return True
    return False


@fault("TPL206", "TPL212", "TPL299")
def system_prompt_missing(draft: Draft) -> bool:
    """A system prompt in the ids that is missing from the messages."""
    if draft.messages[0]["role"] != "system":
        return False
    del draft.messages[0]
    return True


@fault("TPL207", calls=False)
def generation_prompt_at_the_end(draft: Draft) -> bool:
    """A header for an answer that never came."""
    opened, closed = (draft.kit.template(draft.messages, opens) for opens in (True, False))
    header = draft.kit.ids(opened.removeprefix(closed))
    draft.replace(len(draft.ids), len(draft.ids), header, sampled=False)
    return opened.startswith(closed)


@fault("TPL208")
def another_end_token(draft: Draft) -> bool:
    """An answer that ended with the other end token."""
    named = [draft.kit.ids(text) for text in ENDS]
    others = [ids[0] for ids in named if len(ids) == 1 and ids[0] != draft.end]
    if others:
        draft.ids[draft.runs()[0][1] - 1] = others[0]
    return bool(others)


@fault("TPL209", "TPL208", "TPL299")
def bos_in_front(draft: Draft) -> bool:
    """A BOS token in front that the template does not write, or writes once."""
    first = draft.kit.bos
    draft.replace(0, 0, draft.kit.ids(ENDS[0]) if first is None else [first], sampled=False)
    return True


@fault("TPL211")
def call_that_no_template_can_write(draft: Draft) -> bool:
    """A tool call without arguments."""
    made = [call["function"] for one in draft.answers() for call in one.get("tool_calls") or ()]
    for call in made:
        del call["arguments"]
    return bool(made)


@fault("TPL212")
def tools_missing(draft: Draft) -> bool:
    """Tools in the ids that the row lacks."""
    draft.tools = None
    return True


@fault("TPL299", "TPL202", "TPL206")
def question_changed(draft: Draft) -> bool:
    """A message that differs from the ids."""
    asked = next((one for one in draft.messages if one["role"] == "user"), None)
    if asked is None:
        return False
    asked["content"] = "Something else altogether, please."
    return True
