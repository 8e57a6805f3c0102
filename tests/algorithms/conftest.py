"""Estimators and losses that a test registers are gone after it."""

import pytest

from verl.algorithms.advantages import ADVANTAGES
from verl.algorithms.policy_losses import POLICY_LOSSES


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    for registry in (ADVANTAGES, POLICY_LOSSES):
        monkeypatch.setattr(registry, "_rows", dict(registry._rows))
