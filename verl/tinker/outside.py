"""Samples of a service of vLLM or SGLang, which holds adapters by their names and reads them from a folder."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, NoReturn

import torch

from verl.config import PPOConfig, full_key
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.families import ROLLOUT_ENGINES
from verl.models.adapter_weights import AdapterWeights
from verl.rollout.api import WeightTransfer
from verl.rollout.http.client import Client
from verl.rollout.http.dialects import DIALECTS, VLLM, SGLang
from verl.rollout.http.engine import HTTPRollout
from verl.tinker.checkpoints import write_adapter

_ROUTES = {VLLM: "/v1", SGLang: ""}  # the beginning of a service's routes for adapters


def check_outside(config: PPOConfig) -> None:
    """Raise ConfigError for a service that cannot hold adapters by their names."""
    rollout, key = config.actor_rollout_ref.rollout, full_key("rollout.service")
    if rollout.service.url is None:
        raise ConfigError(f"A training service samples at a server that runs already. Set {key}.url to its address.")
    if rollout.service.weights_dir is None:
        raise ConfigError(
            f"Adapters for {rollout.service.url} are files. Set {key}.weights_dir to a folder that both can use."
        )
    if DIALECTS[ROLLOUT_ENGINES.get(rollout.name).api or rollout.service.api] not in _ROUTES:
        raise ConfigError(
            f"{key}.api={rollout.service.api} takes no adapters by name. Choose another server, and name its api."
        )
    if config.actor_rollout_ref.model.lora_rank == 0:
        raise ConfigError("A server that samples takes adapters, not rank=0. Leave out rollout.name.")


class OutsideRollout(HTTPRollout):
    """An engine of lanes whose samples come from a service. `adapters` has the ones that it holds."""

    def __init__(
        self, config: PPOConfig, module: Any, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], device: torch.device
    ):
        sections = config.actor_rollout_ref
        self.api = ROLLOUT_ENGINES.get(sections.rollout.name).api or sections.rollout.service.api
        limit_s = sections.rollout.service.timeout_s
        transfer = WeightTransfer(
            sections.model, device, module.dtype, _no_weights, "", _no_weights, "",
            start_timeout_s=limit_s, call_timeout_s=limit_s,
        )  # fmt: skip
        super().__init__(module, tokenizer, sections.rollout, eos_token_ids=eos_token_ids, transfer=transfer)

    def lane(self) -> OutsideRollout:
        """This engine with other connections and adapters."""
        lane, service = copy.copy(self), self.config.service
        lane.client = Client(
            self.client.url, token_env=service.token_env, timeout_s=service.timeout_s, num_retries=service.num_retries
        )
        return lane

    def hold(self, name: str, weights: AdapterWeights) -> None:
        """Let the service read an adapter."""
        folder = self._folder(name)
        folder.mkdir(parents=True)
        write_adapter(folder, weights, self.transfer.model.path)
        try:
            body: dict[str, object] = {"lora_name": name, "lora_path": str(folder)}
            self.client.command(f"{_ROUTES[type(self.dialect)]}/load_lora_adapter", body)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def let_go(self, name: str) -> None:
        """Let the service forget an adapter."""
        try:
            self.client.command(f"{_ROUTES[type(self.dialect)]}/unload_lora_adapter", {"lora_name": name})
        finally:
            shutil.rmtree(self._folder(name), ignore_errors=True)

    def _folder(self, name: str) -> Path:
        return Path(str(self.config.service.weights_dir)).expanduser() / name


def _no_weights(*arguments: object) -> NoReturn:
    raise AssertionError("the base model of a service never changes")
