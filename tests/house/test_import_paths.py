"""Import paths of other releases lead to the code here."""

import importlib
import logging
import subprocess
import sys

import pytest
import torch

import verl
from tests.house.source import PACKAGE, files
from tests.slow import slow
from verl.compat.finder import IS_PACKAGE, CompatibilityFinder, names_of
from verl.compat.import_paths import COMMANDS, IMPORT_PATHS
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError

NEED_RAY = ("verl.single_controller.ray", "verl.trainer.ppo.ray_trainer")


class TestFinder:
    @pytest.mark.parametrize("module", IMPORT_PATHS)
    def test_every_name_is_the_object_of_the_table(self, module):
        if module.startswith(NEED_RAY):
            pytest.importorskip("ray")
        imported = importlib.import_module(module)
        assert dir(imported) == sorted(imported.__all__) == sorted(names_of(module))
        for name, (source, here) in names_of(module).items():
            assert getattr(imported, name) is getattr(importlib.import_module(source), here)
            assert name in vars(imported)

    def test_names_are_listed_once(self):
        for module, sources in IMPORT_PATHS.items():
            names = [entry.partition("=")[0] for listed in sources.values() for entry in listed.split()]
            assert len(names) == len(set(names)), module

    def test_a_file_wins_over_the_table(self, tmp_path):
        """Also where a listed package has no file: `verl/trainer` is a folder without __init__.py."""
        assert importlib.import_module("verl.protocol").__file__ == str(PACKAGE / "protocol.py")
        assert not set(IMPORT_PATHS) & set(files())
        (tmp_path / "fs.py").write_text("place = 'file'")
        assert CompatibilityFinder.find_spec("verl.utils.fs", [str(tmp_path)]).origin == str(tmp_path / "fs.py")

    def test_an_empty_folder_does_not_hide_a_listed_package(self, tmp_path):
        """An older checkout leaves folders with __pycache__ behind."""
        (tmp_path / "utils" / "__pycache__").mkdir(parents=True)
        spec = CompatibilityFinder.find_spec("verl.utils", [str(tmp_path)])
        assert spec.origin.endswith("module.py")
        assert spec.submodule_search_locations == [str(tmp_path / "utils")]

    def test_modules_that_are_not_listed(self):
        assert CompatibilityFinder.find_spec("verl.models", verl.__path__) is None
        with pytest.raises(ModuleNotFoundError, match=r"verl\.utils\.nothing"):
            importlib.import_module("verl.utils.nothing")

    def test_forms_of_import(self):
        import verl.utils.torch_functional as functions
        from verl.trainer.ppo import core_algos
        from verl.utils import reward_score

        names = {}
        exec("from verl.utils.torch_functional import *", names)
        assert names["masked_mean"] is functions.masked_mean
        assert set(functions.__all__) <= set(names)
        assert core_algos.__name__ == "verl.trainer.ppo.core_algos"
        assert reward_score.math_dapo is sys.modules["verl.utils.reward_score.math_dapo"]  # a submodule, on first use
        assert importlib.reload(functions).masked_mean is names["masked_mean"]
        with pytest.raises(AttributeError, match=r"module 'verl\.utils\.fs' has no attribute 'nothing'"):
            _ = importlib.import_module("verl.utils.fs").nothing

    @pytest.mark.parametrize("module", COMMANDS)
    def test_commands_exist(self, module):
        source, _, function = COMMANDS[module].partition(":")
        assert callable(getattr(importlib.import_module(source), function))

    @pytest.mark.parametrize("launcher", [["-m"], slow(["-m", "torch.distributed.run", "--nproc-per-node=1", "-m"])])
    def test_a_listed_command_runs(self, launcher, tmp_path):
        done = subprocess.run(
            [sys.executable, *launcher, "verl.model_merger", "merge", "--local_dir", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "verl merge: merge writes a Hugging Face folder; add --target_dir FOLDER" in done.stderr
        assert done.returncode != 0

    def test_listed_packages_need_no_torch(self):
        code = (
            "import importlib, sys\n"
            f"for module in {list(IS_PACKAGE)}: importlib.import_module(module)\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_of_the_package():
    assert all(hasattr(verl, name) for name in verl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = verl.Nothing


def test_folders_as_data_preparation_scripts_make_them(tmp_path):
    from verl.utils.hdfs_io import copy, exists, makedirs

    makedirs(f"{tmp_path}/a/b")
    makedirs(f"{tmp_path}/a/b")
    (tmp_path / "a/b/rows").write_text("x")
    assert copy(src=f"{tmp_path}/a/b", dst=str(tmp_path)) == f"{tmp_path}/b"
    assert exists(f"{tmp_path}/b/rows")
    with pytest.raises(ConfigError, match="Give a mounted folder"):
        makedirs("hdfs://somewhere/a")


def test_the_model_merger_is_an_export(monkeypatch, capsys):
    from verl import model_merger
    from verl.compat import commands

    calls = []
    monkeypatch.setattr(commands, "run_export", lambda arguments: calls.append(arguments) or 0)
    run = "checkpoints/p/e/global_step_4"
    common = ("--backend", "fsdp", "--tie-word-embedding", "--local_dir")
    assert model_merger.main(["merge", *common, f"{run}/critic", "--target_dir", "out"]) == 0
    assert model_merger.main(["test", *common, f"{run}/actor/huggingface", "--test_hf_dir", "out"]) == 0
    assert calls == [[run, "out", "--role", "critic"], [run, "out", "--role", "actor", "--compare"]]
    for arguments, words in (
        (["merge", "--target_dir", "out", "--hf_upload_path", "me/model", "--private"], "hf upload me/model out"),
        (["merge"], "--target_dir"),
        (["test"], "--test_hf_dir"),
    ):
        assert model_merger.main([*arguments, "--local_dir", f"{run}/actor"]) == 2
        assert words in capsys.readouterr().err
    assert model_merger.main(["merge", "--local_dir", "x", "--target_dr", "out"]) == 2
    assert "did you mean '--target_dir'" in capsys.readouterr().err
    assert len(calls) == 2


class TestTensorFunctions:
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])

    def test_masked(self):
        from verl.utils.torch_functional import masked_mean, masked_sum, masked_var, masked_whiten

        selected = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        assert masked_sum(self.values, self.mask).item() == 7
        torch.testing.assert_close(masked_sum(self.values, self.mask, axis=-1), torch.tensor([3.0, 4.0]).double())
        torch.testing.assert_close(masked_mean(self.values, self.mask, axis=-1), torch.tensor([1.5, 4.0]).double())
        assert masked_var(self.values, self.mask).item() == pytest.approx(selected.var().item(), rel=1e-6)
        assert masked_var(self.values, self.mask, unbiased=False).item() == pytest.approx(
            selected.var(correction=0).item(), rel=1e-6
        )
        for shift in (True, False):
            white = masked_whiten(self.values, self.mask, shift_mean=shift)
            expected = (selected - selected.mean()) / selected.std() + (0 if shift else selected.mean())
            torch.testing.assert_close(white[self.mask.bool()], expected)
            assert (white[self.mask == 0] == 0).all()

    def test_log_probs(self):
        from verl.utils.torch_functional import logprobs_from_logits

        logits, labels = torch.randn(2, 3, 7).double(), torch.randint(7, (2, 3))
        expected = logits.log_softmax(-1)[torch.arange(2)[:, None], torch.arange(3), labels]
        torch.testing.assert_close(logprobs_from_logits(logits, labels), expected)

    def test_padding(self):
        from verl.utils.torch_functional import clip_by_value, pad_sequence_to_length

        ids = torch.tensor([[1, 2]])
        assert pad_sequence_to_length(ids, 4, 0).tolist() == [[1, 2, 0, 0]]
        assert pad_sequence_to_length(ids, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
        assert pad_sequence_to_length(ids, 1, 0).tolist() == [[1, 2]]
        assert clip_by_value(torch.tensor([1, 5]), torch.tensor([2, 2]), torch.tensor([3, 3])).tolist() == [2, 3]


class TestBalancing:
    def batch(self):
        lengths = torch.tensor([5, 1, 4, 2, 3, 5])
        mask = (torch.arange(5) < lengths[:, None]).long()
        return DataProto.from_dict({"attention_mask": mask, "row": torch.arange(6)})

    def test_partitions_and_their_metrics(self):
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance

        lengths = [8, 7, 2, 1]
        parts = get_seqlen_balanced_partitions(lengths, 2, equal_size=True)
        assert sorted(sum(lengths[i] for i in part) for part in parts) == [9, 9]
        assert log_seqlen_unbalance(lengths, parts, "global_seqlen") == {
            "global_seqlen/min": 3, "global_seqlen/max": 15, "global_seqlen/minmax_diff": 12,
            "global_seqlen/balanced_min": 9, "global_seqlen/balanced_max": 9, "global_seqlen/mean": 9,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("wishes", "count"), [({}, 4), ({"min_num_micro_batch": 5}, 5), ({"num_batches_divided_by": 3}, 6)]
    )
    def test_micro_batches(self, wishes, count):
        from verl.utils.seqlen_balancing import rearrange_micro_batches

        batch = self.batch()
        micro_batches, rows = rearrange_micro_batches(batch.batch, 5, **wishes)
        assert len(micro_batches) == len(rows) == count
        assert sorted(sum(rows, [])) == list(range(6))
        for part, members in zip(micro_batches, rows, strict=True):
            assert part["row"].tolist() == members
            assert part["attention_mask"].sum() <= 5

    def test_a_row_that_does_not_fit(self):
        from verl.utils.seqlen_balancing import rearrange_micro_batches

        with pytest.raises(ValueError, match="max_token_len=4"):
            rearrange_micro_batches(self.batch().batch, 4)

    def test_there_and_back(self):
        from verl.utils.seqlen_balancing import prepare_dynamic_batch, restore_dynamic_batch

        parts, rows = prepare_dynamic_batch(self.batch(), 5)
        joined = torch.cat([part.batch["row"] for part in parts])
        assert restore_dynamic_batch(joined, rows).tolist() == list(range(6))


def test_the_log_of_a_rank(tmp_path, monkeypatch):
    from logging.handlers import RotatingFileHandler

    from verl.trainer.logger import RLLogger

    monkeypatch.setenv("RANK", "3")
    logger = RLLogger(tmp_path / "logs")
    logger.warning("step %d is slow", 7)
    logger.close()
    logging.getLogger("verl").warning("not written any more")
    lines = (tmp_path / "logs" / "rank_3.log").read_text().splitlines()
    assert len(lines) == 1
    assert "step 7 is slow" in lines[0]
    logger = RLLogger(handler=RotatingFileHandler(tmp_path / "own.log"))
    logger.warning("a line")
    logger.close()
    assert "a line" in (tmp_path / "own.log").read_text()
