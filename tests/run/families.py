"""Every causal language model of the installed transformers, built tiny: how it loads here, and whether it trains.

python -m tests.run.families docs/families.md              the whole table, in about half an hour
python -m tests.run.families docs/families.md llama bloom  these rows again
"""

import contextlib
import logging
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.damage import deadline
from tests.json_lines import read_lines, write_lines
from tests.models.reference import make_columns
from verl.config import load_config
from verl.errors import VerlError
from verl.model_families import families_with
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm
from verl.models.packing import pack_rows
from verl.models.padded import forward_kind
from verl.models.tiny import make_tokenizer
from verl.parallel.device import CPU_BF16
from verl.run.host import train

FAMILIES = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
BY_HOST = (
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "deepseek_v3",
)  # which the device does not sample by itself
LARGEST = 16_000_000  # parameters of a model that counts as tiny
TOLERANCE = 1e-5
PROMPT, RESPONSES = [3, 4, 5, 6], [[7, 8, 9, 10, 11], [12], [13, 14, 2]]

# Entries of a config that make it small; each family gets the entries that its config has.
SMALL = {
    "vocab_size": 264, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, "is_decoder": True,
    "initializer_range": 0.1, "max_position_embeddings": 300, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256,
    **dict.fromkeys("hidden_size n_embd d_model embedding_dim word_embed_proj_dim embedding_size lru_width".split(), 64),
    **dict.fromkeys("intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size".split(), 128),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads decoder_attention_heads".split(), 4),
    **dict.fromkeys("encoder_attention_heads linear_num_key_heads linear_num_value_heads linear_num_heads".split(), 4),
    **dict.fromkeys("num_key_value_heads num_kv_heads index_n_heads swa_num_attention_heads".split(), 4),
    **dict.fromkeys("head_dim dim_head d_kv global_head_dim linear_key_head_dim linear_value_head_dim".split(), 16),
    **dict.fromkeys("linear_head_dim attention_head_dim kv_channels v_head_dim index_head_dim".split(), 16),
    **dict.fromkeys("q_lora_rank kv_lora_rank o_lora_rank qk_nope_head_dim rotary_dim adapter_rank".split(), 16),
    "qk_rope_head_dim": 16, "partial_rotary_factor": 1.0, "query_pre_attn_scalar": 16, "attention_window": 16,
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4),
    **dict.fromkeys("num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k moe_num_active_experts".split(), 2),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size".split(), 32),
    **dict.fromkeys("shared_intermediate_size expert_intermediate_size moe_shared_expert_intermediate_size".split(), 32),
    "zero_expert_num": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "sliding_window": 8, "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_ssm": 128, "index_topk": 256,
    "n_mamba_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "chunk_size": 16, "mamba_chunk_size": 16,
    "attention_chunk_size": 64, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 264,
    "num_kv_shared_layers": 0, "num_nextn_predict_layers": 0, "use_mamba_kernels": False, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2}, "gemma3n_text": {"num_hidden_layers": 5},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}, "bamba": {"attn_layer_indices": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mllama": {"cross_attention_layers": []}, "recurrent_gemma": {"num_hidden_layers": 3},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]}, "falcon_mamba": {"intermediate_size": 128},
    "reformer": {"is_decoder": True, "axial_pos_embds": False}, "xlnet": {"d_inner": 128},
    "xlm": {"causal": True, "emb_dim": 64},
    "ctrl": {"dff": 128}, "zamba": {"num_hidden_layers": 3}, "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]}, "dbrx": {"tie_word_embeddings": False},
    "zaya": {"num_experts_per_tok": 1}, "moshi": {"sliding_window": 64},
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), {"layer_types": ["linear_attention", "full_attention"]}
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A family as it loads here: `forward` is a kind of verl.models.padded, "refused" or "not built"; `note` says why."""

    family: str
    class_name: str
    forward: str
    note: str

    def line(self) -> str:
        return f"| `{self.family}` | {self.class_name} | {self.forward} | {self.note} |"


def config_of(family: str):
    """The smallest config of a family that keeps its structure."""
    default = transformers.AutoConfig.for_model(family)
    names = {**{name: name for name in vars(default)}, **{n: n for n in default.attribute_map}}
    small = {name: value for name, value in SMALL.items() if name in names}
    return transformers.AutoConfig.for_model(family, **{**small, **SETTINGS.get(family, {})})


def build(family: str, folder: Path) -> None:
    """Save a random model of the family with the byte-level tokenizer. Raises whatever transformers does."""
    config = config_of(family)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():  # no tensor keeps a constant that hides a difference
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def theirs(folder: Path) -> torch.Tensor:
    """[rows, 5] log-probs of transformers' own forward, row by row."""
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    log_probs = torch.zeros(len(RESPONSES), 5)
    with torch.no_grad():
        for row, response in enumerate(RESPONSES):
            logits = module(input_ids=torch.tensor([PROMPT + response]), use_cache=False).logits[
                0, len(PROMPT) - 1 : -1
            ]
            chosen = torch.tensor(response).unsqueeze(1)
            log_probs[row, : len(response)] = logits.float().log_softmax(-1).gather(1, chosen).squeeze(1)
    return log_probs


