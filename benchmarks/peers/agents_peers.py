"""One GRPO step of episodes with a tool, ours against TRL's `environment_factory`, on identical work, alternating.

    python benchmarks/peers/agents_peers.py        # 4 prompts x 8 episodes of 3 turns of 24 tokens; a tool of 50 ms
    python benchmarks/peers/agents_peers.py --latency-ms 500 --trl best --dtype bfloat16

Both sides play agents_task.Library: every turn but the last calls its tool, whatever the model wrote. Turns have exactly
`--turn-tokens` tokens. See peers_cpu.py for how sides are held, compared and refused.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import peers_cpu
from agents_task import LATENCY_S, TEMPLATE, TURN_TOKENS, TURNS
from peer_env import ensure
from report import Report, number, series_of
from workload import Workload

ROLLOUT = "actor_rollout_ref.rollout"
HERE = Path(__file__).resolve().parent
_TOOL_TOKENS = 64  # for the answer of a tool and the tokens that the template writes around it
_PROMPT_EXTRA = 16  # tokens that the template writes around a prompt


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers_cpu.add_workload_options(parser)
    peers_cpu.add_trl_options(parser)
    parser.set_defaults(prompts=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=24)
    parser.add_argument("--latency-ms", type=float, default=50.0, help="of the tool")
    options = parser.parse_args(argv)
    options.response_tokens = options.turns * options.turn_tokens + (options.turns - 1) * _TOOL_TOKENS
    return options


def overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    """Overrides of `verl train` for the same episodes, in addition to verl_side's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "loops.yaml").write_text("- name: fixed_turns\n  _target_: agents_turns.FixedTurns\n")
    return [
        f"actor_rollout_ref.model.custom_chat_template={folder}/chat.jinja",
        f"actor_rollout_ref.model.external_lib={HERE}/agents_turns.py",
        f"data.max_prompt_length={options.prompt_tokens + _PROMPT_EXTRA}",
        f"{ROLLOUT}.agent.environment={HERE}/agents_task.py:Library",
        f"{ROLLOUT}.agent.agent_loop_config_path={folder}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=fixed_turns",
        f"{ROLLOUT}.multi_turn.format=every_turn_of_a_benchmark",
        f"{ROLLOUT}.multi_turn.max_assistant_turns={options.turns}",
    ]


def main(argv: list[str] | None = None) -> Report:
    options = parse(argv)
    if options.trl:
        ensure("trl", options.trl_env)
    settings = {TURNS: options.turns, TURN_TOKENS: options.turn_tokens, LATENCY_S: options.latency_ms / 1000}
    os.environ.update({name: str(value) for name, value in settings.items()})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    work = peers_cpu.make_workload(options, num_steps=options.rounds + 1)
    report = Report("GRPO step of episodes with a tool")
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agents-peers-")))
        ours = peers_cpu.start_verl(stack, work, logs, options.limit_s, overrides(options, logs / "keys"))
        peers = [ours]
        for form in dict.fromkeys(options.trl):
            peers.append(peers_cpu.start_trl(stack, work, logs, options, form, script="child_trl_agents.py"))
        steps_of_peers = peers_cpu.alternate(peers, options.rounds, options.limit_s)
        report.facts = {"workload": describe(work, options), **{peer.name: peer.facts for peer in peers}}
        peers_cpu.fill(report, steps_of_peers, {peer.name: peer.idle_share for peer in peers})
    steps = {name: series_of(rounds, "step_s") for name, rounds in steps_of_peers.items()}
    hourly = ", ".join(f"{name} {number(3600 / series.median)}" for name, series in steps.items())
    report.notes.append(f"Steps per hour: {hourly}.")
    report.finish(options.json)
    return report


def describe(work: Workload, options: argparse.Namespace) -> str:
    """One line that says what every side did."""
    return (
        f"{Path(work.model).name} {work.dtype}, {work.num_prompts} prompts x {work.num_samples} episodes of {options.turns} "
        f"turns of {options.turn_tokens} tokens after a prompt of {work.prompt_tokens}, a tool of {options.latency_ms:g} ms"
    )


if __name__ == "__main__":
    main()
