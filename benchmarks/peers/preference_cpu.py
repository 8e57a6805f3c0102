"""DPO of ours against TRL's DPOTrainer on the same pairs, alternating, on a CPU.

    python benchmarks/peers/preference_cpu.py                    # 8 pairs a step, prompts of 128 and completions of 64 tokens
    python benchmarks/peers/preference_cpu.py --trl shipped precomputed --json results.json
    python benchmarks/peers/preference_cpu.py --ours ref.precompute=False

Rounds are as in peers_cpu.py. All sides train on the same pairs in each step, and their losses are compared. Tokens count
both completions with their prompts. By default ours computes the reference's log-probabilities once, before its first step
(`start_s` among its facts); of TRL's forms `precomputed` does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers_cpu import MALLOC, TRLForm, model_of
from report import Report
from sft_cpu import compare, parser_of
from workload import make_prompts

TRL_FORMS = {
    "shipped": TRLForm(8),  # DPOConfig's own defaults: micro-batches of 8 pairs, activations recomputed, a second model
    "plain": TRLForm(4, {"gradient_checkpointing": False}, MALLOC),
    "precomputed": TRLForm(4, {"gradient_checkpointing": False, "precompute_ref_log_probs": True}, MALLOC),
}


def pairs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The pairs of all steps: words that are one token each."""
    model = model_of(options)
    from verl.models.load import load_tokenizer

    tokenizer, count = load_tokenizer(model), (options.rounds + 1) * options.rows
    completion = options.completion_tokens - 1
    lengths = {"prompt": options.prompt_tokens, "chosen": completion, "rejected": completion}
    columns = [
        make_prompts(tokenizer, count=count, num_tokens=length, seed=seed)
        for seed, length in enumerate(lengths.values())
    ]
    return [dict(zip(lengths, row, strict=True)) for row in zip(*columns, strict=True)]


def main(argv: list[str] | None = None) -> Report:
    parser = parser_of(__doc__, TRL_FORMS, rows=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--completion-tokens", type=int, default=64, help="with the end of sequence")
    options = parser.parse_args(argv)
    return compare("DPO", options, TRL_FORMS, pairs_of(options))


if __name__ == "__main__":
    main()
