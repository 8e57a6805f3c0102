"""Many adapters on one base: their memory, samples of several in one decode batch, and a step through the service.

    python -m benchmarks.tinker.adapters memory --model MODEL
    python -m benchmarks.tinker.adapters decode --model MODEL
    python -m benchmarks.tinker.adapters step --model MODEL

`memory` counts the bytes of tensors by storage: with the base, with ten adapters that train, and with their samplers.
`decode` compares the tokens per second of one adapter and of four that share a batch, in turn. `step` takes the same steps of
reinforcement learning by `verl.train` and by the official SDK, and lists the parts of a step: the seconds that the service
trained, sampled and wrote its journal, the client's own, and the rest (HTTP, queues). Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

RANK, NUM_ADAPTERS, ROUNDS = 16, 10, 3
PROMPTS, SAMPLES, NEW_TOKENS = 4, 8, 16  # of a step


def main() -> None:
    """Run one comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["memory", "decode", "step"])
    parser.add_argument("--model", required=True, help="folder of the base model")
    arguments = parser.parse_args()
    measure = {"memory": memory, "decode": decode, "step": step}[arguments.kind]
    print(json.dumps(measure(arguments.model), indent=1))


def workbench(model: str) -> Any:
    """The computation of a service of `model` in float32."""
    from verl.cli.serve import serving_config
    from verl.tinker.workbench import Workbench

    return Workbench(serving_config(model, ["actor_rollout_ref.actor.fsdp_config.dtype=float32"], rank=RANK))


