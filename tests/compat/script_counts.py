"""Counts how many launch scripts of the existing verl train two steps here; nothing of the scripts is in this repository.

    python -m tests.compat.script_counts FOLDER                        # FOLDER/verl, FOLDER/verl_recipe: their checkouts
    python -m tests.compat.script_counts FOLDER --only spo trainer.engine_fallback=fsdp

Each script runs with a `python` that notes its arguments and ends. Then the command trains a tiny random model of its
family, in a process with a deadline. Paths, counts, logger and rollout engine are changed, and a reward function is added.
Actors of recipes are plain objects. FOLDER/results.json keeps the outcomes, and a later call tries what is not there.
It needs peft; recipes need hydra-core, codetiming, litellm, pylatexenc, zmq and langgraph.
"""

import argparse
import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas
import peft
import ray
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import verl
from tests.engines.tiny import make_model_with_head
from tests.vision_families import vision_folder
from verl.models.tiny import TINY_FAMILIES, make_tiny_model

LIMIT_S, CAPTURE_LIMIT_S, NUM_ROWS = 120, 12, 64
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")
FAMILIES = {  # pattern of a path or a script's name -> family
    r"qwen3[._-]5.*a\d+b": "qwen3_5_moe", r"qwen3[._-]5": "qwen3_5", r"qwen3[._-]?next": "qwen3_next",
    r"qwen3[._-]vl.*(a\d+b|moe)": "qwen3_vl_moe", r"qwen3[._-]vl": "qwen3_vl", r"qwen2[._-]5[._-]vl": "qwen2_5_vl",
    r"qwen2[._-]vl": "qwen2_vl", r"qwen3.*a\d+b|qwen3[-_](235|moe)": "qwen3_moe", r"qwen3": "qwen3", r"qwen": "qwen2",
    r"mimo": "mimo", r"deepseek[-_]v4": "deepseek_v4", r"deepseek[-_](v3|v2)|moonlight|kimi|dsv3": "deepseek_v3",
    r"gpt[-_]oss": "gpt_oss", r"glm[-_]?4[._-]?1v": "glm4v", r"glm.*air|glm[-_]?4[._-]5": "glm4_moe", r"glm": "glm4",
    r"gemma": "gemma2", r"mistral|nemo": "mistral", r"seed[-_]oss": "seed_oss", r"nemotron": "nemotron_h",
    r"minicpm": "minicpmo", r"mixtral": "mixtral", r"deepseek|llama|smollm": "llama",
}  # fmt: skip
FURTHER_FAMILIES = {  # families of transformers that the tiny models do not have
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    "seed_oss": {"head_dim": 16}, "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "full_attention_interval": 2},
}  # fmt: skip
KINDS = {  # pattern of a module, a script and its arguments -> kind of rows, length of prompts
    r"messages_key=prompt": ("turns", "256"), r"^\S*sft": ("sft", "256"), r"main_eval.*open_math": ("aime24", "256"),
    r"/r1/": ("Maxwell-Jia/AIME_2024", "256"), r"/spo/": ("text", "1024"), r"teacher_key": ("both", "1024"),
    r"tool_config_path|retool|interaction_config|multi_turn.enable=true": ("tools", "1400"), r"infigui": ("point", "1024"),
    r"geo3k|image_key|_vl_|-vl-|video": ("image", "1024"), "": ("chat", "256"),
}  # fmt: skip
CHANGES = {  # pattern of a key -> value; OUT is a folder of the run, PROMPT the length of its prompts
    r"train_batch_size$|val_batch_size$|ppo_mini_batch_size$|micro_batch_size(_per_gpu)?$": "2", r"data\.gen_batch_size$": "4",
    r"max_token_len_per_gpu$|max_num_batched_tokens$": "4096", r"max_prompt_length$|rollout\.prompt_length$": "PROMPT",
    r"max_response_length$|rollout\.response_length$|max_resp_len$": "16", r"rollout\.n$|val_kwargs\.n$": "2",
    r"virtual_pipeline_model_parallel_size$": "null", r"parallel_size$|n_gpus_per_node$|nnodes$|nproc_per_node$": "1",
    r"max_model_len$": "2048", r"max_num_seqs$": "16", r"trainer\.logger$": "[console]", r"trainer\.save_freq$": "-1",
    r"total_training_steps$|total_epochs$|test_freq$": "2", r"default_local_dir$|_data_dir$": "OUT", r"fsdp_size$": "-1",
    r"num_workers$": "1", r"truncate_length$|max_length$": "512", r"rollout\.name$": "native", r"trainer\.device$": "auto",
    r"tool_response_length$": "64", r"max_turns$|max_(user|assistant)_turns$": "2", r"overlong_buffer(_cfg)?\.len$": "4",
}  # fmt: skip
MODEL_KEYS = r"(model\.path|model_path|tokenizer_path|partial_pretrain|hf_config_path|lora_adapter_path)$"
ADDED = {
    "actor_rollout_ref.rollout.name": "native", "trainer.n_gpus_per_node": "1", "trainer.nnodes": "1", "reward.debug": "True",
    "reward.num_workers": "1", "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
    "ray_kwargs.ray_init.num_cpus": "4", "trainer.device": "auto",
}  # fmt: skip
RECORD = """import json, os, re, sys
name, words = os.path.basename(sys.argv[1]), sys.argv[2:]
if name == "ray" and words[:2] == ["job", "submit"] and "--" in words:
    name, *words = words[words.index("--") + 1 :]
if name == "uv":
    words = words[next((i for i, word in enumerate(words) if re.match("python|torchrun", word)), len(words)) + 1 :]
if re.search("python|torchrun|^uv$", name) and "-c" not in words[:1]:
    modules = [word for word, before in zip(words[1:], words) if before == "-m" and word != "torch.distributed.run"]
    start = (modules + [word for word in words if word.endswith(".py")])[:1]
    if start:
        rest = words[words.index(start[0]) + 1 :]
        print(json.dumps([start[0], *rest]), file=open(os.environ["CAPTURED"], "a"))
    elif "-" in words: print("cuda")  # a program on the standard input asks for the device
"""
STUBS = """accelerate apt apt-get conda cp curl git hf huggingface-cli nsys nvidia-smi npu-smi pip pip3 python python3 ray
sbatch scp sleep srun ssh sudo torchrun uv wget"""
REWARD = """import hashlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    bit = hashlib.sha256(solution_str.encode()).digest()[0] % 2
    return {"score": float(bit), "acc": bool(bit)}
"""


