"""Completions as reward functions of TRL's form get them."""

from verl.foreign_text import clean


class Messages(list[dict[str, str]]):
    """A completion for a prompt of messages. To look for a text among them is a mistake: it would always be False."""

    def __contains__(self, item: object) -> bool:
        if isinstance(item, str):
            raise TypeError(f"{clean(item, 40)!r} is looked for in a list of messages")
        return super().__contains__(item)


def completion_of(text: str, prompt: object) -> str | Messages:
    """The response `text`, as a message if the prompt has messages."""
    return text if isinstance(prompt, str | None) else Messages([{"role": "assistant", "content": text}])
