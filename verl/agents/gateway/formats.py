"""Requests and answers in the formats of OpenAI (chat completions, completions, responses) and Anthropic (messages).

A request chooses its most tokens, stop texts, JSON schema and number of choices. What would change the policy's sampling
otherwise is either harmless and passed over (temperature, top_p, seed, user), or refused with a sentence (logit_bias, forced
tool calls). So is what an answer would have to show.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.agents.continuity import Content, joined_contents
from verl.agents.gateway.sessions import ModelTurn, RequestError, TurnRules, arguments_of
from verl.data.schema import Messages

MODEL = "policy"


ChatRequest = tuple[Any, object, TurnRules]  # messages, tools, and how the turn is sampled
_MOST_CHOICES, _MOST_STOPS, _MOST_LETTERS = 64, 16, 1000  # of a stop text
_MOST_SCHEMA = 1 << 16


def _rules(body: Mapping[str, Any], *limits: str, form: object = None) -> TurnRules:
    """Rules of the sampling of a turn; `limits` are names of its most tokens. Raises RequestError for options that the policy
    does not support."""
    if body.get("best_of") not in (None, 1):
        raise RequestError("best_of must be 1: n has as many choices as it says, and all are sampled")
    n = _limit(body, "n") or 1
    if n > _MOST_CHOICES:
        raise RequestError(f"n is {n}; a request has at most {_MOST_CHOICES} choices")
    if body.get("logit_bias"):
        raise RequestError("logit_bias is not available: the policy samples without it")
    if unread := next((name for name in ("top_logprobs", "echo", "suffix") if body.get(name)), None):
        raise RequestError(f"{unread} is not available: an answer has the sampled tokens with their log-probabilities")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none") and not (isinstance(choice, dict) and choice.get("type") == "auto"):
        raise RequestError("tool_choice can be auto or none: the policy is not forced to call a tool")
    return TurnRules(_limit(body, *limits), _stops(body), _grammar(body.get("response_format") or form), n)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = next((body[name] for name in ("stop", "stop_sequences") if body.get(name)), ())
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list | tuple)
        or not all(isinstance(one, str) for one in stops)
        or len(stops) > _MOST_STOPS
    ):
        raise RequestError(f"`stop` must be a text or a list of at most {_MOST_STOPS} texts")
    if any(len(one) > _MOST_LETTERS for one in stops):  # each step looks back as far
        raise RequestError(f"a text of `stop` has more than {_MOST_LETTERS} letters")
    return tuple(one for one in stops if one)


def _grammar(form: Any) -> str:
    """The JSON schema of a response_format; "" for text."""
    kind = form.get("type", "text") if isinstance(form, Mapping) else "text"
    if kind == "text":
        return ""
    if kind == "json_object":
        return json.dumps({"type": "object"})
    schema = form.get("json_schema", form) if kind == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("response_format can be text, json_object, or json_schema with a schema")
    if len(text := json.dumps(schema)) > _MOST_SCHEMA:
        raise RequestError(f"the JSON schema has {len(text)} letters; at most {_MOST_SCHEMA} are taken")
    return text


def _list(owner: Mapping[str, object], name: str) -> list[object]:
    """A field that is a list or missing. Raises RequestError."""
    value = owner.get(name)
    if value is not None and not isinstance(value, list):
        raise RequestError(f"`{name}` must be a list")
    return value or []


def _function(**entry: object) -> dict[str, object]:
    return {"type": "function", "function": entry}


def _limit(body: Mapping[str, object], *names: str) -> int | None:
    value = next((body[name] for name in names if body.get(name) is not None), None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{names[0]} must be a whole number of at least 1")
    return value


# -- chat completions


def chat_request(body: Mapping[str, object]) -> ChatRequest:
    """Of POST /chat/completions."""
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    return body.get("messages"), tools, _rules(body, "max_completion_tokens", "max_tokens")


def chat_response(answers: Sequence[ModelTurn], body: Mapping[str, object]) -> dict[str, Any]:
    """Its answer. `token_ids` and `prompt_token_ids` are ours."""
    return {
        **_head(body, "chatcmpl", "chat.completion"),
        "choices": [_choice(number, answer, body) for number, answer in enumerate(answers)],
        "prompt_token_ids": answers[0].prompt_ids,
        "usage": _usage(answers),
    }


def _choice(number: int, answer: ModelTurn, body: Mapping[str, object]) -> dict[str, Any]:
    message: dict[str, object] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.calls else None,
    }
    if answer.calls:
        message["tool_calls"] = [call.in_message() for call in answer.calls]
    choice = {"index": number, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    if body.get("logprobs"):
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
                for token, log_prob in zip(answer.token_ids, answer.log_probs, strict=True)
            ]
        }
    return {**choice, "token_ids": answer.token_ids}


def chat_chunks(answers: Sequence[ModelTurn], body: Mapping[str, object]) -> list[dict[str, object]]:
    """The same, streamed: each turn comes in one chunk, since it is read at once."""
    base, chunks = _head(body, "chatcmpl", "chat.completion.chunk"), list[dict[str, object]]()
    for number, answer in enumerate(answers):
        delta: dict[str, object] = {"role": "assistant", "content": answer.text}
        if answer.calls:
            delta["tool_calls"] = [{"index": i, **call.in_message()} for i, call in enumerate(answer.calls)]
        choice = _choice(number, answer, body)
        del choice["message"]
        said = {**choice, "delta": delta, "finish_reason": None}
        chunks += [
            {**base, "choices": [said], "prompt_token_ids": answer.prompt_ids},
            {**base, "choices": [{"index": number, "delta": {}, "finish_reason": answer.finish_reason}]},
        ]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**base, "choices": [], "usage": _usage(answers)})
    return chunks


def _usage(answers: Sequence[ModelTurn]) -> dict[str, int]:
    prompt, new = len(answers[0].prompt_ids), sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _head(body: Mapping[str, object], kind: str, name: str) -> dict[str, object]:
    return {"id": _id(kind), "object": name, "created": int(time.time()), "model": body.get("model") or MODEL}


# -- completions


def completion_request(body: Mapping[str, object], encode: Callable[[str], list[int]]) -> tuple[list[int], TurnRules]:
    """The tokens to continue and how, of POST /completions: `prompt` is a text or token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        ids = encode(prompt)
    elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        ids = prompt
    else:
        raise RequestError("`prompt` must be a text or a list of token ids")
    if not ids:
        raise RequestError("`prompt` has no tokens")
    return list(ids), _rules(body, "max_tokens")


