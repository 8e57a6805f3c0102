"""`verl serve tinker`: its settings, before a model is loaded."""

import pytest

from verl.cli.main import main

KEYS = "a" * 64


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs model=PATH"),
        (["model"], "'model' is no setting"),
        (["model=m", "port=x"], "port=x is no number"),
        (["model=m", "keys=missing"], "keys=missing cannot be read"),
        (["model=m", "actor_rollout_ref.rollot.n=1"], "rollot"),
    ],
)
def test_a_wrong_setting_is_a_sentence(arguments, sentence, capsys, monkeypatch, tmp_path):
    pytest.importorskip("tinker", reason="the extra tinker is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "tinker", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("text", "code"), [("", 2), ("short", 2), (f"# ours\n{KEYS}\n", 0)])
def test_a_key_file_has_sums(text, code, tmp_path):
    from verl.cli.serve import _key_hashes
    from verl.errors import ConfigError

    (tmp_path / "keys").write_text(text)
    if code:
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            _key_hashes(str(tmp_path / "keys"))
    else:
        assert _key_hashes(str(tmp_path / "keys")) == {KEYS}
