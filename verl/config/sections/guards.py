"""`trainer.guards`: actions on NaN, infinity and values beyond a limit."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.keys import OURS, Section, section, used

ACTIONS = ("warn", "skip", "rollback", "stop")  # the later, the stronger
_LIMIT = "bound; null: not looked at"
_ACTION = (
    "skip: the batch or optimizer step is not applied; rollback: back to the newest checkpoint, then on with the next "
    "prompts; stop"
)


@dataclass(frozen=True)
class NonfiniteGuardConfig(Section):
    action: str = used("skip", _ACTION, choices=ACTIONS[1:])


@dataclass(frozen=True)
class GuardConfig(Section):
    limit: float | None = used(None, _LIMIT, strict=OURS, gt=0)  # where its section is not read
    action: str = used("warn", f"warn; {_ACTION}", when="has_limit", choices=ACTIONS, strict=OURS)


@dataclass(frozen=True)
class StepGuardsConfig(Section):
    """Guards of any program that trains."""

    nonfinite: NonfiniteGuardConfig = section(
        NonfiniteGuardConfig, "NaN or infinity in rewards, log-probs, values, advantages, loss or gradient"
    )
    grad_norm: GuardConfig = section(GuardConfig, "largest gradient norm of an optimizer step, before clipping")
    max_skips_in_row: int = used(5, "steps in a row in which something may be skipped; one more stops the run", ge=0)
    max_rollbacks: int = used(3, "times that a process may go back to a checkpoint; one more stops the run", ge=0)


@dataclass(frozen=True)
class GuardsConfig(StepGuardsConfig):
    """Guards of reinforcement learning."""

    policy_kl: GuardConfig = section(GuardConfig, "largest KL(old policy || policy) of a mini-batch, nats per token")
    reference_kl: GuardConfig = section(
        GuardConfig, "largest KL(policy || reference policy), nats per token", when="reference"
    )
    ratio: GuardConfig = section(GuardConfig, "largest probability ratio to the old policy of a token, or its inverse")
    entropy: GuardConfig = section(GuardConfig, "lowest mean entropy of the policy, nats per token")
    mismatch: GuardConfig = section(
        GuardConfig, "largest difference between the trainer's and the sampler's probability of a sampled token"
    )
