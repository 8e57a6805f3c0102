"""verl's part of a server of SGLang: its sampler uses our keys, its receiver takes whole and right weights or none."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.service import running
from tests.rollout.sglang_modules import FOREIGN_TOKEN, FusedModel, import_inside
from tests.rollout.sglang_service import SimulatedSGLang
from tests.rollout.simulated import send, weight_transfer
from tests.rollout.test_vllm import weights_of
from verl.config import ModelConfig, RolloutConfig
from verl.config.sections.rollout import ServiceConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError, ModelError
from verl.models.lora import LoRASpec, add_adapters, is_adapter, peft_names
from verl.rollout.api import ENGINES
from verl.rollout.http.server import arguments
from verl.rollout.sampling import sample
from verl.rollout.uniforms import uniforms_at
from verl.rollout.vllm.sample import draw_arguments
from verl.rollout.vllm.weights import READERS

VOCABULARY = 264
PLAIN, FILTERED = SamplingParams(temperature=0.7), SamplingParams(top_k=5, top_p=0.9)


@pytest.fixture
def inside(monkeypatch):
    return import_inside(monkeypatch)


@pytest.fixture
def serve(inside, connect, load):
    """serve(model) -> (server, engine), with verl's receiver of weights in front of `model`."""
    with running({}) as service:

        def build(model, **config):
            receiver = inside.Receiver(READERS)
            server = SimulatedSGLang(
                "a/model", lambda ids, position, params: (7, -0.5), VOCABULARY,
                receive=lambda message: receiver(model, **json.loads(message)),
            )  # fmt: skip
            service.answers.update(server.answers)
            return server, connect(service.url, "sglang", **config)

        build.service = service
        yield build


def batch_of(*draws):
    """A batch of SGLang: requests with (prompt tokens, custom_params)."""
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(origin_input_ids=[0] * num, sampling_params=SimpleNamespace(custom_params=params))
            for num, params in draws
        ]
    )


def info_of(inside, batch):
    info = SimpleNamespace(device="cpu")
    inside._read(info, batch, VOCABULARY)
    return info


def test_tokens_are_sampled_by_key_and_place_in_the_sample(inside):
    """Of three requests the second is another client's. One leaves the batch, another one joins it."""
    ours = [(5, 11, 0, PLAIN), (9, 12, 4, FILTERED), (3, 13, 0, PLAIN)]  # prompt tokens, key, tokens before, params
    draws = [(num, draw_arguments(key, drawn, params)) for num, key, drawn, params in ours]
    info = info_of(inside, batch_of(draws[0], (4, None), draws[1]))
    sampler = inside.KeyedSampler()
    assert inside.SamplingBatchInfo.adjusted_from_schedule_batch is inside._read
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    output = SimpleNamespace(next_token_logits=logits.clone())
    # positions: the last tokens of the sequence so far, here of a prompt and of samples with 2 and 3 tokens
    tokens = sampler.forward(output, info, True, [], [], torch.tensor([4, 5, 11]))
    for row, position, (_, key, drawn, params) in ((0, 0, ours[0]), (2, 3, ours[1])):
        u = uniforms_at(torch.tensor([key]), torch.tensor([drawn + position]))
        token, log_prob = sample(logits[row : row + 1], params, u)
        assert (int(tokens[row]), float(output.next_token_logprobs[row])) == (int(token), float(log_prob))
    assert (int(tokens[1]), float(output.next_token_logprobs[1])) == (FOREIGN_TOKEN, -3.0)

    info.sampling_seed = info.sampling_seed[[0, 2]]  # as SGLang does
    inside._filter(info, [0, 2], None)
    other = info_of(inside, batch_of(draws[2]))
    info.sampling_seed = torch.cat([info.sampling_seed, other.sampling_seed])
    inside._merge(info, other)
    output = SimpleNamespace(next_token_logits=logits.clone())
    tokens = sampler.forward(output, info, True, [], [], torch.tensor([5, 12, 2]))
    for row, position in enumerate((1, 4, 0)):
        _, key, drawn, params = ours[row]
        u = uniforms_at(torch.tensor([key]), torch.tensor([drawn + position]))
        assert int(tokens[row]) == int(sample(logits[row : row + 1], params, u)[0])
    assert torch.equal(output.next_token_logits, logits), "SGLang may read them afterwards"


