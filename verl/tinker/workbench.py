"""The computation behind the service: passes, optimizer steps and samples of many adapters on one base model.

Training, sampling and scoring compute on one module, in turns. Samples of several adapters share decode steps if the
hand-written decoders read the model. Only one thread may call it.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.algorithms.policy_losses import policy_loss
from verl.config import PPOConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion, SamplingParams
from verl.data_proto.trajectory import token_columns
from verl.engines.api import BatchTotals, MicroBatching
from verl.errors import NumericsError
from verl.families import engine_facts
from verl.models.adapter_weights import AdapterWeights
from verl.models.load import load_tokenizer
from verl.models.optim import AdamStep
from verl.models.rope import row_limits
from verl.models.tokenizer import eos_token_ids
from verl.parallel.balance import TokenCost, balanced_shares
from verl.parallel.device import resolve_device
from verl.parallel.mesh import Mesh
from verl.rollout.native.engine import NativeRollout
from verl.rollout.requests import vocab_size
from verl.tinker.adapters import Adapter, AdapterEngine
from verl.tinker.copied import CopiedModels, FullModels, ShardedModels
from verl.tinker.open_lane import OpenLane
from verl.tinker.outside import OutsideRollout
from verl.tinker.records import SampleOutput, SamplingRequest, TopTokens, TrainingOutput, TrainingRequest
from verl.tinker.rows import computed_rows, log_probs_of, training_columns
from verl.tinker.sum_losses import FROM_CONFIG, SUM_LOSSES

_LOG_PROBS = "candidate_log_probs"


class Workbench:
    """The base model of `config` (actor_rollout_ref.model.path); `lora_rank` there is the largest rank of an adapter."""

    def __init__(self, config: PPOConfig, device: torch.device | None = None, mesh: Mesh | None = None):
        """`mesh`: the ranks that train together, each with a part of the model. They do not sample."""
        sections = config.actor_rollout_ref
        settings: dict[str, Any] = {
            "engine": sections.actor.fsdp_config,
            "head": "lm",
            "device": device or resolve_device(config.trainer.device),
            "total_steps": 1,
        }
        settings |= {"model": sections.model, "optim": sections.actor.optim}
        self.engine: AdapterEngine | ShardedModels | FullModels
        if mesh is not None:
            self.engine = ShardedModels(mesh=mesh, timeout_s=sections.nccl_timeout, **settings)
        else:
            self.engine = (AdapterEngine if sections.model.lora_rank else FullModels)(**settings)
        self._mesh, self._actor = mesh, sections.actor
        self._loss_params = {**asdict(sections.actor), **asdict(sections.actor.policy_loss)}
        self.micro = MicroBatching(max_tokens=sections.actor.ppo_max_token_len_per_gpu)
        self.tokenizer = load_tokenizer(sections.model)
        module = self.engine.module
        self.eos_token_ids = eos_token_ids(module, self.tokenizer)
        if mesh is None:
            self._rollout = self._make_rollout(config)
        self.vocabulary, self.most_rows = vocab_size(module), sections.rollout.max_num_seqs
        model = module.config.get_text_config()
        self.architecture = str(model.model_type)
        limits = [limit for limit, _ in row_limits(model)]
        self.longest = min([sections.rollout.max_model_len or 1 << 20, *limits])

    def _make_rollout(self, config: PPOConfig) -> NativeRollout | OutsideRollout:
        rollout, module = config.actor_rollout_ref.rollout, self.engine.module
        if engine_facts(rollout.name).asks_service:
            return OutsideRollout(config, module, self.tokenizer, self.eos_token_ids, self.engine.device)
        native = NativeRollout(module, self.tokenizer, rollout, eos_token_ids=self.eos_token_ids)
        native.adapters = {}
        return native

    def forward_backward(self, adapter: Adapter, request: TrainingRequest) -> TrainingOutput:
        """The sum of the loss over all rows, and the log-probs of their targets; adds the gradient to the adapter's unless
        `forward_only`. One of several ranks has its share of the sum, and zeros for the log-probs of rows of other ranks.
        Raises NumericsError for a loss that is not finite."""
        rows = computed_rows(request.data, request.loss)
        batch = training_columns(request.data, rows)
        collected, share = dict[int, np.ndarray](), self._share(batch)

        def loss(
            outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals | None
        ) -> tuple[torch.Tensor, dict[str, Metric]]:
            del totals  # a sum is divided by nothing
            log_probs, columns = outputs[_LOG_PROBS], batch.batch
            for row, number in enumerate(columns["number"].tolist()):
                collected[number] = log_probs[row].detach().to("cpu", torch.float32).numpy()
            chosen, exists = SUM_LOSSES[request.loss], columns["target_mask"]
            if request.loss == FROM_CONFIG:
                return self._policy_loss(log_probs, columns, exists), {}
            inputs = {name: columns[name].to(log_probs)[exists] for name in chosen.inputs}
            return chosen.function(log_probs[exists], **inputs, **request.settings), {}

        if isinstance(self.engine, CopiedModels):
            self.engine.rows = share
        with self.engine.using(adapter):
            if request.forward_only:
                outputs = self.engine.forward(batch, (_LOG_PROBS,), self.micro)
                if share is not None:
                    batch, outputs = batch.select_idxs(share), {name: value[share] for name, value in outputs.items()}
                value = loss(outputs, batch, None)[0].item() if len(batch) else 0.0
            else:
                value = self.engine.forward_backward(batch, loss, (_LOG_PROBS,), self.micro)["loss"].value
        if not np.isfinite(value):
            raise NumericsError(f"The loss is {value}. Look at the log-probs and weights of the data.")
        return TrainingOutput(log_probs_of(request.data, rows, collected), {"loss:sum": value})

    def _share(self, batch: DataProto) -> list[int] | None:
        """The rows of this rank, by cost; None on one device: all."""
        if self._mesh is None:
            return None
        shares = balanced_shares(batch, self._mesh.dp_size, TokenCost())
        return list(map(int, shares[self._mesh.dp_rank(self._mesh.ranks.index(dist.get_rank()))]))

    def _policy_loss(self, log_probs: torch.Tensor, columns: TensorDict, exists: torch.Tensor) -> torch.Tensor:
        """The policy loss of the config on `log_probs` [rows, response, 1], summed over tokens with an advantage."""
        old, advantages = (columns[name].to(log_probs)[..., 0] for name in ("logprobs", "advantages"))
        mask = exists[..., 0].to(log_probs.device) & (advantages != 0)
        loss, _ = policy_loss(
            self._actor.policy_loss.loss_mode, old_log_prob=old, log_prob=log_probs[..., 0], advantages=advantages,
            response_mask=mask, agg=_sum_of, params=self._loss_params, config=self._actor,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return loss

    def optim_step(self, adapter: Adapter, values: AdamStep) -> dict[str, float]:
        """One step on the adapter's gradients, and forget them. Raises NumericsError for gradients that are not finite: they
        leave the weights as they were, and ConfigError without gradients."""
        with self.engine.using(adapter):
            metrics = self.engine.optim_step(values)
        norm = metrics["grad_norm"].value
        if "num_skipped_updates" in metrics:
            raise NumericsError(f"The gradient norm is {norm}; the step was not taken, and no weight changed.")
        return {"grad_norm": norm}

    def mixes_adapters(self) -> bool:
        """Whether requests of one lane may have different weights."""
        if isinstance(self._rollout, OutsideRollout):
            return True
        return self.engine.spec is not None and self._rollout.mixes_adapters()

    def open_lane(self, params: SamplingParams, longest: int) -> OpenLane:
        """A lane for requests with equal `params` and at most `longest` tokens a sample."""
        return OpenLane(self._rollout, params, longest, mixes=self.mixes_adapters())

    def advance(self, lane: OpenLane, tokens: int) -> list[tuple[int, SampleOutput]]:
        """Let a lane take steps of about `tokens` tokens: the requests that have ended, by their numbers."""
        if not self.mixes_adapters():
            self.engine.show(next(iter(lane.weights())))
        return [(number, self._output(*request)) for number, request in lane.advance(tokens).items()]

    def _output(
        self, weights: AdapterWeights | None, request: SamplingRequest, completions: list[Completion]
    ) -> SampleOutput:
        log_probs, top, tops = None, None, []
        targets = request.targets
        if request.prompt_log_probs or request.top_of_prompt or request.top_of_samples or targets is not None:
            self.engine.show(weights)
        if request.prompt_log_probs or request.top_of_prompt:
            log_probs, top = self._scores(request.tokens[:1], request.tokens[1:], request.top_of_prompt)
            unscored = len(request.tokens) - (request.last_tokens or len(request.tokens))
            log_probs = np.concatenate([np.full(1, np.nan, np.float32), log_probs])
            log_probs[:unscored] = np.nan
            if top is not None:  # nothing predicts the first token
                empty = np.zeros((1, request.top_of_prompt))
                top = TopTokens(np.concatenate([empty, top.ids]), np.concatenate([empty - 99999.0, top.log_probs]))
                top.ids[:unscored], top.log_probs[:unscored] = 0, -99999.0
        if request.top_of_samples:
            ends = (tuple(completion.token_ids) for completion in completions)
            tops = [
                t for end in ends if (t := self._scores(request.tokens, end, request.top_of_samples)[1]) is not None
            ]
        if targets is not None:
            targets = replace(targets, ids=self._target_scores(request.tokens, targets.ids))
        return SampleOutput(completions, log_probs if request.prompt_log_probs else None, top, tops, targets)

    def _target_scores(self, tokens: Sequence[int], ids: np.ndarray) -> np.ndarray:
        """Log-probs [prompt - 1, K] of the tokens `ids` at the places of tokens[1:], at temperature 1; 0 for -1."""
        if not ids.size:
            return np.zeros(ids.shape, np.float32)
        columns = token_columns([(np.asarray(tokens[:1]), np.asarray(tokens[1:]), np.ones(len(ids), dtype=bool))])
        columns["candidate_ids"] = torch.from_numpy(ids.clip(0))[None]
        scores = self.engine.forward(DataProto.from_dict(columns), (_LOG_PROBS,), self.micro)[_LOG_PROBS]
        return np.where(ids >= 0, scores[0].float().cpu().numpy(), 0)

    def _scores(self, start: Sequence[int], end: Sequence[int], top: int) -> tuple[np.ndarray, TopTokens | None]:
        """Log-probs [end] of the tokens `end` after `start` at temperature 1, and the `top` most probable tokens there."""
        if not len(end):
            return np.zeros(0, np.float32), TopTokens(np.zeros((0, top)), np.zeros((0, top))) if top else None
        row = (np.asarray(start), np.asarray(end), np.ones(len(end), dtype=bool))
        names = ("log_probs", *((f"top_log_probs@{top}", f"top_ids@{top}") if top else ()))
        columns = self.engine.forward(DataProto.from_dict(token_columns([row])), names, self.micro)
        log_probs, *best = (columns[name][0].numpy() for name in names)
        return log_probs, TopTokens(best[1], best[0]) if top else None


def _sum_of(values: torch.Tensor, mask: torch.Tensor, mode: str | None = None, /) -> torch.Tensor:
    """An aggregate of a policy loss: the plain sum."""
    return (values * mask).sum()
