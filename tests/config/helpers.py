"""Loading with fewer words."""

from pathlib import Path

import pytest

from verl.config import LoadedConfig, load_config
from verl.config.checks import check_config
from verl.errors import ConfigError

FIXTURES = Path(__file__).parent / "fixtures"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")


def fixture_lines(name: str) -> list[str]:
    text = (FIXTURES / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def load(*overrides: str) -> LoadedConfig:
    return load_config(overrides)


def refused(*overrides: str, match: str = "", **sources: str) -> str:
    """The message of the ConfigError that these overrides give."""
    with pytest.raises(ConfigError, match=match or None) as caught:
        load_config(overrides, **sources)
    return str(caught.value)


def problems(*overrides: str) -> list[tuple[str, str]]:
    """(level, key) of every problem."""
    return [(p.level, p.key) for p in check_config(load_config(overrides, check=False))]
