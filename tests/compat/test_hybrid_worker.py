"""`from verl.worker import ActorRolloutRefWorker`, as the seed documents write it."""

from dataclasses import replace

import pytest
import torch

from verl.compat.hybrid_worker import ActorRolloutRefWorker as Implementation
from verl.errors import ConfigError, DataError, ModelError
from verl.parallel.placement import DataParallelConfig, set_device_map
from verl.worker import ActorRolloutRefWorker

pytestmark = pytest.mark.seed("E2")


def test_it_generates_scores_and_trains(tiny_llama):
    assert ActorRolloutRefWorker is Implementation
    overrides = [
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.rollout.n=3",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
    ]
    with ActorRolloutRefWorker(
        model_path=str(tiny_llama), max_batch_size=4, rollout_backend="native", overrides=overrides
    ) as worker:
        batch = worker.generate_sequences(["What is 2 + 2?", "And 3?"])
        assert len(batch) == 6
        assert set(batch.batch["weight_version"].tolist()) == {0}
        assert len(worker.generate_sequences([[1, 2, 3]], n=1)) == len(worker.generate_sequences("2 + 2?", n=1)) == 1
        with pytest.raises(DataError, match="no prompts"):
            worker.generate_sequences([])
        old, reference = worker.compute_log_prob(batch), worker.compute_ref_log_prob(batch)
        mask = batch.batch["response_mask"]
        sampled = batch.batch["rollout_log_probs"]
        for log_probs in (old.batch["old_log_probs"], reference.batch["ref_log_prob"]):
            assert torch.allclose(log_probs[mask], sampled[mask], atol=1e-4)
        with pytest.raises(DataError, match="column advantages"):
            worker.update_actor(batch.union(old))
        old.batch["advantages"] = torch.where(mask, torch.arange(6.0)[:, None] - 2.5, 0.0)
        with pytest.raises(DataError, match="column ref_log_prob, .*Call compute_ref_log_prob first"):
            worker.update_actor(batch.union(old))
        batch, worker.actor.schedule = batch.union(reference), replace(worker.actor.schedule, epochs=2)
        with pytest.raises(DataError, match="column old_log_probs, .*Call compute_log_prob first"):
            worker.update_actor(batch.select([name for name in batch.batch.keys() if name != "old_log_probs"]))
        worker.update_actor(batch)
        moved = worker.compute_log_prob(batch).batch["old_log_probs"]
        assert not torch.allclose(moved[mask], sampled[mask], atol=1e-4)
        again = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
        assert torch.equal(again, reference.batch["ref_log_prob"])
        assert set(worker.generate_sequences([[5, 6]], n=2).batch["weight_version"].tolist()) == {1}


def test_devices_that_one_process_has_no_use_for_are_refused(tiny_llama):
    for engine in ("native", "hf"):
        with pytest.raises(ConfigError, match=f"one process, .*tensor_parallel_size=2 with {engine}"):
            ActorRolloutRefWorker(str(tiny_llama), tensor_parallel_size=2, rollout_backend=engine)
    set_device_map(DataParallelConfig(actor_devices=[0, 1], critic_devices=[2]))
    try:
        with pytest.raises(ConfigError, match=r"a placement on 3 devices .*set_device_map\(None\)") as error:
            ActorRolloutRefWorker(str(tiny_llama), rollout_backend="vllm")
        assert "rollout_backend" not in str(error.value)
    finally:
        set_device_map(None)


def test_a_module_that_is_no_pretrained_model_is_refused(tiny_llama):
    class M(torch.nn.Linear):
        pass

    class CustomWorker(ActorRolloutRefWorker):
        def _build_model_optimizer(self, *arguments, **settings):
            return M(4, 4)

    with pytest.raises(ModelError, match=r"M is not a transformers\.PreTrainedModel"):
        CustomWorker(str(tiny_llama))