def held_bytes() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages = (t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def memory(model: str) -> dict[str, Any]:
    """Bytes that ten adapters add, in multiples of their weights."""
    from verl.models.optim import AdamStep

    bench = workbench(model)
    base = sum(p.numel() * p.element_size() for n, p in bench.engine.module.named_parameters() if "lora_" not in n)
    bench.sample([(None, prompt(0))])
    start = held_bytes()
    adapters = [bench.engine.new_adapter(RANK, seed) for seed in range(NUM_ADAPTERS)]
    own = sum(adapter.weights.num_bytes() for adapter in adapters)
    created = held_bytes()
    for adapter in adapters:
        bench.forward_backward(adapter, training_request())
        bench.optim_step(adapter, AdamStep(1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0))
    trained = held_bytes()
    snapshots = [adapter.snapshot() for adapter in adapters]
    bench.sample([(weights, prompt(number)) for number, weights in enumerate(snapshots)])
    return {
        "base_bytes": base,
        "with_the_decoder_in_base_sizes": start / base,
        "adapters_bytes": own,
        "created": (created - start) / own,
        "trained": (trained - start) / own,
        "trained_and_sampled": (held_bytes() - start) / own,
    }


def decode(model: str) -> dict[str, Any]:
    """Tokens per second of one adapter and of four in a batch of as many samples."""
    bench = workbench(model)
    adapters = [filled(bench.engine.new_adapter(RANK, seed).weights, seed) for seed in range(4)]
    batches = {"base": [None] * 4, "one": adapters[:1] * 4, "four": adapters}
    rates: dict[str, list[float]] = {name: [] for name in batches}
    for number in range(ROUNDS + 1):
        for name, weights in batches.items():
            start = time.perf_counter()
            outputs = bench.sample([(w, prompt(place, 16, 8)) for place, w in enumerate(weights)])
            count = sum(len(c.token_ids) for output in outputs for c in output.completions)
            if number:  # the first packs the adapters
                rates[name].append(count / (time.perf_counter() - start))
    separate = [bench.sample([(w, prompt(place, 16, 8))])[0] for place, w in enumerate(adapters)]
    together = bench.sample([(w, prompt(place, 16, 8)) for place, w in enumerate(adapters)])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    equal = [[(c.token_ids, c.log_probs) for o in outputs for c in o.completions] for outputs in (separate, together)]
    return {
        "tokens_per_s": medians,
        "four_to_one": medians["four"] / medians["one"],
        "one_to_base": medians["one"] / medians["base"],
        "equal_bits": equal[0] == equal[1],
    }


def filled(weights: Any, seed: int) -> Any:
    """`weights` whose second factors are not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.tensors.items():
        if name.endswith("lora_B"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 1e-3)
    return weights


def prompt(number: int, num_samples: int = 1, max_tokens: int = 4) -> Any:
    """A request with random tokens."""
    from verl.data_proto.samples import SamplingParams
    from verl.tinker.records import SamplingRequest

    tokens = tuple(np.random.default_rng(number).integers(1000, 9000, 32).tolist())
    return SamplingRequest(tokens, num_samples, max_tokens, SamplingParams(ignore_eos=True), number)


def training_request() -> Any:
    """A row for cross_entropy."""
    from verl.tinker.records import Datum, TrainingRequest

    ids = np.random.default_rng(0).integers(1000, 9000, 33)
    datum = Datum(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(32, np.float32)})
    return TrainingRequest("m", 1, "cross_entropy", {}, [datum])


def step(model: str) -> dict[str, Any]:
    """Seconds per step of both, alternating: a service and a run that take one step each in turn."""
    with (
        tempfile.TemporaryDirectory() as name,
        by_service(model, Path(name)) as served,
        by_run(model, Path(name)) as run,
    ):
        rows: dict[str, list[dict[str, float]]] = {"service": [], "verl.train": []}
        for number in range(ROUNDS + 1):
            for kind, take in (("service", served), ("verl.train", run)):
                start = time.perf_counter()
                parts = take()
                seconds = time.perf_counter() - start
                if number:
                    rows[kind].append({"step": seconds, **parts, "rest": seconds - sum(parts.values())})
    medians = {
        kind: {part: statistics.median(row[part] for row in steps) for part in steps[0]} for kind, steps in rows.items()
    }
    ratio = medians["service"]["step"] / medians["verl.train"]["step"]
    return {"seconds": medians, "steps": {k: [row["step"] for row in v] for k, v in rows.items()}, "ratio": ratio}


def questions() -> list[str]:
    """Sums of two numbers."""
    return [f"What is {a} + {a * 7 % 90 + 10}? Answer with the number only." for a in range(10, 90)]


def reward_of(text: str) -> float:
    """A number that differs between the samples of a question, so that every row trains."""
    return len(set(text)) / 100


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The reward function of the run."""
    return reward_of(solution_str)


@contextmanager
def by_run(model: str, folder: Path) -> Iterator[Any]:
    """A function that takes a step of GRPO with LoRA by `verl.Trainer`, and returns the seconds of its parts."""
    import verl
    from verl.tracking.files import read_metrics

    rows = [
        {
            "prompt": [{"role": "user", "content": q}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": q},
        }
        for q in questions()
    ]
    actor = {"optim.lr": 1e-4, "ppo_mini_batch_size": PROMPTS, "fsdp_config.dtype": "float32", "use_dynamic_bsz": True}
    rollout = {"n": SAMPLES, "temperature": 1.0, "ignore_eos": True}
    keys = {
        **{f"actor_rollout_ref.actor.{name}": value for name, value in actor.items()},
        **{f"actor_rollout_ref.rollout.{name}": value for name, value in rollout.items()},
        "actor_rollout_ref.model.lora_rank": RANK,
        "actor_rollout_ref.model.lora_alpha": 32,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2048,
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 128,
        "data.max_response_length": NEW_TOKENS,
        "trainer.total_training_steps": ROUNDS + 1,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
    }
    with verl.Trainer(model, rows, compute_score, algorithm="grpo", output_dir=folder / "run", config=keys) as trainer:

        def take() -> dict[str, float]:
            trainer.step()
            *_, row = read_metrics(folder / "run" / "metrics.jsonl")
            return {"training": row["timing_s/update_actor"], "sampling": row["timing_s/gen"]}

        yield take


@contextmanager
def by_service(model: str, folder: Path) -> Iterator[Any]:
    """A function that takes the same step by the SDK, from a service in a process of its own, and returns the seconds of its
    parts."""
    import httpx
    import tinker
    from tinker import types

    from benchmarks.tinker.cookbook import server

    asked = iter(questions() * 2)
    with server(model, folder) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        trainer = service.create_lora_training_client(base_model=model, rank=RANK, train_unembed=False).result()
        tokenizer = trainer.get_tokenizer()
        waits: list[float] = []

        def result(future: Any) -> Any:
            start = time.perf_counter()
            value = future.result()
            waits.append(time.perf_counter() - start)
            return value

        def busy() -> dict[str, float]:
            state = httpx.get(f"{url}/api/v1/status", headers={"x-api-key": "tml-local"}).json()["tenants"]["local"]
            return {part: state[f"{part}_s"] for part in ("training", "sampling", "journal")}

        def take() -> dict[str, float]:
            waits.clear()
            before, start = busy(), time.perf_counter()
            sampler = result(trainer.save_weights_and_get_sampling_client())
            prompts = [encoded(tokenizer, next(asked)) for _ in range(PROMPTS)]
            params = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop=[])
            sent = [sampler.sample(types.ModelInput.from_ints(ids), SAMPLES, params) for ids in prompts]
            rows = []
            for ids, future in zip(prompts, sent, strict=True):
                samples = result(future).sequences
                rewards = np.array([reward_of(tokenizer.decode(s.tokens)) for s in samples])
                rows += [datum(ids, s, a) for s, a in zip(samples, advantages(rewards), strict=True)]
            trainer.forward_backward(rows, "importance_sampling")
            result(trainer.optim_step(types.AdamParams(learning_rate=1e-4)))
            client = time.perf_counter() - start - sum(waits)
            return {"client": client, **{part: seconds - before[part] for part, seconds in busy().items()}}

        yield take


def encoded(tokenizer: Any, question: str) -> list[int]:
    """The tokens of a question with the chat template."""
    messages = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def advantages(rewards: np.ndarray) -> np.ndarray:
    """GRPO's."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def datum(ids: Sequence[int], sample: Any, advantage: float) -> Any:
    """A sample as a row of importance_sampling."""
    from tinker import types

    whole, skipped = [*ids, *sample.tokens], [0.0] * (len(ids) - 1)
    inputs = {
        "target_tokens": np.array(whole[1:]),
        "logprobs": np.array([*skipped, *sample.logprobs], dtype=np.float32),
        "advantages": np.array([*skipped, *[advantage] * len(sample.tokens)], dtype=np.float32),
    }
    tensors = {name: types.TensorData.from_numpy(values) for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=tensors)


if __name__ == "__main__":
    main()
