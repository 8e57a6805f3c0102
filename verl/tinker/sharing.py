"""Routes by which checkpoints travel, and by which an owner looks at its sessions."""

import hashlib
import hmac
import secrets
import time
from datetime import datetime, timezone

from starlette.responses import FileResponse, Response
from tinker import types

from verl.tinker.checkpoints import SavedAdapter
from verl.tinker.records import RefusedRequest
from verl.tinker.routes import checked_ttl, rows_of_page
from verl.tinker.served import ClientCall, ClientSession
from verl.tinker.service import Service
from verl.tinker.tenants import Tenant

_URL_S = 3600  # of a URL that needs no key


class SharingRoutes:
    """One method for each route."""

    def __init__(self, service: Service):
        self.service, self._secret = service, secrets.token_bytes(32)  # URLs end with the server

    def _addressed(self, call: ClientCall, *, may_be_public: bool = False) -> SavedAdapter:
        uri = f"tinker://{call.path['model_id']}/{call.path['checkpoint_id']}"
        return self.service.addressed(call, uri, may_be_public=may_be_public)

    async def publish(self, call: ClientCall) -> object:
        return self._set_public(call, is_public=True)

    async def unpublish(self, call: ClientCall) -> object:
        return self._set_public(call, is_public=False)

    def _set_public(self, call: ClientCall, *, is_public: bool) -> Response:
        saved = self._addressed(call)
        if saved.is_public == is_public:
            raise RefusedRequest(f"{saved.uri} is {'public' if is_public else 'private'} already.")
        self.service.checkpoints.set_public(saved, is_public=is_public)
        return Response(status_code=204)

    async def urls(self, call: ClientCall) -> object:
        """A URL for each file of a checkpoint. peft reads the folder of these files."""
        saved = self.service.checkpoints.read(self._addressed(call, may_be_public=True))
        until = int(time.time()) + _URL_S
        place = f"{saved.model_id}/{saved.kind}/{saved.name}"
        urls = {
            file: f"{call.address}/api/v1/download/{until}/{self._signed(f'{until}/{place}/{file}')}/{place}/{file}"
            for file in saved.files()
        }
        return types.ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(until, timezone.utc))

    async def download(self, call: ClientCall) -> object:
        names = ("until", "signature", "model_id", "kind", "name", "file")
        until, signature, *place = (call.path[name] for name in names)
        is_signed = hmac.compare_digest(self._signed("/".join([until, *place])).encode(), signature.encode())
        if not is_signed or int(until) < time.time():
            raise RefusedRequest("The URL has expired, or is none of this server's. Ask for a new one.", 403)
        saved = self.service.checkpoints.find(f"tinker://{'/'.join(place[:3])}")
        return FileResponse(saved.folder / place[3])

    def _signed(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    async def copy(self, call: ClientCall) -> object:
        """A copy has a model for itself, which cannot train. A repeated request gets the first one's."""
        message, checkpoints, tenant = call.read(types.CopyWeightsRequest), self.service.checkpoints, call.tenant
        saved, ttl_s = self.service.saved(call, message.source_path), checked_ttl(message.ttl_seconds)
        identity = f"{tenant.name}/{saved.uri}/{saved.digest}/{message.session_id}/{message.model_seq_id}"
        model_id = f"copy-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        changes = {"model_id": model_id, "tenant": tenant.name, "created": time.time()}
        copied = SavedAdapter(model_id, saved.kind, saved.name, checkpoints.run_folder(model_id), saved.state)
        if not (copied.folder / saved.kind / saved.name).is_dir():
            if self.service.stored_bytes(tenant.name) + saved.num_bytes() > tenant.limits.bytes:
                raise RefusedRequest(
                    f"The limit of this API key is {tenant.limits.bytes} bytes. Delete some checkpoints."
                )
            checkpoints.register(model_id, {**checkpoints.facts(saved.model_id), **changes})
            checkpoints.set_expiry(checkpoints.copy(saved, model_id), ttl_s)
        return types.CopyWeightsResponse(tinker_path=copied.uri)

    # -- sessions ---------------------------------------------------------------------------------------------------------

    def _visible(self, call: ClientCall, scope: str) -> list[tuple[str, ClientSession]]:
        """The sessions of the tenant, or if it asks for all that are accessible, of every tenant that it sees; newest first."""
        reader = call.tenant if scope == "accessible" else Tenant(call.tenant.name)
        held = [(name, one) for name, one in self.service.sessions.items() if reader.sees(one.tenant.name)]
        return sorted(held, key=lambda pair: (pair[1].created, pair[0]), reverse=True)

    async def sessions(self, call: ClientCall) -> object:
        page, _ = rows_of_page(call, [name for name, _ in self._visible(call, call.query.get("access_scope", "owned"))])
        return types.ListSessionsResponse(sessions=page)

    async def session(self, call: ClientCall) -> object:
        name = call.path["session_id"]
        one = dict(self._visible(call, "accessible")).get(name)
        if one is None:
            raise RefusedRequest(f"There is no session {name[:80]!r}; it may have ended.", 404)
        return types.GetSessionResponse(
            training_run_ids=[n for n, model in self.service.models.items() if model.session_id == name],
            sampler_ids=[n for n, sampler in list(self.service.samplers.items()) if sampler.session_id == name], **one.notes,
        )  # fmt: skip

    async def search(self, call: ClientCall) -> object:
        """Sessions that live; sessions that have ended are not in memory."""
        message = call.read(types.SessionSearchRequest)
        sessions = self._visible(call, "owned" if message.owner.type == "own" else "accessible")
        if isinstance(message.owner, types.UserSearchOwner):
            sessions = [(name, one) for name, one in sessions if one.tenant.name in message.owner.owner_urns]
        if message.statuses is not None and "active" not in {status.type for status in message.statuses}:
            sessions = []
        rows = [self._summary(name, one) for name, one in sessions if _matches(message, name, one)]
        if message.cursor is not None:
            last = (message.cursor.last_created_at, message.cursor.last_session_id)
            rows = [row for row in rows if (row.created_at, row.session_id) < last]
        page, cursor = rows[: message.limit], None
        if len(page) < len(rows):
            cursor = types.SessionSearchCursor(last_created_at=page[-1].created_at, last_session_id=page[-1].session_id)
        return types.SessionSearchResponse(sessions=page, next_cursor=cursor)

    def _summary(self, name: str, one: ClientSession) -> types.SessionSummary:
        models = [n for n, model in self.service.models.items() if model.session_id == name]
        saved = [checkpoint for model_id in models for checkpoint in self.service.checkpoints.listed(model_id)]
        return types.SessionSummary(
            session_id=name, created_at=datetime.fromtimestamp(one.created, timezone.utc), owner=one.tenant.name,
            project_id="default", status=types.SessionActive(), checkpoints_count=len(saved),
            checkpoint_storage_bytes=sum(checkpoint.num_bytes() for checkpoint in saved), **one.notes,
        )  # fmt: skip


def _matches(message: types.SessionSearchRequest, name: str, one: ClientSession) -> bool:
    metadata, title = one.notes.get("user_metadata") or {}, (one.notes.get("display_name") or "").lower()
    wished = [name == message.session_id] if message.session_id is not None else []
    if message.display_name is not None:
        wished.append(all(word in title for word in message.display_name.lower().split()))
    return (any(wished) or not wished) and message.user_metadata.items() <= metadata.items()
