"""A managed server: chat and text completions whose ids, labels and logprobs are tracked while they are sampled.

    async with managed_server(provider, tokenizer="DIR") as managed:
        answer = await managed.chat_completion(messages=messages, n=4, max_tokens=512)
        nodes = managed.get_state()["nodes"]

Names and shapes are those of Atropos' `ManagedServer`. What is sent is always token ids: those that were sampled
before, and the template's text for what is new. How the two differ: docs/managed-server.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from tito_audit.errors import ProviderError, SetupError
from tito_audit.parser import Parser, Reads
from tito_audit.parsers import parser_named
from tito_audit.provider import GenerationResult, SamplingParams, TokenProvider, logged_spans
from tito_audit.record.arrays import Ids
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.sessions.engine import Conversations, with_content_form
from tito_audit.sessions.fit import as_tokenizer, find_tokenizer
from tito_audit.sessions.model import Node, Prompt
from tito_audit.sessions.sample import Sample, SampleStatus
from tito_audit.sessions.session import Session
from tito_audit.sessions.shapes import (
    AnswerReader,
    ResponseHead,
    TokenView,
    answer_types,
    parse_chat_call,
    parse_sampling,
    usage_of,
)
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

UNTRAINED = -100
"""The label of a token that is not trained."""
UNSAMPLED = 1.0
"""The logprob of a token that is not trained; real ones are never above zero."""


@dataclass(slots=True)
class SequenceNode:
    """One sequence of a managed server, with the fields that Atropos gives it."""

    full_text: str
    """What the ids spell, special tokens included."""
    tokens: list[int]
    """`[T]` every id as the sampler was given or returned it."""
    masked_tokens: list[int]
    """`[T]` the id of a trained token, else -100."""
    logprobs: list[float]
    """`[T]` the sampler's logprob of a trained token, else 1.0."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`finish_reason`, `stop_reason`, `weight_version`, `call_id` and `choice`, as far as they are known;
    `weight_versions`, spans of `tokens`, where several versions sampled them; how the prompt was made: `branch`
    (`start`, `continues`, `fork`), `kept` (how many ids are an earlier answer's), `proof`, `fork` and
    `fork_detail` (why it does not continue); and in a tree `key` and `parent`.
    """
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as the chat template was given it, the answer last; [] for a text prompt, and where the
    template was given tools or arguments, which a group has no place for."""
    prompt: str | list[dict[str, Any]] = ""
    """The messages before the first answer; the text before it where there are none."""
    response: str = ""
    """What the ids from the first answer on spell."""
    prompt_length: int = 0
    """How many ids come before the first answer."""

    def model_dump(self) -> dict[str, Any]:
        """The node as plain values, for JSON."""
        return asdict(self)

    def as_sample(self, reward: float = 0.0, **fields: Any) -> Sample:
        """The node as a training sample: a loss mask and logprobs over all ids, 0.0 where nothing is trained.

        `fields` are further fields of the sample, such as `index` and `group_index`. Its status is `truncated`
        where the last answer was cut. ValueError for placeholders, which were never sampled.
        """
        if self.metadata.get("dummy_tokens"):
            raise ValueError("The ids of this node are placeholders, which were never sampled.")
        trained = [label != UNTRAINED for label in self.masked_tokens]
        cut = self.metadata.get("finish_reason") == "length"
        stated: dict[str, Any] = {
            "prompt": self.prompt,
            "response": self.response,
            "tokens": self.tokens,
            "loss_mask": [float(is_trained) for is_trained in trained],
            "rollout_log_probs": [
                value if is_trained else 0.0 for is_trained, value in zip(trained, self.logprobs, strict=True)
            ],
            "metadata": self.metadata,
            "status": SampleStatus.TRUNCATED if cut else SampleStatus.COMPLETED,
            "messages": self.messages,
            "prompt_length": self.prompt_length,
        }
        return Sample(**{**stated, "reward": reward, **fields})


def ancestors(node: Node) -> Iterator[tuple[Node, int]]:
    """(answer, ids of it that are kept) for an answer and those that its prompt continues, the last first."""
    count = node.length
    while True:
        yield node, count
        if node.parent is None:
            return
        node, count = node.parent, min(count, node.prompt.kept)


def build_sequence(
    node: Node, vocabulary: Vocabulary, trains: set[int] | None = None, **more: Any
) -> SequenceNode:
    """The sequence that ends with an answer.

    `trains` holds the `id` of each answer that another sequence trains: these are masked, and the others added.
    None: only this answer is trained.
    """
    tokens = node.seen_ids
    trained = np.zeros(len(tokens), np.bool_)
    logprobs = np.full(len(tokens), UNSAMPLED)
    first = node
    for link, count in ancestors(node):
        if link.prompt.length < first.prompt.length:
            first = link
        start = link.prompt.length
        if (link is not node and trains is None) or id(link) in (trains or ()):
            continue
        trained[start:count] = True
        logprobs[start:count] = link.logprobs[: max(count - start, 0)]
        if trains is not None:
            trains.add(id(link))
    prompt, call = node.prompt, node.call
    # Whether messages alone render to the sequence
    alone = prompt.written is not None and not (call.tools or call.template_kwargs) and call.add_generation_prompt
    metadata: dict[str, Any] = {
        "finish_reason": node.finish_reason,
        "call_id": node.call_id,
        "choice": node.choice,
        "branch": str(prompt.branch),
        "kept": prompt.kept,
        "stop_reason": node.stop_reason,
        "weight_version": node.weight_version,
        "proof": str(prompt.proof) if prompt.proof is not None else None,
        "fork": str(prompt.fork.reason) if prompt.fork is not None else None,
        "fork_detail": prompt.fork.detail if prompt.fork is not None else None,
    }
    # The weight versions that sampled the tokens of the sequence, as spans, if there are several.
    spans: list[tuple[str, int, int]] = []
    for link, count in reversed(list(ancestors(node))):
        start, whole = link.prompt.length, link.weight_version
        own = link.weight_spans or (() if whole is None else ((whole, 0, len(link.output_ids)),))
        spans += [(version, start + at, min(start + end, count)) for version, at, end in own if start + at < count]
    if len({version for version, _, _ in spans}) > 1:
        metadata["weight_versions"] = logged_spans(tuple(spans), node.length)
    return SequenceNode(
        vocabulary.text(tokens),
        tokens.tolist(),
        np.where(trained, tokens, UNTRAINED).tolist(),
        logprobs.tolist(),
        {name: value for name, value in metadata.items() if value is not None} | more,
        [*_prompt_messages(node), dict(node.message.wire)] if alone else [],
        _prompt_messages(first) or vocabulary.text(tokens[: first.prompt.length]),
        vocabulary.text(tokens[first.prompt.length :]),
        first.prompt.length,
    )


def _prompt_messages(node: Node) -> list[dict[str, Any]]:
    """The messages that an answer was given; [] for a text prompt."""
    written = node.prompt.written
    return [] if written is None else [dict(message.wire) for message in written.messages]


def short_digest(ids: Ids) -> str:
    """A short name of a sequence of ids."""
    return sha256(ids.tobytes()).hexdigest()[:12]


def as_group(
    nodes: Sequence[SequenceNode],
    scores: Sequence[float],
    *,
    messages: bool = True,
) -> dict[str, Any]:
    """Sequences with their scores as an Atropos group, the row that `scan` reads as `atropos_group`.

    With `messages` it holds the conversations too, if messages alone are enough for all of them; a scan then
    renders them. ValueError if there are not as many scores as nodes.
    """
    if len(scores) != len(nodes):
        raise ValueError(f"{len(nodes)} nodes and {len(scores)} scores: they cannot be matched")
    group: dict[str, Any] = {
        "tokens": [node.tokens for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "scores": [float(score) for score in scores],
        "inference_logprobs": [node.logprobs for node in nodes],
    }
    if messages and nodes and all(node.messages for node in nodes):
        group["messages"] = [node.messages for node in nodes]
    if any(node.metadata.get("dummy_tokens") for node in nodes):
        group["dummy_tokens"] = True
    return group


@asynccontextmanager
async def managed_server(
    provider: TokenProvider | Any,
    tokenizer: Tokenizer | str | Path | None = None,
    track_tree: bool = False,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    *,
    chat_template: str | None = None,
    train_once: bool = True,
    dummy: bool = False,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[ManagedServer | PlaceholderServer]:
    """A managed server for an `async with` block; it forgets everything at the end.

    `provider` samples token ids. A client of a text API, such as `openai.AsyncOpenAI`, returns no ids and is
    refused with SetupError, unless `dummy` is true or the environment variable ATROPOS_ALLOW_DUMMY_MANAGED_SERVER
    is set: then nodes hold placeholders that say so (`metadata["dummy_tokens"]`), and none of them is trained.
    `tokenizer` None: that of the served model, by the folder or name that the server states, compared with the
    server's own where it can encode; SetupError if it is not here.
    `chat_template` is the source of a template that replaces the tokenizer's own. Branches share the answers
    before them: with `train_once` the first branch trains them and the others mask them, else every branch does.
    """
    managed: ManagedServer | PlaceholderServer
    if callable(getattr(provider, "generate_n", None)):
        if tokenizer is None:
            tokenizer = await find_tokenizer(provider)
        managed = ManagedServer(
            provider,
            as_tokenizer(tokenizer),
            track_tree,
            tool_parser,
            reasoning_parser,
            chat_template=chat_template,
            train_once=train_once,
            clock=clock,
        )
    elif dummy or os.environ.get(VARIABLE, "").lower() in ("1", "true", "yes"):
        managed = PlaceholderServer(provider, track_tree)
    else:
        raise SetupError(
            f"A managed server needs token ids, and {type(provider).__name__} returns text: ids encoded "
            "from text may differ from the sampled ids.\n"
            "Pass a provider of vLLM, SGLang, TRL or Hugging Face. If nothing is trained, `dummy=True` gives "
            "placeholders."
        )
    try:
        yield managed
    finally:
        managed.close()


class ManagedServer:
    """Tracks the completions of one provider. Calls may run concurrently."""

    def __init__(
        self,
        provider: TokenProvider,
        tokenizer: Tokenizer,
        track_tree: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        *,
        chat_template: str | None = None,
        train_once: bool = True,
        clock: Callable[[], float] = time.time,
        renderer: Renderer | None = None,
    ) -> None:
        """`renderer`: the one of the tokenizer and template, where it is there already; it may be shared."""
        answer_types()  # before anything is sampled
        self.provider = provider
        self.tokenizer = tokenizer
        if hasattr(provider, "end_ids"):  # a server that does not say why an answer ended
            provider.end_ids = tokenizer.eos_ids
        self.track_tree = track_tree
        self._train_once = train_once
        self._clock = clock
        parsers = _find_parser(reasoning_parser, Reads.REASONING), _find_parser(tool_parser, Reads.TOOLS)
        self._reader = AnswerReader(tokenizer, *parsers)
        has_template = chat_template is not None or bool(tokenizer.chat_templates)
        if renderer is None and has_template:
            renderer = make_renderer(tokenizer, chat_template=chat_template)
        self._renderer = renderer
        """None: only text completions."""
        self._session: Session | None = Conversations(tokenizer, self._renderer).open("managed")
        self._current: list[Node] = []
        """The answers that end the tracked sequences; in a tree, every answer."""

    async def chat_completion(self, **arguments: Any) -> Any:
        """A `ChatCompletion` of the openai package, for its keyword arguments; `n` branches.

        A prompt that continues an answer keeps the ids that were sampled. RenderError as the template raises,
        ProviderError as the provider does; then nothing is tracked.
        """
        session, call, sampling = self._open_session(), parse_chat_call(arguments), parse_sampling(arguments)
        if self._renderer is None:
            raise SetupError(f"{self.tokenizer.name}: no chat template.\nPass chat_template, or use `completion`.")
        call = with_content_form(call, self._renderer)
        prompt = session.prompt(call)
        results = await self._sample(prompt, sampling)
        calls = bool(call.tools) and arguments.get("tool_choice") != "none"
        read = [self._reader.read_message(result, sampling, call, calls=calls) for result in results]
        head = self._response_head("chatcmpl")
        self._track(session.commit(head.id, prompt, call, results, [message for message, _ in read]))
        shown = TokenView(self.tokenizer.vocabulary)
        chat = head.chat(
            [
                {
                    "index": index,
                    "message": message,
                    "finish_reason": finish,
                    "logprobs": shown.chat_logprobs(result) if arguments.get("logprobs") else None,
                    "token_ids": list(result.output_ids),
                }
                for index, (result, (message, finish)) in enumerate(zip(results, read, strict=True))
            ],
            usage=usage_of(results),
            prompt_token_ids=list(results[0].input_ids),
        )
        return answer_types()["ChatCompletion"](**chat)

    async def completion(self, **arguments: Any) -> Any:
        """A `Completion` of the openai package. `prompt` is a text or token ids; one that starts with the text or
        the ids of an answer and its prompt continues it."""
        session, sampling = self._open_session(), parse_sampling(arguments)
        text = arguments.get("prompt", "")
        prompt = session.text_prompt(text)
        results = await self._sample(prompt, sampling)
        texts = [self._reader.read_text(result, sampling) for result in results]
        head = self._response_head("cmpl")
        self._track(session.commit(head.id, prompt, None, results, [{"text": text} for text in texts]))
        offset = len(text) if isinstance(text, str) else 0
        shows = arguments.get("logprobs") is not None
        shown = TokenView(self.tokenizer.vocabulary)
        completion = head.text(
            [
                {
                    "index": index,
                    "text": answer,
                    "finish_reason": result.finish_reason,
                    "logprobs": shown.text_logprobs(result, offset) if shows else None,
                    "token_ids": list(result.output_ids),
                    "prompt_token_ids": list(result.input_ids),
                }
                for index, (result, answer) in enumerate(zip(results, texts, strict=True))
            ],
            usage=usage_of(results),
        )
        return answer_types()["Completion"](**completion)

    async def get_logprobs(self, **arguments: Any) -> dict[str, Any]:
        """What the model says about a prompt (`messages`, `prompt` or `input_ids`), as Atropos gives it:
        `prompt_tokens`, and at each of them the likeliest ids (`prompt_topk_token_ids`) with their logprobs
        (`prompt_topk_logprobs`), as many as `top_k` or `top_logprobs` says. The first token has none."""
        ids = arguments.get("input_ids")
        if ids is None:
            session = self._open_session()
            if "messages" in arguments:
                prompt = session.prompt(with_content_form(parse_chat_call(arguments), self._renderer))
            else:
                prompt = session.text_prompt(arguments["prompt"])
            ids = prompt.ids.tolist()
        top = arguments.get("top_k") or arguments.get("top_logprobs") or 1
        scored = await self.provider.score(list(ids), top=top)
        tops = scored.top_logprobs or ((),) * len(scored.logprobs)
        return {
            "prompt_tokens": list(scored.ids),
            "prompt_topk_token_ids": [[]] * scored.start + [[token for token, _ in pairs] for pairs in tops],
            "prompt_topk_logprobs": [[]] * scored.start + [[value for _, value in pairs] for pairs in tops],
        }

    def get_state(self) -> dict[str, Any]:
        """What is tracked: `nodes`, a list of SequenceNode; in a tree also `sequences` and `tree`, the same nodes
        by their key.

        Without a tree a prompt that continues a node replaces it, and with `train_once` each answer is trained in
        one node only, the first that holds it. In a tree every answer has a node of its own that trains nothing
        else, and `metadata["parent"]` is the key of the node that it continues.
        """
        vocabulary = self.tokenizer.vocabulary
        if not self.track_tree:
            trained: set[int] = set()
            once = self._train_once
            nodes = [build_sequence(node, vocabulary, trained if once else set()) for node in self._current]
            return {"nodes": nodes}
        # Every answer by its text, and by its ids too where another answer has the same text.
        keys: dict[int, str] = {}
        tree: dict[str, SequenceNode] = {}
        for node in self._current:
            node_of_tree = build_sequence(node, vocabulary)
            key, number = node_of_tree.full_text, 1
            while key in tree:
                again = f", {number}" if number > 1 else ""
                key, number = f"{node_of_tree.full_text} [ids {short_digest(node.seen_ids)}{again}]", number + 1
            keys[id(node)] = key
            parent = None if node.parent is None else keys[id(node.parent)]
            node_of_tree.metadata |= {"key": key, "parent": parent}
            tree[key] = node_of_tree
        return {"nodes": list(tree.values()), "sequences": tree, "tree": dict(tree)}

    def reset(self) -> None:
        """Forget everything that is tracked."""
        if self._session is not None:
            self._session.reset()
        self._current.clear()

    def close(self) -> None:
        """Forget everything and refuse further calls. The provider stays open."""
        self.reset()
        self._session = None

    def _open_session(self) -> Session:
        if self._session is None:
            raise SetupError("The managed server is closed.\nUse it inside its `async with` block.")
        return self._session

    async def _sample(self, prompt: Prompt, sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        """The provider's answers; ProviderError if one has no logprob for each id."""
        ids = prompt.ids.tolist()
        if not ids:
            raise ValueError("The prompt has no tokens.")
        results = await self.provider.generate_n(ids, sampling)
        for result in results:
            if len(result.output_ids) != len(result.logprobs):
                raise ProviderError(
                    f"{self.provider.name}: an answer has {len(result.output_ids)} token ids and "
                    f"{len(result.logprobs)} logprobs, so they cannot be matched."
                )
        return results

    def _response_head(self, kind: str) -> ResponseHead:
        return ResponseHead(f"{kind}-{uuid4().hex}", int(self._clock()), self.provider.model or self.provider.name)

    def _track(self, nodes: Sequence[Node]) -> None:
        """Track answers: the first replaces the one that it continues."""
        for node in nodes:
            every = enumerate(self._current)
            whole = (at for at, other in every if node.parent is other and node.prompt.kept == other.length)
            place = None if self.track_tree else next(whole, None)
            if place is None:
                self._current.append(node)
            else:
                self._current[place] = node


def _find_parser(name: str | None, reads: Reads) -> Parser | None:
    return parser_named(name, reads) if name is not None else None


VARIABLE = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
"""The environment variable by which Atropos allows placeholders."""
_TOKENS = 128
"""The ids that Atropos writes: 0, 1, 2, …"""


class PlaceholderServer:
    """A managed server over a client of a text API; the ids of its nodes are placeholders.

    No placeholder is trained, `metadata["dummy_tokens"]` says what they are, and `scan` reports them as REC004.
    """

    def __init__(self, client: Any, track_tree: bool = False) -> None:
        """`client` is an `openai.AsyncOpenAI`, or has its `chat.completions.create` and `completions.create`."""
        self.client: Any = client
        self.track_tree = track_tree
        self._nodes: list[SequenceNode] = []

    async def chat_completion(self, **arguments: Any) -> Any:
        """The client's own answer."""
        answer = await self._client().chat.completions.create(**arguments)
        messages: Sequence[Mapping[str, Any]] = arguments.get("messages") or ()
        for choice in answer.choices:
            conversation = [*messages, {"role": "assistant", "content": choice.message.content}]
            text = "\n\n".join(f"{message['role']}:{message.get('content') or ''}" for message in conversation)
            self._nodes.append(_placeholder_node(text, choice.finish_reason))
        return answer

    async def completion(self, **arguments: Any) -> Any:
        """The client's own answer."""
        answer = await self._client().completions.create(**arguments)
        for choice in answer.choices:
            text = f"{arguments.get('prompt', '')}{choice.text or ''}"
            self._nodes.append(_placeholder_node(text, choice.finish_reason))
        return answer

    async def get_logprobs(self, **arguments: Any) -> dict[str, Any]:
        """Raises SetupError: a text API has none."""
        raise SetupError("An endpoint that returns text gives no logprobs of a prompt.\nUse vLLM, SGLang or hf.")

    def get_state(self) -> dict[str, Any]:
        """`nodes`, a list; in a tree also `sequences` and `tree`, the same by their text."""
        if not self.track_tree:
            return {"nodes": list(self._nodes)}
        tree = {node.full_text: node for node in self._nodes}
        return {"nodes": list(self._nodes), "sequences": tree, "tree": dict(tree)}

    def reset(self) -> None:
        """Forget every node."""
        self._nodes.clear()

    def close(self) -> None:
        """Forget every node and refuse further calls. The client stays open."""
        self.reset()
        self.client = None

    def _client(self) -> Any:
        if self.client is None:
            raise SetupError("The managed server is closed.\nUse it inside its `async with` block.")
        return self.client


def _placeholder_node(text: str, finish_reason: str | None) -> SequenceNode:
    """A node with the ids 0, 1, 2, … in place of those of its text, none of them trained."""
    return SequenceNode(
        text,
        list(range(_TOKENS)),
        [UNTRAINED] * _TOKENS,
        [UNSAMPLED] * _TOKENS,
        {"finish_reason": finish_reason, "dummy_tokens": True},
    )
