"""The endpoint for clients of OpenAI's API samples what the SDK samples."""

import pytest

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")

from tinker import types  # noqa: E402

from tests.tinker.data import datum  # noqa: E402

ODD = "{% if m['role'] == 'odd' %}{{ raise_exception('no') }}{% endif %}"
TEMPLATE = "{% for m in messages %}" + ODD + "{{ m['content'] }}{% endfor %}"


@pytest.fixture
def chat(served, monkeypatch):
    monkeypatch.setattr(served.service.bases.bench().tokenizer, "chat_template", TEMPLATE)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="tml-test", max_retries=0) as client:
        yield client


def test_a_checkpoint_answers_with_the_samples_of_the_sdk(served, chat):
    trainer, tokenizer = served.trainer(), served.service.bases.bench().tokenizer
    trainer.forward_backward([datum(0)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
    path = trainer.save_weights_for_sampler("a").result().path
    assert {served.service.bases.names[0], path} <= {model.id for model in chat.models.list()}
    prompt, params = tokenizer.encode("abc"), types.SamplingParams(max_tokens=6, seed=5)
    texts = {}
    for model in (path, served.service.bases.names[0]):
        source = {"model_path": model} if model == path else {"base_model": model}
        sampler = served.client().create_sampling_client(**source).result()
        sequences = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result().sequences
        texts[model] = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
        settings = {"model": model, "max_tokens": 6, "n": 2, "seed": 5}
        answer = chat.chat.completions.create(messages=[{"role": "user", "content": "abc"}], logprobs=True, **settings)
        assert [choice.message.content for choice in answer.choices] == texts[model]
        scores = [token.logprob for token in answer.choices[0].logprobs.content]
        assert scores == pytest.approx(list(sequences[0].logprobs))
        assert answer.usage.completion_tokens == sum(len(sequence.tokens) for sequence in sequences)
        plain = chat.completions.create(prompt=prompt, **settings)
        assert [choice.text for choice in plain.choices] == texts[model]
    assert texts[path] != texts[served.service.bases.names[0]]


def test_a_stop_ends_the_text_before_it(served, chat):
    settings = {"model": served.service.bases.names[0], "max_tokens": 20, "seed": 1, "prompt": "abc"}
    text = chat.completions.create(**settings).choices[0].text
    stop = next(
        letter for letter in text[1:] if letter.isascii() and letter != text[0]
    )  # others may be parts of tokens
    stopped = chat.completions.create(stop=["", stop], **settings).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text.partition(stop)[0], "stop")
    assert chat.completions.create(stop="", **settings).choices[0].text == text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "other"}, "no base model"),
        ({"model": "tinker://a/weights/b"}, "no checkpoint"),
        ({"stream": True}, "stream"),
        ({"tools": []}, "tools"),
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "samples"),
        ({"messages": [{"role": "odd", "content": ""}]}, "chat template"),
    ],
)
def test_what_is_not_served_is_a_sentence(served, chat, change, sentence):
    settings = {
        "model": served.service.bases.names[0],
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 2,
    }
    with pytest.raises(openai.APIStatusError, match=sentence) as raised:
        chat.chat.completions.create(**{**settings, **change})
    assert raised.value.status_code in (400, 404)
