"""The reward of grpo_shapes: 1 for a reply that is the number and nothing else."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
