"""The snippets of docs/tinker.md run as they stand, and its table of what is not served is true."""

import os
import re
from pathlib import Path

import pytest

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from starlette.routing import Match  # noqa: E402

from tests.forked import run_forked  # noqa: E402
from tests.tinker.served import running  # noqa: E402
from tests.tinker.test_tenants import PROTOBUF, model_of, post, rows  # noqa: E402
from verl.cli.main import main  # noqa: E402
from verl.tinker.app import application  # noqa: E402

TEXT = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text(encoding="utf-8")
CODE = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))


def test_the_snippets_run(bench, tmp_path):
    with running(bench, tmp_path) as served:
        served.service.bases.bases[0].names.append("model")
        environment = {
            **os.environ,
            "TINKER_BASE_URL": served.url,
            "TINKER_API_KEY": "tml-any",
            "TINKER_TELEMETRY": "0",
        }
        # an abort of the client names its threads
        (tmp_path / "snippets.py").write_text(f"import faulthandler\nfaulthandler.enable()\n{CODE}")
        code, output = run_forked(tmp_path / "snippets.py", env=environment, cwd=tmp_path, timeout_s=120)
        assert code == 0, output[-2000:]


CALL = re.compile(r"\b_?(get|post|put|delete)\(\s*f?\"(/api/v1/[^\"]+)\"")


def sdk_routes():
    """(method, path) of the routes that the installed SDK calls, with NAME for what it fills in."""
    files = [file for file in Path(tinker.__file__).parent.rglob("*.py") if not file.name.endswith("_test.py")]
    calls = {call for file in files for call in CALL.findall(file.read_text(encoding="utf-8"))}
    return sorted({(re.sub(r"\{\w+\}", "NAME", path), method.upper()) for method, path in calls})


def test_the_table_of_routes_is_that_of_the_sdk(shared):
    def is_served(path, method):
        scope = {"type": "http", "method": method, "path": path.replace("NAME", "m")}
        (first, *_) = [r for r in application(shared.service).routes if r.matches(scope)[0] == Match.FULL]
        return first.path != "/api/v1/{path:path}"

    calls = [(path, f"{method} {path.removeprefix('/api/v1/')}", method) for path, method in sdk_routes()]
    rows = [f"| `{call}` | {'yes' if is_served(path, method) else ''} |" for path, call, method in calls]
    table = "\n".join(["| route of the SDK, below `/api/v1/` | served |", "|---|---|", *rows])
    assert table in TEXT, table


def answers(section):
    """The rows of the table of requests that are not served."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    return {request: answer for request, answer in rows if answer.endswith(".")}


REFUSED = answers(TEXT.partition("answered with a sentence:")[2].partition("\n## ")[0])
STARTS = {
    "`actor_rollout_ref.rollout.name=vllm`": (["actor_rollout_ref.rollout.name=vllm"], {}),
    "`trainer.n_gpus_per_node=2`": (["trainer.n_gpus_per_node=2"], {}),
    "`actor_rollout_ref.rollout.in_flight_updates=True`": (["actor_rollout_ref.rollout.in_flight_updates=True"], {}),
    "start by torchrun": ([], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}),
}


def test_each_request_that_is_not_served_has_its_answer(shared):
    model, owner = model_of(shared, "tml-ada")
    base = {"session_id": owner, "base_model": shared.service.bases.names[0]}
    sampler = post(shared, "create_sampling_session", {**base, "sampling_session_seq_id": 0}).json()[
        "sampling_session_id"
    ]
    image = {"chunks": [{"type": "image", "data": "", "format": "png"}]}
    requests = {
        "`create_model` without LoRA": ("create_model", {**base, "model_seq_id": 9}),
        "loss `gspo`": ("forward_backward", rows(model, 1, loss="gspo")),
        "loss `stable_reinforce`": ("forward_backward", rows(model, 2, loss="stable_reinforce")),
        "an image in a prompt": (
            "asample",
            {"sampling_session_id": sampler, "seq_id": 0, "prompt": image, "sampling_params": {"max_tokens": 2}},
        ),
        "a sampler that follows the weights": (
            "save_weights_for_sampler",
            {"model_id": model, "seq_id": 3, "kind": "inflight"},
        ),
        "another optimizer": (
            "create_model",
            {**base, "model_seq_id": 9, "lora_config": {"rank": 2}, "optimizer_config": {"type": "dimuon"}},
        ),
        "a file encrypted by age": (
            "save_weights_external",
            {"model_id": model, "seq_id": 4, "path": "a", "age_encryption_recipients": ["age1x"]},
        ),
    }
    assert set(REFUSED) == {*requests, *STARTS}
    for name, (route, body) in requests.items():
        media = PROTOBUF if route == "forward_backward" else "application/json"
        answer = post(shared, route, body, media=media)
        assert 400 <= answer.status_code < 500
        assert answer.json()["detail"] == REFUSED[name]


@pytest.mark.parametrize("name", STARTS)
def test_a_start_that_is_not_possible_is_a_sentence(tiny_llama, tmp_path, monkeypatch, capsys, name):
    keys, environment = STARTS[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert main(["serve", "tinker", f"model={tiny_llama}", f"folder={tmp_path}", *keys]) == 2
    assert REFUSED[name] in capsys.readouterr().err.replace("\n", " ")
