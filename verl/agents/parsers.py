"""Tool calls in the text of a turn, in the formats of model families. `multi_turn.format` chooses one.

A call that cannot be read is left in the text, so that the model is not answered for it; a name or arguments that are wrong are
a matter of the one who runs the call.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from verl.data_proto.tokenizer import Tokenizer
from verl.families import TOOL_PARSERS
from verl.registry import RegistryMapping
from verl.tools.schemas import FunctionCall

log = logging.getLogger(__name__)

Schemas = Sequence[dict[str, Any]]  # of the tools, as chat templates read them
Parsed = tuple[str, list[FunctionCall]]  # (text without the calls, the calls)


class ToolParser:
    """Calls in the tokens of a turn. Subclasses define `extract_tool_calls`, or as those here `parse`."""

    _registry = RegistryMapping(TOOL_PARSERS)

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        texts = {*tokenizer.all_special_tokens, "<|end|>", "<|return|>", "<|call|>"}
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
        text = self.tokenizer.decode(list(responses_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        schemas = [tool if isinstance(tool, dict) else tool.for_template() for tool in tools or ()]
        return self.parse(self._without_end(text), schemas)

    def parse(self, text: str, tools: Schemas) -> Parsed:
        """The same of a text, which does not have the token that ended the turn."""
        raise NotImplementedError

    def _without_end(self, text: str) -> str:
        end = next((end for end in self._ends if text.endswith(end)), "")
        return text.removesuffix(end) if end else text


class _Pattern(ToolParser):
    """Calls that a pattern finds; `read` makes one of a match, or none where it raises ValueError."""

    pattern: re.Pattern[str]

    def parse(self, text: str, tools: Schemas) -> Parsed:
        calls: list[FunctionCall] = []

        def replace(match: re.Match[str]) -> str:
            try:
                calls.extend(self.read(match, tools))
            except (ValueError, SyntaxError, RecursionError) as error:
                log.debug("A tool call could not be read and stays text: %s", error)
                return match[0]
            return ""

        return self.pattern.sub(replace, text).strip(), calls

    def read(self, match: re.Match[str], tools: Schemas) -> list[FunctionCall]:
        raise NotImplementedError


class HermesToolParser(_Pattern):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    pattern = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

    def read(self, match: re.Match[str], tools: Schemas) -> list[FunctionCall]:
        call = json.loads(match[1])
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("it is no object with a name")
        arguments = call.get("arguments", call.get("parameters", {}))
        return [FunctionCall(call["name"], arguments if isinstance(arguments, str) else _dump(arguments))]


class DeepSeekToolParser(_Pattern):
    """`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`: DeepSeek V3.1."""

    pattern = re.compile(
        r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>"
        r"\s*(?:<｜tool▁calls▁end｜>)?",
        re.DOTALL,
    )

    def read(self, match: re.Match[str], tools: Schemas) -> list[FunctionCall]:
        return [FunctionCall(match[1].strip(), match[2].strip())]


class KimiToolParser(_Pattern):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2, whose calls have ids."""

    pattern = re.compile(
        r"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*([^<]+?)\s*<\|tool_call_argument_begin\|>(.*?)"
        r"<\|tool_call_end\|>\s*(?:<\|tool_calls_section_end\|>)?",
        re.DOTALL,
    )

    def read(self, match: re.Match[str], tools: Schemas) -> list[FunctionCall]:
        name = match[1].removeprefix("functions.").partition(":")[0]
        return [FunctionCall(name, match[2].strip(), match[1])]


class GptOssToolParser(_Pattern):
    """`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}`: the harmony format of gpt-oss."""

    pattern = re.compile(
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\.([\w.-]+)\s*(?:<\|channel\|>\w+\s*)?"
        r"(?:<\|constrain\|>\w+)?<\|message\|>(.*?)(?=<\|call\|>|<\|start\|>|<\|end\|>|$)(?:<\|call\|>|<\|end\|>)?",
        re.DOTALL,
    )

    def read(self, match: re.Match[str], tools: Schemas) -> list[FunctionCall]:
        return [FunctionCall(match[1], match[2].strip())]


class GlmToolParser(_Pattern):
    """`<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value></tool_call>`: GLM 4.5 and later."""

    pattern = re.compile(r"<tool_call>\s*([\w.-]+)\s*(.*?)</tool_call>", re.DOTALL)
    pairs = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def read(self, match: re.Match[str], tools: Schemas) -> list[FunctionCall]:
        return [_typed_call(match[1], self.pairs.findall(match[2]), tools)]


class _Tagged(_Pattern):
    """Calls inside a `wrapper`, each a `call` with parameters."""

    call: re.Pattern[str]
    parameter: re.Pattern[str]

    def read(self, match: re.Match[str], tools: Schemas) -> list[FunctionCall]:
        calls = [_typed_call(name, self.parameter.findall(body), tools) for name, body in self.call.findall(match[1])]
        if not calls:
            raise ValueError("it holds no call")
        return calls


class QwenCoderToolParser(_Tagged):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen3-Coder."""

    pattern = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
    call = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
    parameter = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)


class SeedToolParser(QwenCoderToolParser):
    """`<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>`: Seed-OSS."""

    pattern = re.compile(r"<seed:tool_call>(.*?)</seed:tool_call>", re.DOTALL)


class MinimaxToolParser(_Tagged):
    """`<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`: MiniMax M2."""

    pattern = re.compile(r"<minimax:tool_call>(.*?)</minimax:tool_call>", re.DOTALL)
    call = re.compile(r'<invoke name="?([^">]+)"?>(.*?)</invoke>', re.DOTALL)
    parameter = re.compile(r'<parameter name="?([^">]+)"?>(.*?)</parameter>', re.DOTALL)


class DeepSeekV4ToolParser(_Tagged):
    """`<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜parameter></｜DSML｜invoke>`: DeepSeek V3.2
    and later."""

    pattern = re.compile(r"<｜DSML｜(?:function|tool)_calls>(.*?)</｜DSML｜(?:function|tool)_calls>", re.DOTALL)
    call = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
    parameter = re.compile(r'<｜DSML｜parameter name="([^"]+)"[^>]*>(.*?)</｜DSML｜parameter>', re.DOTALL)


class GemmaToolParser(_Pattern):
    """`<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`: Gemma 4."""

    pattern = re.compile(r"<\|tool_call>\s*call:([\w.-]+)(\{.*?\})<tool_call\|>", re.DOTALL)
    texts = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
    keys = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")

    def read(self, call: re.Match[str], tools: Schemas) -> list[FunctionCall]:
        texts: list[str] = []

        def keep(match: re.Match[str]) -> str:
            texts.append(match[1])
            return f"\ue000{len(texts) - 1}\ue000"

        bare = self.keys.sub(r'\1"\2":', self.texts.sub(keep, call[2]))
        whole = re.sub("\ue000(\\d+)\ue000", lambda match: json.dumps(texts[int(match[1])]), bare)
        return [FunctionCall(call[1], _dump(json.loads(whole)))]


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], tools: Schemas) -> FunctionCall:
    """A call whose arguments are texts, each converted to the type that the schema of its tool names."""
    name = name.strip()
    schema: dict[str, Any] = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}
    return FunctionCall(name, _dump({k.strip(): _typed(v, properties.get(k.strip())) for k, v in pairs}))


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
