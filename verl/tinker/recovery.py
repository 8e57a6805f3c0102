"""The start of a service in the folder of an earlier life: sessions, samplers and requests of the journal."""

import logging
from collections.abc import Awaitable, Callable, Mapping

from verl.tinker.records import RefusedRequest
from verl.tinker.served import ClientCall, ClientSession, ServedSampler
from verl.tinker.service import Service

log = logging.getLogger(__name__)


async def recover(service: Service, handlers: Mapping[str, Callable[[ClientCall], Awaitable[object]]]) -> None:
    """Take the requests of the journal, in order. A request with an answer retains it, and is computed again only if its
    effect on the model is in no saved state."""
    for earlier, present in service.journal.aliases.items():  # requests of the journal name them
        service.bases.named(present).names += [] if earlier in service.bases.names else [earlier]
    for session_id, tenant in service.journal.sessions():
        service.sessions[session_id] = ClientSession(service.tenants.named(tenant))
    for name, session_id, base, digest, path in service.journal.samplers():
        if session_id in service.sessions:
            tenant_of = service.sessions[session_id].tenant
            service.samplers[name] = ServedSampler(name, session_id, tenant_of, base, digest, path)
    for request in service.journal.requests():
        call = ClientCall(
            request.route, request.body or b"", service.tenants.named(request.tenant), request.digest, stored=request
        )
        try:
            model = service.models.get(request.owner)
            is_covered = model is not None and 1 <= request.seq_id < model.order.next_seq
            if request.body is not None and not is_covered:
                await handlers[request.route](call)
            else:
                service.restore(call, request)
        except RefusedRequest as error:
            log.warning("A request of %s is not repeated: %s", request.owner, error.sentence)
            service.use_number(call)
        except Exception:  # of one tenant; the next ones do not wait for it
            log.exception("A request of %s is not repeated.", request.owner)
            service.use_number(call)
    for model_id in set(service.checkpoints.models()) - set(service.models):
        if service.checkpoints.facts(model_id)["base_model"] in service.bases.names:  # else it may be served again
            service.checkpoints.drop_states(model_id)
