"""Tool calls in the text of a turn, in the formats of model families. `multi_turn.format` chooses one.

A call that cannot be read has `error`, a sentence for the model. A call inside the model's thoughts is none. A wrong name or
wrong arguments are a matter of the one who runs the call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.data_proto.tokenizer import Tokenizer
from verl.families import TOOL_PARSERS
from verl.foreign_text import clean, quoted
from verl.registry import RegistryMapping
from verl.tools.schemas import FunctionCall

UNREADABLE = "unreadable_call"  # name of a function with an unreadable name
_NUM_LAST = 64  # tokens of a context that may begin thoughts

Schemas = Sequence[dict[str, Any]]  # of the tools, as chat templates read them
Parsed = tuple[str, list[FunctionCall]]  # (text without the calls, the calls)


class ToolParser:
    """Calls in the tokens of a turn. Subclasses define `extract_tool_calls`, or as those here `parse`."""

    _registry = RegistryMapping(TOOL_PARSERS)

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        texts = {*getattr(tokenizer, "all_special_tokens", ()), "<|end|>", "<|return|>", "<|call|>"}
        self._ends = tuple(sorted((text for text in texts if text), key=len, reverse=True))

    @classmethod
    def register(cls, name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
        """Decorator: a parser of the user's under `name`."""

        def add(parser: type[ToolParser]) -> type[ToolParser]:
            TOOL_PARSERS.set(name, parser)
            return parser

        return add

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Tokenizer) -> ToolParser:
        """The parser of a format. Raises NameConfigError for an unknown one."""
        parser: type[ToolParser] = TOOL_PARSERS.get(name)
        return parser(tokenizer)

    async def extract_tool_calls(self, responses_ids: Sequence[int], tools: Any = None) -> Parsed:
        """(text of the turn without its calls, the calls), of the tokens of a turn."""
        schemas = [tool if isinstance(tool, dict) else tool.for_template() for tool in tools or ()]
        return self.parse(self.text_of(responses_ids), schemas)

    async def of_turn(
        self, context_ids: Sequence[int], token_ids: Sequence[int], tools: Schemas, prefix: str = ""
    ) -> Parsed:
        """`extract_tool_calls` of a turn behind a context that may begin the model's thoughts, or the turn with `prefix`.
        Without tools, no calls."""
        if not tools:
            return self.text_of(token_ids).strip(), []
        begun = self.tokenizer.encode(prefix, add_special_tokens=False) if prefix else self.thoughts_begun(context_ids)
        text, calls = await self.extract_tool_calls([*begun, *token_ids], tools)
        return text.removeprefix(self.text_of(begun).strip()).strip() if begun else text, calls

    def thoughts_begun(self, context_ids: Sequence[int]) -> list[int]:
        """The last tokens of a context, if they begin the model's thoughts."""
        return []

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of a turn, without the token that ended it."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        end = next((end for end in self._ends if text.endswith(end)), "")
        return text.removesuffix(end)

    def parse(self, text: str, tools: Schemas) -> Parsed:
        """The same of a text without the token that ended the turn."""
        raise NotImplementedError


