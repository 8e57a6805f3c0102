"""The estimators once more, as loops over Python floats."""

import math
from typing import NamedTuple

import numpy as np
import torch


def _lists(columns):
    rewards = columns["token_level_rewards"].tolist()
    mask = columns["response_mask"].tolist()
    return rewards, mask, len(rewards), len(rewards[0])


def _members(uids):
    groups = {}
    for i, u in enumerate(uids):
        groups.setdefault(u, []).append(i)
    return groups


def _mean(xs):
    return sum(xs) / len(xs)


def _std(xs):
    m = _mean(xs)
    return math.sqrt(sum((x - m) ** 2 for x in xs) / (len(xs) - 1))


def _whiten(matrix, mask):
    selected = [x for row, m in zip(matrix, mask) for x, k in zip(row, m) if k]
    mean, var = (_mean(selected), _std(selected) ** 2) if len(selected) > 1 else (_mean(selected), 0.0)
    scale = 1 / math.sqrt(var + 1e-8)
    return [[(x - mean) * scale if k else 0.0 for x, k in zip(row, m)] for row, m in zip(matrix, mask)]


def _spread(per_row, mask):
    return [[a if k else 0.0 for k in m] for a, m in zip(per_row, mask)]


def _grpo_rows(scores, uids, by_std=True):
    out = [0.0] * len(scores)
    for rows in _members(uids).values():
        mu, sigma = (
            (0.0, 1.0) if len(rows) == 1 else (_mean([scores[i] for i in rows]), _std([scores[i] for i in rows]))
        )
        for i in rows:
            out[i] = (scores[i] - mu) / (sigma + 1e-6) if by_std else scores[i] - mu
    return out


def grpo(columns, norm_adv_by_std_in_grpo=True, **_):
    rewards, mask, *_ = _lists(columns)
    a = _spread(_grpo_rows([sum(r) for r in rewards], columns["uid"], norm_adv_by_std_in_grpo), mask)
    return a, a


def gdpo(columns, gdpo_reward_weights=(1.0, 1.0), **_):
    _, mask, batch, _ = _lists(columns)
    total = [0.0] * batch
    for weight, part in zip(gdpo_reward_weights, columns["reward_parts"].values()):
        for i, a in enumerate(_grpo_rows(part.tolist(), columns["uid"])):
            total[i] += weight * a
    a = _whiten(_spread(total, mask), mask)
    return a, a


def grpo_passk(columns, norm_adv_by_std_in_grpo=True, **_):
    rewards, mask, batch, _ = _lists(columns)
    scores = [sum(r) for r in rewards]
    out = [0.0] * batch
    for rows in _members(columns["uid"]).values():
        ranked = sorted(rows, key=lambda i: scores[i], reverse=True)
        gap = scores[ranked[0]] - scores[ranked[1]]
        out[ranked[0]] = gap / (_std([scores[i] for i in rows]) + 1e-6) if norm_adv_by_std_in_grpo else gap
    a = _spread(out, mask)
    return a, a


def gae(columns, gamma=1.0, lam=1.0, **_):
    rewards, mask, batch, width = _lists(columns)
    values = columns["values"].tolist()
    raw = [[0.0] * width for _ in range(batch)]
    returns = [[0.0] * width for _ in range(batch)]
    for i in range(batch):
        trained = [t for t in range(width) if mask[i][t]]
        for n, t in enumerate(trained):
            # the sum of discounted deltas, from first to last
            for k, s in enumerate(trained[n:]):
                following = values[i][trained[n + k + 1]] if n + k + 1 < len(trained) else 0.0
                raw[i][t] += (gamma * lam) ** k * (rewards[i][s] + gamma * following - values[i][s])
            returns[i][t] = raw[i][t] + values[i][t]
    return _whiten(raw, mask), returns


