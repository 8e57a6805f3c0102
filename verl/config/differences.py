"""Defaults that differ from existing releases, for docs/config.md."""

from __future__ import annotations

# (key, default in existing releases, default here, reason)
DIFFERENCES: tuple[tuple[str, str, str, str], ...] = (
    (
        "`actor_rollout_ref.rollout.name`",
        "none, must be given",
        "`native`",
        "the embedded engine is always there",
    ),
    (
        "`actor_rollout_ref.rollout.tensor_model_parallel_size`",
        "2",
        "1",
        "a run starts on one device",
    ),
    (
        "`trainer.n_gpus_per_node`",
        "8",
        "1",
        "a run starts on one device",
    ),
    (
        "`trainer.device`",
        "`cuda`",
        "`auto`",
        "the same command runs with and without a GPU",
    ),
    (
        "`trainer.logger`",
        '`["console", "wandb"]`',
        '`["console", "file"]`',
        "no account and no network needed",
    ),
    (
        "`*.fsdp_config.dtype`, `critic.fsdp.dtype`",
        "`bfloat16`",
        "`auto`",
        "bfloat16 is slow where the device lacks it",
    ),
    (
        "`actor_rollout_ref.actor.clip_ratio_low`, `clip_ratio_high`",
        "0.2",
        "`null`",
        "so that `clip_ratio` alone has an effect",
    ),
    (
        "`actor_rollout_ref.actor.ppo_mini_batch_size`",
        "256",
        "256, or `data.train_batch_size` if that is smaller",
        "a small batch needs no second key",
    ),
    (
        "`*_micro_batch_size_per_gpu`, with `use_dynamic_bsz=False`",
        "one must be given",
        "`null`: cut by token count",
        "the split does not change the result",
    ),
    (
        "`critic.model.path`",
        "a fixed folder",
        "`actor_rollout_ref.model.path`",
        "the critic starts from the policy's model",
    ),
    (
        "`critic.strategy`, `critic.fsdp.dtype`, `actor_rollout_ref.ref.fsdp_config.dtype`",
        "own defaults",
        "those of the actor",
        "one choice for all roles",
    ),
    (
        "`actor_rollout_ref.rollout.val_kwargs.do_sample`",
        "read by one check only",
        "on where a temperature above 0 is given",
        "the key says what happens",
    ),
    (
        "`actor_rollout_ref.actor.grad_clip`",
        "not read",
        "another spelling of `actor.optim.clip_grad`",
        "the key says what happens",
    ),
    (
        "`data.truncation`",
        "not read",
        "acts",
        "the key says what happens",
    ),
    (
        "`data.seed`",
        "`null`: not seeded",
        "`null`: 42",
        "the same command gives the same run",
    ),
)