class _Marked(ToolParser):
    """Calls between two marks, outside of the model's thoughts. A call that `read` refuses, with ValueError, has `error`."""

    start: str  # patterns
    end: str
    around = ""  # marks around all calls of a turn
    name = r"\"name\"\s*:\s*\"([^\"\\]+)\""  # of the function, in a call that is damaged
    thoughts = ("<think>", "</think>")
    form: str  # of a call, for the model

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        kinds = {"open": self.thoughts[0], "close": self.thoughts[1], "start": self.start, "end": self.end}
        kinds |= {"around": self.around} if self.around else {}
        self._marks = re.compile("|".join(f"(?P<{kind}>{mark})" for kind, mark in kinds.items()))
        self._start, self._end, self._close = map(re.compile, (self.start, self.end, self.thoughts[1]))
        self._open = re.compile(rf"\s*(?:{self.thoughts[0]})\s*")

    def parse(self, text: str, tools: Schemas) -> Parsed:
        calls: list[FunctionCall] = []
        parts: list[str] = []
        at, is_around = 0, False
        while mark := self._marks.search(text, at):
            parts.append(text[at : mark.start()])
            at = mark.end()
            if mark.lastgroup == "start":
                at, read = self._call(text, mark, tools)
                calls += read
                continue
            if mark.lastgroup == "around":
                is_around = True
                continue
            if mark.lastgroup == "open":
                close = self._close.search(text, at)
                at = close.end() if close else len(text)  # thoughts without an end are all that follows
            elif mark.lastgroup == "close":  # of thoughts that the prompt began
                calls, is_around = [], False
                parts[:] = [text[: mark.start()]]
            else:
                calls.append(self._damaged(parts[-1], "it has no beginning"))
            parts.append(text[mark.start() : at])
        rest = "".join([*parts, text[at:]]).strip()
        return rest, calls or ([self._damaged(rest, "it has no beginning")] if is_around else [])

    def thoughts_begun(self, context_ids: Sequence[int]) -> list[int]:
        last = list(context_ids[-_NUM_LAST:])
        if not re.search(rf"(?:{self.thoughts[0]})\s*\Z", self.text_of(last)):
            return []
        parts = (last[-count:] for count in range(1, _NUM_LAST + 1))
        return next((ids for ids in parts if self._open.fullmatch(self.text_of(ids))), [])

    def read(self, body: str, tools: Schemas, *, ends: bool) -> list[FunctionCall]:
        """The calls between two marks. `ends`: the second mark is there, and no other first mark before it."""
        raise NotImplementedError

    def _call(self, text: str, start: re.Match[str], tools: Schemas) -> tuple[int, list[FunctionCall]]:
        """(place after the call, the calls) of the mark `start`."""
        end = self._end.search(text, start.end())
        stop = end.start() if end else len(text)
        other = self._start.search(text, start.end(), stop)
        # without its end, a call goes up to the next one; a text in a call may also look like the next one
        for after, to in ((end.end() if end else stop, stop), *([(other.start(),) * 2] if other else [])):
            body = re.sub(self.around, "", text[start.end() : to]) if self.around else text[start.end() : to]
            try:
                return after, self.read(body, tools, ends=end is not None and other is None)
            except (ValueError, RecursionError) as error:
                damaged = self._damaged(body, clean(error, 100))
        return after, [damaged]

    def _damaged(self, body: str, why: str) -> FunctionCall:
        name = re.search(self.name, body)
        sentence = f"Invalid tool call: {why}. Write it as {self.form}"
        return FunctionCall((name[1].strip() if name else "") or UNREADABLE, body.strip(), error=sentence)


class HermesToolParser(_Marked):
    """Hermes, Qwen2.5, Qwen3."""

    start, end = "<tool_call>", "</tool_call>"
    form = '<tool_call>{"name": "f", "arguments": {...}}</tool_call>'

    def read(self, body: str, tools: Schemas, *, ends: bool) -> list[FunctionCall]:
        call = json.loads(body)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("it is no object with a name")
        if further := set(call) - {"name", "id", "type", "arguments" if "arguments" in call else "parameters"}:
            raise ValueError(f"{quoted(min(further), 20)} is outside of its arguments")
        arguments = call.get("arguments", call.get("parameters", {}))
        return [FunctionCall(call["name"], arguments if isinstance(arguments, str) else _dump(arguments))]


class DeepSeekToolParser(_Marked):
    """DeepSeek V3.1."""

    start, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    around, name = "<｜tool▁calls▁(?:begin|end)｜>", r"\A\s*([\w.-]+)"
    form = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>"
    content = re.compile(r"\s*(?P<id>(?P<name>[^<]+?))\s*<｜tool▁sep｜>(?P<arguments>.*)", re.DOTALL)
    has_ids = False

    def read(self, body: str, tools: Schemas, *, ends: bool) -> list[FunctionCall]:
        if (call := self.content.fullmatch(body)) is None:
            raise ValueError("it has no name and arguments")
        arguments = call["arguments"].strip()
        if not ends:
            json.loads(arguments)
        return [FunctionCall(call["name"], arguments, call["id"] if self.has_ids else None)]


