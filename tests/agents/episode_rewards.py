"""Values that agents give as rewards: a number within reward.max_abs_score, or only that episode fails with a sentence."""

import decimal
import fractions
import math

import numpy as np
import torch

LIMIT = 1e12  # reward.max_abs_score


class Raises:
    def __float__(self):
        raise ZeroDivisionError

    def __repr__(self):
        raise KeyError


VALUES = [
    0, 1, -1, 0.5, -2.5, True, False, 1e12, -1e12, 1.0000001e12, 1e39, 3e38, -1e300, 1e308, 10**400, -(10**400), math.inf,
    -math.inf, math.nan, None, "", "0.5", "1e39", "nan", b"1", "x" * 100_000, [], [0.5], [[0.5]], {}, {"reward": 1},
    {"reward": 1e39}, {"a": 1}, {"score": math.nan}, (0.5,), (0.5, {"a": 1}), {1, 2}, object(), Raises(), len, 1j,
    decimal.Decimal("0.5"), decimal.Decimal("1e39"), decimal.Decimal("sNaN"), fractions.Fraction(1, 3), np.float32(0.5),
    np.float32("inf"), np.float64("nan"), np.int64(3), np.bool_(True), np.array(0.5), np.array([0.5]), np.array([1.0, 2.0]),
    torch.tensor(0.5), torch.tensor([0.5, 1.0]), torch.tensor(math.nan), "\x1b[31m", "\ud800", -0.0, 5e-324, 2**63,
]  # fmt: skip
SOURCES = ("step", "get_reward", "user", "runner", "dict of a runner", "loop")


def outcome(rng, agents, ordinal):
    from tests.agents import test_hostile_episodes as episodes  # its tests run a part of the cases

    source = rng.choice(SOURCES)
    episodes.SETTINGS.clear()
    episodes.SETTINGS.update(reward=rng.choice(VALUES), by_turn=rng.random() < 0.3)
    hostile, usual = episodes.play_rows(agents[source], ordinal)
    assert usual.error is None, (source, usual.error)
    assert usual.reward is None or abs(usual.reward) <= LIMIT
    if hostile.error is not None:
        assert hostile.error.isprintable(), hostile.error
        assert len(hostile.error) < 1000, hostile.error
        assert hostile.reward is None
        return source, "refused"
    numbers = [hostile.reward, *(hostile.extra.get("turn_rewards") or [])]
    for number in numbers:
        assert number is None or (type(number) is float and abs(number) <= LIMIT), (source, number)
    return source, "no reward" if hostile.reward is None else "a number"


def cases(rng, count, folder):
    """(source of the reward, outcome) of `count` episodes."""
    from tests.agents import test_hostile_episodes as episodes

    agents = {source: episodes.make_agents(source, folder) for source in SOURCES}
    try:
        for ordinal in range(0, 2 * count, 2):
            yield outcome(rng, agents, ordinal)
    finally:
        for one in agents.values():
            one.close()
