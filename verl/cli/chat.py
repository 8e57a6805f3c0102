"""`verl chat MODEL`: a conversation with a model in the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.cli.model_folders import model_folder
from verl.cli.parser import Parser
from verl.errors import ModelError
from verl.foreign_text import printable, valid_utf8

_ABOUT = "Chat with a model: a folder, a name of the Hub, a run, or a checkpoint. /clear begins anew; Ctrl-D ends."
_END = ("/exit", "/quit")
MAX_TEMPERATURE = 1e6


def run_chat(argv: list[str]) -> int:
    """Answer line by line: the exit code."""
    parser = Parser(prog="verl chat", description=_ABOUT)
    parser.add_argument("model", help="a Hugging Face folder or name, a run folder, or a folder global_step_N")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer in tokens (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest token (default: 0.7)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    arguments = parser.parse_args(argv)
    if arguments.max_tokens < 1:
        parser.error(f"argument --max-tokens: it is at least 1, but it is {arguments.max_tokens}.")
    if not 0 <= arguments.temperature <= MAX_TEMPERATURE:
        parser.error(
            f"argument --temperature: it is between 0 and {MAX_TEMPERATURE:g}, but it is {arguments.temperature}."
        )
    with model_folder(arguments.model) as folder:
        chat = Chat(folder, arguments.device, arguments.max_tokens, arguments.temperature)
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(start)
    while (text := _asked()) is not None:
        if text == "/clear":
            messages = list(start)
        elif text:
            question = {"role": "user", "content": text}
            if (answer := chat.answer([*messages, question])) is not None:
                messages += [question, {"role": "assistant", "content": answer}]
    return 0


def _asked() -> str | None:
    """A line of the terminal; None at its end."""
    try:
        text = valid_utf8(input("> ").strip())
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if text in _END else text


class Chat:
    """A model and its sampling. `answer` writes to the terminal as it samples. Raises ModelError without a chat template."""

    def __init__(self, folder: Path, device: str, max_tokens: int, temperature: float):
        import torch
        from transformers import AutoModelForCausalLM

        from verl.models.load import load_tokenizer
        from verl.models.quiet import quiet
        from verl.parallel.device import resolve_device

        self._tokenizer: Any = load_tokenizer(folder)
        if self._tokenizer.chat_template is None:
            raise ModelError(
                f"The tokenizer of {folder} has no chat template. Use `verl generate {folder} --prompt TEXT`."
            )
        self._device = resolve_device(device)
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        with quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
        self._model = model.to(self._device).eval()
        sampled = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        self._max_tokens = max_tokens
        self._settings = {"pad_token_id": self._tokenizer.pad_token_id, **sampled}

    def answer(self, messages: Sequence[dict[str, str]]) -> str | None:
        """The answer to `messages`; None if the model cannot read them all. Ctrl-C ends it early."""
        import torch

        ids = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        limit = (
            getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
            or len(ids) + self._max_tokens
        )
        if len(ids) >= limit:
            print(
                f"With this text the conversation has {len(ids)} tokens, and the model reads {limit}. The text is left out; "
                "/clear begins a new conversation."
            )
            return None
        prompt = torch.tensor([ids], device=self._device)
        texts: list[str] = []
        streamer, mask = _streamer(self._tokenizer, texts), torch.ones_like(prompt)
        settings = {**self._settings, "max_new_tokens": min(self._max_tokens, limit - len(ids))}
        try:
            self._model.generate(prompt, attention_mask=mask, streamer=streamer, **settings)
        except KeyboardInterrupt:
            print()
        return "".join(texts).strip()


def _streamer(tokenizer: Any, texts: list[str]) -> Any:
    """A streamer that prints the text of an answer, and appends it to `texts`."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            texts.append(text)
            super().on_finalized_text(printable(text), stream_end)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
