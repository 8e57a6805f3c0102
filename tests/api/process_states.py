"""States of the process of a script or notebook that calls verl, and a run: they do not change its weights."""

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import signal
import time

import torch

import verl

ROWS = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(4)]
KEYS = {
    "data": {"train_batch_size": 2, "max_prompt_length": 32, "max_response_length": 3},
    "actor_rollout_ref": {
        "rollout": {"n": 2},
        "actor": {"ppo_mini_batch_size": 2, "optim.lr": 1e-3, "fsdp_config.dtype": "float32"},
    },
    "trainer": {"total_training_steps": 2, "logger": ["file"], "save_freq": -1},
}


def trained(model, folder, callbacks=(), reward=None):
    """The digest of the weights after two steps of GRPO in the run folder `folder` (absolute or relative)."""
    score = reward or (lambda completions: [float(len(text) + ord(text[0]) % 7 if text else 0) for text in completions])
    run = verl.train(model, ROWS, score, output_dir=folder, callbacks=callbacks, config=KEYS)
    return hashlib.sha256((run.model_path / "model.safetensors").read_bytes()).hexdigest()


@contextlib.contextmanager
def set_to(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


# name -> a context that brings the process into the state
STATES = {
    "gradients off": torch.no_grad,
    "gradients set off": lambda: set_to(torch.set_grad_enabled, False, True),
    "inference mode": torch.inference_mode,
    "float64 by default": lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda: set_to(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta by default": lambda: set_to(torch.set_default_device, "meta", None),
    "inside a device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic": lambda: set_to(torch.use_deterministic_algorithms, True, False),
    "other seeds": lambda: set_to(torch.manual_seed, 7, 1),
}


def leave_gradients_off(*_):
    torch.set_grad_enabled(False)


def leave_float64(*_):
    torch.set_default_dtype(torch.float64)


def leave_meta(*_):
    torch.set_default_device("meta")


def change_folder(*_):
    os.chdir("/")


def fork_a_pool(*_):
    with multiprocessing.get_context("fork").Pool(1) as pool:  # its exit terminates the process
        assert pool.apply_async(abs, [-1]).get(timeout=120) == 1


def terminate_a_process(*_):
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60], daemon=True)
    process.start()
    process.terminate()
    process.join(120)
    assert process.exitcode == -15


CALLBACKS = [leave_gradients_off, leave_float64, leave_meta, change_folder, fork_a_pool, terminate_a_process]


def settings():
    """The settings of this process that a run must leave as they are."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
    )


@contextlib.contextmanager
def restored():
    """Bring back what callbacks leave. Inside, SIGTERM has no handler of Ray: other tests leave one."""
    folder, handler = os.getcwd(), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.chdir(folder)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def trained_in(states, callbacks, in_reward, has_loop, model, folder):
    """The digest of a run in a process with `states`; its callbacks, or reward function, leave others."""

    def reward(completions):
        for callback in callbacks if in_reward else ():
            callback()
        return [float(len(text) + ord(text[0]) % 7 if text else 0) for text in completions]

    async def in_a_loop():
        async def scored(completions):
            await asyncio.sleep(0)
            return reward(completions)

        return trained(model, folder, () if in_reward else callbacks, scored)

    with restored(), contextlib.ExitStack() as stack:
        for state in states:
            stack.enter_context(STATES[state]())
        before = settings()
        digest = (
            asyncio.run(in_a_loop()) if has_loop else trained(model, folder, () if in_reward else callbacks, reward)
        )
        assert callbacks or settings() == before
    return digest


def cases(rng, count, folder):
    """Runs in random combinations of states (benchmarks/fuzz.py)."""
    from verl.models.tiny import make_tiny_model

    model = make_tiny_model(folder / "model")
    clean = trained(model, folder / "clean")
    for number in range(count):
        states = rng.sample(sorted(STATES), rng.randint(0, 4))
        callbacks = rng.sample(CALLBACKS, rng.randint(0, 3))
        if {"meta by default", "inside a device"}.intersection(states) and leave_meta in callbacks:
            callbacks.remove(leave_meta)  # torch refuses it inside of another device
        in_reward, has_loop = rng.random() < 0.5, rng.random() < 0.3
        run = os.path.relpath(folder / f"run{number}")
        digest = trained_in(states, callbacks, in_reward, has_loop, model, run)
        assert digest == clean, (states, [c.__name__ for c in callbacks], in_reward, has_loop)
        yield f"{len(states)} states, {len(callbacks)} left", "same weights"
