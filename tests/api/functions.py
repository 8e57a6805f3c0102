"""Reward functions of these tests. A scorer's process imports their file, so it imports nothing."""


def starts(completions, answer, **columns):
    return [float(text.startswith(a)) for text, a in zip(completions, answer, strict=True)]


def length(completions):
    return [len(text) / 10 for text in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 10, "same_answer": float(extra_info["answer"] == ground_truth)}
