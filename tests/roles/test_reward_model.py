"""Reward models as roles: a classifier against Hugging Face's own, a judge against its prompt, both inside a run."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from verl.config import RewardModelConfig
from verl.config.roots.reward_model import RMDataConfig
from verl.config.sections.reward import RewardModelRolloutConfig
from verl.data.preferences.dataset import load_preferences
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, ModelError, NumericsError
from verl.models import classifier
from verl.models.classifier import load_reward_model, sequence_scores
from verl.models.load import load_tokenizer
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.parallel.register import registered
from verl.roles import judges
from verl.roles.reward_model import build_reward_model, conversation_text, read_template

pytestmark = pytest.mark.seed("B12")

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]


def make_classifier(folder, family="llama", *, labels=1, seed=3):
    """A folder that AutoModelForSequenceClassification wrote."""
    make_tiny_model(folder / "base", family, seed=seed)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=labels)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder / "rm")
    load_tokenizer(folder / "base").save_pretrained(folder / "rm")
    return folder / "rm"


def batch_of(prompts, responses, messages=None, ground_truths=None):
    """The columns that a reward model reads."""
    width_p, width_r = max(map(len, prompts)), max(map(len, responses)) + 1
    p = torch.tensor([[0] * (width_p - len(x)) + list(x) for x in prompts])
    r = torch.tensor([list(x) + [0] * (width_r - len(x)) for x in responses])
    mask_p = torch.tensor([[False] * (width_p - len(x)) + [True] * len(x) for x in prompts])
    mask_r = torch.tensor([[True] * len(x) + [False] * (width_r - len(x)) for x in responses])
    objects = {
        "raw_prompt": messages or [[{"role": "user", "content": f"question {i}"}] for i in range(len(prompts))],
        "reward_model": [{"ground_truth": g} for g in ground_truths or ["x"] * len(prompts)],
        "uid": [str(i) for i in range(len(prompts))],
    }
    arrays = {}
    for name, values in objects.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    tensors = {
        "prompts": p, "prompt_mask": mask_p, "responses": r, "response_mask": mask_r,
        "attention_mask": torch.cat([mask_p, mask_r], dim=1),
    }  # fmt: skip
    return DataProto.from_dict(tensors, arrays)


def settings(path, **changes):
    rollout = RewardModelRolloutConfig(
        **{"dtype": "float32", "max_num_batched_tokens": 64, **changes.pop("rollout", {})}
    )
    return RewardModelConfig(enable=True, model_path=str(path), rollout=rollout, **changes)


TOKENIZER = make_tokenizer()


def ids(text):
    return TOKENIZER(text)["input_ids"]


PROMPTS = [ids("what is two and two")] * 3 + [ids("name a colour")] * 2 + [ids("x")]
RESPONSES = [ids("four"), ids("it is four"), ids("five"), ids("blue"), ids("blue sky"), ids("y")]


def theirs(path, sequences, dtype=torch.float32):
    """The score of each sequence by itself, by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([list(s)])).logits[0] for s in sequences])


