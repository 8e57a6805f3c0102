"""An environment: find a number by "higher" and "lower".

    verl train algorithm.adv_estimator=gigpo algorithm.gamma=0.95 data.train_files=ROWS data.val_files=[] \
        actor_rollout_ref.model.path=MODEL actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8 \
        actor_rollout_ref.rollout.agent.environment=examples/agents/environment.py:HigherLower

The rows hold prompts such as "Play a game."; what `reset` returns follows them.
"""

import random
import re


class HigherLower:
    """One object is one episode. The same seed is the same game: samples of one prompt can be compared."""

    limit = 100

    def reset(self, seed=None, **row):
        """The first observation, and more for the log."""
        self.number = random.Random(seed).randint(1, self.limit)
        self.low, self.high = 1, self.limit
        return f"Guess a number from 1 to {self.limit}. Answer with the number alone.", {}

    def step(self, text):
        """(observation, reward, terminated, truncated, more for the reward function)."""
        match = re.search(r"\d+", text)
        if match is None:
            return "That is no number.", -0.1, False, False, {}
        guess = int(match[0])
        if guess == self.number:
            return "Right!", 1.0, True, False, {}
        before = self.high - self.low
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        said = "Higher." if guess < self.number else "Lower."
        return said, 0.2 * (before - (self.high - self.low)) / self.limit, False, False, {}