def captured(folder: Path, script: Path) -> list[str]:
    """The module and the arguments of a script's last training command; empty if it has none."""
    note, home, stubs = folder / "captured", folder / "home", folder / "stubs"
    if not stubs.exists():
        stubs.mkdir()
        (folder / "record.py").write_text(RECORD)
        for name in STUBS.split():
            (stubs / name).write_text(f'#!/bin/bash\nexec {sys.executable} {folder / "record.py"} {name} "$@"\n')
            (stubs / name).chmod(0o755)
    note.unlink(missing_ok=True)
    places = "HDFS_ROOT DATA_ROOT RAY_DATA_HOME VERL_PROFILE_SAVE_PATH ckpts_home"
    words = ["1", str(home)] if "sft" in str(script) else ["gsm8k", "32", "0.01", "1"] * ("rep_exp" in script.parts)
    environment = {
        "PATH": f"{stubs}:/usr/bin:/bin", "HOME": str(home), "CAPTURED": str(note), "DEVICE": "gpu", "USER": "x",
        "INFER_BACKEND": "vllm", "LANG": "C.UTF-8", "SLURM_SUBMIT_DIR": str(folder / "root"), "BASH_FUNC_ulimit%%": "() { :; }",
        "BASH_FUNC_telnet%%": "() { echo Connected; }", "KIMI_K2_6_MODEL_PATH": "/kimi", "FLASH_MODEL_PATH": "/deepseek_v4",
        "LORA_ADAPTER_PATH": "/qwen3", **dict.fromkeys(places.split(), str(home)), "project_name": "p", "exp_name": "e",
    }  # fmt: skip
    run = {"cwd": folder / "root", "env": environment, "capture_output": True, "timeout": CAPTURE_LIMIT_S}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(["bash", str(script), *words], **run)
    commands = [json.loads(line) for line in note.read_text().splitlines()] if note.exists() else []
    command = next((c for c in reversed(commands) if any("=" in word for word in c[1:])), [])
    return [word for word in command if word not in words]


def model_folder(folder: Path, family: str) -> Path:
    """A tiny random model of a family."""
    out, base = folder / "models" / family, family.removesuffix("_mtp")
    if not any(out.glob("*config.json")):
        out.mkdir(parents=True, exist_ok=True)
        if family in VISION:
            vision_folder(out, family)
        elif base.endswith("_lora"):
            model = AutoModelForCausalLM.from_pretrained(model_folder(folder, base.removesuffix("_lora")))
            peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).save_pretrained(out)
        elif base.endswith("_rm"):
            policy = shutil.copytree(model_folder(folder, base.removesuffix("_rm")), out, dirs_exist_ok=True)
            AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(out)
        elif family != base or family == "mimo":
            make_model_with_head(out, "qwen2" if family == "mimo" else base)
        else:
            TINY_FAMILIES.setdefault(family, FURTHER_FAMILIES.get(family, {}))
            make_tiny_model(out, family, max_position_embeddings=4096)
    return out


