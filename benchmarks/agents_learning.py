"""Do agents learn on two cores: arithmetic with a calculator after 300 traces, and a game.

    python benchmarks/agents_learning.py calculator --folder out
    python benchmarks/agents_learning.py lake --folder out         # needs gymnasium

`calculator`: SmolLM2-135M is fine-tuned on 300 traces of the calculator about two numbers, then GRPO trains on questions about
three. `lake`: a model of random weights is fine-tuned on 300 random walks over frozen lakes, then GRPO trains on the reward 1
at the goal; each seed is a map, and held-out maps are never trained on.

Both print the mean reward of held-out episodes, sampled at temperature 1, before and after GRPO. Exit code 1: the accuracy
rises by less than 0.2, or does not fall without the tool; the win rate does not double.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import table
from workload import DEFAULT_MODEL

ROLLOUT = "actor_rollout_ref.rollout"
NUM_TRACES = 300
DEFAULTS = {
    "calculator": {"steps": 16, "prompts": 8, "samples": 8, "held_out": 100, "lr": 1e-5},
    "lake": {"steps": 60, "prompts": 16, "samples": 16, "held_out": 200, "lr": 5e-4},
}
SYSTEM = "Use the calculator, then say the number."
TWO = (
    ("What is {a} + {b}?", "{a} + {b}"),
    ("What is {a} * {b}?", "{a} * {b}"),
    ("Add {a} to {b}.", "{b} + {a}"),
    ("Take {a} from {b}.", "{b} - {a}"),
    ("Multiply {a} by {b}.", "{a} * {b}"),
    ("How much is {a} less {b}?", "{a} - {b}"),
)
THREE = (
    ("What is {a} + {b} * {c}?", "{a} + {b} * {c}"),
    ("What is ({a} - {b}) * {c}?", "({a} - {b}) * {c}"),
    ("Add {a} to {b}, then multiply by {c}.", "({b} + {a}) * {c}"),
    ("Take {a} from {b}, then add {c}.", "{b} - {a} + {c}"),
    ("Multiply {a} by {b} and take away {c}.", "{a} * {b} - {c}"),
    ("How much is {a} less the product of {b} and {c}?", "{a} - {b} * {c}"),
    ("Take the sum of {a} and {b} from {c}.", "{c} - ({a} + {b})"),
    ("Multiply the difference of {a} and {b} by {c}.", "({a} - {b}) * {c}"),
)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 for a last turn that is the number and nothing else."""
    last = solution_str.rsplit("assistant\n", 1)[-1]
    return float(last.replace("<|im_end|>", "").strip() == ground_truth)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    return {"calculator": _calculator, "lake": _lake}[options.task](options)


def _calculator(options: Any) -> int:
    folder, rng = options.folder, random.Random(7)
    _write(folder / "traces.jsonl", [question(rng, TWO) for _ in range(NUM_TRACES)])
    _write(folder / "train.jsonl", [question(rng, THREE) for _ in range(2000)])
    _write(folder / "held_out.jsonl", [question(rng, THREE) for _ in range(options.held_out)])
    start, sft_s = _fine_tune(options, DEFAULT_MODEL, epochs=1, lr=2e-5)
    common = (f"reward.custom_reward_function.path={__file__}", "data.max_prompt_length=80", *_keys(options, 96))
    tool = (
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.function_tool_path=pkg://verl.agents.tools.calculator",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        f"{ROLLOUT}.multi_turn.tool_sandbox=False",
    )
    before, after, grpo_s = _train(options, start, *common, *tool)
    last = folder / "grpo" / f"global_step_{options.steps}" / "actor" / "huggingface"
    _verl("eval", f"actor_rollout_ref.model.path={last}", *common, f"trainer.default_local_dir={folder}/without")
    without = _held_out([json.loads((folder / "without" / "eval" / "eval.json").read_text())])[0]
    _show(
        "held-out accuracy",
        options,
        before,
        after,
        sft_s,
        grpo_s,
        [["the same, without the tool", f"{without:.3f}", ""]],
    )
    return 0 if after >= before + 0.2 and without <= before else 1


def _lake(options: Any) -> int:
    from verl.models.tiny import make_tiny_model

    folder, rng = options.folder, random.Random(7)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "initializer_range": 0.02}
    model = make_tiny_model(folder / "model", **sizes)
    _write(folder / "traces.jsonl", [random_walk(rng, seed) for seed in range(NUM_TRACES)])
    _write(folder / "train.jsonl", [_map(seed) for seed in range(1000, 3000)])
    _write(folder / "held_out.jsonl", [_map(seed) for seed in range(5000, 5000 + options.held_out)])
    start, sft_s = _fine_tune(options, model, epochs=3, lr=3e-3)
    environment = f"{ROLLOUT}.agent.environment=verl.agents.games:FrozenLakes"
    turns = f"{ROLLOUT}.multi_turn.max_assistant_turns={_MOVES}"
    before, after, grpo_s = _train(
        options, start, environment, turns, "data.max_prompt_length=256", *_keys(options, 640)
    )
    _show("held-out win rate", options, before, after, sft_s, grpo_s)
    return 0 if after >= 2 * before > 0 else 1


