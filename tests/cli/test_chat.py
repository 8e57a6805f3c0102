"""`verl chat MODEL` and `verl generate MODEL --prompt TEXT`."""

import builtins

import pytest

from tests.json_lines import read_lines
from verl.cli.main import main


def typed(monkeypatch, *lines):
    """The terminal gives these lines, then its end."""
    remaining = iter(lines)

    def read(_prompt):
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)


def test_a_chat_answers_in_the_context_of_its_turns(tiny_llama, monkeypatch, around, capsys):
    from verl.cli import chat

    contexts = []

    def remember(answer, self, messages):
        contexts.append([dict(message) for message in messages])
        return answer(self, messages)

    around(chat.Chat, "answer", remember)
    typed(monkeypatch, "Hi.", "", "And?", "/clear", "New.", "/exit", "unread")
    options = ["--max-tokens=4", "--temperature=0", "--system=Be short.", "--device=cpu"]
    assert main(["chat", str(tiny_llama), *options]) == 0
    assert [[message["role"] for message in context] for context in contexts] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert contexts[1][2]["content"] in capsys.readouterr().out


def test_a_model_without_a_template_cannot_chat(tiny_llama, monkeypatch, tmp_path, capsys):
    import shutil

    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert main(["chat", str(folder)]) == 4
    assert "has no chat template. Use `verl generate" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--max-tokens=0", "--temperature=-1", "--temperature=nan", "--temperature=inf"])
def test_a_chat_refuses_numbers_that_no_sampling_has(tiny_llama, capsys, option):
    assert main(["chat", str(tiny_llama), option]) == 2
    assert f"argument {option.partition('=')[0]}: it is" in capsys.readouterr().err


def test_a_chat_goes_on_after_lines_that_the_model_cannot_read(tiny_llama, monkeypatch, capsys):
    typed(monkeypatch, "h\udcff", "x" * 5000, "Hi.", "/clear", "Hi.")
    assert main(["chat", str(tiny_llama), "--max-tokens=4", "--device=cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("The text is left out; /clear begins a new conversation.") == 1
    assert out.count("\n") == 5


def test_generate_prints_the_responses_to_prompts(tiny_llama, capsys):
    settings = ["data.max_response_length=4", "actor_rollout_ref.rollout.n=2"]
    assert main(["generate", str(tiny_llama), "--prompt", "Hi.", "--prompt=2?", *settings]) == 0
    assert capsys.readouterr().out.count("\n\n") >= 3


def test_rows_with_only_a_prompt_get_no_score(tiny_llama, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    prompts.write_text('{"prompt": "Hi."}\n')
    files = [f"data.val_files={prompts}", "--output", str(output), f"trainer.default_local_dir={tmp_path}/run"]
    assert main(["generate", str(tiny_llama), *files, "data.max_response_length=4"]) == 0
    assert [row["score"] for row in read_lines(output)] == [None]
    assert "1 samples of 1 prompts: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "Name prompts: `verl generate MODEL --prompt TEXT`"),
        (("--prompt=a", "--output=b"), "Give one of them"),
        (
            ("--prompt=a", "data.val_files=b.jsonl"),
            "data.val_files='b.jsonl' and --prompt set the same. Give one of them",
        ),
        (
            ("--prompt=a", "actor_rollout_ref.model.path=b"),
            "actor_rollout_ref.model.path='b' and the model of the command set the same",
        ),
        (("--output=b", "--log-dir=c", "trainer.log_dir=d"), "trainer.log_dir='d' and --log-dir set the same"),
    ],
)
def test_generate_needs_prompts_from_one_place(options, sentence, tiny_llama, capsys):
    assert main(["generate", str(tiny_llama), *options]) == 2
    assert sentence in capsys.readouterr().err
