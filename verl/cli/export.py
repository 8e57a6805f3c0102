"""`verl export`: a checkpoint's model as a Hugging Face folder of its own."""

from __future__ import annotations

from verl.cli.arguments import Parser


def run(argv: list[str]) -> int:
    parser = Parser(prog="verl export", description="Turn a checkpoint into a Hugging Face folder.")
    parser.add_argument(
        "source", help="a run folder (its newest complete checkpoint is taken) or a folder global_step_N"
    )
    parser.add_argument("output", help="folder to write; must not exist or be empty (but with --compare)")
    parser.add_argument("--step", type=int, help="step of the checkpoint to take from a run folder")
    parser.add_argument("--role", default="actor", help="actor or critic (default: actor)")
    parser.add_argument("--dtype", default="bfloat16", help="number format of the weights (default: bfloat16)")
    parser.add_argument("--compare", action="store_true", help="compare an existing folder with the checkpoint instead")
    arguments = parser.parse_args(argv)
    from verl.checkpoint.export import compare, export

    if arguments.compare:
        number = compare(arguments.source, arguments.output, arguments.role, arguments.step)
        print(f"{arguments.output} holds the {number} tensors of the checkpoint")
        return 0

    out = export(arguments.source, arguments.output, arguments.dtype, arguments.role, arguments.step)
    print(f"wrote {out}")
    return 0
