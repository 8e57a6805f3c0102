"""Calls of transformers without its warnings and progress bars. Its many errors become one sentence."""

import copy
import functools
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import transformers
from transformers import PreTrainedConfig

from verl.errors import ModelError, VerlError
from verl.foreign_text import clean
from verl.models.folder import reason
from verl.parallel.torch_settings import LOADING


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers. It loads in one thread at a time."""
    with LOADING, _silence():
        yield


@contextmanager
def _silence() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def parse_config(folder: Path, entries: Mapping[str, object], trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a folder whose config.json has these entries. transformers takes 1.4 ms to parse them, and a run asks eight
    times, so they are parsed once, unless the folder's own code does that."""
    parse = _parse.__wrapped__ if trust_remote_code else _parse
    return copy.deepcopy(parse(str(folder), json.dumps(entries), trust_remote_code))


@functools.lru_cache(maxsize=16)
def _parse(folder: str, _: str, trust_remote_code: bool) -> PreTrainedConfig:
    with quiet():
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return config


@contextmanager
def loading(path: str | Path, config: PreTrainedConfig) -> Iterator[None]:
    """Turn the many errors of transformers into one sentence, and keep it quiet."""
    try:
        with quiet():
            yield
    except VerlError:
        raise
    except Exception as error:  # of a family's code, for a config or a file that it does not expect
        if sys.flags.optimize > 1:
            raise ModelError(
                "Python runs without docstrings (PYTHONOPTIMIZE=2 or -OO), which transformers reads to define its models. "
                "Unset PYTHONOPTIMIZE, or set it to 1."
            ) from error
        architecture = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"{architecture} ({path}) is an encoder-decoder model; give a causal language model, such as Llama or Qwen."
            ) from error
        kind = "" if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: "
        raise ModelError(
            f"{clean(architecture, 80)} could not be loaded from {path}: {kind}{reason(error)}. Look at its config.json."
        ) from error