def examine(family: str, folder: Path, overrides: list[str]) -> Row:
    """The family's row; AssertionError when it loads and does not compute or train correctly."""
    name = FAMILIES[family]
    try:
        with deadline(120), quiet():
            build(family, folder)
            reference = theirs(folder)
    except Exception as error:  # noqa: BLE001 - of any library: then there is nothing to load
        return Row(family, name, "not built", _note(error))
    try:
        with deadline(120), quiet():
            module = load_causal_lm(folder, gradient_checkpointing=True)
    except VerlError as error:
        return Row(family, name, "refused", _note(error, folder))
    batch = pack_rows(make_columns([PROMPT] * len(RESPONSES), RESPONSES))
    first, second = (packed_outputs(module, batch, ("log_probs",))["log_probs"].detach() for _ in range(2))
    assert torch.equal(first, second), "two forwards differ"
    error = (first - reference).abs().max().item()
    assert error < TOLERANCE, f"log-probs differ by {error:.2g}"
    gaps = [row["training/rollout_probs_diff_max"] for row in trained_steps(folder, overrides, "float32")]
    assert max(gaps) < 1e-4, gaps  # of the sampler to the forward that trains
    return Row(family, name, forward_kind(module), bfloat16_note(folder, overrides))


def bfloat16_note(folder: Path, overrides: list[str]) -> str:
    """ "" where the model in `folder` trains in bfloat16, multiplied as it is and widened; else the reason why it does not."""
    try:
        for multiplied in ("native", "widened"):
            with mock.patch.dict(os.environ, {CPU_BF16: multiplied}):
                trained_steps(folder, overrides, "bfloat16")
    except VerlError as error:
        return f"float32 only: {_note(error, folder)}"
    return ""


def trained_steps(folder: Path, overrides: list[str], dtype: str) -> list[dict[str, float]]:
    """Metrics of two GRPO steps of the model in `folder`."""
    run = folder.parent / f"{folder.name}-run"
    shutil.rmtree(run, ignore_errors=True)
    with deadline(300), quiet():
        keys = [f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}"]
        assert train(load_config([*overrides, *keys, f"trainer.default_local_dir={run}"])) == 0, "the run failed"
    rows = read_lines(run / "metrics.jsonl")
    steps = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2], steps
    assert any(row["actor/grad_norm"] > 0 for row in steps), "no gradient"
    return steps


def _note(error: BaseException, folder: Path | None = None) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    if folder is not None:
        text = text.replace(str(folder), "the folder")
    text = re.sub(r"<[^>]*>|/\S*/", "", text)
    return text if len(text) <= 160 else text[:157] + "..."


@contextlib.contextmanager
def quiet():
    """Without the warnings of transformers."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def names(families: Iterable[str]) -> str:
    return ", ".join(f"`{family}`" for family in families)


def page(rows: list[Row]) -> str:
    """docs/families.md."""
    count = {
        kind: sum(row.forward == kind for row in rows)
        for kind in ("packed", "padded", "logits", "refused", "not built")
    }
    head = f"""# Model families

