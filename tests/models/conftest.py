"""Tiny models, one folder per family and session."""

import pytest

from verl.models.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """family -> folder of a tiny random model, with every tensor away from its initial constant."""
    folders = {}

    def folder(family):
        if family not in folders:
            folders[family] = make_tiny_model(
                tmp_path_factory.mktemp("tiny") / family, family, max_position_embeddings=128
            )
        return folders[family]

    return folder
