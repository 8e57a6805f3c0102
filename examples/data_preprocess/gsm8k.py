"""GSM8K to parquet with `datasets`: python examples/data_preprocess/gsm8k.py --local_dataset_path FOLDER --local_save_dir OUT

FOLDER holds train.jsonl and test.jsonl ({"question", "answer"}); without it the data set comes from the hub.
"""

import argparse
import os
import re

import datasets

from verl.utils.hdfs_io import copy, makedirs

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def extract_solution(solution_str):
    solution = re.search(r"#### (\-?[0-9\.\,]+)", solution_str)
    assert solution is not None
    return solution.group(1).replace(",", "")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_dataset_path", default=None, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--local_save_dir", default="~/data/gsm8k")
    parser.add_argument("--hdfs_dir", default=None, help="folder to copy the files to")
    args = parser.parse_args()

    data_source = "openai/gsm8k"
    if args.local_dataset_path is not None:
        names = {split: os.path.join(args.local_dataset_path, f"{split}.jsonl") for split in ("train", "test")}
        dataset = datasets.load_dataset("json", data_files=names)
    else:
        dataset = datasets.load_dataset(data_source, "main")

    def make_map_fn(split):
        def process_fn(example, idx):
            question_raw = example.pop("question")
            answer_raw = example.pop("answer")
            return {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": question_raw + " " + INSTRUCTION}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": extract_solution(answer_raw)},
                "extra_info": {"split": split, "index": idx, "answer": answer_raw, "question": question_raw},
            }

        return process_fn

    local_save_dir = os.path.expanduser(args.local_save_dir)
    makedirs(local_save_dir)
    for split in ("train", "test"):
        rows = dataset[split].map(function=make_map_fn(split), with_indices=True)
        rows.to_parquet(os.path.join(local_save_dir, f"{split}.parquet"))
    if args.hdfs_dir is not None:
        makedirs(args.hdfs_dir)
        copy(src=local_save_dir, dst=args.hdfs_dir)


if __name__ == "__main__":
    main()
