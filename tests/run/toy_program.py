"""A program that the host was not written for: one language model, no rollout, no reward; it repeats random token rows."""

import os
import signal
from dataclasses import dataclass
from functools import partial

from tests.models.reference import make_columns, random_rows
from verl.data_proto.metrics import Metric, metric_values
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching
from verl.models.load import load_tokenizer
from verl.parallel.placement import Placement
from verl.programs.api import Program, StepResult
from verl.programs.specs import run_spec
from verl.roles.api import Objective, RoleSpec, RoleSpecs
from verl.roles.objectives.terms import zero_or_nan
from verl.tracking.summary import Result

NAME = "tests.run.toy_program:ToyProgram"
ROWS = 8
INTERRUPT_AT = "TOY_INTERRUPT_AT"  # the step of the Ctrl-C


class MeanLoss(Objective):
    """-mean log-prob over all response tokens of the mini-batch."""

    def __init__(self, guard):
        self.guard = guard

    def __call__(self, outputs, batch, totals):
        log_probs, mask = outputs["log_probs"], batch.batch["response_mask"]
        loss = -log_probs.sum() / totals.num_tokens
        self.guard.observe(batch.batch, mask, {"log_probs": log_probs}, {})
        return loss + zero_or_nan(log_probs), {"nll": Metric.sum(-log_probs.detach().sum() / totals.num_tokens)}


@dataclass
class ToyData:
    tokenizer: object
    num_steps: int
    num_steps_per_epoch: int = 2
    has_validation: bool = True
    data_sources: tuple = ()

    def batch(self, seed):
        prompts, responses = random_rows(seed % self.num_steps_per_epoch, [1] * ROWS, vocabulary=200)
        return DataProto.from_dict(make_columns(prompts, responses))


class ToyProgram(Program):
    console_metrics = {"model/nll": ("loss", "{:.3f}")}

    @classmethod
    def load_data(cls, config, *, train=True):
        return ToyData(load_tokenizer(config.actor_rollout_ref.model), config.trainer.total_training_steps)

    @classmethod
    def roles(cls, config, *, train=True):
        group, trainer = config.actor_rollout_ref, config.trainer
        spec = RoleSpec(
            "model",
            "lm",
            group.model,
            group.actor.fsdp_config,
            group.actor.optim if train else None,
            MeanLoss,
            micro=MicroBatching(max_tokens=40),
            forward_micro=MicroBatching(max_tokens=40),
            checkpoint=group.actor.checkpoint,
            guards=trainer.guards,
        )
        place = partial(Placement.colocated, ["model"], trainer.nnodes, trainer.n_gpus_per_node)
        return RoleSpecs((spec,), place, run_spec(trainer, config.ray_kwargs, 60.0))

    def __init__(self, config, data, roles, run):
        self.data, self.run, self.model = data, run, roles.models["model"]
        self.rows_seen = 0

    def step(self, step):
        if os.environ.get(INTERRUPT_AT) == str(step):
            os.kill(os.getpid(), signal.SIGINT)
        self.run.check_stop()
        batch = self.data.batch(step)
        with self.run.spans("update_model"):
            updates = self.model.update(batch, step).get()
        self.rows_seen += len(batch)
        tokens = int(batch.batch["attention_mask"].sum())
        rows = batch.batch["responses"].tolist()
        return StepResult(
            {**metric_values(updates.metrics()), "train/rows": self.rows_seen},
            tokens,
            rows=lambda: [{"response_ids": row} for row in rows],
            span_tokens={"update_model": tokens},
        )

    def validate(self, step):
        batch = self.data.batch(1)
        outputs = self.model.forward(batch, {"log_probs": "scores"}).get()
        return {"val/nll": float(-outputs.batch["scores"].sum() / batch.batch["response_mask"].sum())}

    def state_dict(self):
        return {"rows_seen": self.rows_seen}

    def load_state_dict(self, state, checkpoint, rolled_back=None):
        self.rows_seen = 0 if state is None else state["rows_seen"]

    def header(self):
        return {"rows": ROWS}

    def results(self, before, after):
        return [Result("loss", "held-out loss", before.get("val/nll"), after.get("val/nll"))]
