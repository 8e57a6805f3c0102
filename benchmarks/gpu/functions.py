"""Steps of the GPU report that show whether everything works.

python benchmarks/gpu/functions.py environment | tests FILE... | loop | fsdp | service | trl SIZE | main-job FOLDER [KEY=VALUE]
"""

import importlib.util
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from child import die_with_parent
from gpu.results import ROOT, Results, device_type, report_device

_REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.1)  # long enough that a kill comes between two steps
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
"""
_EXACT_ANSWER = """
from verl.rewards.scorers.reasoning_gym import extract_answer

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(extract_answer(solution_str, ground_truth) == ground_truth)  # without the package reasoning-gym
"""
_STEPS = 3
_RUN_LIMIT_S = 900.0  # ends a hang; the step has a time limit too


def environment(results: Results) -> None:
    """Versions, `verl doctor`, and the device's rates in a matrix product and a copy."""
    import torch
    import transformers
    from gpu import sizes

    from verl.models.ops.varlen import FLASH, flash_runs

    device = report_device()
    results.add("device", torch.cuda.get_device_name() if device.type == "cuda" else platform.machine())
    results.add("torch", f"torch {torch.__version__}")
    results.add("transformers", f"transformers {transformers.__version__}")
    results.add("python", platform.python_version())
    if shutil.which("nvidia-smi") and device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm,memory.total", "--format=csv"]
        results.add("nvidia-smi", subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())
    results.add("flash attention", flash_runs(device, torch.bfloat16, 64))
    results.add("flash attention reads pages", bool(FLASH.page_multiple))
    limits = sizes.measure_limits(device, device.type == "cpu")
    results.add("bf16 matrix product", limits["flops"] / 1e12, "TFLOP/s")
    results.add("copy", limits["bytes"] / 1e9, "GB/s")
    doctor = subprocess.run(
        [sys.executable, "-m", "verl", "doctor", "--json"], capture_output=True, text=True, cwd=ROOT
    )
    problems = [line for line in json.loads(doctor.stdout)["findings"] if line["level"] in ("warn", "fail")]
    results.add("problems that verl doctor reports", len(problems))
    print(json.dumps(problems, indent=1))


def tests(results: Results, files: list[str]) -> int:
    """The tests of `files` that need a GPU; elsewhere they are collected and skipped."""
    import pytest

    class Outcomes:
        def __init__(self) -> None:
            self.count: dict[str, int] = {}

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                self.count[report.outcome] = self.count.get(report.outcome, 0) + 1
                results.add(f"{report.outcome} tests", self.count[report.outcome])
            if report.outcome == "failed":
                results.add(f"{report.nodeid.split('/')[-1]}: error", str(report.longrepr)[-300:])

    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "gpu", "--rootdir", str(ROOT)]
    return int(pytest.main([*options, *(str(ROOT / file) for file in files)], plugins=[Outcomes()]))


def loop(results: Results) -> None:
    """`verl train` with validation and checkpoints: killed and resumed runs against uninterrupted runs, LoRA, and images."""
    import transformers
    from packaging.version import Version

    from tests.letters_task import write_task
    from verl.models.tiny import make_tiny_model

    parallel = 3 if device_type() == "cuda" else 1
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as scratch, ThreadPoolExecutor(parallel) as pool:
        folder = write_task(Path(scratch), reward=_REWARD)
        model = make_tiny_model(folder / "model", "qwen2", hidden_size=256)
        pending = []
        for deterministic in (True, False):
            keys = [f"trainer.deterministic={deterministic}"]
            name = "deterministic" if deterministic else "not deterministic"
            ours, theirs = folder / f"killed {name}", folder / name
            runs = [pool.submit(_train, model, theirs, keys), pool.submit(_killed_and_resumed, model, ours, keys)]
            pending.append((name, runs, partial(_compare, results, name, ours, theirs)))
        lora = pool.submit(_train, model, folder / "lora", ["actor_rollout_ref.model.lora_rank=4"])
        pending.append(("LoRA", [lora], partial(_metrics, results, "LoRA", folder / "lora")))
        if Version(transformers.__version__) >= Version("5.19"):  # older processors do not give the text of an image
            pictures = pool.submit(_train_on_images, folder / "images")
            pending.append(("images", [pictures], partial(_metrics, results, "images", folder / "images" / "run")))
        for name, runs, report in pending:
            try:
                for run in runs:
                    run.result()
                report()
            except Exception as error:  # noqa: BLE001 - the other runs still count
                results.fail(name, error)


