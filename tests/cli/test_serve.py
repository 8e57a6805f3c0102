"""`verl serve tinker`: its settings, before a model is loaded."""

import hashlib

import pytest

from verl.cli.main import main
from verl.cli.serve import read_bases, serving_config
from verl.errors import ConfigError
from verl.tinker.tenants import Tenant, TenantLimits, read_tenants

KEYS = "a" * 64


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs model=PATH"),
        (["model"], "'model' is no setting"),
        (["model=m", "port=x"], "port=x is no number"),
        (["model=MODEL", "port=99999"], "127.0.0.1:99999 cannot be taken: a port is at most 65535"),
        (["model=m", "rank=-1"], "rank=-1 is no number from 0 on"),
        (["model=m", "keys=missing"], "keys= missing does not exist"),
        (["model=m", "host=0.0.0.0"], "give their API keys with keys=FILE"),
        (["model=m", "tls_key=missing"], "TLS needs two files"),
        (["model=m", "tls_key=missing", "tls_cert=missing"], "missing does not exist"),
        (["model=m", "actor_rollout_ref.rollot.n=1"], "rollot"),
        (
            ["model=m", "actor_rollout_ref.rollout.in_flight_updates=True"],
            "in_flight_updates is not read by a training",
        ),
        (["model=m", "actor_rollout_ref.rollout.agent.num_retries=2"], "agent.num_retries is not read by a training"),
        (["model=m", "actor_rollout_ref.rollout.speculative.num_speculative_tokens=3"], "so there are no drafts"),
        (["model=m", "bases=b.yaml"], "or bases=FILE for several"),
        (["model=m", "memory=nan"], "memory=nan is no number above 0"),
        (["bases=b.yaml"], "bases= b.yaml does not exist"),
    ],
)
def test_a_wrong_setting_is_a_sentence(arguments, sentence, capsys, monkeypatch, tmp_path):
    pytest.importorskip("tinker", reason="the extra tinker is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "tinker", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is no list of base models"),
        ("model: a", "is no list of base models"),
        ("- {name: a}", "row 1 names no model"),
        ("- {model: a}\n- {model: b, train: 1}", "row 2 has 'train' with 1"),
        ("- {model: a}\n- {model: a}", "names 'a' twice"),
        ("- {model: x/a}\n- {model: y/a}", "names 'a' twice"),
        ("- {model: a}\n- {model: b, name: [c, a]}", "names 'a' twice"),
        ("- {model: a, name: [1]}", "has 'name' with"),
        ("- {model: a, rank: true}", "has 'rank' with True"),
        ("- {model: a, 3: b}", "row 1 has 3 with"),
        ("- {model: a", "cannot be read"),
    ],
)
def test_a_wrong_file_of_base_models_is_a_sentence(text, sentence, tmp_path):
    (tmp_path / "bases.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_bases(str(tmp_path / "bases.yaml"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no key"),
        ("short", "64 hexadecimal digits"),
        (f"{KEYS}\n{KEYS}", "line 2 must begin"),
        (f"{KEYS} role=king", "role user or admin"),
        (f"{KEYS} tenant=../up", "tenant of letters"),
        (f"{KEYS} modls=3", "has 'modls'"),
        (f"{KEYS} models=-1", "has 'models'"),
    ],
)
def test_a_wrong_key_file_is_a_sentence(text, sentence, tmp_path):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_tenants(str(tmp_path / "keys"))


def test_a_base_model_may_train_all_its_weights(tmp_path):
    (tmp_path / "bases.yaml").write_text("- {model: a, rank: 0}")
    assert read_bases(str(tmp_path / "bases.yaml")) == [{"model": "a", "rank": 0}]
    assert serving_config("a", [], 0).actor_rollout_ref.model.lora_rank == 0


def test_a_key_file_has_tenants_with_limits(tmp_path):
    sums = [hashlib.sha256(key.encode()).hexdigest() for key in ("tml-a", "tml-b")]
    (tmp_path / "keys").write_text(f"# ours\n{sums[0]} tenant=ada models=4 rank=16\n\n{sums[1]} role=admin\n")
    tenants = read_tenants(str(tmp_path / "keys"))
    assert tenants.of_key("tml-a") == Tenant("ada", limits=TenantLimits(models=4, rank=16))
    assert tenants.of_key("tml-b") == Tenant(sums[1][:12], is_admin=True)
    assert tenants.named("ada").limits.rank == 16


@pytest.mark.parametrize("arguments", [[], ["RUN"], ["vllm", "model=RUN"]])
def test_another_protocol_is_told_who_serves_it(arguments, capsys):
    assert main(["serve", *arguments]) == 2
    assert "`verl export RUN FOLDER`, then `vllm serve FOLDER`." in capsys.readouterr().err
