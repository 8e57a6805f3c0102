"""One rule for the names of files in all keys, and a largest value for every key with a unit."""

import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.helpers import refused
from verl.config import SCHEMAS
from verl.config.load import load_config
from verl.config.values import escape_path, expand_path
from verl.errors import ConfigError

LEAVES = {(schema.name, path): leaf for schema in SCHEMAS.values() for path, leaf in schema.leaves.items()}
PATHS = [key for key, leaf in LEAVES.items() if leaf.key.path and not leaf.inert]
UNITS = {"s": 1, "timeout": 1, "kb": 2**10, "mb": 2**20, "megabytes": 2**20, "gb": 2**30}
MEASURED = [
    key for key, leaf in LEAVES.items() if key[1].rpartition(".")[2].rpartition("_")[2] in UNITS and not leaf.inert
]
TEN_YEARS_S = 315_360_000


def loaded(key, value):
    schema, path = key
    config = load_config([f"{path}='{value}'"], schema=SCHEMAS[schema], check=False)
    resolved = SCHEMAS[schema].flatten(config.config)[path]
    return config, resolved[0] if isinstance(resolved, list) else resolved


def test_every_key_of_a_file_is_one_of_paths():
    words = ("path", "dir", "file", "files")
    named = [key for key, leaf in LEAVES.items() if key[1].rpartition(".")[2].rpartition("_")[2] in words]
    lacking = [
        key for key in named if not LEAVES[key].inert and key not in PATHS and "str" in str(LEAVES[key].annotation)
    ]
    assert not lacking
    assert len(PATHS) > 60


@pytest.mark.parametrize("key", PATHS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_variables_are_replaced_in_every_path(monkeypatch, key):
    monkeypatch.setenv("VERL_TEST_FOLDER", "/some/folder")
    monkeypatch.delenv("VERL_TEST_NOT_SET", raising=False)
    assert loaded(key, "$VERL_TEST_FOLDER/x.py")[1] == "/some/folder/x.py"
    assert loaded(key, "$$HOME/x.py")[1] == "$HOME/x.py"
    with pytest.raises(ConfigError, match="VERL_TEST_NOT_SET is not"):
        loaded(key, "$VERL_TEST_NOT_SET/x.py")
    with pytest.raises(ConfigError, match="must be the name of a file or folder"):
        loaded(key, "")
    with pytest.raises(ConfigError, match="of a user of this machine"):
        loaded(key, "~nobody-has-this-name/x.py")


def test_a_saved_config_names_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("$$HOME/x.py", "a$$$$b", "~/a b", "$HOME/$$HOME"):
        config, value = loaded(("ppo", "reward.custom_reward_function.path"), name)
        again = load_config([], str(config.write(tmp_path)), check=False)
        assert again.config.reward.custom_reward_function.path == value


@given(st.text(alphabet=string.ascii_letters + "$~/._ -0", min_size=1))
def test_escaping_is_the_inverse_of_expanding(path):
    if not path.startswith("~"):
        assert expand_path(escape_path(path)) == path


def test_templates_and_commands_are_no_paths(monkeypatch):
    monkeypatch.delenv("VERL_TEST_NOT_SET", raising=False)
    for text in (
        "Costs $VERL_TEST_NOT_SET. {response}",
        "command: agent --key $VERL_TEST_NOT_SET",
        "a\n$VERL_TEST_NOT_SET",
    ):
        assert expand_path(text) == text


@pytest.mark.parametrize("key", MEASURED, ids=lambda key: f"{key[0]}-{key[1]}")
def test_no_duration_and_no_size_is_without_end(key):
    bounds = LEAVES[key].key.bounds
    factor = UNITS[key[1].rpartition("_")[2]]
    largest = TEN_YEARS_S if factor == 1 else 2**50 // factor
    assert bounds.le is not None
    assert bounds.le <= largest
    for value in (largest + 1, 1e12 if factor == 1 else 10**18, 1e300):
        assert not bounds.hold(value)
    time.gmtime(time.time() + TEN_YEARS_S)
    assert 2**50 < 2**63


NAMES_OF_OTHERS = {  # spelling -> the key in the sentence
    "rollout_backend": "actor_rollout_ref.rollout.name",
    "reward_fn": "reward.custom_reward_function.path",
    "optim.learning_rate": "actor_rollout_ref.actor.optim.lr",
}


@pytest.mark.parametrize("spelling", NAMES_OF_OTHERS)
def test_words_of_other_trainers_lead_to_a_key(spelling):
    assert f"Set {NAMES_OF_OTHERS[spelling]}" in refused(f"{spelling}=x")
