"""Games of several players: the policy plays itself. Each player is an episode, a row of the batch with its own reward.

A game has `num_players`, `reset(seed=None, **row)`, `observe()` (the player to move, from 0, and the text that they read),
`step(text)` (whether it is over) and `rewards()` (a number for each player); docs/agents.md has one.

Samples 0 and 1 of a prompt play one game, samples 2 and 3 the next. A player waits until it is their turn. The observations and
samples of each player depend only on the game, so timing changes nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl.agents.episode import EpisodeError, EpisodeTask

Bounded = Callable[..., Awaitable[Any]]  # calls a function of the game, with a time limit


def num_players(environment: object) -> int:
    """Players of one game of an environment class."""
    return int(getattr(environment, "num_players", 1))


class Match:
    """One game, used only on the event loop."""

    def __init__(self, game: Any, bounded: Bounded, reset: Callable[[], Any]):
        self.game, self.bounded = game, bounded
        self.players: set[int] = set()  # with episodes that have not ended
        self.is_over = False
        self.is_cut = False  # over, since a player could not move
        self._mover, self._text = -1, ""
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self._begun = asyncio.ensure_future(self._begin(reset))

    async def turn(self, player: int) -> str | None:
        """The text that a player reads, once it is their turn; None when the game is over.
        Raises EpisodeError when it has failed."""
        await asyncio.shield(self._begun)  # one player's time limit ends no other's game
        while not self.is_over and self._failure is None and self._mover != player:
            await self._changed.wait()
        if self._failure is not None:
            raise EpisodeError(self._failure)
        return None if self.is_over else self._text

    async def act(self, text: str) -> None:
        self._mover = -1
        if await self.bounded(self.game.step, text):
            self.is_over = True
        else:
            await self._observe()
        self._notify()

    def cut(self) -> None:
        """End the game without rewards: a limit of a player's response or turns is reached."""
        if not self.is_over:
            self.is_over = self.is_cut = True
            self._notify()

    async def reward(self, player: int) -> float:
        """The reward of a player; 0 in a game that was cut."""
        if self.is_cut:
            return 0.0
        rewards = await self.bounded(self.game.rewards)
        return float(rewards.get(player, 0.0) if isinstance(rewards, Mapping) else rewards[player])

    def leave(self, player: int) -> None:
        """Remove a player with an ended episode. During a game that is a failure and ends the other players' episodes."""
        self.players.discard(player)
        if not self.is_over and self._failure is None:
            self._failure = f"its game ended because the episode of player {player} failed"
            self._notify()

    async def _begin(self, reset: Callable[[], object]) -> None:
        await self.bounded(reset)
        await self._observe()

    async def _observe(self) -> None:
        mover, text = await self.bounded(self.game.observe)
        self._mover, self._text = int(mover), str(text)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Matches:
    """The games in progress."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int, int], Match] = {}

    def join(self, task: EpisodeTask, count: int, make: Callable[[], Match]) -> tuple[Match, int]:
        """The game of an episode and the number of its player; the first of `count` players makes it."""
        key, player = self._key(task, count), task.sample % count
        if key not in self._found:
            self._found[key] = make()
            self._found[key].players = set(range(count))
        return self._found[key], player

    def leave(self, task: EpisodeTask, count: int) -> bool:
        """An episode has ended; returns whether it was the last of its game."""
        key, player = self._key(task, count), task.sample % count
        match = self._found[key]
        match.leave(player)
        if not match.players:
            del self._found[key]
        return not match.players

    @staticmethod
    def _key(task: EpisodeTask, count: int) -> tuple[str, int, int, int]:
        return task.split, task.step, task.ordinal, task.sample // count
