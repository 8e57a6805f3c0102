"""A tool, an environment and an agent with pictures. Importing this file registers the parser `asks_for_pictures`."""

import base64
import hashlib
import io

import httpx
import numpy as np
from PIL import Image, ImageDraw

from verl.agents.parsers import ToolParser
from verl.tools.function_tool import function_tool
from verl.tools.schemas import FunctionCall, ToolResponse


def picture(seed, size=(56, 56)):
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for i in range(int(seed) % 5 + 1):
        draw.ellipse((4 + 9 * i, 4 + 7 * i, 14 + 9 * i, 14 + 7 * i), ("black", "red", "blue")[int(seed) % 3])
    return image


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@function_tool
def look(at: int) -> ToolResponse:
    """Look at something.

    Args:
        at: what
    """
    if at % 3 == 2:
        return ToolResponse(text=f"from {at} on", image=[picture(at)], video=[[picture(at + n) for n in range(4)]])
    if at % 7 == 6:
        return ToolResponse(text="no picture", image=[b"damaged"])
    return ToolResponse(text=f"at {at}", image=[picture(at, (56, 28 if at % 2 else 56)), data_url(picture(at + 1))])


@ToolParser.register("asks_for_pictures")
class AsksForPictures(ToolParser):
    """Most turns of a random model are a call of `look`."""

    def parse(self, text, tools):
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        return text, [FunctionCall("look", f'{{"at": {digest[1]}}}')] if digest[0] > 40 else []


class Screen:
    """Gymnasium's kind, with a screenshot at the beginning and after each action."""

    def reset(self, seed=None, **row):
        self.turns, self.seed = 0, seed
        return {"text": f"Game {seed}.", "image": picture(seed)}, {}

    def step(self, text):
        self.turns += 1
        shot = np.asarray(picture(self.seed + self.turns + len(text)))
        return (
            (shot, np.stack([shot] * 4))[self.seed % 2] if self.turns % 2 else "nothing new",
            len(text) % 5 / 5,
            self.turns == 3,
            False,
            {},
        )


def run(task, base_url, api_key):
    """An agent of an endpoint: it sends the row's prompt, then a picture and a video."""
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=120) as client:
        messages = list(task["prompt"])
        for number in range(2):
            answer = client.post("/chat/completions", json={"model": "policy", "messages": messages})
            answer.raise_for_status()
            said = answer.json()["choices"][0]["message"]["content"]
            urls = [data_url(picture(len(said) + number + n)) for n in range(4)]
            video = "data:video/jpeg;base64," + ",".join(url.partition(",")[2] for url in urls)
            parts = [
                {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
                for kind, url in zip(("image", "video"), (urls[0], video))
            ]
            question = {"role": "user", "content": [*parts, {"type": "text", "text": "And?"}]}
            messages += [{"role": "assistant", "content": said}, question]
    return len(said) % 5 / 5