Look up the `model_type` of your model's `config.json` in the table below: it says how the model runs.

| forward | families | meaning |
|---|---|---|
| packed | {count["packed"]} | batches without padding, each shared prompt computed once; native generation: the fastest |
| padded | {count["padded"]} | the model's own forward over padded rows: slower; transformers generates |
| logits | {count["logits"]} | like padded, and the whole logits are in memory at once |
| refused | {count["refused"]} | loading fails with the reason |
| not built | {count["not built"]} | no tiny model could be made for this page; verl checks the real model when it loads |

Your own model is a `transformers.PreTrainedModel` whose `forward` takes token ids and returns logits. verl checks it when it
loads.

On a GPU, {names(name for name in families_with("decoder") if name not in BY_HOST)}
generate with CUDA graphs, without the host between steps. verl's own layers also train and sample
{names(BY_HOST)}, whose steps
the host drives: they cap scores, turn heads in another way, or have narrow vectors in place of keys and values. Other models
generate step by step with their own modules: Qwen3.5 and Qwen3-Next (linear attention), gpt-oss (attention sinks, experts with
biases), and models whose rotation depends on the length. `verl check` says why modules compute a model.

With `rope_parameters` of type `dynamic` or `longrope` (Phi-3 and Phi-4 with long contexts), rows beyond a length have other
rotary frequencies: `max_position_embeddings` tokens, or `original_max_position_embeddings` (4096 in Phi). A batch would turn
all its rows as its longest. So sequences beyond that length are an error, before training where lengths are known. For longer
ones, give `model.override_config.rope_parameters` the `long_factor` as `short_factor` too: it then acts at every length.

`python -m tests.run.families docs/families.md` writes this page from every causal language model class of transformers
{transformers.__version__}, built tiny with random weights. A family passes if its log-probs equal transformers' to
{TOLERANCE:g}, twice in a row, and if two GRPO steps run in float32 and in bfloat16, both with bfloat16 instructions and
widened to float32.

| model_type | class | forward | note |
|---|---|---|---|
"""
    return head + "\n".join(row.line() for row in rows) + "\n"


def read_page(file: Path) -> dict[str, Row]:
    """The rows of a page, by family."""
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \| (.*?) \|$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {row[0]: Row(*row) for row in rows}


def write_task(folder: Path) -> list[str]:
    """Overrides of a run of two GRPO steps over rows written to `folder`."""
    rows = [
        {
            "data_source": "letters", "prompt": f"prompt {i}", "extra_info": {"index": i},
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(8)
    ]  # fmt: skip
    write_lines(folder / "train.jsonl", rows)
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None)"
    (folder / "reward.py").write_text(f"{signature}:\n    return len(set(solution_str)) / 9\n")
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder}/train.jsonl", f"data.val_files={folder}/train.jsonl",
        "data.train_batch_size=2", "data.max_prompt_length=32", "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=0.001",
        "actor_rollout_ref.rollout.temperature=4.0",  # some random models are sure of one token
        f"reward.custom_reward_function.path={folder}/reward.py", "reward.num_workers=1", "trainer.logger=[file]",
        "trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1",
    ]  # fmt: skip


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    logging.disable(logging.WARNING)
    rows = read_page(out) if names and out.exists() else {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        overrides = write_task(Path(folder))
        for family in names or FAMILIES:
            try:
                rows[family] = examine(family, Path(folder) / family, overrides)
                print(rows[family].line(), flush=True)
            except Exception as error:  # noqa: BLE001 - shown for each family, and an exit code
                failed.append(family)
                where = traceback.extract_tb(error.__traceback__)[-1]
                print(f"FAILED {family}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})", flush=True)
            shutil.rmtree(Path(folder) / family, ignore_errors=True)
            shutil.rmtree(Path(folder) / f"{family}-run", ignore_errors=True)
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")
    out.write_text(page([rows[family] for family in FAMILIES if family in rows]), encoding="utf-8")


if __name__ == "__main__":
    main()
