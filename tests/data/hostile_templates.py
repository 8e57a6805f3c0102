"""Untrusted chat templates: an error of verl, or prompts that are the same twice and have the row's content."""

import copy

from tests.data.rows import config, row
from tests.json_lines import write_lines
from verl.config.sections.data import SFTDataConfig
from verl.data.check import check_rows
from verl.data.conversations.dataset import load_conversations
from verl.data.dataset import load_dataset
from verl.data.prompts import PromptEncoder
from verl.errors import VerlError
from verl.models.tiny import make_tokenizer

CONFIG = config(max_prompt_length=100_000, train_max_samples=-1)
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
# what may stand before, in or after the turns of a template
PARTS = [
    "", "", "", "{{ range(1000) | random }}", "{{ ['a', 'b', 'c', 'd'] | random }}", "{{ strftime_now('%H%M%S%f') }}",
    "{{ strftime_now('%d %b %Y') }}", "{{ 'x' * 50000 }}", "{% for i in range(20000) %}ab{% endfor %}",
    "{% for i in range(10**9) %}{% endfor %}", "{{ raise_exception('no \x1b[31m') }}", "{{ 1 / 0 }}", "{{ unknown.a }}",
    "{{ messages.__class__.__mro__ }}", "{{ ''.__class__ }}", "{{ lipsum() }}", "{{ cycler.__init__.__globals__ }}",
    "{{ m['content'][::-1] if m else '' }}", "{{ namespace }}", "{{ messages | length }}", "{{ messages | tojson }}",
    "{{ tools | tojson }}", "{{ bos_token }}{{ eos_token }}", "<|im_end|>", "\u202e\x00\ufffd", "{% set x = messages.pop() %}",
    "{{ messages.append(messages[0]) }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ caller() }}",
]  # fmt: skip
CONTENTS = ["{{ m['content'] }}"] * 6 + [
    "", "{{ m['content'][:1] }}", "{{ m['content'] | upper }}", "{{ m['content'] | replace('e', '3') }}",
    "{{ m['content'] | trim }}", "{{ m['content'] * 3 }}", "{{ m }}", "{{ m['content'] | list | random }}", "{{ m.text }}",
    "{{ m['content'].encode() }}", "{{ m['content'] | e }}",
]  # fmt: skip
LOOPS = ["messages"] * 6 + [
    "messages[:1]", "messages[-1:]", "messages | reverse", "messages | sort(attribute='role')", "messages[1:]", "[]",
    "messages()",
]  # fmt: skip


def template(rng):
    """(kind, text of a template)."""
    turn = TURN.replace("{{ m['content'] }}", rng.choice(CONTENTS))
    before, inside, after = (rng.choice(PARTS) for _ in range(3))
    loop = rng.choice(LOOPS)
    end = rng.choice(["<|im_start|>assistant\n"] * 4 + ["", "{{ range(9) | random }}"])
    text = f"{before}{{% for m in {loop} %}}{inside}{turn}{{% endfor %}}{after}"
    text += f"{{% if add_generation_prompt %}}{end}{{% endif %}}"
    if rng.random() < 0.05:
        text = text[: rng.randrange(len(text))]
    kind = next((name for name in ("random", "strftime", "10**9", "__", "* 50000", "20000") if name in text), "other")
    return {"10**9": "endless", "__": "escape", "* 50000": "long", "20000": "long"}.get(kind, kind), text


def prompts(path, tokenizer):
    """Token ids of all rows, as a run reads them."""
    rows, encoder = load_dataset(str(path), tokenizer, CONFIG), PromptEncoder(tokenizer, CONFIG)
    return [encoder.encode(rows.prompt(rows[number]), rows.place(number)) for number in range(len(rows))]


def sequences(path, tokenizer):
    loaded = load_conversations(str(path), tokenizer, SFTDataConfig())
    return [[sequence.input_ids.tolist() for sequence in loaded[number]] for number in range(len(loaded))]


def outcome(rng, files, tokenizer):
    kind, tokenizer.chat_template = template(rng)
    read, path = rng.choice([(prompts, files[0]), (sequences, files[1])])
    try:
        if read is prompts and (problems := check_rows(str(path), tokenizer, CONFIG).problems):
            check_sentence(problems[0])
            refused_by_run(path, tokenizer)
            return kind, "refused"
        first = read(path, tokenizer)
    except VerlError as error:
        check_sentence(str(error))
        return kind, "refused"
    assert read(path, copy.copy(tokenizer)) == first, f"another prompt each time: {tokenizer.chat_template!r}"
    return kind, "equal twice"


def refused_by_run(path, tokenizer):
    try:
        prompts(path, tokenizer)
    except VerlError:
        return
    raise AssertionError(f"verl check refuses what the run takes: {tokenizer.chat_template!r}")


def check_sentence(text):
    assert text.isprintable(), text
    assert len(text) < 1500, text


def cases(rng, count, folder):
    """(kind of template, outcome) of `count` templates."""
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Where are the seven trees?"}]
    answer = {"role": "assistant", "content": "There, here and elsewhere."}
    files = [folder / "prompts.jsonl", folder / "chats.jsonl"]
    write_lines(files[0], (row(i, prompt=[chat[0], {**chat[1], "content": f"Count {i} 1234"}]) for i in range(3)))
    write_lines(files[1], ({"messages": [*chat, answer] * n} for n in (1, 2)))
    tokenizer = make_tokenizer()
    for _ in range(count):
        yield outcome(rng, files, tokenizer)
