"""Games as environments: FrozenLake, Taxi and Blackjack of gymnasium in words, games of textarena for one player and for two,
and questions with "wrong, try again".

    rollout.agent.environment=verl.agents.games:GAMES      the column `environment` of a row names the game
    rollout.agent.environment=verl.agents.games:Blackjack  one game
    rollout.agent.environment=verl.agents.games:TextArenaSelfPlay

gymnasium and textarena come with the extra `environments`.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from verl.errors import MissingExtraError

Step = tuple[str, float, bool, bool, dict[str, Any]]

_COLOURS = re.compile("\x1b\\[(\\d+(?:;\\d+)*)m(.)\x1b\\[0m")


class GymnasiumText:
    """A game of gymnasium with a small number of actions, each with a word. The last such word in the model's text acts."""

    game: ClassVar[str]
    actions: ClassVar[Mapping[str, int]]
    rules: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    mistake: ClassVar[float] = 0.0  # reward of a text without an action

    def __init__(self) -> None:
        try:
            import gymnasium
        except ImportError:
            raise MissingExtraError(f"The game {self.game}", "environments", "gymnasium") from None
        self.env = gymnasium.make(self.game, **self.settings)

    def reset(self, seed: int | None = None, **row: object) -> tuple[str, dict[str, Any]]:
        observation, _ = self.env.reset(seed=seed)
        return f"{self.rules}\n\n{self.describe(observation)}", {}

    def step(self, text: str) -> Step:
        words = re.findall(rf"\b({'|'.join(self.actions)})\b", text.lower())
        if not words:
            return f"Say one of: {', '.join(self.actions)}.", self.mistake, False, False, {}
        observation, reward, terminated, truncated, _ = self.env.step(self.actions[words[-1]])
        return self.describe(observation), float(reward), bool(terminated), bool(truncated), {}

    def describe(self, observation: object) -> str:
        return _COLOURS.sub(r"[\2]", str(self.env.render())).strip()

    def close(self) -> None:
        self.env.close()


class FrozenLake(GymnasiumText):
    """Walk over a lake to the goal, around its holes."""

    game = "FrozenLake-v1"
    settings: ClassVar[Mapping[str, Any]] = {"is_slippery": False, "render_mode": "ansi"}
    actions: ClassVar[Mapping[str, int]] = {"left": 0, "down": 1, "right": 2, "up": 3}
    rules = "Walk from S to the goal G; H is a hole. You are at the letter in brackets. Say left, down, right or up."


class FrozenLakes(FrozenLake):
    """FrozenLake with a separate map for each seed; its goal can be reached."""

    def reset(self, seed: int | None = None, **row: object) -> tuple[str, dict[str, Any]]:
        from gymnasium import make
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        self.env = make(self.game, desc=generate_random_map(size=4, seed=seed), **self.settings)
        return super().reset(seed, **row)


