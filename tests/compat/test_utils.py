"""verl.utils.{fs, tokenizer, device, memory_utils, import_utils, py_functional, ray_utils, net_utils, debug, rollout_trace,
torch_dtypes, tracking, checkpoint}: small functions, called as recipes call them."""

import asyncio
import collections
import gc
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.json_lines import read_lines
from verl.compat import files
from verl.compat.tracking import Tracking, ValidationGenerationsLogger, _open
from verl.errors import ConfigError, ModelError
from verl.utils import device
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, should_save_ckpt_esi
from verl.utils.debug import marked_timer, simple_timer
from verl.utils.device import auto_set_device, get_device_name
from verl.utils.fs import copy_to_local, is_non_local, local_mkdir_safe
from verl.utils.import_utils import deprecated, import_external_libs, load_class_from_fqn, load_extern_type
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.metric import reduce_metrics
from verl.utils.net_utils import is_valid_ipv6_address
from verl.utils.py_functional import append_to_dict, convert_to_regular_types, union_two_dict
from verl.utils.ray_utils import auto_await, get_event_loop
from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from verl.utils.torch_dtypes import PrecisionType

pytestmark = pytest.mark.seed("F2")


class TestFiles:
    def test_a_place_on_disk_is_read_from_there(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model").mkdir()
        assert copy_to_local("~/model") == f"{tmp_path}/model"
        assert copy_to_local(f"file://{tmp_path}/model", cache_dir="/x", verbose=True) == f"{tmp_path}/model"
        assert copy_to_local("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
        for place in ("hdfs://host/model", "s3://bucket/model"):
            with pytest.raises(ConfigError, match="Give a mounted folder"):
                copy_to_local(place)

    def test_shared_memory_holds_one_whole_copy(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text("1")
        copy = copy_to_local(str(tmp_path / "model"), use_shm=True)
        assert copy.startswith(f"{tmp_path}/shm/")
        assert copy.endswith("/model")
        (tmp_path / "model/config.json").write_text("2")
        read = lambda: (tmp_path / "shm" / copy / "config.json").read_text()  # noqa: E731
        assert copy_to_local(str(tmp_path / "model"), use_shm=True) == copy
        assert read() == "1"
        assert copy_to_local(str(tmp_path / "model"), use_shm=True, always_recopy=True) == copy
        assert read() == "2"
        assert [p.name for p in (tmp_path / "shm").rglob("*") if p.is_file()] == ["config.json"]

    def test_no_room_in_shared_memory(self, tmp_path, monkeypatch, caplog):
        (tmp_path / "model").mkdir()
        (tmp_path / "taken").write_text("a file, so that no folder can be made in it")
        monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "taken")
        assert files.copy_to_local(str(tmp_path / "model"), use_shm=True) == f"{tmp_path}/model"
        assert "the original is used" in caplog.text

    def test_folders(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert local_mkdir_safe("a/b") == local_mkdir_safe("a/b") == f"{tmp_path}/a/b"
        assert (tmp_path / "a/b").is_dir()
        assert [is_non_local(p) for p in ("hdfs://x", "/x", "x", "file:///x")] == [True, False, False, False]


class TestTokenizers:
    def test_of_a_model_of_text(self, tiny_llama, tmp_path):
        from verl.utils import hf_processor, hf_tokenizer

        tokenizer = hf_tokenizer(tiny_llama, trust_remote_code=False)
        assert tokenizer.decode(tokenizer.encode("2 + 2")) == "2 + 2"
        assert tokenizer.pad_token_id == 256
        assert hf_processor(tiny_llama, trust_remote_code=False, use_fast=True) is None
        with pytest.raises(ModelError, match="does not exist"):
            hf_processor(f"{tmp_path}/nothing")

    def test_token_ids_in_every_form(self, tiny_llama):
        from verl.utils.tokenizer import hf_tokenizer, normalize_token_ids

        tokenizer = hf_tokenizer(tiny_llama)
        ids = tokenizer.encode("ab")
        forms = [ids, tuple(ids), [ids], torch.tensor(ids), torch.tensor([ids]), {"input_ids": [ids]}, tokenizer("ab")]
        assert [normalize_token_ids(form) for form in forms] == [ids] * len(forms)
        for wrong in ("ab", [[1], [2]], [1.5], None):
            with pytest.raises(TypeError, match="flat list"):
                normalize_token_ids(wrong)


class TestDevices:
    def test_names_of_one_device_agree(self):
        name = "cuda" if torch.cuda.is_available() else "cpu"
        assert device.is_cuda_available is torch.cuda.is_available()
        assert device.get_device_name() == name
        assert device.get_torch_device() is getattr(torch, name)
        assert torch.device(device.get_device_id()).type in ("cpu", "cuda")
        assert device.get_nccl_backend() == {"cpu": "gloo", "cuda": "nccl"}[name]
        device.set_expandable_segments(True)

    @pytest.mark.parametrize(("chosen", "expected"), [("npu", None), ("cpu", "cpu"), ("auto", "auto")])
    def test_the_device_of_another_machine_is_replaced(self, chosen, expected):
        config = OmegaConf.create({"trainer": {"device": chosen}})
        auto_set_device(config)
        assert config.trainer.device == (expected or get_device_name())
        auto_set_device(OmegaConf.create({"data": {}}))

    def test_garbage_is_collected(self):
        class Ring:
            pass

        ring = Ring()
        ring.itself = ring
        gone = weakref.ref(ring)
        gc.disable()
        try:
            del ring
            assert gone() is not None
            aggressive_empty_cache(force_sync=True, max_retries=2)
        finally:
            gc.enable()
        assert gone() is None


class TestImports:
    def test_packages_that_are_there(self):
        import importlib.util

        from verl.utils import import_utils

        for package in ("nvtx", "trl"):
            available = getattr(import_utils, f"is_{package}_available")()
            assert available is (importlib.util.find_spec(package) is not None)

    def test_code_by_path(self, tmp_path):
        file = tmp_path / "mine.py"
        file.write_text("class Mine:\n    pass\n")
        assert load_extern_type(str(file), "Mine").__name__ == "Mine"
        assert load_extern_type(None, "Mine") is None
        with pytest.raises(ConfigError, match="did you mean 'Mine'"):
            load_extern_type(str(file), "Mime")
        assert load_class_from_fqn("collections.OrderedDict") is collections.OrderedDict
        import_external_libs(None)
        import_external_libs(["json", "collections"])
        with pytest.raises(ConfigError, match="not_there_at_all"):
            import_external_libs("not_there_at_all")

    def test_deprecated(self):
        @deprecated("new_one")
        def old(x):
            return x + 1

        @deprecated("New")
        class Old:
            def __init__(self, x):
                self.x = x

        with pytest.warns(FutureWarning, match="old is deprecated.*Use new_one"):
            assert old(1) == 2
        with pytest.warns(FutureWarning, match="Use New instead"):
            instance = Old(3)
        assert isinstance(instance, Old)
        assert instance.x == 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert old.__name__ == "old"


class TestContainers:
    def test_metrics_of_micro_batches(self):
        metrics = {}
        for loss in (1.0, 3.0):
            append_to_dict(metrics, {"loss": loss, "actor/grad_max": loss, "actor/len_min": loss}, prefix="actor/")
        assert metrics == {"actor/loss": [1.0, 3.0], "actor/grad_max": [1.0, 3.0], "actor/len_min": [1.0, 3.0]}
        assert reduce_metrics(metrics) is metrics
        assert metrics == {"actor/loss": 2.0, "actor/grad_max": 3.0, "actor/len_min": 1.0}

    def test_a_metric_reduces_itself(self):
        from verl.data_proto.metrics import Metric

        assert reduce_metrics({"kl": Metric.mean(1.0, 1).merge(Metric.mean(4.0, 2))}) == {"kl": 3.0}

    def test_metrics_of_ranks(self):
        from verl.utils.metric import AggregationType, Metric, reduce_metrics

        metric = Metric("sum", torch.tensor(1.0))
        metric.extend([2, torch.tensor([3.0])])
        assert (metric.aggregation, metric.values, metric.aggregate()) == (AggregationType.SUM, [1.0, 2, 3.0], 6.0)
        ranks = [metric, Metric("sum", 5.0)]
        with pytest.raises(ValueError, match="same count"):
            Metric.aggregate_dp(ranks)
        ranks[1].extend([0.0, 1.0])
        assert Metric.aggregate_dp(ranks) == 6.0
        assert Metric.aggregate_dp([Metric("max", 1), Metric("max", 4)]) == 4.0
        assert reduce_metrics({"loss": metric, "n": [3]}) == {"loss": 6.0, "n": 3}
        assert metric.init_list().values == []
        assert Metric.from_dict({"a": 1}, "mean")["a"].values == [1]
        for other in (torch.ones(2), "1", Metric("mean", 1)):
            with pytest.raises(ValueError, match="one number|takes numbers|do not join"):
                metric.append(other)
        with pytest.raises(ValueError, match="median"):
            Metric("median")

    def test_regular_types(self):
        config = OmegaConf.create({"a": [1, {"b": "${c}"}], "c": 2})
        converted = convert_to_regular_types({"x": config, "y": (config.a, None)})
        assert converted == {"x": {"a": [1, {"b": 2}], "c": 2}, "y": [[1, {"b": 2}], None]}
        assert type(converted["x"]) is dict
        assert type(converted["x"]["a"]) is list

    def test_dicts(self):
        first = {"a": 1}
        assert union_two_dict(first, {"a": 1, "b": 2}) is first
        assert first == {"a": 1, "b": 2}
        with pytest.raises(ValueError, match="'a'"):
            union_two_dict(first, {"a": 2})

    def test_coroutines_from_both_sides(self):
        @auto_await
        async def double(x):
            return 2 * x

        @auto_await
        def plain(x):
            return x

        async def inside():
            assert get_event_loop() is asyncio.get_running_loop()
            return await double(4) + plain(1)

        assert double(3) == 6
        assert plain(5) == 5
        loop = get_event_loop()
        assert loop.run_until_complete(inside()) == 9
        loop.close()
        other = get_event_loop()
        assert not other.is_closed()
        other.close()

    @pytest.mark.parametrize(
        ("address", "is_v6"), [("10.0.0.1", False), ("::1", True), ("fe80::1", True), ("[::1]", False), ("host", False)]
    )
    def test_addresses(self, address, is_v6):
        assert is_valid_ipv6_address(address) is is_v6


class TestTracing:
    def test_timers_add_up(self):
        seconds = {"gen": 10.0}
        with marked_timer("gen", seconds, color="red"):
            time.sleep(0.01)
        with pytest.raises(KeyError), simple_timer("adv", seconds):
            raise KeyError
        assert seconds["gen"] >= 10.01
        assert seconds["adv"] >= 0

    def test_nothing_is_traced_and_nothing_else_is_claimed(self):
        def generate():
            return 1

        assert rollout_trace_op(generate) is generate
        with rollout_trace_attr(sample_index=1, step=2):
            RolloutTraceConfig.init("project", "experiment", None)
        assert RolloutTraceConfig.get_backend() is None
        with pytest.raises(ConfigError, match="'weave' is not available"):
            RolloutTraceConfig.init("project", "experiment", "weave")


def test_precision():
    spellings = {torch.float16: (16, "16", "fp16"), torch.float32: (32, "fp32"), torch.bfloat16: ("bf16", "bfloat16")}
    for dtype, names in spellings.items():
        assert all(PrecisionType.to_dtype(name) is dtype for name in (*names, dtype))
        assert PrecisionType.to_dtype(PrecisionType.to_str(dtype)) is dtype
    assert PrecisionType.is_bf16("bf16")
    assert not PrecisionType.is_fp16("bf16")
    assert PrecisionType.is_fp32(torch.float32)
    assert PrecisionType.supported_type("mixed")
    assert len(PrecisionType.supported_types()) == 5
    with pytest.raises(RuntimeError, match="int8"):
        PrecisionType.to_dtype("int8")


class TestCheckpoints:
    def test_the_newest(self, tmp_path):
        assert find_latest_ckpt_path(None) is None
        assert find_latest_ckpt_path(str(tmp_path)) is None
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
        assert find_latest_ckpt_path(str(tmp_path)) is None
        (tmp_path / "global_step_12").mkdir()
        assert find_latest_ckpt_path(str(tmp_path)) == f"{tmp_path}/global_step_12"

    @pytest.mark.parametrize(
        ("remaining", "step", "needed"), [(1000, 100, False), (170, 100, True), (170, 0, False), (-5, 100, False)]
    )
    def test_a_machine_that_is_lent(self, remaining, step, needed, monkeypatch):
        """170 s are too short for a step of 100 s, a save of 60 s and 20 s to spare, in either order."""
        for name in ("MLP", "SAGEMAKER"):
            with monkeypatch.context() as patch:
                patch.setenv(f"{name}_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + remaining))
                assert should_save_ckpt_esi(step, save_ckpt_duration=60, redundant_time=20) is needed
        assert should_save_ckpt_esi(step, save_ckpt_duration=60) is False


def test_samples_of_a_validation_go_to_the_open_trackers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    tables = []
    with Tracking("p", "e", ["file"]) as tracking:
        monkeypatch.setattr(tracking.logger["file"], "table", lambda *table: tables.append(table))
        logger = ValidationGenerationsLogger(project_name="p", experiment_name="e")
        logger.log(["file"], [["1+1", "2", 1.0], ["1+2", "4", "3", 0.0]], 7)
        tracking.log({"loss": 1.5}, 7)
    samples = [{"input": "1+1", "output": "2", "score": 1.0}]
    samples.append({"input": "1+2", "output": "4", "ground_truth": "3", "score": 0.0})
    assert tables == [("val/generations", samples, 7)]
    assert "file" not in _open
    rows = [row for path in tmp_path.rglob("*.jsonl") for row in read_lines(path)]
    assert rows == [{"step": 7, "data": {"loss": 1.5}}]


def test_a_console_of_a_script(capsys):
    from verl.utils.logger import LocalLogger

    for prints in (True, False):
        with LocalLogger(print_to_console=prints) as logger:
            logger.log({"loss": 1.5}, 7)
    assert capsys.readouterr().out == "step:7 - loss:1.5\n"


@pytest.mark.parametrize(
    ("labels", "groups"),
    [(["b", "a", "b"], [1, 0, 1]), (["2", "0", "2"], [2, 0, 2]), (torch.tensor([1.0, 0.0, 1.0]), [1, 0, 1])],
)
def test_means_of_groups(labels, groups):
    from verl.utils import as_torch_index, group_mean_std

    index = as_torch_index(labels if isinstance(labels, torch.Tensor) else np.array(labels, dtype=object))
    assert index.tolist() == groups
    mean, std, count = group_mean_std(torch.tensor([1.0, 5.0, 3.0]), index)
    group = groups[0]
    assert (mean[group], count[group], mean[0], std[0], count[0]) == (2.0, 2.0, 0.0, 1.0, 1.0)
    assert std[group] == pytest.approx(2**0.5)
