"""Rows as TRL's SFTTrainer tokenizes them; run by the Python of TRL's own environment.

Reads {"tokenizer": folder, "cases": {name: {"rows", "args", "template"}}} from the file named first, writes for each
case its template and per row [input_ids, labels] to the file named second. `template` is the name of a chat template of
TRL's, or null for the tokenizer's own.
"""

import json
import sys
import tempfile
from pathlib import Path


def main(task_file: str, answer: str) -> None:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    task = json.loads(Path(task_file).read_text())
    answers = {}
    for name, case in task["cases"].items():
        tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
        if case["template"]:
            tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / case["template"]).read_text()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
        with tempfile.TemporaryDirectory() as folder:
            args = SFTConfig(output_dir=folder, max_length=None, report_to=[], use_cpu=True, bf16=False, **case["args"])
            trainer = SFTTrainer(
                model=LlamaForCausalLM(config),
                args=args,
                train_dataset=Dataset.from_list(case["rows"]),
                processing_class=tokenizer,
            )
            rows = [[row["input_ids"], row["labels"]] for row in trainer.train_dataset]
        answers[name] = {"template": tokenizer.chat_template, "rows": rows}
    Path(answer).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
