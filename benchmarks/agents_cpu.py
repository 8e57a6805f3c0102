"""Episodes with tools over one generation: occupancy of decode slots while tools take their time, reuse of the KV cache.

    python benchmarks/agents_cpu.py                         # tools of 0, 50 and 500 ms, a random model made on the spot
    python benchmarks/agents_cpu.py --latency 50 --episodes 64 --json out.json

Each episode has `--turns` turns of `--tokens` tokens; a tool answers `--answer` tokens after its latency. The baseline has
turns in step: all episodes take a turn, then all tools are called at once, then the next turn, on the same engine. Both make
the same tokens, which is checked. Occupancy: rows decoded by slots that there were, times the share of time in which the engine
computed; the end of a run, when episodes run out, counts. Slots can be busy only where `--live` / `--slots` turns last longer
than a turn and its tool. The last column is prompt tokens computed over prompt and answer tokens of the conversations: 1 means
that each is computed once. Exit code 1: tokens differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import Series, ratio, table

PROMPT_TOKENS = 40
Tokens = dict[tuple[int, int], list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="verl-agents-") as folder:
        engine = _engine(arguments, Path(folder))
        rows, results, same = [], [], True
        for latency_ms in arguments.latency:
            ours, in_step, stats = [], [], {}
            for _ in range(arguments.rounds):
                started_at = time.perf_counter()
                tokens, stats = _episodes(engine, arguments, latency_ms / 1000)
                ours.append(time.perf_counter() - started_at)
                started_at = time.perf_counter()
                same &= _in_step(engine, arguments, latency_ms / 1000) == tokens
                in_step.append(time.perf_counter() - started_at)
            rows.append(_figures(arguments, latency_ms, stats, Series(tuple(ours)), Series(tuple(in_step))))
            results.append({**rows[-1], "same_tokens": same})
    header = ["tool", "episodes s", "turns in step s", "ratio", "occupancy", "prompt tokens by needed"]
    print(table(header, [[str(value) for value in row.values()] for row in rows]))
    print(f"tokens of both: {'equal' if same else 'DIFFERENT'}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))
    return 0 if same else 1


def _figures(arguments: Any, latency_ms: int, stats: dict[str, Any], ours: Series, in_step: Series) -> dict[str, str]:
    slots = min(arguments.slots, arguments.episodes)
    rows = stats["num_row_steps"] / (stats["num_decode_steps"] * slots)
    busy = stats["busy_s"] / (stats["busy_s"] + stats["idle_s"])
    # the last token of a turn is computed together with the answer to it
    per_episode = PROMPT_TOKENS + (arguments.turns - 1) * (arguments.answer + 1)
    needed = arguments.episodes * per_episode
    return {
        "tool": f"{latency_ms} ms",
        "episodes": ours.text(),
        "in_step": in_step.text(),
        "ratio": f"{ratio(in_step, ours):.2f}",
        "occupancy": f"{rows * busy:.2f}",
        "prompt_tokens": f"{stats['num_prompt_tokens_computed'] / needed:.3f}",
    }


def _engine(arguments: Any, folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    import verl.models.attention  # noqa: F401 - registers the attention
    from verl.config import RolloutConfig
    from verl.models.tiny import make_tiny_model, make_tokenizer
    from verl.rollout.native.engine import NativeRollout

    torch.set_num_threads(arguments.threads)
    sizes = {
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
    }
    path = make_tiny_model(folder / "model", **sizes)
    module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="verl", dtype=torch.float32)
    return NativeRollout(module, make_tokenizer(), RolloutConfig(max_num_seqs=arguments.slots), eos_token_ids=[258])


def _params(arguments: Any) -> Any:
    from verl.data_proto.samples import SamplingParams

    most = arguments.turns * (arguments.tokens + arguments.answer)
    return SamplingParams(max_new_tokens=most, ignore_eos=True, seed=3)


def _prompt(ordinal: int) -> tuple[int, ...]:
    return tuple((ordinal * 7 + i * 13) % 250 for i in range(PROMPT_TOKENS))


def _answer(arguments: Any, said: Sequence[int]) -> list[int]:
    return [(sum(said) + i) % 250 for i in range(arguments.answer)]


def _episodes(engine: Any, arguments: Any, latency_s: float) -> tuple[Tokens, dict[str, Any]]:
    from verl.agents.driver import EpisodeDriver, EventLoop
    from verl.agents.episode import Episode, EpisodeResult, EpisodeTask

    params = _params(arguments)
    tasks = [
        EpisodeTask(i, 0, 1, "train", _prompt(i), {}, params.max_new_tokens, PROMPT_TOKENS)
        for i in range(arguments.episodes)
    ]

    async def run(episode: Episode) -> EpisodeResult:
        response: list[int] = []
        mask: list[int] = []
        for turn in range(arguments.turns):
            done = await episode.generate([*episode.task.prompt_ids, *response], arguments.tokens)
            assert done is not None
            response += done.token_ids
            mask += [1] * len(done.token_ids)
            if turn + 1 < arguments.turns:
                if latency_s:
                    await asyncio.sleep(latency_s)
                answer = _answer(arguments, done.token_ids)
                response += answer
                mask += [0] * len(answer)
        return EpisodeResult(episode.task, episode.trajectory(episode.task.prompt_ids, response, mask, "stop"))

    events = EventLoop()
    try:
        driver = EpisodeDriver(engine, events, max_episodes=arguments.live, timeout_s=600.0, filler=258)
        found = driver.run(tasks, run, params, step=1)
    finally:
        events.close()
    return {(r.task.ordinal, 0): r.trajectory.response_ids for r in found}, driver.stats


def _in_step(engine: Any, arguments: Any, latency_s: float) -> Tokens:
    """Every turn of all episodes, then every tool."""
    from verl.data_proto.samples import PromptRequest

    params, found = replace(_params(arguments), max_new_tokens=arguments.tokens), {}
    for turn in range(arguments.turns):
        requests = [
            PromptRequest(i, (*_prompt(i), *found.get((i, 0), ())), num_drawn=len(found.get((i, 0), ())))
            for i in range(arguments.episodes)
        ]
        for done in engine.generate(requests, params, step=1):
            said = found.setdefault(done.key, [])
            said += done.token_ids
            if turn + 1 < arguments.turns:
                said += _answer(arguments, done.token_ids)
        if turn + 1 < arguments.turns:
            time.sleep(latency_s)
    return found


def _parse(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--latency", type=int, nargs="+", default=[0, 50, 500], help="of a tool, ms")
    parser.add_argument("--episodes", type=int, default=384)
    parser.add_argument("--live", type=int, default=192, help="episodes in progress at once")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    parser.add_argument("--answer", type=int, default=24, help="tokens of a tool's answer")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
