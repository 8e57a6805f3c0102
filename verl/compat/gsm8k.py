"""The tool and the user of the existing verl for grade-school arithmetic: both tell the model whether its answer is right."""

from typing import Any

from verl.agents.interactions import BaseInteraction
from verl.rewards.scorers.gsm8k import compute_score
from verl.rewards.scorers.math_answers import score_boxed
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import Answer
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, text_tool

_DESCRIPTION = (
    "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, 0.0 if parsed answer is incorrect or not "
    "correctly parsed)"
)
_ANSWER = "The model's answer to the GSM8K math problem, must be a digits"
WORSE = -0.05  # reward of a call that improves nothing


class Gsm8kTool(BaseTool):
    """Scores the answer so far. The row gives the truth: extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs."""

    tool_name = "calc_gsm8k_reward"

    def __init__(self, config: dict[str, object], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema or text_tool(self.tool_name, _DESCRIPTION, "answer", _ANSWER))
        self._truths: dict[str, str] = {}
        self._best: dict[str, float] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance, response = await super().create(instance_id)
        truth = ground_truth if ground_truth is not None else (kwargs.get("create_kwargs") or {}).get("ground_truth")
        if truth is None:
            raise ValueError(f"the row has no tools_kwargs.{self.name}.create_kwargs.ground_truth")
        self._truths[instance], self._best[instance] = str(truth), 0.0
        return instance, response

    async def execute(self, instance_id: str, parameters: dict[str, object], **kwargs: object) -> Answer:
        """See BaseTool. The reward is 0 for a better answer than before in the episode, else -0.05."""
        answer = parameters.get("answer", "")
        text = answer if isinstance(answer, str) else str(answer)
        reward = self._score(text, self._truths[instance_id])
        # of the episode, since an instance is of one call
        extra = getattr(kwargs.get("agent_data"), "extra_fields", None)
        best = self._best[instance_id] if extra is None else extra.get(f"{self.name}_best", 0.0)
        if extra is not None:
            extra[f"{self.name}_best"] = max(best, reward)
        self._best[instance_id] = max(best, reward)
        return (
            ToolResponse(text=f"Current parsed answer={text!r} reward={reward!r}"),
            0.0 if reward > best else WORSE,
            {},
        )

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        return self._best[instance_id]

    async def release(self, instance_id: str, **kwargs: object) -> None:
        self._truths.pop(instance_id, None)
        self._best.pop(instance_id, None)

    @staticmethod
    def _score(answer: str, truth: str) -> float:
        return compute_score(answer if answer.startswith("#### ") else f"#### {answer}", truth, "flexible")


class Geo3kTool(Gsm8kTool):
    """The same for geometry: tools_kwargs.calc_geo3k_reward.create_kwargs."""

    tool_name = "calc_geo3k_reward"

    @staticmethod
    def _score(answer: str, truth: str) -> float:
        return score_boxed(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", truth)


class Gsm8kInteraction(BaseInteraction):
    """A user who asks to try again until the answer is right. The row gives interaction_kwargs.ground_truth."""

    def __init__(self, config: dict[str, object]):
        super().__init__(config)
        self._truths: dict[str, str] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: object
    ) -> str:
        instance = await super().start_interaction(instance_id)
        self._truths[instance] = str(ground_truth)
        return instance

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, object]], **kwargs: object
    ) -> tuple[bool, str, float, dict[str, object]]:
        said = next((str(m.get("content") or "") for m in reversed(messages) if m["role"] == "assistant"), "")
        text = said if said.startswith("#### ") else f"#### {said}"
        reward = compute_score(text, self._truths[instance_id], "flexible")
        if reward == 1.0:
            return True, "Your response is correct!", 1.0, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", 0.0, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: object) -> None:
        self._truths.pop(str(instance_id), None)