class KimiToolParser(DeepSeekToolParser):
    """Kimi K2, with ids of calls."""

    start, end = r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>"
    around, name = r"<\|tool_calls_section_(?:begin|end)\|>", r"\A\s*(?:functions\.)?([\w.-]+)"
    form = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>"
    content = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^<:]+?)(?::[^<]*?)?)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)",
        re.DOTALL,
    )
    has_ids = True


class GptOssToolParser(DeepSeekToolParser):
    """The harmony format of gpt-oss. The message of a header without a recipient is text, or thoughts."""

    _header = r"(?:<\|start\|>assistant)?<\|channel\|>"
    start = rf"(?:\A|<\|start\|>assistant|{_header}(?:commentary|analysis))\s*to=functions\."
    end = r"<\|call\|>|<\|end\|>|(?=<\|start\|>)|\Z"
    around = ""
    thoughts = (rf"{_header}analysis<\|message\|>", r"<\|end\|>|(?=<\|start\|>)")
    form = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>"
    content = re.compile(
        r"(?P<id>(?P<name>[\w.-]+))\s*(?:<\|channel\|>\w+\s*)?(?:<\|constrain\|>\w+)?<\|message\|>(?P<arguments>.*)",
        re.DOTALL,
    )

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        # other messages end with the same tokens as calls and thoughts
        self._marks = re.compile(f"(?P<open>{self.thoughts[0]})|(?P<start>{self.start})")


class _Tagged(_Marked):
    """Calls with tags around their parameters. A parameter without its end tag ends at the next tag."""

    call: re.Pattern[str]
    call_end: re.Pattern[str]
    parameter: re.Pattern[str]
    parameter_end: re.Pattern[str]

    def read(self, body: str, tools: Schemas, *, ends: bool) -> list[FunctionCall]:
        calls: list[FunctionCall] = []
        at = 0
        while call := self.call.match(body, at):
            name, pairs, at = call[1].strip(), list[tuple[str, str]](), call.end()
            properties = _properties(name, tools)
            while parameter := self.parameter.match(body, at):
                stop, at = self._value(body, parameter, properties, ends=ends)
                pairs.append((parameter[1].strip(), body[parameter.end() : stop]))
            end = self.call_end.match(body, at)
            if not (end and end[0].strip()) and not (ends and not body[at:].strip()):
                raise ValueError(_superfluous(body[at:], "parameter") or "its end is missing")
            at = end.end() if end else len(body)
            arguments = {key: _typed(value, properties.get(key)) for key, value in pairs}
            if len(arguments) < len(pairs):
                raise ValueError("it has a parameter twice")
            calls.append(FunctionCall(name, _dump(arguments)))
        if not calls or body[at:].strip():
            raise ValueError(_superfluous(body[at:], "call") or "it is empty")
        return calls

    def _value(
        self, body: str, parameter: re.Match[str], properties: Mapping[str, object], *, ends: bool
    ) -> tuple[int, int]:
        """(end of a value, place after its end tag)."""
        at = parameter.end()
        end = self.parameter_end.search(body, at)
        stop = end.start() if end else len(body)
        parameters = (
            m for m in self.parameter.finditer(body, at, stop) if not properties or m[1].strip() in properties
        )
        tags = [tag for tag in (next(parameters, None), self.call_end.search(body, at, stop)) if tag and tag[0].strip()]
        if tags:
            stop = min(tag.start() for tag in tags)
        elif end:
            return stop, end.end()
        elif not ends:
            raise ValueError(f"the parameter {quoted(parameter[1], 20)} has no end")
        if self._start.search(body, at, stop):
            raise ValueError(f"the parameter {quoted(parameter[1], 20)} has no end")
        return stop, stop