def _train(model: Path, run: Path, keys: list[str], killed_after: str | None = None) -> None:
    """A GRPO run in the folder `run`; `killed_after` is the checkpoint at which it gets SIGKILL. Raises RuntimeError when
    it fails."""
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", f"data.train_files={run.parent}/train.jsonl",
        f"data.val_files={run.parent}/val.jsonl", "data.train_batch_size=4", "data.max_prompt_length=64",
        "data.max_response_length=16", f"{rollout}.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=0.001", "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
        f"reward.custom_reward_function.path={run.parent}/reward.py", "reward.num_workers=1", "trainer.logger=[file]",
        f"trainer.total_training_steps={_STEPS}", "trainer.save_freq=1", "trainer.test_freq=2",
        f"trainer.device={device_type()}", f"trainer.default_local_dir={run}", *keys,
    ]  # fmt: skip
    run_verl(run.with_name(f"{run.name}.log"), ["train", *overrides], run / killed_after if killed_after else None)


def run_verl(log: Path, arguments: list[str], killed_after: Path | None = None) -> None:
    """Run `verl` with its output in `log`; SIGKILL when the file `killed_after` exists. Raises RuntimeError when it fails."""
    with log.open("ab") as output:
        command = [sys.executable, "-m", "verl", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, preexec_fn=die_with_parent)
        end = time.monotonic() + _RUN_LIMIT_S
        while process.poll() is None:
            if time.monotonic() > end or (killed_after and killed_after.exists()):
                process.kill()
                process.wait()
            time.sleep(0.01)
    if process.returncode != (-signal.SIGKILL if killed_after else 0):
        text = log.read_text(errors="replace")
        print(text[-20000:], flush=True)  # the report has only the end
        raise RuntimeError(f"verl {arguments[0]} ended with {process.returncode}: {text[-250:]}")


def _train_on_images(folder: Path) -> None:
    """A GRPO run of a tiny Qwen2.5-VL on questions about pictures."""
    sys.path.append(str(ROOT / "benchmarks" / "peers"))
    from workload import draw_pictures

    from tests.vision_families import vision_folder

    folder.mkdir()
    for name, count in (("train", 12), ("val", 4)):
        rows = draw_pictures(count, seed=count)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")
    _train(vision_folder(folder / "model", "qwen2_5_vl"), folder / "run", ["data.max_prompt_length=300"])


def _killed_and_resumed(model: Path, run: Path, keys: list[str]) -> None:
    _train(model, run, keys, killed_after="global_step_1")
    if (run / f"global_step_{_STEPS}").exists():
        raise RuntimeError("the run ended before it was killed")
    _train(model, run, keys)


def _compare(results: Results, name: str, ours: Path, theirs: Path) -> None:
    sys.path.append(str(ROOT / "benchmarks" / "chaos"))
    from chaos_compare import checkpoint_digests

    a, b = (checkpoint_digests(run / f"global_step_{_STEPS}") for run in (ours, theirs))
    different = sorted(file for file in a.keys() | b.keys() if a.get(file) != b.get(file))
    results.add(f"{name}, files of a checkpoint", len(b))
    results.add(f"{name}, files that differ after kill and resume", len(different))
    for file in different[:3]:
        print(f"   differs: {file}")
    _metrics(results, name, theirs)


