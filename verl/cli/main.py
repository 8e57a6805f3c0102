"""`verl VERB ...`: finds the verb's file, runs it, and turns errors into one sentence and an exit code.

Nothing heavy is imported here: `verl --help` and `verl VERB --help` start without torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from verl.errors import VerlError, nearest

# verb -> what it does; the code of each is verl/cli/<verb>.py
VERBS = {
    "train": "train a policy with PPO, GRPO and their kin",
    "eval": "validate a model on held-out prompts",
    "generate": "write samples of a model as JSON lines",
    "check": "check everything that can be known before training",
    "data": "prepare data files (GSM8K, reasoning-gym)",
    "convert": "turn a GGUF model into a Hugging Face folder",
    "export": "turn a checkpoint into a Hugging Face folder",
    "doctor": "say what this machine has, what would not work, and why",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, that of the error's type, 130 for an interruption, 70 for a bug of ours."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from verl._version import __version__

        print(__version__)
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        print(f"verl: there is no verb {verb!r}{nearest(verb, VERBS) or '; see verl --help'}", file=sys.stderr)
        return 2
    return run_verb(verb, rest)


def run_verb(verb: str, arguments: Sequence[str]) -> int:
    """Run `verb`, with errors shown as `main` says."""
    # Threads that spin while they wait for work stall everything as soon as another process wants a core. The OpenMP
    # runtime reads this once, when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        return importlib.import_module(f"verl.cli.{verb}").run(list(arguments))
    except VerlError as error:
        if os.environ.get("LOG_LEVEL", "").upper() == "DEBUG":
            raise
        print(f"verl {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"verl {verb}: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, for example `head`, has what it wanted
        return 0
    except Exception:  # noqa: BLE001 - anything else is a bug of ours, and is shown whole
        import traceback

        traceback.print_exc()
        print(f"verl {verb}: this is a bug in verl; please report it with the lines above.", file=sys.stderr)
        return 70


def usage() -> str:
    """The text of `verl --help`."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {what}" for name, what in VERBS.items())
    return f"usage: verl VERB ...\n\n{verbs}\n\n`verl VERB --help` says more."


if __name__ == "__main__":
    raise SystemExit(main())