def rows_file(folder: Path, kind: str, name: str) -> Path:
    """Questions with answers, of a kind of KINDS."""
    out = folder / f"{kind.replace('/', '_')}_{name}" / "train.parquet"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        pandas.DataFrame([_row(kind, name, number) for number in range(NUM_ROWS)]).to_parquet(out)
    return out


def _row(kind: str, name: str, number: int) -> dict:
    question, answer = f"What is {number} + {number}?", str(2 * number)
    said = {"question": question, "answer": answer}
    if kind in ("sft", "turns"):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        prompt = turns if kind == "turns" else question
        return {"messages": turns, "prompt": prompt, "response": answer, "extra_info": said, **said}
    facts = {"split": name, "index": number, "total_steps": 4, **said}
    row = {
        "data_source": "openai/gsm8k", "ability": "math", "reward_model": {"style": "rule", "ground_truth": answer},
        "prompt": [{"role": "user", "content": question}], "extra_info": facts,
    }  # fmt: skip
    if kind == "text":  # as DAPO-Math-17k-Processed has them
        return {**row, "data_source": "math_dapo", "prompt": question, "extra_info": {"index": str(number)}}
    if kind in ("aime24", "Maxwell-Jia/AIME_2024"):
        return {**row, "data_source": kind, "responses": [answer]}
    if kind == "tools":
        tool = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": answer}}}
        query = {"name": "gsm8k", "query": question, "ground_truth": answer}
        facts |= {"need_tools_kwargs": True, "tools_kwargs": tool, "interaction_kwargs": query}
    if kind in ("image", "point") or (kind == "both" and number % 2):
        png = io.BytesIO()
        Image.new("RGB", (56, 56), (3 * number, 40, 90)).save(png, "PNG")
        source = "point" if kind == "point" else "hiyouga/geometry3k"
        row |= {"images": [{"bytes": png.getvalue(), "path": None}], "data_source": source}
        row["prompt"] = [{"role": "user", "content": f"<image>{question}"}]
    return row


def changed(folder: Path, script: str, module: str, words: Sequence[str], out: Path) -> Iterator[str]:
    """The arguments of a command for a tiny run."""
    text, keys, student, is_sft = " ".join(words), set(), "", "sft" in module
    everything = re.sub(r"\S*(project|experiment)_name=\S*", "", f"{module} {script} {text}".lower())
    kind, prompt = next(row for pattern, row in KINDS.items() if re.search(pattern, everything))
    for word in words:
        read = re.match(r"^(\+{0,2}|~)([\w./@]+)=(.*)$", word, re.DOTALL)
        if not read or "ray_kwargs" in word or "runtime_env" in word:
            yield from [] if read else [word]
            continue
        sign, key, value = read.groups()
        keys.add(key)
        stays = value.strip() in ("null", "None", "npu")
        if re.search(r"^data\..*(train_files|val_files|test_files)$|^data\.path$", key) and not stays:
            file = rows_file(folder / "rows", kind, "val" if "val" in key else "train")
            # a data set of the hub, which a class of the script loads by its name, can be a folder
            value = file.parent if "custom_cls.path" in text and ".parquet" not in value else file
        elif re.search(MODEL_KEYS, key) and not stays:
            place = value if re.search("[a-zA-Z]{3}", value) else script
            family = next((name for pattern, name in FAMILIES.items() if re.search(pattern, place.lower())), "qwen2")
            student = student or family  # a teacher has its student's tokens
            family = student if "teacher" in key and student in VISION else family
            has_head = re.search(r"mtp\.enable(_train)?=[Tt]rue", text) and family in ("qwen3_5_moe", "deepseek_v3")
            scores = key.startswith("reward") and re.search("reward|hpsv3", value.lower())
            family += "_mtp" * bool(has_head) + "_lora" * key.endswith("adapter_path") + "_rm" * bool(scores)
            value = model_folder(folder, family)
        elif value.startswith("./") and (beside := (folder / script).parent / value).is_file():
            value = beside
        elif (pattern := next((p for p in CHANGES if re.search(p, key)), None)) and not stays:
            value = {"OUT": out / key.rpartition(".")[2], "PROMPT": prompt}.get(CHANGES[pattern], CHANGES[pattern])
        yield f"{sign}{key}={value}"
    if "main_eval" in module:
        return
    added = {"trainer.total_training_steps": "2", "trainer.logger": "[console]", "trainer.default_local_dir": str(out)}
    added |= {"data.train_batch_size": "2"} if is_sft else ADDED
    if not (is_sft or "main_gen" in module or any(key.endswith("custom_reward_function.path") for key in keys)):
        added["custom_reward_function.path"] = str(folder / "reward.py")
    sign = "" if module.startswith("verl.") else "++"
    yield from (f"{sign}{key}={value}" for key, value in added.items() if key not in keys)