class GlmToolParser(_Tagged):
    """GLM 4.5 and later."""

    start, end, name = "<tool_call>", "</tool_call>", r"\A\s*([\w.-]+)"
    form = "<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>"
    call, call_end = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)"), re.compile(r"\s*\Z")
    parameter, parameter_end = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"), re.compile("</arg_value>")


class QwenCoderToolParser(_Tagged):
    """Qwen3-Coder."""

    start, end, name = "<tool_call>", "</tool_call>", r"<function=([^>\n]+)>"
    form = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    call, call_end = re.compile(r"\s*<function=([^<>\n]+)>"), re.compile(r"\s*</function>\s*")
    parameter, parameter_end = re.compile(r"\s*<parameter=([^<>\n]+)>"), re.compile("</parameter>")


class SeedToolParser(QwenCoderToolParser):
    """Seed-OSS."""

    start, end, thoughts = "<seed:tool_call>", "</seed:tool_call>", ("<seed:think>", "</seed:think>")
    form = "<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>"


class MinimaxToolParser(_Tagged):
    """MiniMax M2."""

    start, end, name = "<minimax:tool_call>", "</minimax:tool_call>", r'<invoke name="?([^">\n]+)"?>'
    form = '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>'
    call, call_end = re.compile(r'\s*<invoke name="?([^"<>\n]+)"?>'), re.compile(r"\s*</invoke>\s*")
    parameter, parameter_end = re.compile(r'\s*<parameter name="?([^"<>\n]+)"?>'), re.compile("</parameter>")


class DeepSeekV4ToolParser(_Tagged):
    """DeepSeek V3.2 and later."""

    start, end = "<｜DSML｜(?:function|tool)_calls>", "</｜DSML｜(?:function|tool)_calls>"
    name = r'<｜DSML｜invoke name="([^"\n]+)">'
    form = (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜tool_calls>"
    )
    call, call_end = re.compile(r'\s*<｜DSML｜invoke name="([^"<>\n]+)">'), re.compile(r"\s*</｜DSML｜invoke>\s*")
    parameter = re.compile(r'\s*<｜DSML｜parameter name="([^"<>\n]+)"(?:\s+\w+="[^"<>]*")*>')
    parameter_end = re.compile("</｜DSML｜parameter>")


class GemmaToolParser(_Marked):
    """Gemma 4."""

    start, end, name = r"<\|tool_call>", r"<tool_call\|>", r"\A\s*call:([\w.-]+)"
    form = '<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>'
    thoughts = (r"<\|channel>thought", r"<channel\|>")
    content = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
    texts = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
    keys = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")

    def read(self, body: str, tools: Schemas, *, ends: bool) -> list[FunctionCall]:
        if (call := self.content.fullmatch(body)) is None:
            raise ValueError("it has no name and arguments")
        texts: list[str] = []

        def keep(match: re.Match[str]) -> str:
            texts.append(match[1])
            return f"\ue000{len(texts) - 1}\ue000"

        bare = self.keys.sub(r'\1"\2":', self.texts.sub(keep, call[2]))
        arguments = re.sub("\ue000(\\d+)\ue000", lambda match: json.dumps(texts[int(match[1])]), bare)
        return [FunctionCall(call[1], _dump(json.loads(arguments)))]


def _superfluous(text: str, kind: str) -> str:
    return f"{quoted(text, 20)} is no {kind}" if text.strip() else ""


def _properties(name: str, tools: Schemas) -> Mapping[str, object]:
    """The schemas of a tool's parameters."""
    schema: dict[str, Any] = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    return (schema.get("parameters") or {}).get("properties") or {}


def _typed(text: str, schema: object) -> object:
    """A text as the type of the schema, else as JSON if it is that. One line end at each side is layout."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        pass
    if kind in ("boolean", "array", "object"):
        try:
            return ast.literal_eval(text.strip())  # models write True and single quotes
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
    return text


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