def test_a_batch_of_other_clients_is_sglangs(inside):
    info = info_of(inside, batch_of((3, None), (4, {"own": 1})))
    output = SimpleNamespace(next_token_logits=torch.zeros(2, VOCABULARY))
    tokens = inside.KeyedSampler().forward(output, info, False, [], [], torch.tensor([2, 3]))
    assert tokens.tolist() == [FOREIGN_TOKEN] * 2
    assert info.sampling_seed.shape == (2, 3), "the batch goes on"


def test_weights_arrive_in_buckets_and_are_compared(serve, load):
    module = load("llama")
    model = FusedModel(module)
    server, engine = serve(model)
    send(engine, module, 5)
    assert engine.weights_way() is None
    for name, parameter in weights_of(module):
        held, rows = model._places[name]
        assert torch.equal(dict(model.named_parameters())[held][rows], parameter)
    steps = [json.loads(b["zmq_handles"]["verl"])["step"] for b in serve.service.bodies("/update_weights_from_ipc")]
    assert steps[:2] == ["try", "begin"]
    assert steps.count("load") > 2
    assert (server.version[:2], server.is_updating, server.is_paused) == ("5-", False, False)
    assert {c.weight_version for c in engine.generate(make_prompts([3]), SamplingParams(max_new_tokens=2), step=0)} == {
        5
    }


def test_weights_in_fp8_have_the_scales_of_each_update(serve, load, make_engine):
    """The server holds the numbers of the emulation in the native engine."""
    module = copy.deepcopy(load("llama"))
    model = FusedModel(module, fp8=True)
    _, engine = serve(model)
    for version in (1, 2):
        with torch.no_grad():
            module.model.layers[0].mlp.up_proj.weight.mul_(-3.0)
        send(engine, module, version)
        held = dict(model.named_parameters())
        emulated = make_engine("native", module=module, quantization="fp8").dense()
        for number, layer in enumerate(emulated.decoder.layers):
            for name, joined in (("self_attn.qkv_proj", layer.qkv), ("mlp.gate_up_proj", layer.gate_up)):
                parts, at = [], 0
                for part in joined.parts:
                    prefix = f"model.layers.{number}.{name}.weight"
                    rows = slice(at, at + part.out_features)
                    scale = held[f"{prefix}_scale_inv"][
                        len(parts) : len(parts) + 1, :1
                    ]  # all of a part is one block here
                    parts.append(held[prefix][rows].float() * scale)
                    at += part.out_features
                assert torch.equal(torch.cat(parts), emulated._products[id(joined)][1]._weight)


def test_noise_in_the_scales_of_a_cache_is_none_when_a_server_of_the_run_starts(inside, monkeypatch):
    noise = SimpleNamespace(k_scale=torch.tensor(-1e-4), v_scale=torch.tensor(1e-4))
    monkeypatch.setenv("VERL_OWN_SGLANG", "1")
    inside.change_server()
    inside.BaseKVCacheMethod().process_weights_after_loading(noise)
    assert (noise.k_scale, noise.v_scale) == (1.0, 1.0)


def test_a_server_in_fp8_samples_nothing_before_an_update(connect):
    server = SimulatedSGLang(
        "a/model", lambda ids, position, params: (7, -0.5), VOCABULARY, receive=lambda message: None
    )
    module = even_llama()
    with running(server.answers) as service:
        engine = connect(service.url, "sglang", module=module, quantization="fp8")
        with pytest.raises(ModelError, match="did not come"):
            engine.generate(make_prompts([3]), SamplingParams(max_new_tokens=2), step=0)


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("llama", {}, "a projection of 64 on 1 devices does not divide"),
        ("qwen3_moe", {}, "is for dense text models on SGLang, and Qwen3MoeForCausalLM is none"),
        ("llama", {"adapters_by_name": True}, "a run of adapters sends none to SGLang"),
    ],
)
def test_models_that_sglang_does_not_compute_in_blocks_are_refused(family, config, words, load):
    config = RolloutConfig(name="sglang", quantization="fp8", **config)
    with pytest.raises(ConfigError, match=words):
        ENGINES.get("sglang").require_model(load(family), config, torch.device("cuda", 0))
    ENGINES.get("sglang").require_model(even_llama(), replace(config, adapters_by_name=False), torch.device("cuda", 0))


