"""Models that train all their weights: against plain torch, and through the SDK."""

import pytest
import torch
from transformers import AutoModelForCausalLM

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker import types  # noqa: E402

from tests.models.reference import widen_norms  # noqa: E402
from tests.tinker.data import datum  # noqa: E402
from tests.tinker.served import running  # noqa: E402
from tests.tinker.test_kills import compare, run  # noqa: E402
from tests.tinker.test_workbench import SETTINGS, loss_of, request  # noqa: E402
from verl.cli.serve import serving_config  # noqa: E402
from verl.models.optim import AdamStep  # noqa: E402
from verl.tinker.workbench import Workbench  # noqa: E402

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)
PROMPT = types.ModelInput.from_ints([3, 4, 5, 6])


def bench_of(model, dtype):
    return Workbench(serving_config(str(model), [f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}"], rank=0))


def test_steps_of_two_models_in_turn_equal_torch_in_float64(tiny_llama):
    bench = bench_of(tiny_llama, "float64")
    widen_norms(bench.engine.module)
    models = [bench.engine.held(bench.engine.new_adapter(0, 0)) for _ in range(2)]
    plain = [widen_norms(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)) for _ in models]
    reference = [torch.optim.AdamW(one.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1) for one in plain]
    for step in range(3):
        for number, loss in enumerate(("cross_entropy", "ppo")):
            sent = request(loss, 5 + step)
            value = bench.forward_backward(models[number], sent).metrics["loss:sum"]
            total = 0.0
            for one in sent.data:
                logits = plain[number](torch.from_numpy(one.tokens)[None]).logits[0]
                targets = torch.from_numpy(one.inputs["target_tokens"])
                lp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
                total = total + loss_of(loss, lp, {n: torch.from_numpy(v).double() for n, v in one.inputs.items()})
            total.backward()
            assert value == pytest.approx(total.item(), rel=1e-10), SETTINGS[loss]
        for number, one in enumerate(plain):
            norm = bench.optim_step(models[number], AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.0))["grad_norm"]
            assert norm == pytest.approx(
                torch.nn.utils.get_total_norm([p.grad for p in one.parameters()]).item(), rel=1e-10
            )
            reference[number].step()
            reference[number].zero_grad()
    for held, one in zip(models, plain, strict=True):
        tensors = bench.engine.whole(held).weights.tensors
        for name, parameter in one.named_parameters():
            assert (tensors[name] - parameter).norm() <= 1e-9 * parameter.norm(), name
    bench.engine.show(None)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    for name, parameter in base.named_parameters():
        assert torch.equal(bench.engine.module.get_parameter(name), parameter)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def full(request, tiny_llama, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        folder = tmp_path_factory.mktemp(f"full-{request.param}")
        with running(bench_of(tiny_llama, request.param), folder) as served:
            served.folder = folder
            yield served


def train(trainer, seed=0):
    trainer.forward_backward([datum(seed)], "cross_entropy")
    return trainer.optim_step(ADAM).result()


def test_two_models_train_and_sample_beside_each_other_and_the_base(full):
    trainers = [full.trainer(rank=0) for _ in range(2)]
    base = full.client().create_sampling_client(base_model="base").result()
    before = base.compute_logprobs(PROMPT).result()
    first = train(trainers[0]).metrics["grad_norm"]
    sampler = trainers[0].save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(PROMPT).result()
    assert train(trainers[1]).metrics["grad_norm"] == first, "it begins with the base model's weights"
    train(trainers[0], 1)
    assert base.compute_logprobs(PROMPT).result() == before
    assert sampler.compute_logprobs(PROMPT).result() == scores != before
    samples = [
        one.sample(PROMPT, 2, types.SamplingParams(max_tokens=4, seed=1, stop=[])) for one in (base, sampler, base)
    ]
    drawn = [[list(s.tokens) for s in one.result().sequences] for one in samples]
    assert drawn[0] == drawn[2]
    assert trainers[0].get_info().model_data.model_name
    assert not trainers[0].get_info().is_lora


def test_a_run_with_saves_and_loads_repeats_its_bits(full, monkeypatch):
    monkeypatch.setattr("tests.tinker.test_kills.RANK", 0)
    one, other = run(full.url, 2), run(full.url, 2)
    compare(full.folder, one, other, "model.safetensors")


def test_transformers_reads_a_checkpoint(full):
    trainer = full.trainer(rank=0)
    train(trainer)
    path = trainer.save_weights_external("all").result().path
    saved = full.service.checkpoints.find(path)
    model = AutoModelForCausalLM.from_pretrained(saved.folder, dtype=torch.float32)
    held = full.service.bases.bench().training.state(trainer.model_id, optimizer=False).weights.tensors
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, held[name]), name


@pytest.mark.parametrize("settings", [{"rank": 4}, {"rank": 0, "train_mlp": False}])
def test_adapters_on_such_a_base_model_are_refused(full, settings):
    with pytest.raises(tinker.TinkerError, match="train all their weights"):
        full.trainer(**settings)
