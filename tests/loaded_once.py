"""Models and tokenizers of tests, built once from an unchanged folder. Later loads are copies: 2 ms of a processor, not 28."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COPIES = 32


def remember_loads(patch: Any) -> None:
    """Patch what loading a model builds, reads and checks. The caller's folders must have passed the checks of tests/models."""
    from verl.models import check, load

    tokenizers = load.transformers.AutoTokenizer
    patch.setattr(load, "_on_meta", _once(load._on_meta, _meta_key))
    patch.setattr(load, "_filled", _once(load._filled, _weights_key))
    patch.setattr(check, "_problem_of", _once(check._problem_of, _verdict_key))
    patch.setattr(tokenizers, "from_pretrained", _once(tokenizers.from_pretrained, _tokenizer_key))


def _once(build: Callable[..., Any], key_of: Callable[..., object]) -> Callable[..., Any]:
    results: OrderedDict[object, Any] = OrderedDict()

    def built(*arguments: Any, **settings: Any) -> Any:
        key = key_of(*arguments, **settings)
        if key is None or key not in results:
            result = build(*arguments, **settings)
            if key is not None:
                results[key] = copy.deepcopy(result)
        else:
            result = copy.deepcopy(results[key])
        if key is not None:
            results.move_to_end(key)
            if len(results) > _COPIES:
                results.popitem(last=False)
        return result

    return built


def _meta_key(
    auto_class: str, config: Any, dtype: Any, trust_remote_code: bool, attention: str | None = None
) -> object:
    return None if trust_remote_code else (auto_class, _text(config), dtype, attention)


def _weights_key(auto_class: str, folder: Path, config: Any, skeleton: Any, trust_remote_code: bool) -> object:
    if trust_remote_code:
        return None
    return auto_class, _text(config), skeleton.dtype, skeleton.config._attn_implementation, _state(folder)


def _verdict_key(find: Any, module: Any) -> object:
    first = next(module.parameters())
    return find, type(module), _text(module.config), first.dtype, first.device, first.requires_grad, module.forward_kind


def _tokenizer_key(folder: str, *inputs: object, trust_remote_code: bool = False, **settings: object) -> object:
    return None if inputs or settings or trust_remote_code or not Path(folder).is_dir() else _state(Path(folder))


def _text(config: Any) -> object:
    return type(config), config._attn_implementation, config.to_json_string(use_diff=False)


def _state(folder: Path) -> object:
    """The folder and its files, as they were written last."""
    states = ((file.name, file.stat()) for file in folder.iterdir())
    return str(folder), tuple(sorted((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states))