def reinforce_plus_plus(columns, gamma=1.0, **_):
    rewards, mask, batch, width = _lists(columns)
    returns = [[0.0] * width for _ in range(batch)]
    for i in range(batch):
        trained = [t for t in range(width) if mask[i][t]]
        for n, t in enumerate(trained):
            returns[i][t] = sum(gamma**k * rewards[i][s] for k, s in enumerate(trained[n:]))
    return _whiten(returns, mask), returns


def reinforce_plus_plus_baseline(columns, **_):
    rewards, mask, *_ = _lists(columns)
    a = _whiten(_spread(_grpo_rows([sum(r) for r in rewards], columns["uid"], by_std=False), mask), mask)
    return a, a


def remax(columns, **_):
    rewards, mask, batch, width = _lists(columns)
    baselines = columns["reward_baselines"].tolist()
    returns = [[sum(rewards[i][t:]) if mask[i][t] else 0.0 for t in range(width)] for i in range(batch)]
    return [[(g - baselines[i]) if k else 0.0 for g, k in zip(returns[i], mask[i])] for i in range(batch)], returns


def rloo(columns, **_):
    rewards, mask, batch, _ = _lists(columns)
    scores, out = [sum(r) for r in rewards], [0.0] * batch
    for rows in _members(columns["uid"]).values():
        for i in rows:
            baseline_scores = [scores[j] for j in rows if j != i]
            out[i] = scores[i] - (_mean(baseline_scores) if baseline_scores else 0.0)
    a = _spread(out, mask)
    return a, a


def opo(columns, **_):
    rewards, mask, batch, _ = _lists(columns)
    scores, lengths, out = [sum(r) for r in rewards], [sum(m) for m in mask], [0.0] * batch
    for rows in _members(columns["uid"]).values():
        baseline = sum(lengths[j] * scores[j] for j in rows) / sum(lengths[j] for j in rows)
        for i in rows:
            out[i] = scores[i] - (baseline if len(rows) > 1 else 0.0)
    a = _spread(out, mask)
    return a, a


def gpg(columns, **_):
    rewards, mask, batch, _ = _lists(columns)
    scores = [sum(r) for r in rewards]
    alpha = batch / max(1, sum(1 for s in scores if s != 0))
    a = _spread([alpha * x for x in _grpo_rows(scores, columns["uid"], by_std=False)], mask)
    return a, a


def _token_baseline(columns, positions, handle_zero_tail):
    """`positions[i]` lists (slot, column) of row i's trained tokens; rows of a group meet in equal slots."""
    rewards, _, batch, width = _lists(columns)
    pi, square = columns["old_log_probs"].exp().tolist(), columns["sum_pi_squared"].tolist()
    rho = columns["rollout_is_weights"].tolist() if "rollout_is_weights" in columns else None
    to_go, weight = [{} for _ in range(batch)], [{} for _ in range(batch)]
    for i in range(batch):
        total = 0.0
        for slot, t in positions[i]:
            total += (1 - 2 * pi[i][t] + square[i][t]) * (rho[i][t] ** 2 if rho else 1.0)
            weight[i][slot], to_go[i][slot] = total, sum(rewards[i][t:])
    advantages, returns = ([[0.0] * width for _ in range(batch)] for _ in range(2))
    for rows in _members(columns["uid"]).values():
        for i in rows:
            for slot, t in positions[i]:
                reach = [j for j in rows if slot in to_go[j]]
                b = sum(to_go[j][slot] * weight[j][slot] for j in reach) / (sum(weight[j][slot] for j in reach) + 1e-8)
                if len(rows) == 1 or (handle_zero_tail and len(reach) == 1):
                    b = 0.0
                advantages[i][t], returns[i][t] = to_go[i][slot] - b, to_go[i][slot]
    return advantages, returns


def optimal_token_baseline(columns, handle_zero_tail=True, **_):
    _, mask, *_ = _lists(columns)
    return _token_baseline(columns, [[(t, t) for t, k in enumerate(m) if k] for m in mask], handle_zero_tail)


def tir_optimal_token_baseline(columns, handle_zero_tail=True, **_):
    _, mask, *_ = _lists(columns)
    slots = [list(enumerate(t for t, k in enumerate(m) if k)) for m in mask]
    return _token_baseline(columns, slots, handle_zero_tail)


