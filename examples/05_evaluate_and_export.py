"""Train two steps, validate the checkpoint, export it, and load the export with plain transformers.

python examples/05_evaluate_and_export.py
"""

import json
import runpy
from pathlib import Path

HERE = Path("outputs/example_05")

if __name__ == "__main__":
    from verl.cli.main import main
    from verl.models.tiny import make_tiny_model

    first = str(Path(__file__).with_name("01_first_grpo_run.py"))
    HERE.mkdir(parents=True, exist_ok=True)
    example = runpy.run_path(first)
    example["write_rows"](HERE / "train.jsonl", range(80))
    example["write_rows"](HERE / "val.jsonl", range(10))
    common = [
        f"data.val_files={HERE}/val.jsonl",
        "data.max_prompt_length=64",
        "data.max_response_length=4",
        f"reward.custom_reward_function.path={first}",
    ]
    trained = main(
        [
            "train",
            *common,
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={make_tiny_model(HERE / 'model')}",
            f"data.train_files={HERE}/train.jsonl",
            "data.train_batch_size=16",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "trainer.total_training_steps=2",
            "trainer.save_freq=2",
            f"trainer.default_local_dir={HERE}/run",
            "trainer.resume_mode=disable",
        ]
    )
    exported = trained or main(["export", f"{HERE}/run", f"{HERE}/exported", "--dtype", "float32"])
    evaluated = exported or main(
        ["eval", *common, f"actor_rollout_ref.model.path={HERE}/exported", f"trainer.default_local_dir={HERE}"]
    )
    if evaluated == 0:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(HERE / "exported")
        metrics = json.loads((HERE / "eval" / "eval.json").read_text())
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, held-out reward {metrics['val/reward']:.3f}")
    raise SystemExit(evaluated)
