"""PPO and its relatives from their formulas: plain transformers and torch in float64, one response after the other.

A per-token value is a list with one tensor for each row.
"""

from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM

F64 = {"dtype": torch.float64}


@dataclass(frozen=True)
class Settings:
    """Of one run; the defaults are the defaults of the config."""

    estimator: str
    gamma: float = 1.0
    lam: float = 1.0
    temperature: float = 1.0
    lr: float = 3e-3
    critic_lr: float = 5e-3
    epochs: tuple[int, int] = (2, 2)  # of actor and critic
    mini: tuple[int, int] = (2, 2)  # prompts in a mini-batch
    modes: tuple[str, str] = ("token-mean", "token-mean")
    clips: tuple[float, float, float] = (0.2, 0.2, 3.0)  # below, above, dual
    value_clip: float = 0.5
    norms: float = 1.0  # largest gradient norm
    kl_in_reward: float = 0.0
    kl_loss: float = 0.0
    entropy: float = 0.0


def load(path):
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **F64).eval()
    model.get_input_embeddings().padding_idx = None
    return model


def hidden(decoder, row):
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    return decoder(input_ids=ids, use_cache=False).last_hidden_state[0, len(row["prompt_ids"]) - 1 : -1]


def log_softmax(model, rows, temperature=1.0):
    """[tokens, vocabulary] of each row."""
    return [(model.lm_head(hidden(model.model, row)) / temperature).log_softmax(-1) for row in rows]


def chosen(distributions, rows):
    tokens = [torch.tensor(row["response_ids"])[:, None] for row in rows]
    return [d.gather(-1, t).squeeze(-1) for d, t in zip(distributions, tokens, strict=True)]


def mean(values, mode):
    if mode == "token-mean":
        return torch.cat(values).mean()
    return torch.stack([v.mean() if mode == "seq-mean-token-mean" else v.sum() for v in values]).mean()


def whiten(values):
    tokens = torch.cat(values)
    return [(v - tokens.mean()) / (tokens.var() + 1e-8).sqrt() for v in values]


def k3(difference):
    return (torch.exp(-difference) + difference - 1).clamp(max=10)


def gae(rewards, values, gamma, lam):
    advantages, following, ahead = [], torch.tensor(0.0, **F64), torch.tensor(0.0, **F64)
    for reward, value in zip(reversed(rewards.unbind()), reversed(values.unbind()), strict=True):
        following = reward + gamma * ahead - value + gamma * lam * following
        ahead = value
        advantages.insert(0, following)
    return torch.stack(advantages)


def of_groups(totals, lengths, groups, estimator):
    """One advantage a row."""
    result = torch.zeros_like(totals)
    for group in dict.fromkeys(groups):
        at = torch.tensor([i for i, g in enumerate(groups) if g == group])
        mine, sizes = totals[at], lengths[at]
        if estimator == "rloo":
            result[at] = (mine - mine.mean()) * len(at) / (len(at) - 1)
        elif estimator == "opo":
            result[at] = mine - (sizes * mine).sum() / sizes.sum()
        else:
            result[at] = (mine - mine.mean()) / (mine.std() + 1e-6 if estimator == "grpo" else 1.0)
    return result


class Critic(torch.nn.Module):
    def __init__(self, path):
        super().__init__()
        self.model = load(path).model
        self.score = torch.nn.Linear(self.model.config.hidden_size, 1, **F64)
        for parameter in self.score.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, rows):
        return [self.score(hidden(self.model, row)).squeeze(-1) for row in rows]


