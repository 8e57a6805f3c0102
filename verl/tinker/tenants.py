"""Tenants of the service: keys as SHA-256 sums in a file, roles and limits.

A line of the file is a sum, then settings:

    3f1c...9a  tenant=ada models=4 rank=16            # echo -n tml-... | sha256sum
    77b0...e2  tenant=ops role=admin

Keys of one tenant see the same models; without a name each key is a tenant. An admin sees the models of all.
"""

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from verl.errors import ConfigError
from verl.regular_files import read_user_text
from verl.tinker.records import RefusedRequest

log = logging.getLogger(__name__)

_KEY_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class TenantLimits:
    """The most that a tenant can have at one time, over all its keys."""

    sessions: int = 1024
    models: int = 64
    samplers: int = 4096
    rank: int = 1 << 16
    tokens: int = 1 << 24  # of requests that wait, and of one request
    bytes: int = 1 << 40  # of checkpoints


@dataclass(frozen=True)
class Tenant:
    name: str = "local"
    is_admin: bool = False
    limits: TenantLimits = field(default_factory=TenantLimits)

    def sees(self, owner: str) -> bool:
        """Whether things of the tenant `owner` exist for this one."""
        return self.is_admin or owner == self.name


class Tenants:
    """The tenants by the SHA-256 sum of their keys, in the file `path` if they have one. Without keys, every key is the tenant
    `local`, with `limits`."""

    def __init__(
        self, keys: Mapping[str, Tenant] | None = None, path: str | None = None, limits: TenantLimits | None = None
    ):
        self._keys, self._path, self._limits = dict(keys or {}), path, limits or TenantLimits()
        self._read_at = self._changed_at()

    def _changed_at(self) -> int:
        try:
            return 0 if self._path is None else os.stat(self._path).st_mtime_ns
        except OSError:
            return 0

    def refresh(self) -> None:
        """Read the file again if it has changed. One that cannot be read leaves the keys as they are."""
        if self._path is None or self._changed_at() in (0, self._read_at):
            return
        self._read_at = self._changed_at()
        try:
            self._keys = read_tenants(self._path)._keys
        except (ConfigError, OSError) as error:
            log.warning("The keys stay as they were: %s", error)

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def of_key(self, key: str) -> Tenant:
        """The tenant of a key. Raises RefusedRequest (401) for a key that is none."""
        if not self._keys:
            return Tenant(limits=self._limits)
        self.refresh()
        digest = hashlib.sha256(key.encode()).hexdigest()
        matches = [tenant for key_digest, tenant in self._keys.items() if hmac.compare_digest(digest, key_digest)]
        if not matches:
            raise RefusedRequest("This API key is not one of the server's. Set TINKER_API_KEY.", 401)
        return matches[0]

    def named(self, name: str) -> Tenant:
        """The tenant of this name, as a user."""
        return next(
            (tenant for tenant in self._keys.values() if tenant.name == name), Tenant(name, limits=self._limits)
        )


def read_tenants(path: str) -> Tenants:
    """The tenants of a file. Raises ConfigError that names the line."""
    keys: dict[str, Tenant] = {}
    for number, line in enumerate(read_user_text(path, "keys=").splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            place = f"keys={path}, line {number}"
            if not _KEY_HASH.fullmatch(words[0]) or words[0] in keys:
                raise ConfigError(f"{place} must begin with a new SHA-256 sum, 64 hexadecimal digits.")
            keys[words[0]] = _tenant(words[0][:12], words[1:], place)
    if not keys:
        raise ConfigError(f"keys={path} has no key. Add a line with a SHA-256 sum, or leave keys out.")
    return Tenants(keys, path)


def _tenant(name: str, settings: list[str], place: str) -> Tenant:
    values = dict(setting.partition("=")[::2] for setting in settings)
    name, role = values.pop("tenant", name), values.pop("role", "user")
    names = [field.name for field in fields(TenantLimits)]
    if not _NAME.fullmatch(name) or role not in ("user", "admin"):
        raise ConfigError(f"{place} needs a tenant of letters, digits and . _ -, and the role user or admin.")
    if bad := [key for key, value in values.items() if key not in names or not value.isdigit()]:
        raise ConfigError(f"{place} has {bad[0]!r}; its numbers are {', '.join(names)}.")
    return Tenant(name, role == "admin", TenantLimits(**{key: int(value) for key, value in values.items()}))
