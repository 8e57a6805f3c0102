"""Sessions of the gateway: the conversations of one episode, and the tokens of each.

A call continues the very tokens of an earlier call if its messages begin with that call's messages and answer. Any other call
(another system prompt, a shortened history, a sub-agent) begins a branch. The answer that an agent sends back may differ from
the original only in ids and in the formatting of JSON.

A client that waits too long closes its connection and sends the request again. It gets the answer to the first one, which is
not sampled again. An answer that no client has read does not train.
"""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.agents.continuity import ChatContinuity
from verl.agents.episode import Episode, EpisodeError
from verl.agents.images import EpisodeImages
from verl.agents.parsers import Schemas, ToolParser
from verl.config import full_key
from verl.data.prompts import answer_prefix
from verl.data.schema import MEDIA_PARTS, VIDEO_PARTS, Messages, messages_of
from verl.data_proto.media import Media, VideoSource, images_in, texts_of
from verl.errors import DataError, VerlError
from verl.tools.schemas import FunctionCall

MAX_MESSAGES = 10_000


class RequestError(VerlError):
    """A request that cannot be answered; the agent receives the reason."""


class ContextFullError(RequestError):
    """The conversation has no tokens left. Clients of OpenAI's API tell it from other refusals by `code`."""

    code = "context_length_exceeded"


def read_body(content: bytes) -> dict[str, Any]:
    """The object of a request. Raises RequestError for any other content, and for half of a character (a lone surrogate),
    which no tokenizer takes."""
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise RequestError(f"the request holds half a character (the surrogate {half}); write it whole") from error
    except (ValueError, RecursionError) as error:
        raise RequestError("the request is not JSON") from error
    if not isinstance(body, dict):
        raise RequestError("the request is not a JSON object")
    return body


@dataclass
class ModelTurn:
    """A turn of the model, for the agent."""

    text: str
    calls: list[FunctionCall]
    finish_reason: str  # stop, length or tool_calls
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    raw_text: str  # calls included
    branch: int = 0  # number of the conversation


