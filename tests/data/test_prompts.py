import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.rows import config
from verl.data.prompts import PromptEncoder, truncate
from verl.errors import ConfigError, DataError
from verl.models.tiny import make_tokenizer

USER = [{"role": "user", "content": "hi"}]


def encoder(template=..., **changes):
    tokenizer = make_tokenizer()
    if template is not ...:
        tokenizer.chat_template = template
    return PromptEncoder(tokenizer, config(**changes))


def test_the_prompt_ends_where_the_answer_begins():
    prompt_encoder = encoder()
    ids = prompt_encoder.encode(USER, "here")
    assert prompt_encoder.tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 257
    assert prompt_encoder.encode("hi", "here") == ids


def test_template_kwargs_reach_the_template():
    prompt_encoder = encoder(
        "{{ messages[0].content }}{% if think %}!{% endif %}", apply_chat_template_kwargs={"think": True}
    )
    assert prompt_encoder.tokenizer.decode(prompt_encoder.encode(USER, "here")) == "hi!"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "UndefinedError"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_a_template_that_fails_is_quoted(template, words):
    with pytest.raises(DataError, match=f"a.jsonl, row 3: the chat template failed.*{words}.*custom_chat_template"):
        encoder(template).encode(USER, "a.jsonl, row 3")


def test_without_a_template_only_texts_are_prompts():
    prompt_encoder = encoder(None)
    assert prompt_encoder.tokenizer.decode(prompt_encoder.encode("hi", "here")) == "hi"
    with pytest.raises(DataError, match=r"here: .*no chat template.*model\.custom_chat_template"):
        prompt_encoder.encode(USER, "here")


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(DataError, match="here: the prompt has no tokens"):
        encoder("{{ '' }}").encode(USER, "here")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab1 \n<|é語"), max_size=80), min_size=1), st.sampled_from([..., None]))
def test_bounds_of_short_prompts_choose_the_same_rows(prompts, template):
    prompt_encoder = encoder(template, max_prompt_length=70)
    exact, bounds = prompt_encoder.lengths(prompts), prompt_encoder.lengths(prompts, bounded=True)
    assert [bound <= 70 for bound in bounds] == [length <= 70 for length in exact]
    assert all(bound >= length for bound, length in zip(bounds, exact, strict=True))
    characters = len("ab" if template is None else "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n")
    assert prompt_encoder.lengths(["ab"], bounded=True) in ([characters], prompt_encoder.lengths(["ab"]))


def test_error_names_length_limit_and_fix():
    with pytest.raises(
        DataError, match=r"here: the prompt has \d+ tokens, more than .*=10\. .*filter_overlong_prompts"
    ):
        encoder(max_prompt_length=10).encode(USER, "here")


@pytest.mark.parametrize(
    ("mode", "expected"), [("left", [5, 6, 7, 8, 9]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 7, 8, 9])]
)
def test_truncation_really_acts(mode, expected):
    assert truncate(range(10), 5, mode) == expected
    uncut = encoder(max_prompt_length=1000).encode(USER, "here")
    assert encoder(max_prompt_length=8, truncation=mode).encode(USER, "here") == truncate(uncut, 8, mode)


@given(st.lists(st.integers(), max_size=20), st.integers(1, 20), st.sampled_from(["left", "right", "middle"]))
@settings(max_examples=40, deadline=None)
def test_truncation_laws(ids, limit, mode):
    short = truncate(ids, limit, mode)
    assert len(short) == min(len(ids), limit)
    assert short == ids or len(ids) > limit


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="'center'; it can be error, left, right, middle"):
        encoder(truncation="center")
