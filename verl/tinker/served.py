"""Records of what the service holds: sessions, models, samplers, requests, and work that is ready to compute."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pydantic

from verl.tinker.bases import BaseModel, Bases
from verl.tinker.journal import AcceptedRequest
from verl.tinker.model_run import ModelRun
from verl.tinker.queues import Ordered, WireAnswer
from verl.tinker.records import RefusedRequest, SamplingRequest
from verl.tinker.tenants import Tenant
from verl.tinker.worker import BenchWorker

Message = TypeVar("Message", bound=pydantic.BaseModel)
_WORD = 1 << 63


@dataclass
class ClientSession:
    """A client at work. `last_sign` is the time of its last sign of life, monotonic; `notes` is what it says about itself."""

    tenant: Tenant
    last_sign: float = field(default_factory=time.monotonic)
    created: float = field(default_factory=time.time)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ServedModel:
    """A model that trains; the workers of its base model have its adapter. `num_steps` is None until it is created. `failed`
    says why a forward_backward since the last optimizer step has failed, `unsaved_s` how long requests computed since the last
    state on the disk. `loss` and `num_tokens` are sums since the last step."""

    model_id: str
    session_id: str
    tenant: Tenant
    base_model: str
    rank: int
    run: ModelRun
    bases: Bases
    base: BaseModel
    num_steps: int | None = None
    failed: str = ""
    loss: float = 0.0
    num_tokens: int = 0
    unsaved_s: float = 0.0
    last_seq: int = -1  # the last request that was computed
    state_seq: int = -1  # the last request with an effect in that state
    last_request: float = field(default_factory=time.time)
    order: Ordered = field(default_factory=Ordered)

    @property
    def bench(self) -> BenchWorker:
        """The worker that has the adapter; its base model is loaded. For threads that compute."""
        return self.bases.bench(self.base).training

    @property
    def is_between_steps(self) -> bool:
        """Whether a state of it has everything: there are no gradients."""
        return self.num_steps is not None and not self.num_tokens and not self.failed

    def created(self) -> BenchWorker:
        """The worker that has the adapter. Raises RefusedRequest if creating it has failed."""
        if self.num_steps is None:
            raise RefusedRequest(f"The model {self.model_id} was not created, so it cannot be used.", 404)
        return self.bench

    def fail(self, reason: str) -> None:
        self.failed = self.failed or reason

    def drop_gradients(self, _: str = "") -> None:
        """Begin the next optimizer step."""
        self.failed, self.loss, self.num_tokens = "", 0.0, 0
        self.run.discard()
        if (bench := self.bases.loaded(self.base)) is not None:
            bench.training.discard(self.model_id)


@dataclass
class ServedSampler:
    """A sampling session: the digest of weights that never change (None: the base model), and the address that they came
    from, or the model that they are a snapshot of."""

    sampler_id: str
    session_id: str
    tenant: Tenant
    base_model: str
    digest: str | None
    model_path: str | None = None
    snapshot_of: str | None = None
    last_use: float = field(default_factory=time.monotonic)


def replaced(samplers: Mapping[str, ServedSampler], before: float, tenant: str | None) -> list[str]:
    """Snapshots of a model that has a newer one, of a tenant or of all, whose last request was `before` that time."""
    newest = {sampler.snapshot_of: name for name, sampler in samplers.items()}
    old = [(n, s) for n, s in samplers.items() if s.snapshot_of and newest[s.snapshot_of] != n and s.last_use < before]
    return [name for name, sampler in old if tenant in (None, sampler.tenant.name)]


class SampleJob(NamedTuple):
    """A sample request with the digest of its weights (None: the base model)."""

    digest: str | None
    request: SamplingRequest


@dataclass
class Work:
    """A request of a model that was checked. `steps` yields None after each slice but the last, then the answer.
    A request that `changes` its model runs again after a kill. `failed` gets the reason when it fails."""

    model: ServedModel
    steps: Iterator[WireAnswer | None]
    changes: bool = False
    tokens: int = 1
    failed: Callable[[str], None] | None = None
    seq_id: int = 0


def at_once(compute: Callable[[], WireAnswer]) -> Iterator[WireAnswer | None]:
    """The steps of work in one slice."""
    yield compute()


def failing(reason: str) -> Iterator[WireAnswer | None]:
    """Steps that fail with a reason."""
    raise RefusedRequest(reason)
    yield None


def _integers(message: pydantic.BaseModel) -> Iterator[tuple[str, int]]:
    """The integers of a message and of the messages in it, by their names. Lists of tokens have checks of their own."""
    for name, value in message:
        if isinstance(value, pydantic.BaseModel):
            yield from _integers(value)
        elif isinstance(value, int):
            yield name, value


# begins the name of a tenant's session for OpenAI's API, whose clients cannot ask again after a kill
ENDPOINT = "openai-"


async def _never() -> bool:
    return False


@dataclass(frozen=True)
class ClientCall:
    """A request as routes read it: from a client, or after a kill from the journal; `stored` is its entry. `path` and `query`
    are parameters of the URL, `digest` the SHA-256 of `body`. `is_gone` tells whether the client has closed the connection."""

    route: str
    body: bytes
    tenant: Tenant
    digest: str
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    stored: AcceptedRequest | None = None
    method: str = "POST"
    address: str = ""  # of the server, as the client calls it
    is_gone: Callable[[], Awaitable[bool]] = _never

    def read(self, kind: type[Message]) -> Message:
        try:
            message = kind.model_validate_json(self.body)
            if large := next((name for name, value in _integers(message) if not -_WORD <= value < _WORD), None):
                raise RefusedRequest(f"The number {large} of {kind.__name__} does not fit 64 bits.")
            return message
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise RefusedRequest(
                f"The body is no {kind.__name__}: {place + ': ' if place else ''}{first['msg']}."
            ) from error