@dataclass
class Trainer:
    """`step(rows)` trains on the samples of a step and returns the metrics of compat."""

    path: str
    settings: Settings
    noted: dict = field(default_factory=dict)

    def __post_init__(self):
        s = self.settings
        self.actor, self.reference = load(self.path), load(self.path)
        self.critic = Critic(self.path) if s.estimator == "gae" else None
        parts = [(self.actor, s.lr), *([(self.critic, s.critic_lr)] if self.critic else [])]
        self.optimizers = {m: torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.0) for m, lr in parts}

    def note(self, **metrics):
        for name, value in metrics.items():
            self.noted.setdefault(name, []).append(float(value.detach() if torch.is_tensor(value) else value))

    def update(self, model, loss):
        optimizer = self.optimizers[model]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.settings.norms)
        optimizer.step()
        return norm

    def advantages(self, rows, old, ref):
        s = self.settings
        rewards = [torch.zeros_like(o) for o in old]
        for reward, row, o, r in zip(rewards, rows, old, ref, strict=True):
            reward[-1] += row["score"]
            reward -= s.kl_in_reward * (o - r)
        if s.estimator == "gae":
            values = self.critic(rows)
            raw = [gae(r, v, s.gamma, s.lam) for r, v in zip(rewards, values, strict=True)]
            return whiten(raw), values, [a + v for a, v in zip(raw, values, strict=True)]
        if s.estimator == "reinforce_plus_plus":
            zeros = [torch.zeros_like(o) for o in old]
            return whiten([gae(r, z, s.gamma, 1.0) for r, z in zip(rewards, zeros, strict=True)]), None, None
        totals, lengths = torch.stack([r.sum() for r in rewards]), torch.tensor([float(len(o)) for o in old], **F64)
        per_row = of_groups(totals, lengths, [row["uid"] for row in rows], s.estimator)
        spread = [a.expand(len(o)) for a, o in zip(per_row, old, strict=True)]
        return (whiten(spread) if s.estimator == "reinforce_plus_plus_baseline" else spread), None, None

    def mini_batches(self, rows, kind):
        size = self.settings.mini[kind] * sum(row["uid"] == rows[0]["uid"] for row in rows)
        for _ in range(self.settings.epochs[kind]):
            yield from (range(at, min(at + size, len(rows))) for at in range(0, len(rows), size))

    def step(self, rows):
        self.noted = {}
        with torch.no_grad():
            old, ref = (
                chosen(log_softmax(m, rows, self.settings.temperature), rows) for m in (self.actor, self.reference)
            )
            advantages, values, returns = self.advantages(rows, old, ref)
        for at in self.mini_batches(rows, 1) if self.critic else ():
            self.train_critic([rows[i] for i in at], [values[i] for i in at], [returns[i] for i in at])
        for at in self.mini_batches(rows, 0):
            self.train_actor(*([column[i] for i in at] for column in (rows, old, ref, advantages)))
        return {name: sum(column) / len(column) for name, column in self.noted.items()}, advantages

    def train_critic(self, rows, values, returns):
        clip, worst, clipped = self.settings.value_clip, [], []
        new = self.critic(rows)
        for v, before, target in zip(new, values, returns, strict=True):
            plain, bounded = (v - target) ** 2, (v.clamp(before - clip, before + clip) - target) ** 2
            worst.append(torch.maximum(plain, bounded))
            clipped.append((bounded > plain).double())
        loss = 0.5 * mean(worst, self.settings.modes[1])
        self.note(**{"critic/vf_loss": loss, "critic/vf_clipfrac": torch.cat(clipped).mean()})
        self.note(**{"critic/vpred_mean": torch.cat(new).mean(), "critic/grad_norm": self.update(self.critic, loss)})

    def train_actor(self, rows, old, ref, advantages):
        s, (low, high, dual) = self.settings, self.settings.clips
        distributions = log_softmax(self.actor, rows, s.temperature)
        new = chosen(distributions, rows)
        entropies = [-(d.exp() * d).sum(-1) for d in distributions]
        losses, clipped = [], []
        for lp, o, a in zip(new, old, advantages, strict=True):
            ratio = (lp - o).exp()
            plain, bounded = -a * ratio, -a * ratio.clamp(1 - low, 1 + high)
            worst = torch.maximum(plain, bounded)
            losses.append(torch.where(a < 0, torch.minimum(worst, -a * dual), worst))
            clipped.append((bounded > plain).double())
        policy = mean(losses, s.modes[0])
        distances = [k3(lp - r) for lp, r in zip(new, ref, strict=True)]
        loss = policy - s.entropy * mean(entropies, s.modes[0]) + s.kl_loss * mean(distances, s.modes[0])
        self.note(**{"actor/loss": loss, "actor/pg_loss": policy, "actor/pg_clipfrac": torch.cat(clipped).mean()})
        moved = torch.cat([o - lp for lp, o in zip(new, old, strict=True)])
        self.note(**{"actor/ppo_kl": moved.mean(), "actor/grad_norm": self.update(self.actor, loss)})
        if s.entropy:
            self.note(**{"actor/entropy": torch.cat(entropies).mean()})
        if s.kl_loss:
            self.note(**{"actor/kl_loss": torch.cat(distances).mean()})
