"""In the manner of trl/scripts/sft.py: conversations; turns of the assistant train."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model_path, output_dir = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path)
rows = [
    {"messages": [{"role": "user", "content": f"Double {n}."}, {"role": "assistant", "content": str(2 * n)}]}
    for n in range(24)
]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        max_steps=8,
        learning_rate=5e-3,
        logging_steps=2,
        max_length=256,
        save_steps=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),  # fmt: skip
    train_dataset=rows,
    processing_class=tokenizer,
)
result = trainer.train()
trainer.save_model(f"{output_dir}/final")
