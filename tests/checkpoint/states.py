"""Engine states to save, and the definition of their equality."""

from types import SimpleNamespace

import torch

from verl.checkpoint.background import RoleSave
from verl.checkpoint.files import read_document
from verl.checkpoint.role import ALL_CONTENTS
from verl.checkpoint.store import RoleCheckpoint, read_role, trainer_state
from verl.engines.api import EngineState, whole
from verl.manifest import MANIFEST


def make_state(seed: int, size: int = 8) -> EngineState:
    """Every dtype, a scalar, an empty tensor, a transposed one, values that text would not keep."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(size, 3, generator=g)
    wide[0, 0] = float("nan")
    return EngineState(
        model={
            "layers.0.weight": wide,
            "layers.0.transposed": torch.randn(3, size, generator=g).T,
            "norm": torch.ones(3),
        },
        optimizer={
            "layers.0.weight/exp_avg": torch.randn(size, 3, generator=g).to(torch.bfloat16),
            "layers.0.weight/exp_avg_sq": torch.rand(size, 3, generator=g, dtype=torch.float64),
            "layers.0.weight/step": torch.tensor(float(seed)),
            "norm/mask": torch.tensor([True, False, True]),
            "norm/count": torch.tensor([seed, -1]),
            "norm/none": torch.empty(0, 4),
        },
        extra={"num_lr_steps": seed, "num_optimizer_steps": 2 * seed, "rate": 0.1 + seed / 3, "note": "ü"},
    )


def write_config(folder) -> None:
    """Stands for the config and tokenizer files of a model."""
    (folder / "config.json").write_text('{"model_type": "tiny", "dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")


def make_roles(seed: int, *names: str, **kwargs) -> dict[str, RoleCheckpoint]:
    return {
        name: RoleCheckpoint(make_state(seed + i), write_config, **kwargs) for i, name in enumerate(names or ("actor",))
    }


class Background:
    """A role with files that a thread writes."""

    def __init__(self, role):
        self.role = role

    def num_bytes(self):
        return self.role.num_bytes()

    def begin(self, folder):
        self.saving = RoleSave(self.role.copied(), folder)

    def end(self, timeout_s):
        self.saving.end(timeout_s)


def assert_same_tensors(actual: dict, expected: dict) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        loaded = whole(actual[name])
        assert actual[name].dtype == loaded.dtype == tensor.dtype
        assert actual[name].shape == loaded.shape == tensor.shape
        same = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(loaded.contiguous().reshape(-1).view(torch.uint8), same), name


def assert_same_state(actual: EngineState, expected: EngineState) -> None:
    assert_same_tensors(actual.model, expected.model)
    assert_same_tensors(actual.optimizer, expected.optimizer)
    assert actual.extra == expected.extra


def read_checkpoint(path, contents=None):
    """The step, roles and state of the run in a checkpoint. `contents`: parts to read, by role (default: all)."""
    names = sorted(p.parent.name for p in path.glob("*/huggingface"))
    roles = {name: read_role(path / name, (contents or {}).get(name, ALL_CONTENTS)) for name in names}
    step = read_document(path / MANIFEST)["step"]
    return SimpleNamespace(step=step, roles=roles, trainer_state=trainer_state(path))
