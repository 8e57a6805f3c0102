"""Functions as tools, under the names of the existing verl: `verl.tools.function_tool`."""

import logging

from verl.registry import user_file
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, Answer, FunctionTool, answer_of
from verl.tools.tool_registry import marked_tools

log = logging.getLogger(__name__)

_LOADED_FUNCTION_TOOL_PATHS: dict[str, list[FunctionTool]] = {}  # scripts clear it between two configs


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """The tools of a Python file, which is run once; they are in FUNCTION_TOOL_REGISTRY afterwards. [] with a warning for a
    file without tools. Raises FileNotFoundError for a missing one."""
    if not user_file(path).is_file():
        raise FileNotFoundError(f"function_tool_path does not exist: {path}")
    tools = marked_tools(path)
    if not tools:
        log.warning("%s: no @function_tool decorators found.", path)
    _LOADED_FUNCTION_TOOL_PATHS[path] = tools
    FUNCTION_TOOL_REGISTRY.update({tool.name: tool for tool in tools})
    return tools


def normalize_function_tool_return(ret: object) -> Answer:
    """(response, reward, metrics) of what a function returned: a text, an object, a response, or a tuple of one of them with a
    reward and metrics. Raises TypeError for a tuple of another length."""
    if isinstance(ret, tuple) and not 1 <= len(ret) <= 3:
        raise TypeError(f"A tool returns one value, or a tuple of length 1, 2, or 3; this has {len(ret)}.")
    return answer_of(ret)
