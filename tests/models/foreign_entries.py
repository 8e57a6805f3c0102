"""Files of other programs with entries that change their computation, for the fuzzer: computed as there, or refused."""

import json

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from verl.errors import ModelError
from verl.models.load import load_tokenizer
from verl.models.lora import CONFIG_FILE, WEIGHTS_FILE, LoRASpec, add_adapters, load_adapter, peft_names, read_adapter
from verl.models.tiny import make_tiny_model

SPEC = LoRASpec(4, 8, ("q_proj", "v_proj"))
NEUTRAL = (None, False, 0, "", [], {})
ACTING = (True, 3, "x", ["q_proj"], {"q_proj": 2}, 0.5)
# fields of peft's LoraConfig that change what is computed with the tensors of the file
FIELDS = (
    "use_qalora", "lora_bias", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config", "velora_config",
    "monteclora_config", "use_bdlora", "kasa_config", "ensure_weight_tying", "of_a_later_release",
)  # fmt: skip
INITIAL = {  # init_lora_weights -> whether the model keeps its weights
    True: True, False: True, "gaussian": True, "orthogonal": True, "eva": True, "pissa": False, "pissa_niter_4": False,
    "olora": False, "corda": False, "loftq": False, "lora_ga": False, "mica": False,
}  # fmt: skip


def written_adapter(folder, model, **entries):
    """A folder of adapters of noise with further entries in their adapter_config.json."""
    module = AutoModelForCausalLM.from_pretrained(model)
    names = add_adapters(module, SPEC, torch.float32)
    noise = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(p.shape, generator=noise) / 8 for n, p in module.named_parameters() if p.requires_grad}
    folder.mkdir(exist_ok=True)
    save_file(peft_names(tensors), folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({**SPEC.to_json(str(model), names), **entries}))
    return folder


def logits_with(adapter, model):
    """Logits of a few tokens with the adapters of a folder, as a run computes them."""
    module = AutoModelForCausalLM.from_pretrained(model)
    add_adapters(module, SPEC, torch.float32)
    load_adapter(module, read_adapter(adapter, SPEC, str(model)))
    return module(torch.arange(8).unsqueeze(0)).logits.detach()


def refusal(call):
    """The sentence of a ModelError; "" without one."""
    try:
        call()
    except ModelError as error:
        return str(error)
    return ""


def processor_entry(before, after):
    """The post-processor of a tokenizer.json that puts tokens around a text, as `add_eos_token` makes it."""
    around = {"id": "A", "type_id": 0}
    tokens = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in {**before, **after}.items()}
    parts = [[{"SpecialToken": {"id": n, "type_id": 0}} for n in names] for names in (before, after)]
    single = [*parts[0], {"Sequence": around}, *parts[1]]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def tokenizer_with(folder, before=(), after=(), template=False, content=(), **settings):
    """The tokenizer of a folder with other settings in its files; `before` and `after` are control tokens around a text."""
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    entries = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in entries["added_tokens"]}
    processors = [entries["post_processor"]] if entries.get("post_processor") else []
    around = processor_entry({n: ids[n] for n in before}, {n: ids[n] for n in after})
    entries["post_processor"] = {"type": "Sequence", "processors": [*processors, around]}
    file.write_text(json.dumps({**entries, **dict(content)}))
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    tokenizer = load_tokenizer(str(folder))
    if not template:
        tokenizer.chat_template = None
    return tokenizer


def cases(rng, count, folder):
    """Adapters and tokenizers with random entries: refused by the entry's name, or computed as without the entry."""
    model = make_tiny_model(folder / "model", "qwen3")
    expected = logits_with(written_adapter(folder / "adapter", model), model)
    file = folder / "adapter" / CONFIG_FILE
    plain = json.loads(file.read_text())
    for _ in range(count):
        name = rng.choice((*FIELDS, "init_lora_weights", "bias", "peft_type"))
        value = rng.choice((*NEUTRAL, *ACTING, *INITIAL))
        file.write_text(json.dumps({**plain, name: value}))
        sentence = refusal(lambda: read_adapter(folder / "adapter", SPEC, str(model)))
        acts = (
            value not in NEUTRAL
            if name in FIELDS
            else value not in NEUTRAL
            and not (name == "init_lora_weights" and INITIAL.get(value) if isinstance(value, str | bool) else False)
        )
        assert bool(sentence) == acts, (name, value, sentence)
        assert not acts or f"{name}=" in sentence, (name, value, sentence)
        yield name, "refused" if sentence else "computed"
    file.write_text(json.dumps(plain))
    assert torch.equal(logits_with(folder / "adapter", model), expected)
