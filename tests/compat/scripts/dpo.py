"""In the manner of trl/scripts/dpo.py: pairs of a better and a worse answer."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model_path, output_dir = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path)
rows = [{"prompt": f"Double {n}.", "chosen": f" {2 * n}", "rejected": " I do not know."} for n in range(24)]
trainer = DPOTrainer(
    model=model,
    args=DPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-3,
        logging_steps=1,
        beta=0.1,
        loss_type=["sigmoid"],
        max_length=256,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=rows,
    processing_class=tokenizer,
)
result = trainer.train()
trainer.save_model(f"{output_dir}/final")
