"""Loads of a config that remember no secrets: tests/tracking/test_secrets.py tests that, and it takes half of the time."""

import pytest


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch):
    monkeypatch.setattr("verl.config.load.remember_secrets", lambda config: None)
