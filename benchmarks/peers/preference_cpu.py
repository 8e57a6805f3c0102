"""DPO of ours against TRL's DPOTrainer on the same pairs, alternating, on a CPU.

    python benchmarks/peers/preference_cpu.py                    # 8 pairs a step, prompts of 128 and completions of 64 tokens
    python benchmarks/peers/preference_cpu.py --trl shipped precomputed --json results.json
    python benchmarks/peers/preference_cpu.py --ours ref.precompute=False

Every side is a process that builds its trainer once, takes one step to warm up, and then one per round while the others
wait. All sides train on the same pairs in each step, and their losses are compared. Tokens count both completions with
their prompts. By default ours computes the reference's log-probabilities once, before its first step (`start_s` among its
facts); of TRL's forms `precomputed` does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Report
from sft_cpu import MALLOC, TRLForm, add_common_arguments, compare
from workload import make_prompts, prepare_model

TRL_FORMS = {
    "shipped": TRLForm(8),  # DPOConfig's own defaults: micro-batches of 8 pairs, activations recomputed, a second model
    "plain": TRLForm(4, None, {"gradient_checkpointing": False}, MALLOC),
    "precomputed": TRLForm(4, None, {"gradient_checkpointing": False, "precompute_ref_log_probs": True}, MALLOC),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, TRL_FORMS, rows=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--completion-tokens", type=int, default=64, help="with the end of sequence")
    return parser.parse_args(argv)


def make_work(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The pairs of all steps in a file: words that are one token each."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    from verl.cli.model_folders import run_convert as convert

    model = prepare_model(options.model, convert)
    tokenizer, count = AutoTokenizer.from_pretrained(model), (options.rounds + 1) * options.rows
    columns = {
        name: make_prompts(tokenizer, count=count, num_tokens=tokens, seed=seed)
        for seed, (name, tokens) in enumerate(
            (
                ("prompt", options.prompt_tokens),
                ("chosen", options.completion_tokens - 1),
                ("rejected", options.completion_tokens - 1),
            )
        )
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    file = folder / "pairs.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "trainer": "DPO",
        "model": str(model),
        "dtype": options.dtype,
        "file": str(file),
        "rows_per_step": options.rows,
        "num_steps": options.rounds + 1,
        "learning_rate": options.learning_rate,
    }


def main(argv: list[str] | None = None) -> Report:
    return compare("DPO step on the same pairs", parse(argv), TRL_FORMS, make_work)


if __name__ == "__main__":
    main()
