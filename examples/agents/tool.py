"""A tool from a function; the reward function is in the same file.

    verl train algorithm.adv_estimator=grpo actor_rollout_ref.model.path=MODEL data.train_files=ROWS data.val_files=[] \
        actor_rollout_ref.rollout.multi_turn.enable=True \
        actor_rollout_ref.rollout.multi_turn.function_tool_path=examples/agents/tool.py \
        reward.custom_reward_function.path=examples/agents/tool.py
"""

from verl.tools.function_tool import function_tool


@function_tool
def power(base: float, exponent: float) -> str:
    """Raise a number to a power.

    Args:
        base: the number
        exponent: the power
    """
    if abs(exponent) > 1000:
        raise ValueError("the exponent is too large")  # the model reads this
    return str(base**exponent)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right answer after the last tool output, less a little for each further turn."""
    right = str(ground_truth) in solution_str[-40:]
    return float(right) - 0.01 * extra_info["num_turns"]
