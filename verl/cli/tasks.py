"""`verl eval --tasks`: a checkpoint or model folder on tasks of the Language Model Evaluation Harness (lm_eval)."""

import argparse
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.cli.model_folders import model_folder
from verl.cli.parser import Parser
from verl.errors import ConfigError, MissingExtraError, nearest


def run_tasks(argv: list[str]) -> int:
    """Evaluate a model on tasks: the exit code."""
    parser = Parser(
        prog="verl eval", description="Evaluate a model on tasks of lm_eval. Without --tasks: `verl eval --help`."
    )
    parser.add_argument("source", help="a run folder, a folder global_step_N, or a Hugging Face folder")
    parser.add_argument("--tasks", required=True, help="names of tasks or groups, separated by commas")
    parser.add_argument("--include-path", metavar="FOLDER", help="folder with further tasks (.yaml)")
    parser.add_argument("--num-fewshot", type=int, help="examples in front of each question (default: the task's)")
    parser.add_argument("--limit", type=int, help="questions of each task (default: all)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a forward pass (default: 8)")
    parser.add_argument("--chat-template", action="store_true", help="put questions into the model's chat template")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", help="dtype of a checkpoint's weights (default: bfloat16)")
    parser.add_argument("--output", metavar="FILE", help="write all results as JSON, with the answer to each question")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtraError("verl eval --tasks", "lm-eval", "lm_eval")
    output = Path(arguments.output).expanduser() if arguments.output else None
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output={output} is in no existing folder. Create it, or choose another place.")
    with model_folder(arguments.source, arguments.dtype) as folder:
        results = _evaluate(folder, arguments)
    for line in _table(results["results"]):
        print(line)
    if output is not None:
        output.write_text(json.dumps(results, indent=2, default=str), encoding="utf-8")
        print(f"wrote {output}")
    return 0


def _evaluate(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from verl.parallel.device import resolve_device

    manager = TaskManager(include_path=arguments.include_path)
    names = [name for name in arguments.tasks.split(",") if name]
    all_tasks = set(manager.all_tasks)
    for name in names:
        if not any(char in name for char in "*?[/") and name not in all_tasks:
            raise ConfigError(f"lm_eval has no task {name!r}{nearest(name, all_tasks) or '; see `lm_eval ls tasks`.'}")
    model = HFLM(str(folder), device=str(resolve_device(arguments.device)), batch_size=arguments.batch_size)
    results = simple_evaluate(
        model, tasks=names, num_fewshot=arguments.num_fewshot, limit=arguments.limit, task_manager=manager,
        apply_chat_template=arguments.chat_template, log_samples=arguments.output is not None,
    )  # fmt: skip
    assert results is not None  # other ranks get it
    return dict(results)


def _table(results: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Lines of task, metric, value and standard error; names of metrics have their filter behind a comma."""
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            label = metric if filtered == "none" else f"{metric} ({filtered})"
            yield f"{task:<24} {label:<32} {value:.4f}{spread}"
