"""The sampler of a trainer class under the names of newer releases: servers, their clients, and who gives them weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.agents.loops import TokenOutput
from verl.compat.python import auto_await
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.compat.endpoint import PolicyEndpoint


class Sampler(NamedTuple):
    """The sampler of a trainer: `served` starts its endpoint, `sync` gives it the trained weights, `rest` frees its cache, and
    `until` sets texts that end a turn."""

    served: Callable[[], PolicyEndpoint]
    sync: Callable[[], object]
    rest: Callable[[], object]
    until: Callable[[Sequence[str]], object]


class LLMServerClient:
    """The policy for agents in the process of the trainer."""

    def __init__(self, served: Callable[[], PolicyEndpoint]):
        self._served = served

    async def generate(
        self,
        request_id: object = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any] | None = None,
        image_data: object = None,
        video_data: object = None,
        **_: object,
    ) -> TokenOutput:
        """The tokens after `prompt_ids`, sampled as the run samples; of `sampling_params` only max_tokens or max_new_tokens
        counts. Raises RequestError for images, and for a prompt that is too long."""
        params = dict(sampling_params or {})
        limit = params.get("max_tokens", params.get("max_new_tokens"))
        done = await self._served().generate(prompt_ids, limit, media=image_data or video_data)
        return TokenOutput(done.token_ids, done.log_probs, stop_reason=done.finish_reason)


class LLMServerManager:
    """The server of a trainer's sampler, in this process. A replica aborts nothing: a request samples to its end."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler

    @classmethod
    def create(
        cls, config: object, worker_group: object = None, rollout_resource_pool: object = None
    ) -> LLMServerManager:
        """The manager of the trainer whose `actor_rollout_wg` is given; `config` is the trainer's. Raises ConfigError for
        workers of a script."""
        return cls(_sampler_of(worker_group, "LLMServerManager"))

    def get_client(self, client_cls: type[LLMServerClient] = LLMServerClient) -> LLMServerClient:
        return client_cls(self._sampler.served)

    def get_addresses(self) -> list[str]:
        return [self._sampler.served().address]

    def get_replicas(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(abort_all_requests=_nothing_to_do, resume_generation=_nothing_to_do)]

    def start_profile(self, *_: object, **__: object) -> None:
        """Each step reports where its time went."""

    stop_profile = start_profile


class Addressed(SimpleNamespace):
    """A rollout manager; reading its addresses starts the endpoint."""

    def __init__(self, addresses: Callable[[], list[str]], **members: object):
        super().__init__(**members)
        self._addresses = addresses

    @property
    def server_addresses(self) -> list[str]:
        return self._addresses()


class CheckpointEngineManager:
    """Gives the trained weights to the sampler. `trainer` is the trainer's `actor_rollout_wg`."""

    def __init__(self, config: object = None, trainer: object = None, replicas: object = ()):
        self._sampler = _sampler_of(trainer, "CheckpointEngineManager")

    @auto_await
    async def update_weights(self, *_: object, **__: object) -> None:
        self._sampler.sync()

    @auto_await
    async def sleep_replicas(self) -> None:
        """Free the cache of the sampler."""
        self._sampler.rest()

    @auto_await
    async def wake_up_replicas(self) -> None:
        """A generation takes the memory that it needs."""


def _sampler_of(worker_group: object, name: str) -> Sampler:
    sampler: Sampler | None = getattr(worker_group, "sampler", None)
    if sampler is None:
        raise ConfigError(
            f"{name} has the sampler of a trainer: give it the actor_rollout_wg of a RayPPOTrainer. Workers of a script have "
            "no sampler here, since engines compute in the run."
        )
    return sampler


async def _nothing_to_do() -> None:
    """An engine here is idle between two calls."""
