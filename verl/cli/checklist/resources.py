"""Memory and disk that the run will need, against what there is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from verl.cli.checklist.api import Subject
from verl.cli.checklist.estimate import checkpoint_bytes, memory_needed
from verl.cli.machine.host import available_memory
from verl.cli.report import Level, Line
from verl.config.active_keys import runs_on_several_devices

_TIGHT = 0.8  # share of what is free from which an estimate may be wrong


def check_memory(subject: Subject) -> Iterator[Line]:
    """The estimate of a step's peak."""
    from verl.parallel.device import compute_dtype, resolve_device

    if subject.policy is None:
        yield Line("skip", "not estimated without a model")
        return
    if runs_on_several_devices(subject.config):
        yield Line("skip", "not estimated for a run over several devices")
        return
    device = resolve_device(subject.config.trainer.device)
    width = compute_dtype(subject.config.actor_rollout_ref.actor.fsdp_config.dtype, device).itemsize
    parts = memory_needed(subject.config, subject.policy, subject.critic, width)
    free = _free_device_bytes(str(device))
    total = sum(parts.values())
    level: Level = "fail" if total > free else "warn" if total > _TIGHT * free else "pass"
    shown = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    fix = (
        "; lower ppo_max_token_len_per_gpu or rollout.max_num_seqs, or take a smaller model" if level != "pass" else ""
    )
    yield Line(level, f"about {total / 1e9:.1f} GB of {free / 1e9:.1f} GB free ({shown}){fix}")


def check_disk(subject: Subject) -> Iterator[Line]:
    """One checkpoint must fit, all that will be kept should."""
    if subject.policy is None:
        yield Line("skip", "not estimated without a model")
        return
    config = subject.config
    size = checkpoint_bytes(subject.policy.num_parameters, config.actor_rollout_ref.actor.checkpoint.save_contents)
    if subject.critic is not None:
        size += checkpoint_bytes(subject.critic.num_parameters, config.critic.checkpoint.save_contents)
    folder = Path(config.trainer.default_local_dir).expanduser().absolute()
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    free -= int(config.trainer.min_free_disk_gb * 1e9)
    at_once = num_checkpoints(subject)
    shown = (
        f"{at_once} checkpoint{'s' if at_once > 1 else ''} of {size / 1e9:.2f} GB, "
        f"{max(0, free) / 1e9:.1f} GB free beyond trainer.min_free_disk_gb"
    )
    if size > free:
        yield Line("fail", f"{shown}; set trainer.default_local_dir to a larger disk")
    elif at_once * size > free:
        yield Line("warn", f"{shown}; set trainer.max_actor_ckpt_to_keep, or a larger trainer.save_freq")
    else:
        yield Line("pass", shown)


def num_checkpoints(subject: Subject) -> int:
    """Most checkpoints on disk at once, the one being written included; where the steps are not known, two."""
    trainer = subject.config.trainer
    if trainer.save_freq <= 0:
        return 1
    saves = -(-subject.num_steps // trainer.save_freq) if subject.num_steps else 2
    keep = max(trainer.max_actor_ckpt_to_keep or 0, trainer.max_critic_ckpt_to_keep or 0)
    return max(1, min(saves, keep + 1) if keep else saves)


def _free_device_bytes(device: str) -> int:
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()
