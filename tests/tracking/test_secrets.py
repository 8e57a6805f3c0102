"""Secrets: the values that are secret, and that they do not get into configs, logs and rows."""

import io
import json
import logging
import types

import pytest

from verl.config import load_config, secrets
from verl.config.secrets import MASK, hide, hide_values, is_secret_name, remember_secrets
from verl.errors import ConfigError
from verl.tracking.files import json_text
from verl.tracking.logs import CleanRecords
from verl.tracking.run_folder import RunFolder
from verl.tracking.tracker import Tracker

PLANTED = "sk-planted-4711"


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "api_key",
        "apiKey",
        "dbPassword",
        "AWS_SECRET_ACCESS_KEY",
        "hub_token",
        "client-secret",
        "GH_PAT",
        "HTTP_AUTH",
        "auth_header",
        "authorization_headers",
        "BEARER",
        "SESSION_COOKIE",
        "cookies",
        "JWT",
        "AZURE_STORAGE_KEY",
        "SSH_KEY",
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "token_budget",
        "SSH_AUTH_SOCK",
        "PATH",
        "custom_reward_function.path",
        "header",
        "author",
        "images_key",
        "reward_fn_key",
        "eos_token",
        "pad_token",
        "prompt_key",
        "TOKENIZERS_PARALLELISM",
        "key",
        "",
        "tokenizer",
    ],
)
def test_names_of_others(name):
    assert not is_secret_name(name)


def test_credentials_of_a_header_are_secret_whatever_the_key_is(monkeypatch):
    monkeypatch.setenv("PLAIN_NAME", "Bearer credential-value-1")
    monkeypatch.setenv("GH_PAT", "credential-value-2")
    remember_secrets({"headers": ["Basic credential-value-3"], "note": "Basic arithmetic for bearers"})
    text = "credential-value-1 credential-value-2 credential-value-3 arithmetic for bearers"
    assert hide(text) == f"{MASK} {MASK} {MASK} arithmetic for bearers"


def test_environment_config_and_urls_are_remembered(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "from-environment-1")
    monkeypatch.setenv("PROXY", "http://user:pass-word-2@proxy:80")
    remember_secrets({"a": [{"password": "nested-value-3", "eos_token": "<|end|>long"}], "token": "short"})
    text = "from-environment-1 pass-word-2 nested-value-3 <|end|>long short"
    assert hide(text) == f"{MASK} {MASK} {MASK} <|end|>long short"
    values = {"token": "short", "url": "https://me:pw@host/x", "deep": {"k": ["nested-value-3", 4, None]}}
    assert hide_values(values) == {"token": MASK, "url": f"https://me:{MASK}@host/x", "deep": {"k": [MASK, 4, None]}}


def test_a_secret_in_json_is_hidden_too(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", 'quo"ted\\secret')
    remember_secrets()
    assert hide('quo"ted\\secret') == MASK
    secrets_before = list(secrets._known)
    remember_secrets()
    assert sorted(secrets._known) == sorted(secrets_before)  # and not what escaping it twice would give
    assert json.loads(json_text({"text": 'it is quo"ted\\secret!'})) == {"text": f"it is {MASK}!"}


def test_the_written_config_has_masks_and_asks_for_them_again(tmp_path):
    function = "reward.custom_reward_function"
    keys = [
        f"{function}.path=f.py",
        f"{function}.reward_kwargs.api_key={PLANTED}",
        f"{function}.reward_kwargs.note=x-{PLANTED}",
    ]
    file = load_config(keys, check=False).write(tmp_path)
    assert PLANTED not in file.read_text()
    assert MASK in file.read_text()
    with pytest.raises(ConfigError, match=r"reward_kwargs .*has the mask of a secret.*Give the value again"):
        load_config([], str(file), check=False)
    again = [f"{function}.reward_kwargs.api_key={PLANTED}", f"{function}.reward_kwargs.note=x"]
    loaded = load_config(again, str(file), check=False)
    assert loaded.config.reward.custom_reward_function.reward_kwargs == {"api_key": PLANTED, "note": "x"}


def test_logs_have_masks_in_messages_and_tracebacks():
    remember_secrets({"token": PLANTED})
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(CleanRecords())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("key %s of %d", PLANTED, 3)
    try:
        raise ValueError(f"refused {PLANTED}")
    except ValueError:
        logger.exception("it failed")
    assert PLANTED not in stream.getvalue()
    assert f"key {MASK} of 3" in stream.getvalue()
    assert f"ValueError: refused {MASK}" in stream.getvalue()


def test_rows_and_trackers_get_masks(tmp_path, monkeypatch):
    remember_secrets({"token": PLANTED})
    assert json.loads(json_text({"error": f"401 for {PLANTED}"})) == {"error": f"401 for {MASK}"}
    told = []
    monkeypatch.setattr("verl.tracking.tracker.make_sink", lambda name, info: told.append(info) or Silent())
    with RunFolder(tmp_path / "run") as folder, Tracker(folder, ["wandb"], "p", "e", {"reward": {"api_key": PLANTED}}):
        pass
    assert told[0].config == {"reward": {"api_key": MASK}}


class Silent(types.SimpleNamespace):
    def start(self): ...

    def close(self): ...