@dataclass(frozen=True)
class TurnRules:
    """Rules of a request for the sampling of its turn: most tokens, strings that end it, a JSON schema, and how many
    choices it wants."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str = ""
    n: int = 1


@dataclass(eq=False)
class EndpointCall:
    """A request with an answer that was not read yet. `is_gone`: whether its client has closed the connection."""

    reply: asyncio.Task[Any]
    is_gone: Callable[[], Awaitable[bool]]


@dataclass
class EndpointSession:
    """The conversations of one episode."""

    id: str
    episode: Episode
    continuity: ChatContinuity
    parser: ToolParser
    stop_token_ids: frozenset[int]
    first_messages: str  # messages of the row, the last of their `prefixes`
    images: EpisodeImages
    limits_requests: bool = False  # whether the engine takes stop strings and schemas of a request
    reward: float | None = None
    info: dict[str, object] = field(default_factory=dict)
    num_turns: Counter[int] = field(default_factory=Counter)  # by the number of the conversation, of both sides
    last_call_at: float = field(default_factory=time.monotonic)
    _known: dict[str, list[int]] = field(default_factory=dict)  # `prefixes` of messages, the answer included -> tokens
    _calls: dict[str, list[EndpointCall]] = field(default_factory=dict)  # by their content
    _sampled: dict[object, dict[int, int]] = field(default_factory=dict)  # a reply's branches and lengths of its prompt

    async def answered(
        self, content: str, handle: Callable[[], Awaitable[Any]], is_gone: Callable[[], Awaitable[bool]]
    ) -> Any:
        """The reply to a request: of an equal request with a client that has gone, else of `handle`. Raises RequestError if the
        client of this request has gone too."""
        calls = self._calls.setdefault(content, [])
        for call in list(calls):
            client_is_gone = call.is_gone
            # while it was asked, the call may have been read, or another request may have taken it
            if await client_is_gone() and call in calls and call.is_gone is client_is_gone:
                break
        else:
            call = EndpointCall(asyncio.ensure_future(handle()), is_gone)
            calls.append(call)
        call.is_gone = is_gone
        try:
            reply = await asyncio.shield(call.reply)
        except VerlError:
            if call in calls:
                calls.remove(call)
            raise
        if call.is_gone is not is_gone or await is_gone():
            raise RequestError("the client has gone")
        calls.remove(call)
        self._sampled.pop(call.reply, None)
        return reply

    def unread(self) -> dict[int, int]:
        """Branch -> its length without the answer that no client has read."""
        waiting = [self._sampled.get(call.reply, {}) for calls in self._calls.values() for call in calls]
        return {branch: length for branches in waiting for branch, length in branches.items()}

    async def chat(self, messages: object, tools: object, rules: TurnRules) -> list[ModelTurn]:
        """The choices for the next turn of a conversation. Raises RequestError when the conversation cannot be rendered or does
        not fit."""
        (said, sources), schemas = _placed(_messages(messages)), _tools(tools)
        media = await self._media(sources)
        prompt_ids, is_first = self._prompt(said, schemas, texts_of(media))
        answers = await self.complete(prompt_ids, rules, is_first=is_first, media=media)
        for number, answer in enumerate(answers):
            await self._read(answer, said, schemas, f"_{number}" if number else "")
        return answers

    async def _read(self, answer: ModelTurn, said: Messages, schemas: Schemas, suffix: str) -> None:
        """Read the calls of a turn, and remember its tokens. `suffix` tells the calls of choices apart."""
        prompt_ids = answer.prompt_ids
        prefix = answer_prefix(said, self.continuity.template_kwargs)
        if schemas:
            answer.text, answer.calls = await self.parser.of_turn(prompt_ids, answer.token_ids, schemas, prefix or "")
            if answer.finish_reason == "length" and any(call.error for call in answer.calls):  # cut, not damaged
                answer.calls = [call for call in answer.calls if call.error is None]
                answer.text = answer.text if answer.calls else answer.raw_text
            self.episode.faults["unreadable"] += sum(call.fault() is not None for call in answer.calls)
        for call in answer.calls:
            call.id = call.id or f"call_{len(self._known)}_{answer.calls.index(call)}{suffix}"
        if answer.calls:
            answer.finish_reason = "tool_calls"
        said = said if prefix is None else said[:-1]
        content = (prefix or "") + answer.text
        turn = {"role": "assistant", "content": content, "tool_calls": [c.in_message() for c in answer.calls]}
        self._known[prefixes([*said, turn], schemas)[-1]] = [*answer.prompt_ids, *answer.token_ids]
        self.episode.conversations[answer.branch] = [*said, turn]
        self.num_turns[answer.branch] += 2

    async def complete(
        self,
        prompt_ids: Sequence[int],
        rules: TurnRules,
        *,
        is_first: bool | None = None,
        media: Sequence[Media] | None = None,
    ) -> list[ModelTurn]:
        """The choices after a prompt with the images `media` (None: the row's). The first continues a conversation, the others
        are conversations that begin with its tokens. Raises RequestError when the prompt is too long or unknown to the
        model."""
        self.last_call_at = time.monotonic()
        if (rules.stop or rules.grammar) and not self.limits_requests:
            raise RequestError(f"stop and response_format of a request need {full_key('rollout.name')}=native")
        reply = asyncio.current_task()
        firsts = [is_first, *[False] * (rules.n - 1)]
        turns = [self._complete(prompt_ids, rules, reply, is_first=first, media=media) for first in firsts]
        return list(await asyncio.gather(*turns))

    async def _complete(
        self, prompt_ids: Sequence[int], rules: TurnRules, reply: object, *, is_first: bool | None,
        media: Sequence[Media] | None,
    ) -> ModelTurn:  # fmt: skip
        try:
            done = await self.episode.generate(
                prompt_ids, rules.max_tokens, is_first=is_first, media=media, stop=rules.stop, grammar=rules.grammar
            )
        except (EpisodeError, VerlError) as error:
            raise RequestError(str(error)) from error
        if done is None:
            raise ContextFullError(
                f"the context length is exceeded: the response of this episode is full (data.max_response_length="
                f"{self.episode.task.limit} tokens, tool output included)"
            )
        self._sampled.setdefault(reply, {})[done.sample] = len(prompt_ids)
        ids = list(done.token_ids)
        text = self.continuity.tokenizer.decode(
            ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids, skip_special_tokens=False
        )
        text = min((text.partition(stop)[0] for stop in rules.stop), key=len, default=text)
        reason = "stop" if done.finish_reason == "stop" else "length"
        return ModelTurn(text, [], reason, list(prompt_ids), ids, list(done.log_probs), text, done.sample)

    async def _media(self, sources: Sequence[object]) -> list[Media]:
        """The images of a conversation. Raises RequestError."""
        row = images_in(self.episode.task.media)
        num_of_row = len(texts_of(row)) if None in sources else 0
        if None in sources and (None in sources[num_of_row:] or any(sources[:num_of_row]) or not num_of_row):
            raise RequestError(
                f"an image part without image_url stands for an image of the row, which has {len(texts_of(row))}: send all "
                "of them, before other images"
            )
        try:
            return [*(row if num_of_row else []), *await self.images.read(sources[num_of_row:], "`messages`")]
        except DataError as error:
            raise RequestError(str(error)) from error

    def _prompt(
        self, messages: Messages, tools: list[dict[str, object]], images: Sequence[str]
    ) -> tuple[list[int], bool | None]:
        """(token ids, whether the conversation has the random numbers of the sample itself)."""
        try:
            keys = prefixes(messages, tools)
            for end in range(len(messages) - 1, 0, -1):
                if messages[end - 1]["role"] != "assistant":
                    continue
                if tokens := self._known.get(keys[end]):
                    contents = [message["content"] for message in messages[:end]]
                    parts = [part for content in contents if isinstance(content, list) for part in content]
                    new = images[sum(part["type"] in ("image", "video") for part in parts) :]
                    suffix = self.continuity.suffix(messages[end:], tokens[-1], self.stop_token_ids, new)
                    return [*tokens, *suffix], False
            prompt_ids = self.continuity.prompt(_for_template(messages), tools, images)
        except DataError as error:
            raise RequestError(str(error)) from error
        return prompt_ids, prefixes(messages, [])[-1] == self.first_messages


def prefixes(messages: Messages, tools: Schemas) -> list[str]:
    """Digests of the first 0, 1, ... messages, each equal for equal conversations."""
    state = hashlib.sha256(json.dumps([tool["function"]["name"] for tool in tools]).encode())
    digests = [state.hexdigest()]
    for message in messages:
        calls = [
            [call["function"]["name"], arguments_of(call["function"].get("arguments"))]
            for call in message.get("tool_calls") or []
        ]
        row = [message["role"], str(message.get("content") or "").strip(), calls]
        state.update(json.dumps(row, sort_keys=True).encode())
        digests.append(state.hexdigest())
    return digests


def arguments_of(written: object) -> object:
    """The arguments of a call: what its JSON holds; {"arguments": text} for a text that is none."""
    if not isinstance(written, str):
        return written
    try:
        return json.loads(written.strip() or "{}")
    except (ValueError, RecursionError):
        return {"arguments": written}


def _for_template(messages: Messages) -> Messages:
    """Arguments of calls as objects: templates write them as JSON themselves."""
    rendered = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                {**c, "function": {**c["function"], "arguments": arguments_of(c["function"].get("arguments"))}}
                for c in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        rendered.append(message)
    return rendered


def _messages(messages: object) -> Messages:
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise RequestError(f"`messages` has {len(messages)} messages; at most {MAX_MESSAGES} are taken")
    try:
        conversation = messages_of(messages, images=True)
    except DataError as error:
        raise RequestError(str(error)) from error
    for number, checked in enumerate(conversation):
        checked["role"] = "system" if checked["role"] == "developer" else checked["role"]
        checked["content"] = checked.get("content") or ""
        for call in checked.get("tool_calls") or []:
            if (
                not isinstance(call, Mapping)
                or not isinstance(call.get("function"), Mapping)
                or "name" not in call["function"]
            ):
                raise RequestError(f"messages[{number}].tool_calls has an entry without function.name")
    return conversation


def _placed(messages: Messages) -> tuple[Messages, list[object]]:
    """Messages with the digest of its image in each image part, and the data URLs of the images, None for an image of the row.
    Raises RequestError for an image that would be read from this machine or the network."""
    urls: list[object] = []
    placed = []
    for message in messages:
        if isinstance(message["content"], list):
            parts = [dict(part) for part in message["content"]]
            for part in (part for part in parts if part["type"] in MEDIA_PARTS):
                kind = "video" if part["type"] in VIDEO_PARTS else "image"
                source = part.get(f"{kind}_url")
                url = source.get("url") if isinstance(source, Mapping) else source
                if url is not None and (not isinstance(url, str) or not url.startswith("data:")):
                    raise RequestError(f"{kind}_url must be a data URL in base64: nothing else is read")
                part.clear()
                part["type"] = kind
                if url is not None:
                    part["digest"] = hashlib.sha256(url.encode()).hexdigest()
                urls.append(VideoSource(url) if url is not None and kind == "video" else url)
            message = {**message, "content": parts}
        placed.append(message)
    return placed, urls


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    fits = isinstance(tools, list) and all(
        isinstance(t, Mapping)
        and isinstance(t.get("function"), Mapping)
        and isinstance(t["function"].get("name"), str)
        and isinstance(t["function"].get("parameters") or {}, Mapping)
        for t in tools
    )
    if not fits:
        raise RequestError("`tools` must be a list of {type: function, function: {name, description, parameters}}")
    return [{"type": "function", "function": {"description": "", **dict(tool["function"])}} for tool in tools]
