"""Override lists of launch scripts (script_lists.py): each trains two steps on a tiny model, or gets its sentence."""

import json
import re

import pytest

from tests.compat import vision_lists
from tests.compat.script_lists import ACTOR, FAMILIES, KINDS, QUICK, REFUSED, ROLLOUT, RUNS
from tests.house.source import ROOT
from tests.json_lines import write_lines
from tests.slow import slow
from verl.config import load_config
from verl.errors import ConfigError
from verl.models.tiny import make_tiny_model

FILES = {
    "tools": "tools:\n- {class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}}\n",
    "rows": "from verl.utils.dataset.rl_dataset import RLHFDataset\nclass CustomRLHFDataset(RLHFDataset): pass\n",
    "parts": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return {'score': 1.0, 'a': float(len(solution_str)), 'b': 0.5}\n",
}
FILES["asks"] = """
import json
import urllib.request


async def compute_score_fapo(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    question = [{"role": "user", "content": solution_str[:20]}]
    ids = reward_model_tokenizer.apply_chat_template(question, tokenize=True, add_generation_prompt=True)
    body = json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 4}}).encode()
    request = urllib.request.Request(f"http://{reward_router_address}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        flawed = len(json.loads(reply.read())["output_ids"]) % 2
    return {"score": 1.0 - flawed, "acc": True, "pred": "", "is_flawed_positive": bool(flawed)}
"""
TRUTH = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}}
ROWS = (
    ("train", "x", "1", {}),
    ("turns", "x", "1", {"tools_kwargs": TRUTH}),
    ("kk", "kk_logic", {"solution_text_format": "(1) Zoey is a knight"}, {}),
    ("countdown", "countdown", {"target": 24, "numbers": [4, 6]}, {}),
)


@pytest.fixture(scope="module")
def files(tiny_llama, tmp_path_factory):
    """Place of each name that lists have in braces, but {model} and {out}."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("scripts")
    places = {name: folder / f"{name}.{'yaml' if name == 'tools' else 'py'}" for name in FILES}
    for name, place in places.items():
        place.write_text(FILES[name])
    for name, source, truth, extra in ROWS:
        rows = [
            {"data_source": source, "prompt": [{"role": "user", "content": f"row {i}"}],
             "reward_model": {"ground_truth": truth}, "extra_info": extra}
            for i in range(16)
        ]  # fmt: skip
        places[name] = folder / f"{name}.jsonl"
        write_lines(places[name], rows)
    judge = folder / "rm"
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tiny_llama, num_labels=1))
    model.save_pretrained(judge)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(judge)
    return {**places, "rm": judge}


@pytest.fixture(scope="module")
def model_of(tiny_llama, tmp_path_factory):
    folders = {"llama": tiny_llama}

    def model_of(family):
        if family not in folders:
            folders[family] = make_tiny_model(tmp_path_factory.mktemp(family), family)
        return folders[family]

    return model_of


def overrides(text, tree, files, model):
    out = tree["trainer"]["default_local_dir"]
    base = [
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", f"{ROLLOUT}.n=2",
        f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.fsdp_config.dtype=float32",
        *(f"data.{name}={value}" for name, value in {**tree["data"], "train_files": files["train"]}.items()),
        f"custom_reward_function.path={tree['custom_reward_function']['path']}", "reward.num_workers=1", "reward.debug=True",
        "trainer.logger=[file]", "trainer.total_training_steps=2", "trainer.val_before_train=False",
        f"trainer.default_local_dir={out}",
    ]  # fmt: skip
    added = text.format(**files, model=model, out=out).split()
    taken = {item.partition("=")[0].lstrip("+") for item in added}
    if f"+{ACTOR}.megatron.dtype=float16" in added:
        taken.add(f"{ACTOR}.fsdp_config.dtype")
    return [*(item for item in base if item.partition("=")[0] not in taken), *added]


@pytest.mark.parametrize(
    "row", [slow((kind, name), when=QUICK.get(name) != kind, id=f"{kind}, {name}") for kind, name in RUNS]
)
def test_a_list_trains_two_steps(row, tiny_tree, files, model_of):
    from verl.run.host import train

    assert train(load_config(overrides(RUNS[row], tiny_tree, files, model_of(FAMILIES.get(row[1], "llama"))))) == 0
    lines = open(f"{tiny_tree['trainer']['default_local_dir']}/metrics.jsonl").read().splitlines()
    trained = [metrics for metrics in map(json.loads, lines) if "actor/grad_norm" in metrics]
    assert [metrics["step"] for metrics in trained] == [1, 2]
    if "float16" in row:
        assert all(metrics["actor/loss_scale"] == 2.0**16 for metrics in trained)


def test_the_page_counts_the_lists():
    page = (ROOT / "docs" / "coming-from-verl.md").read_text(encoding="utf-8")
    section = page.split("## Launch scripts that were tried")[1].partition("A script that needs")[0]
    counts = {re.match(r"\w+", kind)[0]: str(len(lists)) for kind, lists in KINDS.items()}
    counts["images"] = str(len(vision_lists.RUNS) + len(vision_lists.FINE_TUNING))
    assert dict(re.findall(r"^\| (\w+)[^|]*\| (\d+) \|$", section, re.M)) == counts


@pytest.mark.parametrize("name", REFUSED)
def test_a_list_gets_its_sentence(name, tiny_tree, files, tiny_llama):
    text, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        load_config(overrides(text, tiny_tree, files, tiny_llama))