def _metrics(results: Results, name: str, run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    results.add(f"{name}, steps", max(row["step"] for row in rows))
    results.add(f"{name}, validations", sum(any(key.startswith("val") for key in row) for row in rows))
    for key, label in (("timing_s/gen", "generation"), ("timing_s/step", "step")):
        if key in rows[-1]:
            results.add(f"{name}, {label}", float(rows[-1][key]), "s")


def fsdp(results: Results) -> None:
    """FSDP of one rank over NCCL against one device, with and without offload; and the engine of one device with offload."""
    import torch.distributed as dist

    device = report_device()
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            _collectives(results, backend, device)
            for dtype, offloads, kind in product(("float32", "bfloat16"), (False, True), ("FSDPEngine", "LocalEngine")):
                name = f"{dtype}{', offload' * offloads}{', without FSDP' * (kind == 'LocalEngine')}"
                try:
                    _compare_engines(results, name, Path(folder), device, dtype, offloads, kind)
                except Exception as error:  # noqa: BLE001 - the other combinations still count
                    results.fail(name, error)
        finally:
            dist.destroy_process_group()


def _collectives(results: Results, backend: str, device: Any) -> None:
    import torch
    import torch.distributed as dist

    values, output = torch.randn(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    dist.all_gather_into_tensor(output, values)
    gathered = torch.equal(output, values)
    dist.reduce_scatter_tensor(output.zero_(), values)
    summed = torch.equal(output, values)
    dist.all_reduce(output)
    results.add(f"{backend} collectives of one rank are right", gathered and summed and torch.equal(output, values))


def _compare_engines(
    results: Results, name: str, folder: Path, device: Any, dtype: str, offloads: bool, kind: str
) -> None:
    from tests.engines.test_contract import largest_gap, make_batch, policy_loss
    from verl.config import FSDPConfig, ModelConfig, OptimConfig
    from verl.engines.api import MicroBatching
    from verl.engines.fsdp import FSDPEngine
    from verl.engines.local import LocalEngine
    from verl.models.tiny import make_tiny_model

    if not (folder / "model").exists():
        make_tiny_model(folder / "model", "qwen3")
    model = ModelConfig(path=str(folder / "model"), enable_gradient_checkpointing=False)
    settings: dict[str, Any] = {"optim": OptimConfig(lr=1e-2), "head": "lm", "device": device, "total_steps": 10}
    one = LocalEngine(model=model, engine=FSDPConfig(dtype=dtype), **settings)
    engine = FSDPConfig(dtype=dtype, param_offload=offloads, optimizer_offload=offloads)
    many = {"FSDPEngine": FSDPEngine, "LocalEngine": LocalEngine}[kind](model=model, engine=engine, **settings)
    arguments = (policy_loss, ("log_probs", "entropy"), MicroBatching(max_tokens=24), 1.2)
    gap = 0.0
    for seed in range(3):
        batch = make_batch(seed, (3, 1, 4, 2))
        expected, measured = (engine.train_batch(batch, *arguments) for engine in (one, many))
        gap = max(gap, abs(measured["grad_norm"].value / expected["grad_norm"].value - 1))
    results.add(f"{name}, largest relative gap of gradient norms in three steps", gap)
    weights = [{n: w.float().cpu() for n, w in engine.gather_weights()} for engine in (many, one)]
    results.add(f"{name}, largest relative gap of weights after three steps", largest_gap(*weights))


def service(results: Results) -> None:
    """The computation behind `verl serve tinker`: two adapters that learn other tokens, and samples of both in one batch."""
    import numpy as np

    from verl.cli.serve import serving_config
    from verl.data_proto.samples import SamplingParams
    from verl.models.optim import AdamStep
    from verl.models.tiny import make_tiny_model
    from verl.tinker.records import Datum, SamplingRequest, TrainingRequest
    from verl.tinker.workbench import Workbench

    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        model = make_tiny_model(Path(folder) / "model", "qwen2", hidden_size=256)
        bench = Workbench(serving_config(str(model), [f"trainer.device={device_type()}"], rank=8))
        adapters, prompt = [bench.engine.new_adapter(8, seed) for seed in (0, 1)], np.arange(5, 25)
        for name, adapter, token in zip("ab", adapters, (70, 90), strict=True):
            targets = {"target_tokens": np.full(len(prompt), token), "weights": np.ones(len(prompt), np.float32)}
            request = TrainingRequest("m", 1, "cross_entropy", {}, [Datum(prompt, targets)] * 4)
            losses = []
            for _ in range(20):
                losses.append(bench.forward_backward(adapter, request).metrics["loss:sum"])
                bench.optim_step(adapter, AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0))
            results.add(f"adapter {name}, loss at the start", losses[0])
            results.add(f"adapter {name}, loss after 20 steps", losses[-1])
        sampling = SamplingRequest(tuple(prompt.tolist()), 8, 16, SamplingParams(ignore_eos=True), 0)
        outputs = bench.sample([(adapter.weights, sampling) for adapter in adapters])
        for name, output, token in zip("ab", outputs, (70, 90), strict=True):
            tokens = [token for completion in output.completions for token in completion.token_ids]
            results.add(f"adapter {name}, share of its token in samples", tokens.count(token) / len(tokens))


def compare_with_trl(results: Results, size: str) -> None:
    """GRPO steps by verl and by TRL, whose default is a micro-batch of 8 with activations computed again, in turns."""
    sys.path.append(str(ROOT / "benchmarks" / "peers"))
    import peers_cpu
    from gpu.sizes import SIZES

    from verl.models.tiny import make_tiny_model

    if importlib.util.find_spec("trl") is None:
        results.add("TRL", "not installed")
        return
    on_gpu = device_type() == "cuda"
    family, settings = SIZES[size if on_gpu else "tiny"]
    work = (16, 8, 256, 256) if on_gpu else (2, 2, 8, 8)  # prompts, samples, tokens of both
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        model = make_tiny_model(Path(folder) / "model", family, **{"initializer_range": 0.02, **settings})
        options = ["--prompts", "--samples", "--prompt-tokens", "--response-tokens"]
        arguments = [text for option, number in zip(options, work, strict=True) for text in (option, str(number))]
        report = peers_cpu.main([
            *arguments, "--model", str(model), "--device", device_type(), "--same-python", "--rounds", "2",
            "--dtype", "bfloat16" if on_gpu else "float32", "--trl", "shipped", "best", "--limit-s", "120",
            "--trl-micro-batch", "8" if on_gpu else "2", "--logs", str(Path(folder) / "logs"),
            "--ours", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
        ])  # fmt: skip
    for name, phases in report.results["phases"].items():
        for phase in ("generate_s", "train_s", "step_s"):
            results.add(f"{name}, {phase.removesuffix('_s')}", phases[phase]["median"], "s")
    for name, ratios in report.results["ratios"].items():
        results.add(f"times faster than {name}, step", ratios["step_s"])


def main_job(results: Results, place: str, *overrides: str) -> None:
    """The main job (`make train`) with the pretrained model: rewards before and after 20 steps, and times.

    The folder `place` has train.parquet and test.parquet of `verl data reasoning_gym`, and the model: a Hugging Face folder
    or a .gguf file, both called "model", which is converted.
    """
    folder = Path(place).resolve()
    start, model = time.monotonic(), folder / "model"
    if not model.exists():
        run_verl(folder / "convert.log", ["convert", str(folder / "model.gguf"), str(model)])
        results.add("conversion of the model", time.monotonic() - start, "s")
    (folder / "reward.py").write_text(_EXACT_ANSWER, encoding="utf-8")
    keys = [
        "--config-name", "grpo_smollm2", f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet",
        f"reward.custom_reward_function.path={folder}/reward.py", "trainer.logger=[console,file]",
        f"trainer.device={device_type()}", f"trainer.default_local_dir={folder}/run", *overrides,
    ]  # fmt: skip
    start = time.monotonic()
    run_verl(folder / "run.log", ["train", *keys])
    results.add("whole run", time.monotonic() - start, "s")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for key, value in row.items():
            if key == "val/greedy" or (key.startswith("val-core/") and key.endswith("acc/mean@4")):
                results.add(f"step {row['step']}, {key}", float(value))
    for key in ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "critic/score/mean"):
        values = [row[key] for row in rows if key in row]
        for name, value in (("first", values[0]), ("median", sorted(values)[len(values) // 2]), ("last", values[-1])):
            results.add(f"{key}, {name}", float(value))


def main(arguments: list[str]) -> int:
    die_with_parent()
    step, *more = arguments
    results = Results()
    if step == "tests":
        return tests(results, more)
    steps: dict[str, Any] = {"environment": environment, "loop": loop, "fsdp": fsdp, "service": service}
    steps |= {"trl": compare_with_trl, "main-job": main_job}
    steps[step](results, *more)
    return int(any(name.endswith(": error") for name in results.numbers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