def _turns(columns, gamma):
    """For each row the list of (tokens of the turn, return, tokens between it and the turn before)."""
    rewards, _, batch, width = _lists(columns)
    numbers, tokens = columns["turn_ids"].tolist(), columns["responses"].tolist()
    rows = []
    for i in range(batch):
        places = [[t for t in range(width) if numbers[i][t] == k] for k in range(max(numbers[i]) + 1)]
        turn_rewards = [sum(rewards[i][t] for t in place) for place in places]
        turns = []
        for k, place in enumerate(places):
            value = sum(gamma**j * r for j, r in enumerate(turn_rewards[k:]))
            before = tuple(tokens[i][t] for t in range(places[k - 1][-1] + 1, place[0])) if k else "prompt"
            turns.append((place, value, before))
        rows.append(turns)
    return rows


def _fill(columns, values):
    """[batch][turn] values to the trained tokens of the turns."""
    _, mask, batch, width = _lists(columns)
    out = [[0.0] * width for _ in range(batch)]
    for i, turns in enumerate(_turns(columns, 1.0)):
        for (place, _, _), value in zip(turns, values[i]):
            for t in place:
                out[i][t] = value if mask[i][t] else 0.0
    return out


def turn_gae(columns, gamma=1.0, lam=1.0, **_):
    values = columns["values"].tolist()
    raw, returns = [], []
    for i, turns in enumerate(_turns(columns, 0.0)):  # a discount of 0: the rewards themselves
        before = [values[i][place[0]] for place, _, _ in turns] + [0.0]
        deltas = [r + gamma * before[k + 1] - before[k] for k, (_, r, _) in enumerate(turns)]
        raw.append([sum((gamma * lam) ** j * d for j, d in enumerate(deltas[k:])) for k in range(len(turns))])
        returns.append([a + v for a, v in zip(raw[-1], before)])
    return _whiten(_fill(columns, raw), columns["response_mask"].tolist()), _fill(columns, returns)


def _among_equals(turns, label, by_std):
    by_label = {}
    for i, row in enumerate(turns):
        for k, (_, value, before) in enumerate(row):
            by_label.setdefault(label(i, k, before), []).append(value)
    out = []
    for i, row in enumerate(turns):
        out.append([])
        for k, (_, value, before) in enumerate(row):
            peers = by_label[label(i, k, before)]
            scale = _std(peers) + 1e-6 if by_std and len(peers) > 1 else 1.0
            out[-1].append((value - _mean(peers)) / scale)
    return out


def turn_grpo(columns, gamma=1.0, norm_adv_by_std_in_grpo=True, **_):
    uids = columns["uid"]
    a = _among_equals(_turns(columns, gamma), lambda i, k, before: (uids[i], k), norm_adv_by_std_in_grpo)
    a = _fill(columns, a)
    return a, a


def gigpo(columns, gamma=1.0, step_advantage_w=1.0, norm_adv_by_std_in_grpo=True, **_):
    uids = columns["uid"]
    steps = _among_equals(_turns(columns, gamma), lambda i, k, before: (uids[i], before), norm_adv_by_std_in_grpo)
    steps = _fill(columns, steps)
    episodes, _ = grpo(columns, norm_adv_by_std_in_grpo)
    a = [[e + step_advantage_w * s for e, s in zip(*rows)] for rows in zip(episodes, steps)]
    return a, a


T = 0.5773502691896258  # 1/sqrt(3)
GRPO = 0.5 / (math.sqrt(0.5) + 1e-6)
TURN = 0.25 / (math.sqrt(0.125) + 1e-6)  # of returns 0.5 and 0
GAE = 1 / math.sqrt(147)
HALF = {"gamma": 0.5}


class Row(NamedTuple):
    """Expected `advantages` and `returns` for the columns of HAND below, worked out on paper."""

    reference: object
    advantages: list
    returns: list
    hand_settings: dict = {}
    settings: dict = {}
    singles: bool = True  # groups of one row are allowed
    slides: bool = True  # tool output may be inserted at a different place in each row