@pytest.mark.parametrize("family", FAMILIES)
def test_classifier_scores_as_transformers_does(tmp_path, family):
    path = make_classifier(tmp_path, family)
    module = load_reward_model(path, dtype=torch.float64)
    sequences = [tuple(p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    expected = theirs(path, sequences, torch.float64)
    for max_tokens in (1, 30, 1000):
        scores = sequence_scores(module, sequences, max_tokens=max_tokens)
        torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    assert expected.unique().numel() == len(expected)


def test_a_shared_beginning_is_computed_once(tmp_path, around):
    module = load_reward_model(make_classifier(tmp_path))
    computed = []

    def counted(pack_rows, *args, **kwargs):
        packed = pack_rows(*args, **kwargs)
        computed.append(packed.num_tokens)
        return packed

    around(classifier, "pack_rows", counted)
    common = tuple(range(1, 40))
    sequences = [(*common, 50 + i) for i in range(8)] + [(7,), (7,)]
    sequence_scores(module, sequences, max_tokens=1000)
    assert computed == [39 + 8 + 2]
    computed.clear()
    sequence_scores(module, sequences, max_tokens=45)
    assert max(computed) <= 45
    assert sum(computed) < 3 * 39 + 8 + 3


def test_order_and_neighbours_do_not_change_a_score(tmp_path):
    module = load_reward_model(make_classifier(tmp_path), dtype=torch.float64)
    sequences = [tuple(p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    together = sequence_scores(module, sequences, max_tokens=1000)
    order = [4, 0, 5, 2, 1, 3]
    torch.testing.assert_close(sequence_scores(module, [sequences[i] for i in order], max_tokens=40), together[order])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda f: make_tiny_model(f / "m"), "causal language model"),
        (lambda f: make_classifier(f, labels=3), "one label"),
    ],
    ids=["causal", "labels"],
)
def test_models_that_cannot_score_are_refused(tmp_path, make, says):
    with pytest.raises(ModelError, match=says):
        load_reward_model(make(tmp_path))


def test_a_model_without_head_is_refused(tmp_path):
    path = make_tiny_model(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ModelError, match="no reward head"):
        load_reward_model(path)


def test_sequences_that_do_not_fit_are_refused(tmp_path):
    module = load_reward_model(make_classifier(tmp_path))
    with pytest.raises(ModelError, match="max_position_embeddings"):
        sequence_scores(module, [tuple([5] * 1025)], max_tokens=4096)
    with pytest.raises(ModelError, match="empty"):
        sequence_scores(module, [()], max_tokens=4096)


def test_same_tokenizer_reads_the_tokens_of_the_policy(tmp_path):
    path = make_classifier(tmp_path)
    worker = build_reward_model(settings(path), load_tokenizer(path), torch.device("cpu"))
    scores = worker.score(batch_of(PROMPTS, RESPONSES)).batch["reward_model_score"]
    expected = theirs(path, [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert scores.dtype == torch.float32


def test_another_tokenizer_reads_the_conversation(tmp_path, caplog):
    path = make_classifier(tmp_path)
    policy = load_tokenizer(path)
    policy.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    worker = build_reward_model(settings(path), policy, torch.device("cpu"))
    batch = batch_of(PROMPTS, RESPONSES)
    texts = [
        f"<|im_start|>user\nquestion {i}<|im_end|>\n<|im_start|>assistant\n{TOKENIZER.decode(r)}<|im_end|>"
        for i, r in enumerate(RESPONSES)
    ]
    expected = theirs(path, [worker.tokenizer(t)["input_ids"] for t in texts])
    torch.testing.assert_close(worker.score(batch).batch["reward_model_score"], expected, rtol=1e-4, atol=1e-5)
    assert "several turns" not in caplog.text
    batch.batch["response_mask"][0, 1] = False  # answered by a tool
    worker.score(batch)
    assert "an episode of several turns as one message" in caplog.text


@pytest.mark.parametrize("is_policy_template", [True, False])
def test_a_response_is_read_at_the_token_where_verl_rm_trains(tmp_path, is_policy_template):
    """Once, rows of messages trained at the line end of the template, and were read at <|im_end|>."""
    path = make_classifier(tmp_path)
    question = [{"role": "user", "content": "question 0"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("four", "five")]
    pair = {"prompt": question, "chosen": answers[0], "rejected": answers[1]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(pair))
    tokenizer = load_tokenizer(path)
    trained = [s.input_ids.tolist() for s in load_preferences(rows, tokenizer, RMDataConfig())[0]]
    policy = load_tokenizer(path)
    if not is_policy_template:
        policy.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    worker = build_reward_model(settings(path), policy, torch.device("cpu"))
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    sampled = [[*ids(text), tokenizer.eos_token_id] for text in ("four", "five")]
    assert trained == [prompt + response for response in sampled]
    scores = worker.score(batch_of([prompt] * 2, sampled, messages=[question] * 2)).batch["reward_model_score"]
    torch.testing.assert_close(scores, theirs(path, trained), rtol=1e-4, atol=1e-5)


def test_a_process_reward_model_is_read_before_the_token_that_ends_the_response(tmp_path):
    """A step's label trains at its last token; nothing trains at the end of the response."""
    path = make_classifier(tmp_path)
    tokenizer = load_tokenizer(path)
    as_classifier = build_reward_model(settings(path), tokenizer, torch.device("cpu"))
    steps = [ids("a\nb\n"), ids("c\n")]
    expected = as_classifier.score(batch_of(PROMPTS[:2], steps)).batch["reward_model_score"]
    file = path / "config.json"
    file.write_text(file.read_text().replace("LlamaForSequenceClassification", "LlamaForTokenClassification"))
    worker = build_reward_model(settings(path), tokenizer, torch.device("cpu"))
    ended = [[*step, tokenizer.eos_token_id] for step in steps]
    scores = worker.score(batch_of(PROMPTS[:2], ended)).batch["reward_model_score"]
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_a_score_that_is_not_finite_is_refused(tmp_path):
    path = make_classifier(tmp_path)
    worker = build_reward_model(settings(path), load_tokenizer(path), torch.device("cpu"))
    worker.module.score.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="gave nan for a response to prompt 0"):
        worker.score(batch_of(PROMPTS, RESPONSES))


def test_scores_by_rows_can_be_shared_out(tmp_path):
    """The parts of a batch score as the whole does, so any rank may take any rows."""
    path = make_classifier(tmp_path)
    worker = build_reward_model(settings(path), load_tokenizer(path), torch.device("cpu"))
    batch = batch_of(PROMPTS, RESPONSES)
    parts = [worker.score(batch.select_idxs(rows)).batch["reward_model_score"] for rows in ([0, 3, 4], [1, 2, 5])]
    together = worker.score(batch).batch["reward_model_score"]
    torch.testing.assert_close(torch.cat(parts), together[[0, 3, 4, 1, 2, 5]], rtol=1e-5, atol=1e-6)
    assert registered(type(worker))["score"].dispatch_mode.name == "ND_COMPUTE_PROTO"


TEMPLATE = "Q: {prompt} A: {response} key {ground_truth} {as json}"


def judge(path, **rollout):
    config = settings(path, judge_template=TEMPLATE, rollout={"response_length": 8, **rollout})
    return build_reward_model(config, load_tokenizer(path), torch.device("cpu"))


def test_a_judge_reads_the_template_and_replies_greedily(tmp_path, caplog):
    judges.warn_of_cut_replies.cache_clear()
    path = make_tiny_model(tmp_path / "judge")
    worker = judge(path)
    batch = batch_of(PROMPTS, RESPONSES, ground_truths=list("abcdef"))
    first = worker.score(batch).non_tensor_batch["reward_model_reply"]
    assert list(first) == list(worker.score(batch).non_tensor_batch["reward_model_reply"])
    prompt = worker.prompt("question 1", "it is four", "b")
    assert prompt == "Q: question 1 A: it is four key b {as json}"
    model = worker.judge.engine.module
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    tokens = worker.judge.tokenizer(text, return_tensors="pt")["input_ids"]
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    out = reference.generate(tokens, max_new_tokens=8, do_sample=False)
    assert first[1] == worker.judge.tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True)
    assert not any(p.requires_grad for p in model.parameters())
    assert [line for line in caplog.messages if "cut at reward.reward_model.rollout.response_length=8" in line]


def test_equal_questions_are_asked_once(tmp_path):
    worker = judge(make_tiny_model(tmp_path / "judge"))
    message = [[{"role": "user", "content": "same"}]] * 4
    replies = worker.score(batch_of(PROMPTS[:4], [ids("r")] * 4, messages=message)).non_tensor_batch[
        "reward_model_reply"
    ]
    assert len(set(replies)) == 1
    assert worker.judge.engine.stats()["num_prompt_tokens"] < 2 * len(worker.prompt("same", "r", "x")) + 80


def test_what_does_not_fit_into_the_judge_says_which_key(tmp_path):
    worker = judge(make_tiny_model(tmp_path / "judge"), response_length=1000)
    with pytest.raises(ModelError, match=r"reward_model\.rollout\.response_length"):
        worker.score(batch_of(PROMPTS, RESPONSES))


@pytest.mark.parametrize(("template", "says"), [("only {prompt}", "no place"), ("nowhere.txt", "does not exist")])
def test_templates_without_the_response_are_refused(template, says):
    with pytest.raises(ConfigError, match=says):
        read_template(template)


def test_a_template_may_be_a_file(tmp_path):
    (tmp_path / "judge.txt").write_text("Rate {response}")
    assert read_template(str(tmp_path / "judge.txt")) == "Rate {response}"


def test_a_conversation_names_its_speakers():
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert conversation_text(turns) == "system: be brief\n\nuser: hi"
    assert conversation_text(turns[1:]) == "hi"


def scripted(monkeypatch, reply):
    """A judge that replies as `reply(question)` says; returns the questions that it was asked."""
    prompts = []

    class Scripted:
        def replies(self, questions):
            prompts.extend(questions)
            return [reply(question) for question in questions]

        def release(self):
            pass

        def close(self):
            pass

    monkeypatch.setattr("verl.roles.reward_model.build_judge", lambda config, device, **limits: Scripted())
    return prompts


def replies_of(worker, truths):
    batch = batch_of(PROMPTS, RESPONSES, ground_truths=truths)
    return list(worker.score(batch).non_tensor_batch["reward_model_reply"])


def test_a_judge_compares_with_the_ground_truth_in_both_orders(monkeypatch):
    prompts = scripted(monkeypatch, lambda q: "[[A]]" if len(q.split("|")[0]) > len(q.split("|")[1]) else "[[B]]")
    worker = build_reward_model(settings("judge", judge_template="{first}|{second}"), TOKENIZER, torch.device("cpu"))
    answers = replies_of(worker, ["a long truth"] * 3 + [""] * 3)
    assert [reply.splitlines()[-1] for reply in answers] == ["Score: 0.0000"] * 3 + ["Score: 1.0000"] * 3
    assert all("judge/order_agreement: 1.0000" in reply for reply in answers)
    assert len(prompts) == 12


def test_a_judge_grades_by_a_rubric_and_keeps_its_replies(monkeypatch, tmp_path):
    (tmp_path / "rubric.yaml").write_text(
        "- {name: length, question: long, weight: 3}\n- {name: tone, question: kind}\n"
    )
    prompts = scripted(monkeypatch, lambda q: "8" if "kind" in q else str(len(q)))
    (tmp_path / "config.json").write_text("{}")  # of the judge
    config = settings(
        str(tmp_path), judge_template="{criterion}:{response}", rubric=str(tmp_path / "rubric.yaml"),
        reply_cache=str(tmp_path / "replies.jsonl"),
    )  # fmt: skip
    first, again = (
        replies_of(build_reward_model(config, TOKENIZER, torch.device("cpu")), list("abcdef")) for _ in "12"
    )
    assert first == again
    assert len(prompts) == 12
    (tmp_path / "config.json").write_text("{ }")
    replies_of(build_reward_model(config, TOKENIZER, torch.device("cpu")), list("abcdef"))
    assert len(prompts) == 24  # another judge
    assert first[0] == f"judge/length: {len('long:four'):.4f}\njudge/tone: 8.0000\nScore: {(3 * 9 + 8) / 4:.4f}"
    with pytest.raises(ConfigError, match=r"no place \{criterion\}"):
        read_template("{response}", has_rubric=True)
    with pytest.raises(ConfigError, match=r"no place \{second\}"):
        read_template("{first}")
