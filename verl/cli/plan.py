"""`verl plan`: the placement, the layouts, the memory and the time of a run, before a device is rented."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from verl.cli.arguments import ConfigArguments, parse, with_run_folder
from verl.cli.check import PROGRAM, schema_asked
from verl.config.checks import check_config
from verl.errors import ConfigError
from verl.families import engine_facts
from verl.foreign_text import clean
from verl.model_families import families_with
from verl.tracking.files import json_text, write_atomically
from verl.tracking.timeline import PLAN

if TYPE_CHECKING:
    from rich.console import Console

    from verl.models.shapes import ModelShape
    from verl.planner.search import RunPlan

_FULL = 0.95  # from this share of the memory on a plan is called full

_ABOUT = """Plan a run: which roles share devices, how each divides its model, how much memory and how long.
Takes the keys of verl train (--program: of verl sft, preference or rm), and plan.*: plan.cluster={gpu: h100_sxm, nodes: 4},
plan.workload={prompt_mean: 300, image_tokens: 200, response: [p10, p50, p90, longest]},
plan.async=off|auto|on, plan.engine=fsdp|megatron, plan.apply=true. The model needs a config.json or a published name; its
weights are not read."""
_JSON = {"action": "store_true", "help": "print the best plan and the runner-up as one JSON object"}
_SIMULATE = {
    "metavar": "FOLDER",
    "help": "also simulate the run, with jitter of devices, and write its timeline and the plan there for "
    "verl show and verl view",
}
_BESIDE = {
    "metavar": "RUN",
    "help": "write the plan and its simulated steps into this run folder too: verl view shows them beside the measured ones "
    "(plan.apply=true does so for the run that it starts)",
}
_STEPS = {"type": int, "default": 100, "metavar": "N", "help": "steps to simulate (100)"}
_OPTIONS: Mapping[str, Mapping[str, object]] = {"--program": PROGRAM, "--json": _JSON, "--simulate": _SIMULATE,
                                           "--beside": _BESIDE, "--steps": _STEPS}  # fmt: skip


def run_plan(argv: list[str]) -> int:
    """Print the plan; with plan.apply=true start the run with it: the exit code."""
    plan_keys = [a for a in argv if a.startswith("plan.")]
    run_keys = [a for a in argv if not a.startswith("plan.")]
    arguments = parse("plan", _ABOUT, run_keys, _OPTIONS, schema=schema_asked(run_keys))
    from verl.planner.overrides import overrides, plan_as_json
    from verl.planner.request import PlanRequest, cluster_of, dataflow_of, engine_of, rules_of, workload_of
    from verl.planner.search import search

    request = PlanRequest.parse(plan_keys)
    _check_simulation(arguments.options.simulate, arguments.options.steps)
    loaded = arguments.load(check=False)
    loaded = with_run_folder(loaded) if request.apply else loaded
    config, engine = loaded.config, engine_of(request, loaded.config)
    flow = dataflow_of(config, on_cpu=request.cluster.gpu == "cpu")
    rules = rules_of(request, config, flow.roles)
    plans = search(flow, cluster_of(request.cluster, loaded), workload_of(config, request.workload), rules)
    best, second = plans[0], plans[1] if len(plans) > 1 else None
    chosen = overrides(best, engine, config)
    _require_taken(arguments, chosen)
    rows = {
        "best": {**plan_as_json(best), "overrides": chosen},
        "runner_up": {**plan_as_json(second), "overrides": overrides(second, engine, config)} if second else None,
    }
    if arguments.options.json:
        print(json.dumps(rows, indent=2))
    else:
        from rich.console import Console

        if not any(setting.startswith("plan.cluster") for setting in plan_keys):
            gpu = request.cluster.gpu
            print(f"plan.cluster names no GPU: this plan is for {gpu}, not for this machine (plan.cluster.gpu=cpu).")
        console = Console(highlight=False)
        show_plan(best, second, chosen, console)
        _show_weights(config, flow.shapes["actor"].num_parameters, console)
    for notice in [engine_notice(engine, flow.shapes["actor"]), *_unplanned(config, loaded.settings, best)]:
        if notice:
            print(f"verl: {notice}", file=sys.stderr)
    beside = arguments.options.beside or (config.trainer.default_local_dir if request.apply else None)
    _simulate(best, arguments.options.simulate, beside, arguments.options.steps)
    for name in {arguments.options.simulate, beside} - {None}:
        write_atomically(Path(name).expanduser() / PLAN, json_text(rows, indent=2) + "\n")
    if "trainer.default_local_dir" not in loaded.settings:
        chosen = [*chosen, f"trainer.default_local_dir={config.trainer.default_local_dir}"]
    return _start(arguments, chosen) if request.apply else 0


def _require_taken(arguments: ConfigArguments, chosen: list[str]) -> None:
    """Raise ConfigError for keys of the run that the layout of its plan excludes."""
    runs = (arguments, replace(arguments, overrides=[*arguments.overrides, *chosen]))
    before, after = ([p.sentence for p in check_config(r.load(check=False)) if p.level == "error"] for r in runs)
    if excluded := [sentence for sentence in after if sentence not in before]:
        raise ConfigError("The fastest plan has settings that this run refuses. " + " ".join(excluded))


def _show_weights(config: object, num_parameters: int, console: Console) -> None:
    """The weights that a rollout engine with its own memory takes, and where they stay."""
    from verl.cli.checklist.resources import bytes_for_restarts
    from verl.config import PPOConfig
    from verl.models.memory import WEIGHT

    if isinstance(config, PPOConfig) and engine_facts(config.actor_rollout_ref.rollout.name).takes_buckets:
        delta = config.actor_rollout_ref.rollout.checkpoint_engine.backend == "delta"
        keeps = delta or bytes_for_restarts(config, num_parameters, WEIGHT)
        stays = " and stay in its memory" if keeps else ""
        size = f"{WEIGHT * num_parameters / 1e9:.1f} GB"
        console.print(f"weights of {size} go to each host once a step{stays}", soft_wrap=True)


def _start(arguments: ConfigArguments, chosen: list[str]) -> int:
    """Run the program with the overrides of its plan."""
    from verl.cli import train

    config_options = ["--config-path", arguments.config_path] if arguments.config_path else []
    config_options += ["--config-name", arguments.config_name] if arguments.config_name else []
    run = {"ppo": train.run_train, "sft": train.run_sft, "preference": train.run_preference, "rm": train.run_rm}
    return run[arguments.schema.name]([*config_options, *arguments.overrides, *chosen])


def _check_simulation(name: str | None, steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"--steps {steps}: simulate at least one step.")
    folder = Path(name or "").expanduser()
    if name and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--simulate {folder}: it exists and is no empty folder. Name a new one.")


def _simulate(plan: RunPlan, name: str | None, beside: str | None, steps: int) -> None:
    """Write a simulated run to the new or empty folder `name`, and its steps into the run folder `beside`."""
    from verl.planner.simulate import Conditions, simulate

    if beside:
        folder = Path(beside).expanduser()
        simulate(plan, Conditions(steps=steps, jitter=0.0)).write_plan(folder)
        print(f"simulated {steps} steps beside {folder}; verl view {folder} shows them", file=sys.stderr)
    if name:
        folder = Path(name).expanduser()
        run = simulate(plan, Conditions(steps=steps, jitter=0.02))
        run.write(folder)
        print(
            f"simulated {steps} steps: {run.total_s / steps:.1f} s a step with jitter; verl show {folder} displays them",
            file=sys.stderr,
        )


def show_plan(plan: RunPlan, second: RunPlan | None, chosen: list[str], console: Console) -> None:
    """Print a plan as tables, with its overrides `chosen`."""
    device = plan.cluster.device
    mode = ", rollout a step ahead of training" if plan.asynchronous else ", synchronous" if plan.flow.generates else ""
    model = clean(plan.flow.shapes["actor"].name) or "model"
    console.print(
        f"{plan.flow.name}, {model} on {plan.cluster.num_devices} x {device.name}: "
        f"a step takes about {_seconds(plan.step_s)} s{mode}",
        soft_wrap=True,
        markup=False,
    )
    if tower := plan.flow.shapes["actor"].tower:
        images = plan.workload.image_tokens
        per_prompt = f"{images:,.0f} of {plan.workload.prompt_mean:,.0f} tokens of a prompt are of images"
        per_prompt = per_prompt if images else "no images, set plan.workload.image_tokens"
        size = f"{tower.num_parameters / 1e6:,.0f} million parameters, {tower.patches} patches a token"
        console.print(f"vision tower: {size}; {per_prompt}", soft_wrap=True, markup=False)
    console.print(f"placement: {plan.placement()}", soft_wrap=True, markup=False)
    _show_layouts(plan, console)
    _show_memory(plan, console)
    _show_time(plan, console)
    if second is not None:
        console.print(f"\nrunner-up: {why_it_lost(plan, second)}", soft_wrap=True, markup=False)
    console.print("\n[bold]overrides[/bold]")
    console.print(" \\\n".join(f"  {quote(line)}" for line in chosen), soft_wrap=True, markup=False)
    console.print(
        "\nTimes are predictions from kernels measured one by one; published RL steps took 1.1 to 3.2 times as long.",
        soft_wrap=True,
    )


def engine_notice(engine: str, shape: ModelShape) -> str:
    """A sentence if the training engine cannot have a model of this shape, else ""."""
    parts = {
        "latent attention": shape.is_latent,
        "linear attention": shape.linear is not None,
        "shared experts": shape.shared_intermediate > 0,
        "dense layers before its experts": shape.is_mixture and shape.dense_layers > 0,
    }
    refused = [name for name, is_there in parts.items() if is_there]
    if engine != "megatron" or not refused:
        return ""
    return (
        f"verl train cannot start this plan: the model has {' and '.join(refused)}, and strategy=megatron takes the families "
        f"{', '.join(families_with('megatron'))}. Set plan.engine=fsdp for a plan that starts."
    )


def _unplanned(config: object, settings: Collection[str], plan: RunPlan) -> list[str]:
    """Sentences about keys of the run that the plan does not follow."""
    from verl.config import PPOConfig

    notices, work, limit = [], plan.workload, plan.flow.shapes["actor"].max_positions
    if limit is not None and (longest := work.longest) > limit:
        notices.append(
            f"sequences of {longest:,.0f} tokens are longer than the model's max_position_embeddings={limit:,}."
        )
    if "trainer.placement" in settings:
        notices.append("the plan chooses trainer.placement in place of the value of this command.")
    quantization = config.actor_rollout_ref.rollout.quantization if isinstance(config, PPOConfig) else None
    if quantization:
        notices.append(f"rollout.quantization={quantization} is planned with the times and bytes of the model's dtype.")
    return notices


def _show_layouts(plan: RunPlan, console: Console) -> None:
    table = _table("role", "devices", "training", "rollout")
    for count, chosen in zip(plan.devices, plan.options, strict=True):
        for option in chosen:
            layout = f"{option.layout.text()}, {option.layout.micro_batch:,} tokens" if option.layout else ""
            table.add_row(option.role, str(count), layout, option.rollout.text() if option.rollout else "")
    console.print(table)


def _show_memory(plan: RunPlan, console: Console) -> None:
    names = ("weights", "grads", "optimizer", "activations", "kv", "buffers")
    table = _table("GB per device", *names, "sum")
    for chosen in plan.options:
        for option in chosen:
            for kind, part in option.parts.items():
                sizes = [getattr(part, name) / 1e9 for name in names]
                table.add_row(f"{option.role} {kind}", *(f"{s:.1f}" for s in sizes), f"{sum(sizes):.1f}")
    console.print(table)
    for roles, chosen in zip(plan.groups, plan.options, strict=True):
        resident, peak = sum(o.resident for o in chosen), max(o.peak for o in chosen)
        console.print(
            f"  peak of {', '.join(roles)}: {(resident + peak) / 1e9:.1f} of {plan.cluster.memory / 1e9:.1f} GB "
            f"({resident / 1e9:.1f} stay between calls)"
            + (": no room for fragmentation" if resident + peak > _FULL * plan.cluster.memory else ""),
            soft_wrap=True,
            markup=False,
        )
    tensor = max((o.rollout.tensor for chosen in plan.options for o in chosen if o.rollout), default=1)
    if tensor > plan.cluster.gpus_per_node:
        console.print(
            f"  a replica of the rollout needs {tensor} devices: more than the {plan.cluster.gpus_per_node} of a node, within "
            "which verl train starts vLLM and SGLang",
            soft_wrap=True,
        )


def _show_time(plan: RunPlan, console: Console) -> None:
    table = _table("phase", "seconds", "bound by", "parts")
    for chosen in plan.options:
        for option in chosen:
            for kind, time in option.times.items():
                largest = sorted(time.parts.items(), key=lambda item: -item[1])[:3]
                parts = ", ".join(f"{name} {_seconds(part)}" for name, part in largest if part >= 0.02 * time.seconds)
                table.add_row(f"{option.role} {kind}", _seconds(time.seconds), time.bound, parts)
    if plan.sync_s:
        table.add_row("weight sync", _seconds(plan.sync_s), "network", "")
    console.print(table)


def why_it_lost(best: RunPlan, second: RunPlan) -> str:
    """One sentence: the stage with the largest loss of the second plan against the best one."""
    mode = ", rollout ahead" if second.asynchronous else ""
    head = f"{second.placement()}{mode}: {_seconds(second.step_s)} s ({second.step_s / best.step_s - 1:+.0%})"
    names = [" and ".join(call.name for call in stage) for stage in best.flow.stages]
    slower = max(range(len(names)), key=lambda i: second.stages[i] - best.stages[i])
    if second.stages[slower] <= 1.01 * best.stages[slower]:
        return f"{head}; no stage is slower, but they take turns"
    return f"{head}; {names[slower]} takes {_seconds(second.stages[slower])} s instead of {_seconds(best.stages[slower])} s"


def _seconds(seconds: float) -> str:
    """12.3, and 0.012 below one."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _table(first: str, *columns: str):
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="left" if name in ("training", "rollout", "bound by", "parts") else "right")
    return table
