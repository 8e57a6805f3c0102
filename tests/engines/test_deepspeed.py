"""The DeepSpeed engine: its merge of configurations, and on two ranks the losses, norms and states of one device."""

import json
import sys

import pytest
import torch

from tests.engines.ranks import results_once
from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.config.sections.deepspeed import DeepSpeedConfig
from verl.engines.deepspeed.engine import DeepSpeedEngine
from verl.engines.deepspeed.library import load_deepspeed
from verl.engines.deepspeed.settings import ds_config
from verl.errors import ConfigError

pytestmark = pytest.mark.seed("B4")

CHECKS = [
    *(f"check_stage_{name}" for name in ("0", "1", "2", "2_offload", "2_value", "3", "3_experts", "3_offload")),
    "check_pairs",
    "check_user_config",
]


def settings(section, **changes):
    return ds_config(section, **{"bfloat16": False, "clip_grad": 1.0, "optimizer": "AdamW", **changes})


def test_the_keys_of_a_run_become_a_deepspeed_configuration():
    config = settings(DeepSpeedConfig(zero_stage=3, offload_param=True), bfloat16=True, clip_grad=0.5)
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "offload_optimizer" not in config["zero_optimization"]
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"]["enabled"]
    assert "bf16" not in settings(DeepSpeedConfig())
    assert DeepSpeedConfig().stage() == 2
    assert DeepSpeedConfig(zero_stage=3).sizes(4) == {"replicate": 1, "shard": 4}
    assert DeepSpeedConfig(zero_stage=2).sizes(4) == {"replicate": 4, "shard": 1}


def test_a_file_of_hugging_faces_trainer_is_merged(tmp_path):
    content = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "none"},
            "reduce_bucket_size": "auto",
            "sub_group_size": 1e9,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    (tmp_path / "ds.json").write_text(json.dumps(content))
    section = DeepSpeedConfig(config=str(tmp_path / "ds.json"))
    config = settings(section)
    assert section.stage() == 3
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["sub_group_size"], zero["offload_optimizer"]["device"]) == (3, 1e9, "cpu")
    assert "reduce_bucket_size" not in zero
    assert "offload_param" not in zero
    assert not {"optimizer", "scheduler", "fp16", "train_batch_size"} & config.keys()
    assert config["wall_clock_breakdown"] is False


@pytest.mark.parametrize(
    ("content", "section", "words"),
    [
        ({"zero_optimization": {"stage": 3}}, {"zero_stage": 2}, "contradicts deepspeed.zero_stage=2"),
        ({"zero_optimization": {"stage": 7}}, {}, "none of 0, 1, 2, 3"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, {}, "device=nvme is not available"),
        ({}, {"zero_stage": 2, "offload_param": True}, "needs ZeRO stage 3"),
        ({"fp16": {"enabled": True}}, {}, "fp16 is not available"),
        ({"bf16": {"enabled": True}}, {}, "contradicts fsdp_config.dtype=float32"),
        ({"gradient_clipping": 0.5}, {}, "contradicts optim.clip_grad=1.0"),
        ({"optimizer": {"type": "Lamb"}}, {}, "contradicts optim.optimizer=AdamW"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, {}, "params.lr is set by the keys of optim"),
        ({"train_batch_size": 64}, {}, "decided by the mini-batch size"),
    ],
)
def test_contradictions_are_refused_with_the_two_keys(tmp_path, content, section, words):
    (tmp_path / "ds.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        settings(DeepSpeedConfig(config=str(tmp_path / "ds.json"), **section))


@pytest.mark.parametrize(("text", "words"), [(None, "does not exist"), ("{", "is not JSON"), ("[1]", "no mapping")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        settings(DeepSpeedConfig(config=str(tmp_path / "ds.json")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"lora_rank": 4}}, "adapters train with deepspeed.zero_stage=0"),
        ({"engine": {"dtype": "float64"}}, "float32 or bfloat16, not in float64"),
        ({"optim": {"optimizer": "Muon"}}, "which ZeRO 2 takes apart"),
    ],
)
def test_roles_that_the_engine_cannot_have_are_refused(changes, words):
    model, engine = ModelConfig(path="x", **changes.get("model", {})), FSDPConfig(**changes.get("engine", {}))
    roles = (model, engine, OptimConfig(**changes.get("optim", {})))
    with pytest.raises(ConfigError, match=words):
        DeepSpeedEngine.check_role(*roles, DeepSpeedConfig(), 2)
    DeepSpeedEngine.check_role(*roles, DeepSpeedConfig(zero_stage=0), 2)


def test_nothing_is_compiled_on_a_cpu(tmp_path, monkeypatch):
    """In a package like DeepSpeed's: the name `torch` of deepspeed.comm is PyTorch and its module has the same name."""
    files = {
        "__init__.py": "import deepspeed.comm.torch\n__version__ = '0'",
        "comm/__init__.py": "import deepspeed.comm.torch as backend\nimport torch",
        "comm/torch.py": "def build_shm_op():\n    raise AssertionError('compiled')\ndef start():\n    return build_shm_op()",
    }
    for name, text in files.items():
        (file := tmp_path / "deepspeed" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("deepspeed", "deepspeed.comm", "deepspeed.comm.torch"):
        monkeypatch.setitem(sys.modules, name, None)  # so that monkeypatch removes the modules of this test
        del sys.modules[name]
    load_deepspeed(torch.device("cpu"))
    assert sys.modules["deepspeed.comm"].torch is torch
    assert sys.modules["deepspeed.comm.torch"].start() is None
    assert not hasattr(torch, "build_shm_op")


@pytest.fixture(scope="module")
def checks(tmp_path_factory, worker_id):
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    return results_once("tests.engines.deepspeed_checks", 2, tmp_path_factory, worker_id, 280.0)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_equal_one_device(checks, check):
    assert {name: gap for name, gap in checks[check].items() if gap > 1e-5} == {}


@pytest.mark.slow
def test_masters_are_rounded_as_everywhere(checks):
    different = checks["check_bfloat16_rounding"]
    assert {stage: n for stage, n in different.items() if n} == {}  # and masters are not exact in bfloat16


@pytest.mark.slow
def test_weights_lie_where_the_layout_says(checks):
    gaps = checks["check_declared_weights"]
    assert all(gap > 0 for name, gap in gaps.items() if "moved" in name)
    assert all(gap == 0 for name, gap in gaps.items() if "back" in name)


@pytest.mark.slow
def test_refused_steps_leave_no_trace(checks):
    assert set(checks["check_refused_steps"].values()) == {0}


@pytest.mark.slow
def test_checkpoints_continue_bit_for_bit_and_with_other_engines(checks):
    results = checks["check_checkpoint"]
    assert {name: n for name, n in results.items() if n and "gap" not in name} == {}
    assert all(gap < 1e-5 for name, gap in results.items() if "gap" in name)
