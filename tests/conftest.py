"""Shared fixtures. Tests use no network and one thread each, so that they can run side by side on two cores."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Folder of a tiny random Llama with tokenizer and chat template."""
    from verl.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama")
