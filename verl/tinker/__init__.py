"""A training service that the official Tinker SDK drives: many LoRA models on one base model, in one process."""
