"""Row formats of preferences: the result of each, and the errors for rows that fit none or are wrong inside."""

import pytest

from tests.data.conversations.templates import chat
from verl.config.sections.data import PreferenceDataConfig
from verl.data.preferences.formats import preference_of
from verl.errors import DataError

QA = chat("q", "a")
QB = chat("q", "b")
ASK, A, B = QA[:1], QA[1:], QB[1:]
SAYS = [{"from": "human", "value": "q"}]

PAIRS = {
    "texts": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "prompt_chosen_rejected", "q", ("a", "b")),
    "an empty text": ({"prompt": "q", "chosen": "a", "rejected": ""}, "prompt_chosen_rejected", "q", ("a", "")),
    "messages": ({"prompt": ASK, "chosen": A, "rejected": B}, "prompt_chosen_rejected", ASK, (A, B)),
    "texts beside messages": ({"prompt": ASK, "chosen": "a", "rejected": "b"}, "prompt_chosen_rejected", ASK, (A, B)),
    "a text prompt beside answers": (
        {"prompt": "q", "chosen": A, "rejected": B},
        "prompt_chosen_rejected",
        ASK,
        (A, B),
    ),
    "UltraFeedback": (
        {"prompt": "q", "chosen": QA, "rejected": QB, "score_chosen": 9.0, "messages": QA},
        "repeated_prompt",
        ASK,
        (A, B),
    ),
    "a prompt of messages that is repeated": (
        {"prompt": ASK, "chosen": QA, "rejected": QB},
        "repeated_prompt",
        ASK,
        (A, B),
    ),
    "more than the prompt is repeated": (
        {"prompt": "q", "chosen": chat("q", "a", system="s"), "rejected": chat("q", "b", system="s")},
        "repeated_prompt",
        chat("q", system="s"),
        (A, B),
    ),
    "a repeated text": (
        {"prompt": "q a", "chosen": "q a b", "rejected": "q a c"},
        "repeated_prompt",
        "q a",
        (" b", " c"),
    ),
    "a repeated word": ({"prompt": "1", "chosen": "1a", "rejected": "1b"}, "prompt_chosen_rejected", "1", ("1a", "1b")),
    "implicit texts": (
        {"chosen": "Human: q\n\nAssistant: yes", "rejected": "Human: q\n\nAssistant: no"},
        "chosen_rejected",
        "Human: q\n\nAssistant:",
        (" yes", " no"),
    ),
    "implicit texts without a prompt": ({"chosen": "a", "rejected": "b"}, "chosen_rejected", "", ("a", "b")),
    "implicit messages": ({"chosen": QA, "rejected": QB}, "chosen_rejected", ASK, (A, B)),
    "implicit messages of several turns": (
        {"chosen": chat("q", "x", "r", "a"), "rejected": chat("q", "x", "r", "b", "more", "c")},
        "chosen_rejected",
        chat("q", "x", "r"),
        (A, chat("_", "b", "more", "c")[1:]),
    ),
    "LLaMA-Factory conversations": (
        {
            "system": "s",
            "conversations": SAYS,
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        "conversations_chosen_rejected",
        chat("q", system="s"),
        (A, B),
    ),
    "LLaMA-Factory instructions": (
        {"instruction": "q", "input": "x", "chosen": "a", "rejected": "b"},
        "instruction_chosen_rejected",
        chat("q\nx"),
        (A, B),
    ),
}
LABELLED = {
    "texts": ({"prompt": "q", "completion": "a", "label": True}, "prompt_completion_label", "q", "a"),
    "messages": ({"prompt": ASK, "completion": A, "label": 0}, "prompt_completion_label", ASK, A),
    "a text beside messages": ({"prompt": ASK, "completion": "a", "label": 1}, "prompt_completion_label", ASK, A),
    "LLaMA-Factory messages": ({"messages": QA, "label": False}, "messages_label", ASK, A),
    "LLaMA-Factory conversations": (
        {"conversations": [*SAYS, {"from": "gpt", "value": "a"}], "label": True},
        "conversations_label",
        ASK,
        A,
    ),
    "LLaMA-Factory instructions": (
        {"instruction": "q", "output": "a", "label": True},
        "instruction_output_label",
        ASK,
        A,
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pairs_become_a_prompt_and_two_completions(case):
    row, row_format, prompt, completions = PAIRS[case]
    preference = preference_of(row, PreferenceDataConfig())
    assert (preference.row_format, preference.prompt, preference.completions) == (row_format, prompt, completions)
    assert (preference.label, preference.margin) == (None, 0.0)


@pytest.mark.parametrize("case", PAIRS | LABELLED)
def test_a_system_column_is_read_or_refused(case):
    row, _, prompt, _ = (PAIRS | LABELLED)[case]
    if isinstance(prompt, str):
        with pytest.raises(DataError, match="would not read its field 'system'"):
            preference_of(row | {"system": "S"}, PreferenceDataConfig())
    else:
        system = [] if prompt[0]["role"] == "system" else [{"role": "system", "content": "s"}]
        assert preference_of(row | {"system": "s"}, PreferenceDataConfig()).prompt == system + prompt


@pytest.mark.parametrize("case", LABELLED)
def test_labelled_completions_become_a_prompt_and_one(case):
    row, row_format, prompt, completion = LABELLED[case]
    preference = preference_of(row, PreferenceDataConfig())
    assert (preference.row_format, preference.prompt, preference.completions) == (row_format, prompt, (completion,))
    assert preference.label is bool(row["label"])


def test_columns_can_have_other_names():
    settings = PreferenceDataConfig(prompt_key="input", chosen_key="good", rejected_key="bad", margin_key="gap")
    preference = preference_of({"input": "q", "good": "a", "bad": "b", "gap": 2, "prompt": "x"}, settings)
    assert (preference.prompt, preference.completions, preference.margin) == ("q", ("a", "b"), 2.0)
    settings = PreferenceDataConfig(completion_key="output", label_key="kto_tag")
    assert preference_of({"prompt": "q", "output": "a", "kto_tag": True}, settings).label is True


WRONG = {
    "neither": ({"text": "a"}, "neither a pair .'chosen', 'rejected'. nor a labelled completion .'label'."),
    "half a pair": ({"prompt": "q", "chosen": "a", "rejected": None}, "neither a pair"),
    "equal texts": ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal, so that there is nothing to prefer"),
    "equal conversations": ({"chosen": QA, "rejected": QA}, "are equal, so that there is nothing to prefer"),
    "other first messages": ({"chosen": QA, "rejected": chat("r", "b")}, "no common first message"),
    "no answer": ({"chosen": QA, "rejected": ASK}, "field 'rejected' ends where the common beginning"),
    "another prompt": ({"prompt": "r", "chosen": QA, "rejected": QB}, "without the user message of 'prompt': 'r'"),
    "another system message": (
        {"system": "t", "chosen": chat("q", "a", system="s"), "rejected": chat("q", "b", system="s")},
        "different system messages",
    ),
    "tools of a text": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "tools": [{"name": "f"}]},
        "would not read its field 'tools'",
    ),
    "a text beside a conversation": ({"chosen": "a", "rejected": QB}, "both be texts or both be lists"),
    "a wrong role": ({"prompt": "q", "chosen": [{"role": "asistant", "content": "a"}], "rejected": B}, "assistant"),
    "a number": (
        {"prompt": "q", "chosen": 3, "rejected": "b"},
        "field 'chosen' must be a text or a list of messages, but it is 3",
    ),
    "a label that is none": ({"prompt": "q", "completion": "a", "label": "good"}, "must be true .desirable. or false"),
    "a label alone": ({"prompt": "q", "label": True}, "has a label, but no completion"),
    "no answer at the end": ({"messages": chat("q", "a", "r"), "label": True}, "must be the assistant's answer"),
    "a margin that is no number": ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "1"}, "a finite number"),
    "an infinite margin": ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")}, "a finite number"),
    "a margin beyond floats": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 10**400},
        "at most 1e.12 in size",
    ),
    "a margin beyond float32": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1e308},
        "at most 1e.12 in size",
    ),
    "images": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "images": ["x.png"]},
        "images .field 'images'. cannot be read",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rows_are_refused_with_the_field(case):
    row, sentence = WRONG[case]
    with pytest.raises(DataError, match=sentence):
        preference_of(row, PreferenceDataConfig())