class Taxi(GymnasiumText):
    """Fetch a passenger and bring them to the hotel."""

    game = "Taxi-v4"
    settings: ClassVar[Mapping[str, Any]] = {"render_mode": "ansi"}
    actions: ClassVar[Mapping[str, int]] = {"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5}
    rules = "Drive the taxi to the passenger, say pickup, drive to the destination and say dropoff."
    places = ("R", "G", "Y", "B", "the taxi")

    def describe(self, observation: Any) -> str:
        row, column, passenger, destination = self.env.unwrapped.decode(int(observation))  # type: ignore[attr-defined]
        where = f"The taxi is in row {row}, column {column}. The passenger is at {self.places[passenger]}"
        return f"{super().describe(observation)}\n{where} and wants to go to {self.places[destination]}."


class Blackjack(GymnasiumText):
    """Come nearer to 21 than the dealer."""

    game = "Blackjack-v1"
    actions: ClassVar[Mapping[str, int]] = {"stick": 0, "stand": 0, "hit": 1}
    rules = "Blackjack: come nearer to 21 than the dealer, but not above. Say hit for a card, or stick."

    def describe(self, observation: Any) -> str:
        hand, dealer, usable = observation
        ace = ", with an ace that counts 11" if usable else ""
        return f"You have {hand}{ace}. The dealer shows {dealer}."


class TextArena:
    """A game of textarena for one player, of the row's column or extra_info `game` ("GuessTheNumber-v0"). The reward comes at
    the end, as the game gives it."""

    def __init__(self) -> None:
        try:
            import textarena
        except ImportError:
            raise MissingExtraError("A game of textarena", "environments", "textarena") from None
        self.library: Any = textarena
        self.env: Any = None
        self.texts: dict[int, str] = {}  # by each player
        self.final_rewards: dict[int, float] = {}  # rewards

    def reset(self, seed: int | None = None, **row: object) -> tuple[str, dict[str, Any]]:
        self._begin(row, seed, 1)
        return self._observation()[1], {}

    def step(self, text: str) -> Step:
        assert self.env is not None
        done, _ = self.env.step(action=text)
        if not done:
            return self._observation()[1], 0.0, False, False, {}
        return "The game is over.", float(self._rewards().get(0, 0.0)), True, False, {}

    def _begin(self, row: Mapping[str, Any], seed: int | None, num_players: int) -> None:
        name = row.get("game") or (row.get("extra_info") or {}).get("game")
        if not isinstance(name, str):
            raise ValueError("the row names no game; give it a column `game`, such as GuessTheNumber-v0")
        self.env, self.texts = self.library.make(name), dict.fromkeys(range(num_players), "")
        self.env.reset(num_players=num_players, seed=seed)

    def _observation(self) -> tuple[int, str]:
        """The player to move, and the new text of their observation: the game repeats it from its beginning."""
        assert self.env is not None
        player, observation = self.env.get_observation()
        text = observation if isinstance(observation, str) else "\n".join(str(part[1]) for part in observation)
        earlier, self.texts[player] = self.texts[player], text
        return player, text.removeprefix(earlier).strip()

    def _rewards(self) -> dict[int, float]:
        assert self.env is not None
        rewards = self.env.close()
        return (rewards[0] if isinstance(rewards, tuple) else rewards) or {}


class TextArenaSelfPlay(TextArena):
    """A game of textarena for two ("TicTacToe-v0"): samples 2i and 2i + 1 of a prompt play each other, and each gets the reward
    of its player."""

    num_players: ClassVar[int] = 2

    def reset(self, seed: int | None = None, **row: object) -> None:  # type: ignore[override]
        self._begin(row, seed, self.num_players)

    def observe(self) -> tuple[int, str]:
        """The player to move, and the text that they read."""
        return self._observation()

    def step(self, text: str) -> bool:  # type: ignore[override]
        """Make a move; returns whether the game is over."""
        assert self.env is not None
        return bool(self.env.step(action=text)[0])

    def rewards(self) -> dict[int, float]:
        """The reward of each player, once the game is over."""
        if not self.final_rewards:
            self.final_rewards = self._rewards()
        return self.final_rewards


class TryAgain:
    """A question of the data set, answered until the scorer of its data_source (GSM8K, reasoning-gym, ...) is content."""

    answer = "That is wrong. Try again."

    def reset(self, **row: Any) -> tuple[None, dict[str, Any]]:
        self.row = row
        return None, {}

    def step(self, text: str) -> Step:
        from verl.rewards.scorers.route import default_compute_score

        truth = (self.row.get("reward_model") or {}).get("ground_truth")
        outcome = default_compute_score(str(self.row["data_source"]), text, truth, self.row.get("extra_info") or {})
        score = float(outcome["score"] if isinstance(outcome, dict) else outcome)
        return self.answer, score, score >= 1.0, False, {}


GAMES = {
    "frozen_lake": FrozenLake,
    "frozen_lakes": FrozenLakes,
    "taxi": Taxi,
    "blackjack": Blackjack,
    "textarena": TextArena,
    "try_again": TryAgain,
}
