"""Names of vLLM and SGLang that verl uses, looked up in their sources.

A lookup imports neither package, since an import takes many seconds and may need a GPU. Forms of a name:

    vllm.v1.engine.llm_engine:LLMEngine.step     a member of a class or of its bases, or a name of a module
    sglang.srt.arg_groups.fields:*.tp_size       a field of some class of a module or of a package's modules
    vllm.entrypoints:/collective_rpc             a route: a literal in some module of a package
"""

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from verl.errors import ModelError

IN_PROCESS, SERVICE = "in verl's processes", "as a service"


def _members(place: str, names: str) -> tuple[str, ...]:
    return tuple(f"{place}{name}" for name in names.split())


# package -> way of use -> names; library.py has the imported names of vLLM
USES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        IN_PROCESS: (
            *_members(
                "vllm.engine.arg_utils:EngineArgs.",
                "model tokenizer skip_tokenizer_init trust_remote_code hf_overrides dtype seed tensor_parallel_size "
                "enable_expert_parallel max_model_len max_num_seqs max_num_batched_tokens enable_prefix_caching "
                "enable_chunked_prefill enforce_eager async_scheduling logprobs_mode logits_processors "
                "worker_extension_cls kv_cache_memory_bytes gpu_memory_utilization enable_sleep_mode "
                "distributed_executor_backend",
            ),
            *_members("vllm.entrypoints.llm:LLM.", "llm_engine collective_rpc reset_prefix_cache sleep wake_up"),
            *_members(
                "vllm.v1.engine.llm_engine:LLMEngine.",
                "add_request step abort_request engine_core model_executor vllm_config",
            ),
            *_members(
                "vllm.sampling_params:SamplingParams.",
                "n temperature max_tokens stop_token_ids ignore_eos logprobs detokenize extra_args output_kind",
            ),
            *_members("vllm.outputs:RequestOutput.", "request_id outputs finished num_cached_tokens"),
            *_members("vllm.outputs:CompletionOutput.", "token_ids logprobs finish_reason"),
        ),
        SERVICE: _members(
            "vllm.entrypoints:",
            "/health /v1/models /v1/completions /collective_rpc /reset_prefix_cache /update_weight_version /weight_info",
        ),
    },
    "sglang": {
        SERVICE: (
            *_members(
                "sglang.srt.arg_groups.fields:*.",
                "model_path tokenizer_path trust_remote_code json_model_override_args host port device dtype tp_size "
                "load_format quantization kv_cache_dtype "
                "ep_size mem_fraction_static context_length max_running_requests random_seed disable_radix_cache "
                "disable_decode_cuda_graph disable_prefill_cuda_graph enable_memory_saver log_level sampling_backend "
                "enable_lora max_lora_rank lora_target_modules max_loras_per_batch lora_strict_loading lora_backend",
            ),
            *_members(
                "sglang.srt.entrypoints:",
                "/health /model_info /server_info /generate /update_weights_from_disk /update_weight_version "
                "/begin_weight_update /update_weights_from_ipc /end_weight_update /pause_generation /continue_generation "
                "/abort_request /flush_cache /release_memory_occupation /resume_memory_occupation "
                "/load_lora_adapter /unload_lora_adapter",
            ),
            *_members("sglang.srt.layers.sampler:", "Sampler.forward register_sampler_backend"),
            *_members(
                "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.",
                "update_weights_from_ipc get_model",
            ),
            *_members(
                "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.",
                "adjusted_from_schedule_batch adjusted_filter_batch adjusted_merge_batch sampling_seed custom_params",
            ),
            "sglang.srt.layers.quantization.kv_cache:BaseKVCacheMethod.process_weights_after_loading",
            "sglang.srt.runtime_context:get_parallel",
        )
    },
}


def lookup(package: str) -> dict[str, dict[str, bool]]:
    """For each way of use, whether the installed `package` has the names; {} when it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(next(iter(spec.submodule_search_locations))).parent
    imported = {IN_PROCESS: _imported_names(Path(__file__).with_name("vllm") / "library.py", package)}
    uses = {way: (*imported.get(way, ()), *names) for way, names in USES[package].items()}
    return {way: {name: _has(root, name) for name in names} for way, names in uses.items()}


def require_names(package: str, way: str, advice: str) -> None:
    """Raise ModelError when the installed `package` lacks a name that `way` of use needs; `advice` is its last clause."""
    missing = [name for name, is_there in lookup(package).get(way, {}).items() if not is_there]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{package} {_version(package)} has no {missing[0]}{more}, which verl uses {way}; "
            f"{advice}. `verl doctor` lists all names."
        )


def _version(package: str) -> str:
    distributions = importlib.metadata.packages_distributions().get(package, ())
    return next(map(importlib.metadata.version, distributions), "of unknown version")


def _imported_names(file: Path, package: str) -> Iterator[str]:
    """Names that a module imports from `package`, except the optional ones inside `try`."""
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def _has(root: Path, name: str) -> bool:
    place, _, rest = name.partition(":")
    folder = root.joinpath(*place.split("."))
    if rest.startswith("/"):
        literals = (f'"{rest}"', f"'{rest}'")
        return any(literal in _text(file) for file in folder.rglob("*.py") for literal in literals)
    if rest.startswith("*."):
        classes = (node for file in _files(folder) for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef))
        return any(rest[2:] in _names(node.body) for node in classes)
    module = next(iter(_files(folder)), None)
    owner, _, member = rest.partition(".")
    if module is None:
        return False
    return _class_has(root, module, owner, member) if member else owner in _names(_tree(module).body)


def _class_has(root: Path, module: Path, owner: str, member: str) -> bool:
    """Whether a class or one of its bases has `member`, as far as imports by name lead to the bases."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            if member in _names(node.body) | _assigned_on_self(node):
                return True
            return any(_class_has(root, module, base.id, member) for base in node.bases if isinstance(base, ast.Name))
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and owner in (alias.name for alias in node.names):
            files = _files(root.joinpath(*node.module.split(".")))
            return bool(files) and _class_has(root, files[0], owner, member)
    return False


def _files(place: Path) -> list[Path]:
    """The file of a module, or the files of a package, its own first."""
    if place.is_dir():
        return sorted(place.glob("*.py"), key=lambda file: (file.name != "__init__.py", file.name))
    return [place.with_suffix(".py")] if place.with_suffix(".py").exists() else []


def _names(body: list[ast.stmt]) -> set[str]:
    """Names that statements define, below `if` and `try` too."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            names |= _names([*node.body, *node.orelse])
    return names


def _assigned_on_self(node: ast.ClassDef) -> set[str]:
    return {
        child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
    }


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(_text(file))
