"""Which vLLM there is, and which are known to work."""

from __future__ import annotations

import importlib.util
import logging

from verl.errors import MissingExtraError

log = logging.getLogger(__name__)

KNOWN = ("0.32",)
WORKING = f"versions known to work: {', '.join(KNOWN)}"


def require_vllm(key: str = "actor_rollout_ref.rollout.name") -> None:
    """Raise MissingExtraError where vLLM is not installed, which `key` asks for. It is not imported."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(f"{key}=vllm", "vllm", "vllm")


def check_version(version: str) -> None:
    """Warn, with the versions that are known to work, of one that is not of them."""
    if not any(version == known or version.startswith(f"{known}.") for known in KNOWN):
        log.warning("vLLM %s was not tried with this version of verl; %s.", version, WORKING)
