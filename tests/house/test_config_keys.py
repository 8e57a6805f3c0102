"""Keys of the config that declare themselves used are read."""

import ast

import pytest

from tests.house.source import files, nodes, package_of
from verl.config import SCHEMAS

# Conditions that hold only with a feature that is listed as not available: nothing can read these keys yet.
NEEDS_A_MISSING_FEATURE: dict[str, str] = {}

# Keys that verl.config reads itself: keys that another key takes its value from (derived_defaults.py), which is read, and
# how strict it is (checks.py).
WORKED_OUT_IN_CONFIG = {
    "trainer.strict_config",
    "trainer.engine_fallback",
    *(  # MegatronConfig.contradictions
        f"{role}.megatron.use_megatron_fsdp"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "engine")
    ),
    *(
        f"{role}model.enable_gradient_checkpointing" for role in ("actor_rollout_ref.", "critic.", "")
    ),  # ModelConfig.recompute
    *(f"{role}model.mtp.enable_rollout" for role in ("actor_rollout_ref.", "critic.", "")),
    "trainer.v1.trainer_mode",
    "trainer.v1.colocate_async.num_warmup_batches",
    "trainer.v1.separate_async.num_warmup_batches",
    "algorithm.rollout_correction.rollout_rs_threshold_lower",  # rejection_rules
    "algorithm.rollout_correction.rollout_token_veto_threshold",  # rejection_rules
    "distillation.other_teachers",  # DistillationConfig.teachers
    "trainer.max_ckpt_to_keep",  # TrainerConfig.num_checkpoints_kept
    "preference.loss_weights",  # PreferenceLossConfig.weights
}


def _reads():
    """Names that code outside verl.config could read a key by: attributes, parameters that the section's mapping fills,
    and strings, whole or in two parts (f"{prefix}use_dynamic_bsz")."""
    names, strings = set(), set()
    for name, path in files().items():
        if package_of(name) == "config":
            continue
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
    return names, strings


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_used_keys_are_read(schema):
    names, strings = _reads()
    refused = {row.path for row in schema.compat.unavailable}

    def read(name):
        parts = ((name[:i], name[i:]) for i in range(1, len(name)) if name[i - 1] == "_")
        return name in names or name in strings or any(a in strings and b in strings for a, b in parts)

    unread = [
        leaf.path
        for leaf in schema.leaves.values()
        if not leaf.inert
        and leaf.path not in refused | WORKED_OUT_IN_CONFIG
        and not any(condition in NEEDS_A_MISSING_FEATURE for condition, _ in leaf.conditions)
        and not read(leaf.path.rpartition(".")[2])
    ]
    assert not unread, f"declared as used, but nothing reads them: {unread}"


def test_missing_features_are_still_missing():
    """The row of a feature goes when it is built, and its keys must be read from then on."""
    missing = {row.path for schema in SCHEMAS.values() for row in schema.compat.unavailable}
    assert set(NEEDS_A_MISSING_FEATURE.values()) <= missing
