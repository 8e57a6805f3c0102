"""Python as a tool: `multi_turn.function_tool_path=pkg://verl.agents.tools.python`. Each program has a separate process with
limits on time and memory; with multi_turn.tool_sandbox it runs inside the sandbox of tools."""

from verl.rewards.programs import ProgramLimits, run_program
from verl.tools.function_tool import function_tool

LIMITS = ProgramLimits(time_s=10.0, memory_mb=1024)
MAX_OUTPUT = 20_000  # characters


@function_tool
def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program
    """
    return program_output(code, LIMITS)


def program_output(code: str, limits: ProgramLimits) -> str:
    """The prints of a program, with the end of its errors and the reason when it fails."""
    done = run_program(code, limits=limits)
    text = done.stdout[:MAX_OUTPUT]
    return text if done.ok else f"{text}\n{done.stderr[-MAX_OUTPUT:]}\nThe program {done.failure}.".strip()
