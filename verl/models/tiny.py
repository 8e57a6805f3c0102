"""Tiny random models with a byte-level tokenizer and a chat template, for tests, examples and dry runs (no network)."""

from pathlib import Path
from typing import Any

from verl.model_families import FAMILIES

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY_FAMILIES = {name: row.tiny for name, row in FAMILIES.items() if row.tiny is not None}


def make_tokenizer() -> Any:
    """A byte-level tokenizer: 256 bytes, then <|pad|> (256), <|im_start|> (257), <|im_end|> (258, end of sequence)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<|pad|>", "<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|im_end|>", model_max_length=4096
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(folder: str | Path, family: str = "llama", seed: int = 0, **overrides: object) -> Path:
    """Write a random model of 2 layers, hidden size 64, 4 heads, 2 KV heads, 264 tokens; returns the folder.

    `family` is one of TINY_FAMILIES; `overrides` go to its config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.models.quiet import quiet

    settings: dict[str, object] = {
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,  # large enough that next-token distributions differ visibly
        "pad_token_id": 256,
        "eos_token_id": 258,
        "bos_token_id": 257,
        **TINY_FAMILIES[family],
        **overrides,
    }
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    finally:
        torch.random.set_rng_state(generator_state)
    path = Path(folder)
    with quiet():
        model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path
