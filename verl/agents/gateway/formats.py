"""Requests and answers in the formats of OpenAI (chat completions, completions, responses) and Anthropic (messages).

What would change the policy's sampling is either harmless and passed over (temperature, top_p, seed, user), or refused with a
sentence (n above 1, response_format, logit_bias, forced tool calls, stop texts). So is what an answer would have to show.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from verl.agents.continuity import Content, joined_contents
from verl.agents.gateway.sessions import ModelTurn, RequestError, arguments_of
from verl.config import full_key
from verl.data.schema import Messages

MODEL = "policy"


ChatRequest = tuple[Any, object, int | None]  # messages, tools, most tokens of the turn to sample


def _refuse(body: Mapping[str, Any]) -> None:
    """Raise RequestError for options that the policy does not support."""
    if several := next((name for name in ("n", "best_of") if body.get(name) not in (None, 1)), None):
        raise RequestError(f"{several} must be 1: each sample of a prompt is a separate episode")
    form = body.get("response_format")
    if (kind := form.get("type", "text") if isinstance(form, dict) else "text") != "text":
        raise RequestError(f"response_format of type {kind} is not available: the policy samples without constraints")
    if body.get("logit_bias"):
        raise RequestError("logit_bias is not available: the policy samples without constraints")
    if body.get("stop"):
        raise RequestError(f"stop is not available in a request; set {full_key('rollout.stop')} for the run")
    if unread := next((name for name in ("top_logprobs", "echo", "suffix") if body.get(name)), None):
        raise RequestError(f"{unread} is not available: an answer has the sampled tokens with their log-probabilities")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none") and not (isinstance(choice, dict) and choice.get("type") == "auto"):
        raise RequestError("tool_choice can be auto or none: the policy is not forced to call a tool")


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
    _refuse(body)
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    return body.get("messages"), tools, _limit(body, "max_completion_tokens", "max_tokens")


def chat_response(answer: ModelTurn, body: Mapping[str, object]) -> dict[str, Any]:
    """Its answer. `token_ids` and `prompt_token_ids` are ours."""
    message: dict[str, object] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.calls else None,
    }
    if answer.calls:
        message["tool_calls"] = [call.in_message() for call in answer.calls]
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    if body.get("logprobs"):
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
                for token, log_prob in zip(answer.token_ids, answer.log_probs, strict=True)
            ]
        }
    return {
        **_head(body, "chatcmpl", "chat.completion"),
        "choices": [{**choice, "token_ids": answer.token_ids}],
        "prompt_token_ids": answer.prompt_ids,
        "usage": _usage(answer),
    }


def chat_chunks(answer: ModelTurn, body: Mapping[str, object]) -> list[dict[str, object]]:
    """The same, streamed: the turn comes in one chunk, since it is read at once."""
    base, reply = _head(body, "chatcmpl", "chat.completion.chunk"), chat_response(answer, body)
    delta: dict[str, object] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        delta["tool_calls"] = [{"index": i, **call.in_message()} for i, call in enumerate(answer.calls)]
    (choice,) = reply["choices"]
    del choice["message"]
    chunks = [
        {**base, "choices": [{**choice, "delta": delta, "finish_reason": None}], "prompt_token_ids": answer.prompt_ids},
        {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]},
    ]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**base, "choices": [], "usage": _usage(answer)})
    return chunks


def _usage(answer: ModelTurn) -> dict[str, int]:
    prompt, new = len(answer.prompt_ids), len(answer.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _head(body: Mapping[str, object], kind: str, name: str) -> dict[str, object]:
    return {"id": _id(kind), "object": name, "created": int(time.time()), "model": body.get("model") or MODEL}


# -- completions


def completion_request(body: Mapping[str, object], encode: Callable[[str], list[int]]) -> tuple[list[int], int | None]:
    """The tokens to continue and the most tokens to sample, of POST /completions: `prompt` is a text or token ids."""
    _refuse(body)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        ids = encode(prompt)
    elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        ids = prompt
    else:
        raise RequestError("`prompt` must be a text or a list of token ids")
    if not ids:
        raise RequestError("`prompt` has no tokens")
    return list(ids), _limit(body, "max_tokens")


def completion_response(answer: ModelTurn, body: Mapping[str, object]) -> dict[str, object]:
    log_probs = {"token_logprobs": answer.log_probs} if body.get("logprobs") is not None else None
    choice = {"index": 0, "text": answer.raw_text, "finish_reason": answer.finish_reason, "logprobs": log_probs}
    return {
        **_head(body, "cmpl", "text_completion"),
        "choices": [{**choice, "token_ids": answer.token_ids}],
        "usage": _usage(answer),
    }


# -- responses


def responses_request(body: Mapping[str, object]) -> ChatRequest:
    """Of POST /responses, as a chat: `instructions`, and `input` as a text or a list of messages, calls and their outputs."""
    _refuse(body)
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
    return _joined(messages), tools, _limit(body, "max_output_tokens")


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
    if body.get("stop_sequences"):
        raise RequestError(f"stop_sequences are not available in a request; set {full_key('rollout.stop')} for the run")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    _refuse({"tool_choice": kind})
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
    return messages, None if kind == "none" else tools, _limit(body, "max_tokens")


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