def completion_response(answers: Sequence[ModelTurn], body: Mapping[str, object]) -> dict[str, object]:
    choices = [
        {
            "index": number, "text": answer.raw_text, "finish_reason": answer.finish_reason, "token_ids": answer.token_ids,
            "logprobs": {"token_logprobs": answer.log_probs} if body.get("logprobs") is not None else None,
        }
        for number, answer in enumerate(answers)
    ]  # fmt: skip
    return {**_head(body, "cmpl", "text_completion"), "choices": choices, "usage": _usage(answers)}


# -- responses


def responses_request(body: Mapping[str, object]) -> ChatRequest:
    """Of POST /responses, as a chat: `instructions`, and `input` as a text or a list of messages, calls and their outputs."""
    if body.get("stream") or body.get("previous_response_id"):
        raise RequestError("stream and previous_response_id are not available in responses; send the whole input")
    messages: list[dict[str, object]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    text = body.get("input")
    for item in [{"role": "user", "content": text}] if isinstance(text, str) else _list(body, "input"):
        messages += _of_item(item)
    tools = [
        _function(**{str(k): v for k, v in tool.items() if k in ("name", "description", "parameters")})
        for tool in _list(body, "tools")
        if isinstance(tool, Mapping) and tool.get("type") == "function"
    ]
    text_rules = body.get("text")
    form = text_rules.get("format") if isinstance(text_rules, Mapping) else None
    return _joined(messages), tools, _rules({**body, "n": 1}, "max_output_tokens", form=form)


def _of_item(item: object) -> list[dict[str, object]]:
    if not isinstance(item, Mapping):
        raise RequestError("`input` must be a text or a list of objects")
    kind = item.get("type", "message")
    if kind == "function_call":
        function = _function(name=item.get("name"), arguments=item.get("arguments") or "{}")
        call = {"id": item.get("call_id"), **function}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}]
    if kind == "message":
        return [{"role": item.get("role"), "content": _content(item.get("content"))}]
    return []


