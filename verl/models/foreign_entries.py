"""Entries of files that other programs write: the ones that are computed here, with their values. Any other entry with a value
that is not neutral (null, false, 0, empty) may change the computation, and is refused by its name."""

from collections.abc import Collection, Mapping

Computed = Mapping[str, Collection[object] | None]  # name of an entry -> the values that are computed; None: all

# adapter_config.json, by the fields of peft's LoraConfig
ADAPTER: Computed = {
    # compared with keys of the run, or with the tensors
    **dict.fromkeys("r lora_alpha use_rslora use_dora target_modules exclude_modules modules_to_save".split()),
    **dict.fromkeys("layers_to_transform layers_pattern base_model_name_or_path lora_dropout".split()),
    # about the file, and about initial weights, replaced by the tensors
    **dict.fromkeys("task_type auto_mapping peft_version revision inference_mode runtime_config".split()),
    **dict.fromkeys("loftq_config eva_config corda_config lora_ga_config qalora_group_size".split()),
    **dict.fromkeys("megatron_config megatron_core".split()),
    "peft_type": ("LORA",),
    "bias": ("none",),
    # other schemes (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the weights of the model too
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}

# generation_config.json
GENERATION: Computed = {
    # read, or set by keys of the run
    **dict.fromkeys("eos_token_id pad_token_id bos_token_id temperature top_p top_k min_p do_sample".split()),
    **dict.fromkeys("max_length max_new_tokens num_return_sequences".split()),
    # about the file, and about caches and answers of transformers' generate
    **dict.fromkeys("transformers_version _from_model_config trust_remote_code use_cache chat_format".split()),
    **dict.fromkeys("cache_implementation cache_config return_dict_in_generate max_window_size".split()),
    **dict.fromkeys("output_attentions output_hidden_states output_scores output_logits".split()),
    # values that change nothing
    **dict.fromkeys("typical_p num_beams num_beam_groups repetition_penalty length_penalty".split(), (1,)),
    **dict.fromkeys("encoder_repetition_penalty guidance_scale".split(), (1,)),
}


def uncomputed_entry(entries: Mapping[str, object], computed: Computed) -> str | None:
    """The first entry with a value that is neither neutral nor in `computed`."""
    return next(iter(uncomputed_entries(entries, computed)), None)


def uncomputed_entries(entries: Mapping[str, object], computed: Computed) -> list[str]:
    """All entries with values that are neither neutral nor in `computed`."""

    def acts(name: str, value: object) -> bool:
        values = computed.get(name, ())
        is_neutral = value is None or value in (False, "", [], {}, set())
        return not is_neutral and values is not None and value not in values

    return [name for name, value in entries.items() if acts(name, value)]
