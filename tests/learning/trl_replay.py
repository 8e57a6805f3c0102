"""TRL's trainer on samples that a run of ours has made; run by the Python of TRL's environment.

Reads {"cases": {name: {"trainer", "model", "args", "steps", "weights"}}} from the file named first; `steps` are lists of
samples with prompt_ids, response_ids and reward. Writes to the file named second the log of every optimizer step by case, and
the weights at the end to the file `weights`. TRL computes masks, log-probs, advantages, loss, gradients, clipping and AdamW.
"""

import json
import sys
import tempfile
from pathlib import Path


def replaying(trainer, kind, steps):
    """`trainer` with the samples of `steps` in place of generation."""

    class Replaying(trainer):
        number = -1

        def _tokenize_prompts(self, prompts):
            self.number += 1
            return [sample["prompt_ids"] for sample in steps[self.number]], None, {}

        def _generate_single_turn(self, *_, **__):
            replies = [sample["response_ids"] for sample in steps[self.number]]
            return (replies, None) if kind == "GRPO" else replies

        def _rewards_of_step(self, completions, **_):
            return [sample["reward"] for sample in steps[self.number]]

    return Replaying


def replay(case):
    import torch
    import trl
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    kind, steps, holder = case["trainer"], case["steps"], []
    module = sys.modules[getattr(trl, f"{kind}Trainer").__module__]
    module.shuffle_sequence_dict = lambda samples: samples  # mini-batches in the order of the samples
    size = len(steps[0])
    settings = {
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"},
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "weight_decay": 0.0, "shuffle_dataset": False, "per_device_train_batch_size": size, **case["args"],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = replaying(getattr(trl, f"{kind}Trainer"), kind, steps)(
            model=case["model"],
            reward_funcs=lambda completions, **_: holder[0]._rewards_of_step(completions),
            args=getattr(trl, f"{kind}Config")(output_dir=folder, **settings),
            processing_class=AutoTokenizer.from_pretrained(case["model"], padding_side="left"),
            train_dataset=Dataset.from_list([{"prompt": "x"}] * (4 * size * len(steps))),
        )
        holder.append(trainer)
        for part in trainer.model.modules():
            if isinstance(part, torch.nn.Embedding):
                part.padding_idx = None  # torch drops the gradient of that row, even if the token was sampled
        trainer.train()
    save_file({name: p.detach().contiguous().clone() for name, p in trainer.model.named_parameters()}, case["weights"])
    return [row for row in trainer.state.log_history if "grad_norm" in row]


def main(task, answer):
    import torch

    torch.set_num_threads(1)
    logs = {name: replay(case) for name, case in json.loads(Path(task).read_text())["cases"].items()}
    Path(answer).write_text(json.dumps(logs))


if __name__ == "__main__":
    main(*sys.argv[1:])
