"""MATH to parquet with `datasets`: python examples/data_preprocess/math_dataset.py --local_dataset_path FOLDER

FOLDER holds train.jsonl and test.jsonl ({"problem", "solution"}); without it the data set comes from the hub.
"""

import argparse
import os

import datasets

from verl.utils.hdfs_io import copy, makedirs
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def extract_solution(solution_str):
    return remove_boxed(last_boxed_only_string(solution_str))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_dataset_path", default=None, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--local_save_dir", default="~/data/math")
    parser.add_argument("--hdfs_dir", default=None, help="folder to copy the files to")
    args = parser.parse_args()

    data_source = "DigitalLearningGmbH/MATH-lighteval"
    if args.local_dataset_path is not None:
        names = {split: os.path.join(args.local_dataset_path, f"{split}.jsonl") for split in ("train", "test")}
        dataset = datasets.load_dataset("json", data_files=names)
    else:
        dataset = datasets.load_dataset(data_source)

    def make_map_fn(split):
        def process_fn(example, idx):
            question = example.pop("problem") + " " + INSTRUCTION
            answer = example.pop("solution")
            return {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": extract_solution(answer)},
                "extra_info": {"split": split, "index": idx},
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
