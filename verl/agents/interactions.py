"""Interactions: a user who answers the model, in turns. The contract of verl releases up to 2026 and of their scripts."""

from typing import Any
from uuid import uuid4

from verl.data.schema import Messages
from verl.errors import ConfigError, NameConfigError
from verl.tools.tool_registry import load_class, read_list


class BaseInteraction:
    """A user of the model. One object serves all episodes: keep what belongs to an episode by its `instance_id`."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode; kwargs are the interaction_kwargs of the row. Returns its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: object
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the episode ends, text of the next turn of the user, score of the model's turn, more for the scorer)."""
        return True, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: object) -> float:
        """A score of the episode so far."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: object) -> None:
        """End of the episode."""


def load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    """The interactions of a YAML file: `interaction: [{name, class_name, config}]`. Raises ConfigError."""
    interactions: dict[str, BaseInteraction] = {}
    for number, row in enumerate(read_list(path, "interaction") if path else ()):
        place = f"{path}, interaction {number} (counted from 0)"
        cls = load_class(row.get("class_name"), place)
        config = dict(row.get("config") or {})
        name = str(row.get("name") or config.get("name") or cls.__name__.lower().removesuffix("interaction"))
        if name in interactions:
            raise NameConfigError(f"{place}: there is another interaction named {name!r}. Rename one.")
        try:
            interactions[name] = cls({**config, "name": name})
        except Exception as error:  # the user's class may raise anything
            raise ConfigError(f"{place} could not be made: {type(error).__name__}: {error}") from error
    return interactions
