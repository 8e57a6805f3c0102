"""Uploads of models to the Hugging Face Hub, by huggingface_hub. Nothing is sent unless a key or an option asks for it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from verl.checkpoint.export import export
from verl.checkpoint.model_card import write_model_card
from verl.errors import ConfigError, UnreachableError, VerlError
from verl.foreign_text import clean

log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0  # of a server that does not answer; huggingface_hub sets none


def create_repository(repo_id: str, private: bool) -> None:
    """Create the model repository `repo_id` unless it exists: this fails where an upload would. Raises ConfigError for a name
    that is none, UnreachableError otherwise."""
    with _explained(repo_id):
        huggingface_hub.create_repo(repo_id, private=private, exist_ok=True)


def push(folder: Path, repo_id: str, private: bool, message: str = "Upload model") -> str:
    """Upload the files of `folder` as one commit; returns the address of the repository. Raises as `create_repository`."""
    create_repository(repo_id, private)
    with _explained(repo_id):
        commit = huggingface_hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
        return str(commit.repo_url)


def push_result(checkpoint: Path, role: str, repo_id: str, private: bool) -> None:
    """Upload the model of a run that has ended. A failure is logged with the command that uploads again."""
    try:
        with tempfile.TemporaryDirectory(prefix=".pushed-", dir=checkpoint.parent) as temporary:
            folder = export(checkpoint, Path(temporary) / "model", role=role)
            write_model_card(folder, checkpoint)
            log.info("The trained model is at %s.", push(folder, repo_id, private))
    except VerlError as error:
        log.error(
            "%s The run is complete, and its model is in %s. To upload again: verl export %s FOLDER --push %s",
            error, checkpoint, checkpoint, repo_id,
        )  # fmt: skip


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into sentences."""
    huggingface_hub.utils.get_session().timeout = _TIMEOUT_S
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{clean(repo_id)} is no name of a repository on the Hub: give owner/name.") from error
    except OfflineModeIsEnabled as error:
        raise UnreachableError("HF_HUB_OFFLINE is set, so nothing can be uploaded to the Hub. Unset it.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "Upload again later"
        if status in (401, 403):
            advice = "Log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
        why = clean(error.server_message or "no reason").rstrip(".")
        raise UnreachableError(
            f"The Hub refused the upload to {repo_id} with status {status}: {why}. {advice}."
        ) from error
    except Exception as error:
        raise UnreachableError(
            f"The upload to {repo_id} failed: {type(error).__name__}: {clean(error, 200)}. Check the network and HF_ENDPOINT."
        ) from error