def make_ray_plain() -> None:
    """Let actors be objects of this process, and references values."""

    def value(reference: object) -> object:
        if isinstance(reference, list):
            return [value(one) for one in reference]
        result = reference[0] if isinstance(reference, tuple) else reference
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    class Handle:
        def __init__(self, target: object):
            self.__dict__["target"] = target

        def __getattr__(self, name: str) -> object:
            result = getattr(self.target, name)
            return types.SimpleNamespace(remote=lambda *a, **k: (result(*a, **k),)) if callable(result) else result

    def wrapped(target: object) -> object:
        if inspect.isfunction(target):
            target.remote, target.options = (lambda *a, **k: (target(*a, **k),)), (lambda **k: target)
            return target
        members = {"remote": staticmethod(lambda *a, **k: Handle(target(*a, **k)))}
        members |= {"options": classmethod(lambda cls, **k: cls)}
        return type("Actor", (), {**members, "__ray_metadata__": types.SimpleNamespace(modified_class=target)})

    ray.remote = lambda *a, **k: wrapped(a[0]) if a and callable(a[0]) and not k else wrapped
    ray.get, ray.wait = (lambda reference, **k: value(reference)), (lambda references, **k: (references, []))
    ray.init = ray.shutdown = ray.timeline = lambda *a, **k: None
    ray.is_initialized = lambda: True


def outcome(folder: Path, script: str, further: Sequence[str]) -> str | None:
    """ "" if a script trains two steps or evaluates, else the last line that says why not; None without a command."""
    if not (command := captured(folder, folder / script)):
        return None
    out, log = folder / "out", folder / "logs" / f"{script.replace('/', '+')}.txt"
    shutil.rmtree(out, ignore_errors=True)
    child = os.fork()
    if not child:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        code: object = 1
        try:
            words = [*changed(folder, script, command[0], command[1:], out), *further]
            print(*command[:1], *words, sep="\n  ", flush=True)
            if not command[0].startswith("verl."):
                make_ray_plain()
            sys.argv = [command[0], *words]
            (runpy.run_path if command[0].endswith(".py") else runpy.run_module)(command[0], run_name="__main__")
            code = 0
        except SystemExit as error:
            code = error.code or 0
        except BaseException:  # noqa: BLE001 - whatever a recipe raises
            traceback.print_exc()
        print("Ended with", code, flush=True)
        os._exit(code if isinstance(code, int) else 1)
    until = time.monotonic() + LIMIT_S
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end within {LIMIT_S} s"
        time.sleep(0.1)
    text = log.read_text(errors="replace")
    if "Ended with 0" in text and re.search(r"\b2 steps in |^\S*main_(eval|gen)", text):
        return ""
    lines = [line for line in text.splitlines() if re.search(r"Error|error:|There is no |^verl \w+: ", line)]
    return (lines or text.splitlines() or ["no output"])[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", default="", metavar="PATTERN", help="scripts with paths that have it")
    parser.add_argument("further", nargs="*", metavar="KEY=VALUE", help="overrides of every command")
    options = parser.parse_intermixed_args()
    folder, results = options.folder, options.folder / "results.json"
    for place in ("root", "logs", "home/pythonpath/Megatron-LM"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    links = {"examples": "verl/examples", "tests": "verl/tests", "recipe": "verl_recipe", "base_dir": "root"}
    for name, target in {**links, "verl": Path(verl.__file__).parent}.items():  # recipes find configs in this folder
        if not (folder / "root" / name).exists():
            (folder / "root" / name).symlink_to(folder / target)
    (folder / "reward.py").write_text(REWARD)
    os.environ.update(OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1", WANDB_MODE="disabled", VERL_PAGE="0")
    torch.set_num_threads(1)
    os.chdir(folder / "root")
    sys.path[:0] = [str(folder / "root"), str(folder / "verl_recipe")]
    scripts = sorted(path for part in ("verl", "verl_recipe") for path in (folder / part).rglob("*.sh"))
    outcomes = json.loads(results.read_text()) if results.exists() else {}
    for script in (str(path.relative_to(folder)) for path in scripts):
        if re.search(options.only, script) and script not in outcomes:
            why = outcome(folder, script, options.further)
            if why is not None:
                outcomes[script] = why
                results.write_text(json.dumps(outcomes, indent=1))
                print(script, why or "trains", sep=": ", flush=True)
    print(f"{sum(not why for why in outcomes.values())} of {len(outcomes)} scripts with a command train two steps.")


if __name__ == "__main__":
    main()
