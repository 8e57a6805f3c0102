"""Import path of verl.compat.rollout_correction."""

from verl.compat.rollout_correction import (
    apply_bypass_mode,
    apply_rollout_correction,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
)

__all__ = [
    "apply_bypass_mode",
    "apply_rollout_correction",
    "compute_offpolicy_metrics",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
]
