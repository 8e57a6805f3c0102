"""`verl check`: everything that can be known before training, as a list of passes, warnings and failures."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.cli.arguments import ConfigArguments, parse
from verl.config import VerlConfig
from verl.errors import VerlError

ABOUT = "Check config, model, every data row, rewards, memory and disk, without training. Exit code 0: nothing fails."
MARKS = {"pass": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


@dataclass(frozen=True)
class Finding:
    level: Literal["pass", "warn", "fail"]
    subject: str
    sentence: str


def run(argv: list[str]) -> int:
    return check(parse("check", ABOUT, argv))


def check(arguments: ConfigArguments) -> int:
    """Print every finding; returns 0 when none fails, else 1."""
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    num_failed = 0
    for finding in findings(arguments):
        num_failed += finding.level == "fail"
        console.print(f"{MARKS[finding.level]} [bold]{finding.subject}[/]  {escape(finding.sentence)}", soft_wrap=True)
    console.print(f"[red]{num_failed} failed[/]" if num_failed else "[green]ready to train[/]")
    return 1 if num_failed else 0


def findings(arguments: ConfigArguments) -> Iterator[Finding]:
    """Config first; the rest only when it holds. A stage that raises one of our errors is a failure with its sentence."""
    from verl.config.checks import check_config

    try:
        loaded = arguments.load(check=False)
    except VerlError as error:
        yield Finding("fail", "config", str(error))
        return
    problems = check_config(loaded)
    for problem in problems:
        yield Finding("fail" if problem.level == "error" else "warn", "config", problem.sentence)
    if any(problem.level == "error" for problem in problems):
        return
    yield Finding("pass", "config", f"{len(loaded.given)} keys set, the rest at their defaults.")
    config = loaded.config
    tokenizer: list[Any] = []
    stages: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("model", lambda: _model(config, tokenizer)),
        ("data", lambda: _data(config, tokenizer[0])),
        ("reward", lambda: _reward(config, tokenizer[0])),
        ("memory", lambda: _memory(config)),
        ("disk", lambda: _disk(config)),
    )
    for subject, stage in stages:
        if subject in ("data", "reward") and not tokenizer:
            continue  # the model stage has failed and said why
        try:
            yield from stage()
        except VerlError as error:
            yield Finding("fail", subject, str(error))


def _model(config: VerlConfig, tokenizer: list[Any]) -> Iterator[Finding]:
    from verl.models.load import load_tokenizer

    model = config.actor_rollout_ref.model
    tokenizer.append(load_tokenizer(model))
    shape = _model_config(model.path)
    limit = shape.get("max_position_embeddings")
    wanted = config.data.max_prompt_length + config.data.max_response_length
    if not has_weights(model.path):
        yield Finding("fail", "model", f"{model.path} holds no *.safetensors; give a folder with weights.")
    elif limit and wanted > limit:
        yield Finding(
            "fail",
            "model",
            f"data.max_prompt_length + data.max_response_length = {wanted}, and {model.path} holds {limit} positions. "
            "Lower one of them.",
        )
    else:
        kind = (shape.get("architectures") or ["?"])[0]
        yield Finding("pass", "model", f"{model.path}: {kind}, {num_parameters(model.path) / 1e6:.0f} million parameters.")


def _data(config: VerlConfig, tokenizer: Any) -> Iterator[Finding]:
    from verl.data.check import check_data

    report = check_data(config.data, tokenizer)
    for name, rows in (("training", report.train), ("validation", report.validation)):
        if rows is None:
            continue
        for sentence in rows.problems:
            yield Finding("fail", "data", sentence)
        if rows.num_problems > len(rows.problems):
            yield Finding("fail", "data", f"... and {rows.num_problems - len(rows.problems)} more {name} rows.")
        yield Finding(
            "pass",
            "data",
            f"{rows.num_rows} {name} rows, prompts of {rows.mean_length:.0f} tokens on average and {rows.max_length} at most "
            f"({rows.num_overlong} over the limit, {rows.num_repeated} repeated).",
        )
    if report.train and report.train.num_rows < config.data.train_batch_size:
        yield Finding(
            "fail",
            "data",
            f"data.train_batch_size={config.data.train_batch_size} is more than the {report.train.num_rows} training rows.",
        )
    if report.num_shared:
        yield Finding("warn", "data", f"{report.num_shared} validation prompts occur in training too.")


def _reward(config: VerlConfig, tokenizer: Any) -> Iterator[Finding]:
    from verl.data.dataset import load_dataset
    from verl.rewards.check import check_references

    files = [f for f in (config.data.train_files, config.data.val_files) if f]
    sets = [load_dataset(f, tokenizer, config.data) for f in files]
    rows = itertools.chain.from_iterable((rows[i] for i in range(len(rows))) for rows in sets)
    for source in check_references(rows, config.reward).sources:
        yield Finding(source.level, "reward", source.sentence)
        for failure in source.failures:
            yield Finding("warn", "reward", failure)


def _memory(config: VerlConfig) -> Iterator[Finding]:
    """Weights, gradients and two Adam moments in float32, for each model that trains; weights for the reference."""
    import psutil

    from verl.controller.needs import Needs

    needs = Needs.of(config)
    actor = num_parameters(config.actor_rollout_ref.model.path)
    wanted = actor * 16 + (actor * 4 if needs.reference else 0)
    if needs.critic:
        wanted += num_parameters(config.critic.model.path) * 16
    free = psutil.virtual_memory().available
    level: Literal["pass", "fail"] = "pass" if wanted < free else "fail"
    advice = "" if level == "pass" else " Choose a smaller model or a machine with more memory."
    yield Finding(
        level,
        "memory",
        f"weights, gradients and optimizer take {wanted / 1e9:.1f} GB, activations and cache come on top; "
        f"{free / 1e9:.1f} GB are available.{advice}",
    )


def _disk(config: VerlConfig) -> Iterator[Finding]:
    from verl.controller.needs import Needs

    trainer = config.trainer
    folder = Path(trainer.default_local_dir).expanduser()
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    size = num_parameters(config.actor_rollout_ref.model.path) * 12
    if Needs.of(config).critic:
        size += num_parameters(config.critic.model.path) * 12
    saves = trainer.save_freq > 0
    # the newest and the one being written exist at the same time
    wanted = (size * ((trainer.max_actor_ckpt_to_keep or 1) + 1) if saves else 0) + trainer.min_free_disk_gb * 1e9
    sentence = f"a checkpoint takes {size / 1e9:.1f} GB; {free / 1e9:.1f} GB are free at {existing}."
    if wanted > free:
        yield Finding("fail", "disk", f"{sentence} Free some space or set trainer.max_actor_ckpt_to_keep.")
    else:
        yield Finding("pass", "disk", sentence if saves else f"no checkpoints are asked for (trainer.save_freq); {sentence}")


def _model_config(path: str) -> dict[str, Any]:
    file = Path(path).expanduser() / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def has_weights(path: str) -> bool:
    """Whether a folder holds weights; a hub name is given the benefit of the doubt."""
    folder = Path(path).expanduser()
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def num_parameters(path: str) -> int:
    """Counted from the headers of the folder's safetensors files; 0 for a hub name."""
    from safetensors import safe_open

    total = 0
    for file in Path(path).expanduser().glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                count = 1
                for size in tensors.get_slice(name).get_shape():
                    count *= size
                total += count
    return total
