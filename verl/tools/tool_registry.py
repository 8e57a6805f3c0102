"""Loading of tools: the YAML file of tool classes, and the Python file of functions."""

import functools
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.sources import read_limited
from verl.errors import ConfigError, NameConfigError, nearest
from verl.registry import is_in_process, load_module, load_object, user_file
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import MARK, FunctionTool
from verl.tools.mcp_client import load_servers
from verl.tools.schemas import OpenAIFunctionToolSchema


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None = None) -> list[BaseTool]:
    """The tools of both files, in the order of the files; made once for a file as it is. Raises ConfigError for
    a file that cannot be used, and if two tools have one name."""
    stamps = tuple(
        (path, user_file(path).stat().st_mtime_ns) if path and user_file(path).is_file() else (path, 0)
        for path in (tool_config_path, function_tool_path)
    )
    return list(_load_all_tools(*stamps))


@functools.cache
def _load_all_tools(classes: tuple[str | None, int], functions: tuple[str | None, int]) -> tuple[BaseTool, ...]:
    tools = [
        *(initialize_tools_from_config(classes[0]) if classes[0] else ()),
        *(load_function_tools(functions[0]) if functions[0] else ()),
    ]
    names = [tool.tool_schema.function.name for tool in tools]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise NameConfigError(
            f"Names of tools {doubles} collide: the model could not tell them apart. Rename one of each."
        )
    return tuple(tools)


def load_function_tools(path: str) -> list[FunctionTool]:
    """`marked_tools`; raises ConfigError when there are none."""
    tools = marked_tools(path)
    if not tools:
        raise ConfigError(f"{path} has no tools: put @function_tool (verl.tools.function_tool) above a function.")
    return tools


def marked_tools(path: str) -> list[FunctionTool]:
    """The functions of a Python file or module that `@function_tool` marks, or the function of "path/to/file.py:name", marked
    or not. Raises ConfigError for a file that cannot be imported."""
    is_one = re.search(r":\w+$", path) is not None
    tools: list[FunctionTool] = []
    for value in [load_object(path)] if is_one else vars(load_module(path)).values():
        tool = getattr(value, MARK, None) or (FunctionTool(value) if is_one and callable(value) else None)
        if isinstance(tool, FunctionTool) and tool not in tools:
            tool.path = None if is_in_process(path) else path
            tools.append(tool)
    return tools


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """The tools of a YAML file: `tools: [{class_name, config: {type: native}, tool_schema}]`; of type mcp with
    `mcp: {mcp_servers_config_path, tool_selected_list}` in place of the schema, see verl/tools/mcp_client.py."""
    rows = read_list(tools_config_file, "tools")
    tools: list[BaseTool] = []
    for number, row in enumerate(rows):
        place = f"{tools_config_file}, tool {number} (counted from 0)"
        config = dict(row.get("config") or {})
        kind = config.get("type", "native")
        if kind == "mcp":
            tools += _mcp_tools(row, config, place)
            continue
        if kind != "native":
            raise ConfigError(f"{place} has type {kind!r}, which is neither native nor mcp.")
        schema = row.get("tool_schema")
        cls = load_class(row.get("class_name"), place)
        try:
            tools.append(cls(config, None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)))
        except Exception as error:  # the user's class may raise anything
            raise ConfigError(f"{place} could not be made: {type(error).__name__}: {error}") from error
    return tools


def _mcp_tools(row: dict[str, Any], config: dict[str, object], place: str) -> list[BaseTool]:
    """The tools of the servers that an entry names, or only the tools of its `tool_selected_list`."""
    section = dict(row.get("mcp") or {})
    if not isinstance(section.get("mcp_servers_config_path"), str):
        raise ConfigError(f"{place} has type 'mcp' but no mcp.mcp_servers_config_path, the JSON file of its servers.")
    cls = load_class(row.get("class_name") or "verl.tools.mcp_base_tool.MCPBaseTool", place)
    offered = {
        t["name"]: (t, server)
        for server in load_servers(section["mcp_servers_config_path"]).values()
        for t in server.tools
    }
    names = section.get("tool_selected_list") or list(offered)
    if unknown := next((name for name in names if name not in offered), None):
        raise ConfigError(f"{place}: its servers have no tool {unknown!r}{nearest(unknown, offered) or '.'}")
    tools: list[BaseTool] = []
    for name in names:
        described, server = offered[name]
        function = {
            "name": name,
            "description": described.get("description") or "",
            "parameters": described.get("inputSchema") or {},
        }
        tool = cls(config, OpenAIFunctionToolSchema.model_validate({"function": function}))
        tool.server = server
        tools.append(tool)
    return tools


def read_list(path: str, key: str) -> list[dict[str, Any]]:
    """The list under `key` of a YAML file (with key "": of the file itself). Raises ConfigError."""
    content = read_limited(Path(user_file(path)))
    rows = content.get(key) if key and isinstance(content, Mapping) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        what = f"a list of objects under {key!r}" if key else "a list of objects"
        raise ConfigError(f"{path} must hold {what}.")
    return rows


def load_class(name: object, place: str) -> Any:
    """The class `package.module.Class`. Raises ConfigError with `place`."""
    if not isinstance(name, str) or "." not in name:
        raise ConfigError(f"{place} names no class: give it as package.module.Class, not {name!r}.")
    module, _, attribute = name.rpartition(".")
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        fix = "Set PYTHONPATH to the folder that it is in, or install it." if absent else "Correct the module."
        raise ConfigError(f"{place}: importing {module} failed: {type(error).__name__}: {error}. {fix}") from error
    if not hasattr(loaded, attribute):
        raise NameConfigError(f"{place}: {module} has no {attribute!r}{nearest(attribute, vars(loaded)) or '.'}")
    return getattr(loaded, attribute)
