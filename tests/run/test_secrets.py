"""A run that knows secrets leaves none in its folder."""

KEYS = {"environment": "planted-in-environment-17", "config": "planted-in-config-18"}

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key=None):
    print("called with", api_key)
    if len(solution_str) % 2:
        raise ConnectionError(f"401 for {api_key}")
    return {"score": 1.0, "asked": f"with {api_key}"}
"""


def test_a_planted_secret_is_nowhere_in_the_run_folder(tiny_run, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PLANTED_API_KEY", KEYS["environment"])
    (tmp_path / "reward.py").write_text(REWARD)
    run = tiny_run(
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        "reward.debug=False",  # what a scorer prints goes to its log
        f"+reward.custom_reward_function.reward_kwargs.api_key={KEYS['config']}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.OTHER={KEYS['environment']}",
        "trainer.logger=[console,file]",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
    )
    said = capfd.readouterr()
    assert run.training_rows()[-1]["reward/num_defaulted"] > 0, "no reply made the function fail"
    files = [f for f in run.folder.rglob("*") if f.is_file()]
    assert any(f.name == "config.yaml" for f in files)
    for kind, secret in KEYS.items():
        assert [str(f) for f in files if secret.encode() in f.read_bytes()] == [], kind
        assert secret not in said.out + said.err, kind