def same(x):
    return x, x


TABLE = {
    "gae": Row(gae, [[T, T], [-2 * T, 0]], [[1, 1], [0, 0]], settings={"gamma": 0.9, "lam": 0.8}),
    "grpo": Row(grpo, *same([[GRPO, GRPO], [-GRPO, 0]])),
    "grpo_vectorized": Row(grpo, *same([[0.5, 0.5], [-0.5, 0]]), *[{"norm_adv_by_std_in_grpo": False}] * 2),
    "gdpo": Row(
        gdpo, *same([[T, T], [-2 * T, 0]]), *[{"gdpo_reward_weights": [2.0, 1.0], "gdpo_reward_keys": ["x", "y"]}] * 2
    ),
    "grpo_passk": Row(grpo_passk, *same([[2 * GRPO, 2 * GRPO], [0, 0]]), singles=False),
    "reinforce_plus_plus": Row(
        reinforce_plus_plus, [[0, 1], [-1, 0]], [[0.5, 1], [0, 0]], {"gamma": 0.5}, {"gamma": 0.7}
    ),
    "reinforce_plus_plus_baseline": Row(reinforce_plus_plus_baseline, *same([[T, T], [-2 * T, 0]])),
    "remax": Row(remax, [[0.75, 0.75], [-0.25, 0]], [[1, 1], [0, 0]]),
    "rloo": Row(rloo, *same([[1, 1], [-1, 0]])),
    "rloo_vectorized": Row(rloo, *same([[1, 1], [-1, 0]])),
    "opo": Row(opo, *same([[1 / 3, 1 / 3], [-2 / 3, 0]])),
    "gpg": Row(gpg, *same([[1, 1], [-1, 0]])),
    "optimal_token_baseline": Row(optimal_token_baseline, [[0.5, 1], [-0.5, 0]], [[1, 1], [0, 0]], slides=False),
    "tir_optimal_token_baseline": Row(
        tir_optimal_token_baseline, [[0.5, 0], [-0.5, 0]], [[1, 1], [0, 0]], {"handle_zero_tail": False}
    ),
    "turn_gae": Row(
        turn_gae,
        [[-2 * GAE, 13 * GAE], [-11 * GAE, 0]],
        [[0.375, 1], [0, 0]],
        {"gamma": 0.5, "lam": 0.5},
        {"gamma": 0.9, "lam": 0.8},
    ),
    "turn_grpo": Row(turn_grpo, *same([[TURN, 0], [-TURN, 0]]), HALF, {"gamma": 0.8}),
    "gigpo": Row(
        gigpo,
        *same([[GRPO + 2 * TURN, GRPO], [-GRPO - 2 * TURN, 0]]),
        {"gamma": 0.5, "step_advantage_w": 2.0},
        {"gamma": 0.8, "step_advantage_w": 0.5, "norm_adv_by_std_in_grpo": False},
        slides=False,
    ),
}

TURNS = ("turn_gae", "turn_grpo", "gigpo")

# one prompt, two samples: the first has two tokens and is right, the second one token and wrong
HAND = {
    "uid": np.array(["p", "p"], dtype=object),
    "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
    "response_mask": torch.tensor([[True, True], [True, False]]),
    "values": torch.full((2, 2), 0.5, dtype=torch.float64),
    "reward_baselines": torch.tensor([0.25, 0.25], dtype=torch.float64),
    "old_log_probs": torch.full((2, 2), math.log(0.5), dtype=torch.float64),
    "sum_pi_squared": torch.full((2, 2), 0.5, dtype=torch.float64),
    "reward_parts": {"x": torch.tensor([1.0, 0.0]), "y": torch.tensor([0.0, 1.0])},
    "turn_ids": torch.tensor([[0, 1], [0, -1]]),
    "responses": torch.tensor([[4, 5], [6, 0]]),
}
