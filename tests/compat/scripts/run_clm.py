"""In the manner of transformers/examples/pytorch/language-modeling/run_clm.py: text in blocks, every token trains."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

model_path, output_dir = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path)

ids = tokenizer(" ".join(f"the {n} of {n % 7}" for n in range(200)))["input_ids"]
blocks = [ids[start : start + 32] for start in range(0, len(ids) - 32, 32)]
rows = [{"input_ids": block, "attention_mask": [1] * 32, "labels": list(block)} for block in blocks]

args = TrainingArguments(
    output_dir=output_dir, per_device_train_batch_size=4, num_train_epochs=2, learning_rate=5e-3, logging_steps=1,
    eval_strategy="epoch", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[4:],
    eval_dataset=rows[:4],
    processing_class=tokenizer,
    data_collator=default_data_collator,
)
result = trainer.train()
metrics = trainer.evaluate()
trainer.save_model(f"{output_dir}/final")
