"""The state of a service as a tenant may see it: JSON, metrics for Prometheus, and the page at the service's address."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from starlette.responses import HTMLResponse, Response

from verl.page.pages import Site
from verl.page.server import HEADERS, gauges
from verl.tinker.call import ClientCall
from verl.tinker.service import Service
from verl.tinker.tenants import Tenant

_COUNTED = ("models", "samplers", "waiting_requests", "waiting_tokens", "training_s", "sampling_s", "journal_s")
_LISTED = 200  # models and samplers of an answer, the last used first


class StatusRoutes:
    """One method for each route."""

    def __init__(self, service: Service):
        self.service, self._site = service, Site([])

    async def status(self, call: ClientCall) -> object:
        return status(self.service, call.tenant)

    async def page(self, call: ClientCall) -> object:
        context = status(self.service, call.tenant)
        html = self._site.render("service.html", "/", names=self.service.names, now=time.time(), **context)
        return HTMLResponse(html, headers={**HEADERS, "Cache-Control": "no-store"})

    async def metrics(self, call: ClientCall) -> object:
        state, samples = status(self.service, call.tenant), dict[str, list[tuple[dict[str, str], float]]]()
        for tenant, counts in state["tenants"].items():
            for name, count in counts.items():
                samples.setdefault(f"tinker_{name}", []).append(({"tenant": tenant}, count))
        samples["tinker_paused"] = [({}, int(bool(state["paused"])))]
        return Response(gauges(samples), media_type="text/plain; version=0.0.4")


def status(service: Service, tenant: Tenant) -> dict[str, Any]:
    """The tenants that `tenant` sees, with their models, samplers, waiting requests and seconds of computing; the models that
    train and the samplers, each with the requests that wait for it. `paused` says why answers wait."""
    waiting = [f for f in list(service.futures.values()) if f.answer is None and tenant.sees(f.tenant)]
    models = [m for m in list(service.models.values()) if tenant.sees(m.tenant.name)]
    samplers = [s for s in list(service.samplers.values()) if tenant.sees(s.tenant.name)]
    used = [row for one in service.computers for row in list(one.seconds.items()) if tenant.sees(row[0][0])]
    listed: list[tuple[str, str, float]] = [
        *((m.tenant.name, "models", 1) for m in models), *((s.tenant.name, "samplers", 1) for s in samplers),
        *((f.tenant, "waiting_requests", 1) for f in waiting), *((f.tenant, "waiting_tokens", f.tokens) for f in waiting),
        *((owner, kind, seconds) for (owner, kind), seconds in used),
    ]  # fmt: skip
    tenants: dict[str, dict[str, float]] = {}
    for owner, kind, count in sorted(listed):
        tenants.setdefault(owner, dict.fromkeys(_COUNTED, 0))[kind] += count
    queues, epoch = Counter(f.owner for f in waiting), time.time() - time.monotonic()
    of_models = [
        {
            "model_id": m.model_id, "tenant": m.tenant.name, "rank": m.rank, "num_steps": m.num_steps or 0,
            "waiting_requests": queues[m.model_id], "last_request": m.last_request,
        }
        for m in sorted(models, key=lambda m: -m.last_request)[:_LISTED]
    ]  # fmt: skip
    of_samplers = [
        {
            "sampler_id": s.sampler_id, "tenant": s.tenant.name, "weights": s.digest, "model_path": s.model_path,
            "waiting_requests": queues[s.sampler_id], "last_request": s.last_use + epoch,
        }
        for s in sorted(samplers, key=lambda s: -s.last_use)[:_LISTED]
    ]  # fmt: skip
    apart = service.bench.is_apart
    return {
        "tenants": tenants,
        "models": of_models,
        "samplers": of_samplers,
        "is_apart": apart,
        "paused": service.paused,
    }