def _joined(messages: Messages) -> list[dict[str, object]]:
    """Text and calls of one turn as one message."""
    turns: Messages = []
    for message in messages:
        if turns and message["role"] == turns[-1]["role"] == "assistant":
            last = turns[-1]
            last["content"] = joined_contents(last["content"] or "", message["content"] or "")
            last["tool_calls"] = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
        else:
            turns.append(dict(message))
    return turns


def responses_response(answer: ModelTurn, body: Mapping[str, object]) -> dict[str, object]:
    output: list[dict[str, object]] = []
    if answer.text or not answer.calls:
        content = [{"type": "output_text", "text": answer.text, "annotations": []}]
        output.append(
            {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed", "content": content}
        )
    for call in answer.calls:
        entry = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        output.append({"type": "function_call", "id": _id("fc"), **entry})
    usage = {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)}
    is_cut = answer.finish_reason == "length"
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or MODEL,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


# -- Anthropic's messages


def anthropic_request(body: Mapping[str, object]) -> ChatRequest:
    """Of POST /messages, as a chat."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    rules = _rules(
        {"tool_choice": kind, "stop_sequences": body.get("stop_sequences"), "max_tokens": body.get("max_tokens")},
        "max_tokens",
    )
    messages: list[dict[str, object]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"])})
    for message in _list(body, "messages"):
        if not isinstance(message, Mapping):
            raise RequestError("`messages` must be a list of messages {role, content}")
        messages += _of_blocks(message)
    tools = [
        _function(
            name=tool.get("name"),
            description=tool.get("description", ""),
            parameters=tool.get("input_schema") or {"type": "object", "properties": {}},
        )
        for tool in _list(body, "tools")
        if isinstance(tool, Mapping)
    ]
    return messages, None if kind == "none" else tools, rules


def _of_blocks(message: Mapping[str, object]) -> list[dict[str, object]]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [block for block in _list(message, "content") if isinstance(block, Mapping)]
    results = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _content(block.get("content"))}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    said = _content([block for block in blocks if block.get("type") in ("text", "image", "document")])
    calls = [
        {"id": b.get("id"), **_function(name=b.get("name"), arguments=json.dumps(b.get("input") or {}))}
        for b in blocks
        if b.get("type") == "tool_use"
    ]
    if calls:
        return [{"role": role, "content": said, "tool_calls": calls}]
    return [*results, *([{"role": role, "content": said}] if said or not results else [])]


def _content(content: object) -> Content:
    """A content as chat completions have it: a text, or a list of parts if some are images."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError("content must be a text or a list of parts")
    return joined_contents(*(_part(part) for part in content))


def _part(part: object) -> Content:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "video_url":
        return [{"type": kind, kind: part.get(kind)}]
    if not isinstance(part, Mapping) or kind not in ("image", "input_image", "image_url"):
        raise RequestError("only parts with text and images are available; files are not")
    source, url = part.get("source"), part.get("image_url")
    if isinstance(source, Mapping):
        if source.get("type") != "base64":
            raise RequestError("the source of an image must be base64: nothing is downloaded")
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return [{"type": "image_url", "image_url": url}]


def _text(content: object) -> str:
    """The text of a content that can have no image."""
    if not isinstance(said := _content(content), str):
        raise RequestError("the system prompt has an image; put it into a message of the user")
    return said


def anthropic_response(answer: ModelTurn, body: Mapping[str, object]) -> dict[str, Any]:
    content: list[dict[str, object]] = (
        [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    )
    for call in answer.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call.arguments)})
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]
    return {
        "id": _id("msg"),
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or MODEL,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)},
    }


def anthropic_events(answer: ModelTurn, body: Mapping[str, object]) -> list[dict[str, object]]:
    message = anthropic_response(answer, body)
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    ]
    for index, block in enumerate(message["content"]):
        is_text = block["type"] == "text"
        empty = {**block, "text": ""} if is_text else {**block, "input": {}}
        delta = (
            {"type": "text_delta", "text": block["text"]}
            if is_text
            else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        )
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ending, "usage": {"output_tokens": len(answer.token_ids)}})
    return [*events, {"type": "message_stop"}]