def even_llama():
    """A model on the meta device whose projections divide into blocks."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "part", ["self_attn.k_proj.weight", "input_layernorm.weight", "mlp.down_proj.weight_scale_inv"]
)
def test_a_value_that_the_server_lost_is_found(part, fp8, serve, load):
    name = f"model.layers.1.{part}"
    if "scale" in part and not fp8:
        pytest.skip("there is no such value")
    server, engine = serve(FusedModel(load("llama"), loses=name, fp8=fp8))
    with pytest.raises(ModelError, match=r"holds other values in model\.layers\.1\.\S+ than it was sent"):
        send(engine, load("llama"), 1)
    with pytest.raises(ModelError, match="did not end well"):
        engine.generate(make_prompts([3]), SamplingParams(max_new_tokens=2), step=0)
    assert server.is_paused, "half of the weights are nobody's"


def test_a_server_that_restarts_within_an_update_is_named_and_takes_the_next_one(serve, inside, load):
    """Its receiver knows nothing of the buckets that came before. The update after it is whole."""
    module = load("llama")
    model = FusedModel(module)
    server, engine = serve(model)
    before, after, loads = server.receive, inside.Receiver(READERS), []

    def receive(message):
        if json.loads(message)["step"] == "load":
            loads.append(message)
        if len(loads) < 2:
            return before(message)
        if len(loads) == 2 and message is loads[1]:
            server.restart()
        return after(model, **json.loads(message))

    server.receive = receive
    with pytest.raises(ModelError, match="No update has begun here: the server was started again"):
        send(engine, module, 1)
    with pytest.raises(ModelError, match="did not end well"):
        engine.generate(make_prompts([3]), SamplingParams(max_new_tokens=2), step=0)
    send(engine, module, 2)
    assert server.version.startswith("2-")


def test_a_run_that_ended_within_an_update_leaves_a_usable_server(serve, connect, load):
    """The session of weights is open, and the server is paused."""
    server, _ = serve(FusedModel(load("llama")))
    server.is_updating = server.is_paused = True
    send(connect(serve.service.url, "sglang"), load("llama"), 1)
    assert (server.version[:2], server.is_updating, server.is_paused) == ("1-", False, False)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([{"step": "load", "reader": READERS[0], "bucket": {}}], "No update has begun"),
        ([{"step": "begin"}, {"step": "finish", "manifest": "0"}], "some were lost or came twice"),
        ([{"step": "begin"}, {"step": "load", "reader": "os:system", "bucket": {}}], "'os:system' is not a reader"),
        ([{"step": "other"}], "KeyError: 'other'"),
    ],
)
def test_wrong_orders_and_readers_are_refused(calls, words, inside, load):
    receiver, model = inside.Receiver(READERS), FusedModel(load("llama"))
    *before, last = calls
    for call in before:
        receiver(model, **call)
    with pytest.raises(ModelError, match=words):
        receiver(model, **last)


def test_a_parameter_without_a_new_weight_is_named(inside, load, monkeypatch):
    module = load("llama")
    receiver, model = inside.Receiver(READERS), FusedModel(module)
    some = [(name, p.detach()) for name, p in weights_of(module) if not name.endswith("up_proj.weight")]
    monkeypatch.setattr(inside, "load_object", lambda reader: lambda bucket: some)
    receiver(model, "begin")
    receiver(model, "load", reader=READERS[0], bucket={"entries": []})
    with pytest.raises(ModelError, match=r"No new weight came for model\.layers\.0\.mlp\.gate_up_proj\.weight"):
        receiver(model, "finish", manifest=receiver._manifest.digest)


def test_messages_of_others_are_left_to_sglang(inside):
    updater = SimpleNamespace(get_model=lambda: None)
    receive = inside._receiving(inside.WeightUpdater.update_weights_from_ipc)
    assert receive(updater, SimpleNamespace(zmq_handles={"GPU-1": "a socket"}))[1].startswith(
        "IPC weight update failed"
    )
    assert receive(updater, SimpleNamespace(zmq_handles={"verl": "no JSON"}))[0] is False


def test_adapters_travel_without_weights(connect, load, tokenizer, tmp_path):
    """As peft has them; the last ones are used and the ones before are gone, as is their folder."""
    spec = LoRASpec(4, 16.0, ("q_proj", "down_proj"), rslora=True)
    module = copy.deepcopy(load("llama"))
    layers = add_adapters(module, spec, torch.float32)
    adapters = peft_names({name: p.detach() for name, p in module.named_parameters() if is_adapter(name)})
    model = ModelConfig(
        path="a/model", lora_rank=4, lora_alpha=16, use_rslora=True, target_modules=["q_proj", "down_proj"]
    )
    server = SimulatedSGLang("a/model", lambda ids, position, params: (7, -0.5), VOCABULARY)
    config = RolloutConfig(name="sglang", adapters_by_name=True, max_num_seqs=4)
    with running(server.answers) as service:
        settings = ServiceConfig(url=service.url, weights_dir=str(tmp_path), timeout_s=5.0)
        engine = ENGINES.get("sglang")(
            load("llama"), tokenizer, replace(config, service=settings), eos_token_ids=[EOS],
            transfer=replace(weight_transfer("a/model"), model=model),
        )  # fmt: skip
        for version in (1, 2):
            engine.load(iter(adapters.items()))
            engine.publish(version)
            (sample, *_) = engine.generate(make_prompts([3]), SamplingParams(max_new_tokens=2), step=0)
            assert sample.weight_version == version
        names = [body.get("lora_path") for body in service.bodies("/generate")]
        with pytest.raises(ModelError, match=r"missing parameter base_model\.model\.model\.layers\.1"):
            engine.load(iter(list(adapters.items())[:-1]))
    assert names[0] is None, "the check at the start"
    assert len({*names}) == 3
    (held,) = server.adapters.values()
    assert held.keys() == adapters.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in adapters.items())
    assert server.adapter_config["lora_alpha"] / server.adapter_config["r"] == spec.scale
    assert server.adapter_config["target_modules"] == layers
    assert list(tmp_path.iterdir()) == []


def test_a_server_of_the_run_is_started_for_its_adapters(load):
    config = RolloutConfig(prompt_length=20, response_length=12, adapters_by_name=True)
    transfer = weight_transfer("a/model")
    transfer = replace(transfer, model=ModelConfig(path="a/model", lora_rank=4, target_modules=["q_proj", "up_proj"]))
    said = " ".join(arguments(config, transfer, load("llama"), 8123))
    for part in ("--enable-lora", "--max-lora-rank 4", "--lora-target-modules q_proj up_proj", "--lora-backend torch"):
        assert part in said
    on_gpu = replace(transfer, device=torch.device("cuda"))
    assert "--lora-backend" not in arguments(config, on_gpu, load("llama"), 8123), "SGLang chooses it"


def test_a_server_without_verl_inside_gets_files(connect, load, tmp_path, monkeypatch):
    """Or nothing, if there is no folder with room for them."""
    server = SimulatedSGLang("a/model", lambda ids, position, params: (7, -0.5), VOCABULARY)
    with running(server.answers) as service:
        with pytest.raises(ConfigError, match="cannot read memory of this run.*checkpoint-engine.*weights_dir"):
            connect(service.url, "sglang").load(weights_of(load("llama")))
        engine = connect(service.url, "sglang", weights_dir=str(tmp_path))
        assert engine.weights_way() == f"files in {tmp_path}"
        send(engine, load("llama"), 1)
        assert (server.num_updates, list(tmp_path.iterdir())) == (1, [])
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(ConfigError, match=r"which has 0\.0 GB free for .* of them"):
            connect(service.url, "sglang", weights_dir=str(tmp_path))
