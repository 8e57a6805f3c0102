"""`python -m verl.model_merger merge|test`: the options of the existing verl's model merger, for `verl export`.

Nothing is merged: a checkpoint holds its model as a Hugging Face folder already.
"""

from __future__ import annotations

from pathlib import Path

from verl.cli import export
from verl.cli.arguments import Parser
from verl.errors import ConfigError

_NOT_NEEDED = ("--tie-word-embedding", "--is-value-model", "--use_cpu_initialization", "--trust-remote-code")


def run(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    folder = Path(arguments.local_dir)
    folder = folder.parent if folder.name == "huggingface" else folder
    checkpoint, role = (folder.parent, folder.name) if folder.name in ("actor", "critic") else (folder, "actor")
    if arguments.operation == "test":
        if arguments.test_hf_dir is None:
            raise ConfigError(
                "test compares --local_dir with a Hugging Face folder; give that as --test_hf_dir FOLDER."
            )
        return export.run([str(checkpoint), arguments.test_hf_dir, "--role", role, "--compare"])
    if arguments.target_dir is None:
        raise ConfigError(
            f"merge writes a Hugging Face folder; say where with --target_dir FOLDER, or use {folder}/huggingface."
        )
    if arguments.hf_upload_path is not None or arguments.private:
        raise ConfigError(
            "--hf_upload_path and --private upload the model, which is not available in this version. Leave them out, and "
            f"upload the folder afterwards: hf upload {arguments.hf_upload_path or 'NAME'} {arguments.target_dir}."
        )
    return export.run([str(checkpoint), arguments.target_dir, "--role", role])


def _parser() -> Parser:
    parser = Parser(
        prog="verl.model_merger", description="Turn a checkpoint into a Hugging Face folder, or compare the two."
    )
    parser.add_argument("operation", choices=("merge", "test"))
    parser.add_argument(
        "--local_dir", required=True, help="folder global_step_N/actor or global_step_N/critic of a run"
    )
    parser.add_argument("--target_dir", help="folder to write (merge)")
    parser.add_argument("--test_hf_dir", help="Hugging Face folder to compare with (test)")
    parser.add_argument("--backend", help="not needed: every engine saves the same files")
    parser.add_argument("--hf_upload_path", help="not available")
    parser.add_argument("--private", action="store_true", help="not available")
    for flag in _NOT_NEEDED:
        parser.add_argument(flag, action="store_true", help="not needed")
    return parser