# -- data

_MOVES = 10  # of a game; six are enough without holes
_ASK = [{"role": "user", "content": "A game."}]


def question(rng: random.Random, forms: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A question as a row for GRPO and, with `messages`, for fine-tuning."""
    from verl.agents.tools.calculator import calculated

    text, expression = rng.choice(forms)
    numbers = {name: rng.randint(11, 99) for name in "abc"}
    expression = expression.format(**numbers)
    answer = calculated(expression)
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text.format(**numbers)}]
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    turns = [
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": [*prompt, *turns], **_row("calculator", prompt, answer)}


def random_walk(rng: random.Random, seed: int) -> dict[str, Any]:
    """A game of random moves, as messages for fine-tuning."""
    from verl.agents.games import FrozenLakes

    game = FrozenLakes()
    seen, _ = game.reset(seed=seed)
    messages = [{"role": "user", "content": f"{_ASK[0]['content']}\n\n{seen}"}]
    over = False
    while not over and len(messages) < 2 * _MOVES:
        move = rng.choice(list(game.actions))
        seen, _, ended, cut, _ = game.step(move)
        over = ended or cut
        messages += [{"role": "assistant", "content": move}, {"role": "user", "content": seen}]
    game.close()
    return {"messages": messages[:-1]}


def _map(seed: int) -> dict[str, Any]:
    return {**_row("lake", _ASK, ""), "extra_info": {"seed": seed}}


def _row(source: str, prompt: list[dict[str, str]], answer: str) -> dict[str, Any]:
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": answer}}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# -- runs


def _fine_tune(options: Any, model: Path, *, epochs: int, lr: float) -> tuple[Path, float]:
    """The folder of the model after the traces, and seconds."""
    began, folder, batch = time.monotonic(), options.folder, 10
    _verl(
        "sft",
        f"model.path={model}",
        f"data.train_files={folder}/traces.jsonl",
        f"data.train_batch_size={batch}",
        "data.max_length=1024",
        f"optim.lr={lr}",
        f"trainer.total_epochs={epochs}",
        "trainer.save_freq=after_each_epoch",
        f"trainer.default_local_dir={folder}/sft",
    )
    steps = epochs * NUM_TRACES // batch
    return folder / "sft" / f"global_step_{steps}" / "model" / "huggingface", time.monotonic() - began


def _keys(options: Any, response_length: int) -> tuple[str, ...]:
    return (
        f"data.train_files={options.folder}/train.jsonl",
        f"data.val_files={options.folder}/held_out.jsonl",
        f"data.max_response_length={response_length}",
        "reward.num_workers=1",
        f"{ROLLOUT}.max_num_seqs=64",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
        "trainer.logger=[file]",
    )


def _train(options: Any, model: Path, *keys: str) -> tuple[float, float, float]:
    """GRPO: the held-out reward before and after, and seconds."""
    began, folder = time.monotonic(), options.folder / "grpo"
    _verl(
        "train",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={options.prompts}",
        f"{ROLLOUT}.n={options.samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.prompts}",
        f"actor_rollout_ref.actor.optim.lr={options.lr}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.test_freq={options.test_freq or options.steps}",
        f"trainer.save_freq={options.steps}",
        "trainer.val_before_train=True",
        f"trainer.default_local_dir={folder}",
        *keys,
    )
    found = _held_out([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    return found[0], found[-1], time.monotonic() - began


def _held_out(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The held-out rewards in rows of metrics."""
    return [float(v) for row in rows for name, v in row.items() if name.startswith("val-core/") and "mean@1" in name]


def _verl(verb: str, *keys: str) -> None:
    done = subprocess.run([sys.executable, "-m", "verl", verb, *keys], check=False)
    if done.returncode:
        raise SystemExit(f"verl {verb} ended with {done.returncode}.")


def _show(
    title: str, options: Any, before: float, after: float, sft_s: float, grpo_s: float, more: Sequence[list[str]] = ()
) -> None:
    rows = [
        [f"after fine-tuning on {NUM_TRACES} traces", f"{before:.3f}", f"{sft_s:.0f}"],
        [f"after {options.steps} steps of GRPO", f"{after:.3f}", f"{grpo_s:.0f}"],
        *more,
    ]
    print(table(["", title, "s"], rows))


def _parse(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("calculator", "lake"))
    parser.add_argument(
        "--folder", type=lambda text: Path(text).resolve(), required=True, help="for data and run folders"
    )
    parser.add_argument("--steps", type=int, help="of GRPO")
    parser.add_argument("--prompts", type=int, help="of a step")
    parser.add_argument("--samples", type=int, help="of a prompt")
    parser.add_argument("--held-out", type=int, help="episodes")
    parser.add_argument("--test-freq", type=int, default=0, help="steps between held-out rewards")
    parser.add_argument("--lr", type=float, help="of GRPO")
    options = parser.parse_args(argv)
    given = {name: value for name, value in vars(options).items() if value is not None}
    return argparse.Namespace(**{**vars(options), **DEFAULTS[options.task], **given})


if __name__ == "__main__":
    sys.exit(main())
