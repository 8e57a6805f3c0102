"""Keys of the config that declare themselves used are read by somebody."""

import ast

from tests.house.source import files, room, tree
from verl.config.tree import leaves
from verl.config.unavailable import MISSING

# Conditions that hold only with a feature that the table of unavailable ones refuses: nothing can read these keys yet.
NEEDS_A_MISSING_FEATURE = {
    "multi_turn": "actor_rollout_ref.rollout.multi_turn.enable",
    "megatron": "actor_rollout_ref.actor.strategy",
    "sandbox": "reward.sandbox_fusion.url",
    "distillation": "distillation.enabled",
    "skips": "skip.rollout.enable",
}

# Keys that verl.config reads itself: those that another key takes its value from (follows.py), which is read, and how strict
# it is (checks.py).
WORKED_OUT_IN_CONFIG = {
    "trainer.strict_config",
    "trainer.v1.trainer_mode",
    "trainer.v1.colocate_async.num_warmup_batches",
    "trainer.v1.separate_async.num_warmup_batches",
}


def _reads():
    """Names that code outside verl.config could read a key by: attributes, parameters that the section's mapping fills,
    and strings, whole or in two pieces (f"{prefix}use_dynamic_bsz")."""
    names, strings = set(), set()
    for name, path in files().items():
        if room(name) == "config":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
    return names, strings


def test_used_keys_are_read():
    names, strings = _reads()
    refused = {row.path for row in MISSING}

    def read(name):
        pieces = ((name[:i], name[i:]) for i in range(1, len(name)) if name[i - 1] == "_")
        return name in names or name in strings or any(a in strings and b in strings for a, b in pieces)

    unread = [
        leaf.path
        for leaf in leaves().values()
        if not leaf.inert
        and leaf.path not in refused
        and leaf.path not in WORKED_OUT_IN_CONFIG
        and not any(condition in NEEDS_A_MISSING_FEATURE for condition, _ in leaf.conditions)
        and not read(leaf.path.rpartition(".")[2])
    ]
    assert not unread, f"declared as used, but nothing reads them: {unread}"


def test_missing_features_are_still_missing():
    """When a feature is built its row goes, and its keys must be read from then on."""
    assert set(NEEDS_A_MISSING_FEATURE.values()) <= {row.path for row in MISSING}
