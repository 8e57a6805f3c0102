"""`verl VERB ...`: finds the verb's file, runs it, and turns errors into one sentence and an exit code.

Nothing heavy is imported here: `verl --help` and `verl VERB --help` start without torch.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from verl.errors import ConfigError, VerlError, nearest
from verl.parallel.memory import keep_freed_memory
from verl.parallel.openmp import spin_briefly

# verb -> what it does; the code of each is verl/cli/<verb>.py, with _ for -
VERBS = {
    "train": "train a policy with PPO, GRPO and their kin",
    "eval": "validate a model on held-out prompts",
    "generate": "write samples of a model as JSON lines",
    "show": "show a run: what bounds it, what to change, how it learns",
    "check": "check everything that can be known before training",
    "import-check": "say what of a script or file of the existing verl runs here",
    "data": "prepare data files (GSM8K, reasoning-gym)",
    "convert": "turn a GGUF model into a Hugging Face folder",
    "export": "turn a checkpoint into a Hugging Face folder",
    "doctor": "say what this machine has, what would not work, and why",
}

# what other releases and trainers have as a verb -> what to do here
_ELSEWHERE = {
    **dict.fromkeys(
        ("sft", "dpo", "kto", "rm"),
        "is not available in this version. Train with another library, and go on from its model folder with verl train",
    ),
    **dict.fromkeys(
        ("plan", "bench"),
        "is not available in this version. verl check estimates the memory of a run, verl show "
        "says where its time goes",
    ),
    "dashboard": "is not available in this version. verl show RUN says how a run stands; trainer.logger=[console,tensorboard] "
    "draws it",
    **dict.fromkeys(("ppo", "grpo"), "is verl train with algorithm.adv_estimator=gae (PPO) or grpo"),
    "merge": "is not needed: actor/huggingface in a checkpoint loads as it is, and verl export writes it elsewhere",
}

# what the user's disk or rights can refuse at any moment; other operating system errors are bugs of ours
_REFUSALS = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some of your quota",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "Choose a folder that can be written",
    errno.EACCES: "Choose a file that this user may read and write, or change its rights",
    errno.EPERM: "Choose a file that this user may read and write, or change its rights",
    errno.EISDIR: "Name a file, not a folder",
    errno.ENOTDIR: "Name a folder, not a file",
    errno.EIO: "Check the disk",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, that of the error's type, 130 for an interruption, 70 for a bug of ours."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    if arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        from verl._version import __version__

        print(__version__)
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb in _ELSEWHERE:
        print(f"verl: {verb} {_ELSEWHERE[verb]}.", file=sys.stderr)
        return 2
    if verb not in VERBS:
        print(f"verl: there is no verb {verb!r}{nearest(verb, VERBS) or '; see verl --help.'}", file=sys.stderr)
        return 2
    return run_verb(verb, rest, whole_process=argv is None)


def run_verb(verb: str, arguments: Sequence[str], *, whole_process: bool = False) -> int:
    """Run `verb`, with errors shown as `main` says. `whole_process`: this process is there for nothing else, so that the verb
    may fork it (its `run_process`, where it has one)."""

    def run(given: list[str]) -> int:
        module = importlib.import_module(f"verl.cli.{verb.replace('-', '_')}")
        return (getattr(module, "run_process", module.run) if whole_process else module.run)(given)

    return run_guarded(verb, run, arguments)


def run_guarded(verb: str, run: Callable[[list[str]], int], arguments: Sequence[str]) -> int:
    """The exit code of `run(arguments)`, with errors shown as `main` says, under the name `verb`."""
    spin_briefly()
    keep_freed_memory()
    try:
        _require_text(arguments)
        return run(list(arguments))
    except VerlError as error:
        if os.environ.get("LOG_LEVEL", "").upper() == "DEBUG":
            _show_traceback()
        print(f"verl {verb}: {_without_secrets(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"verl {verb}: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, for example `head`, has what it wanted
        return 0
    except OSError as error:
        if error.errno not in _REFUSALS:
            return _report_bug(verb)
        print(f"verl {verb}: {_refusal(error)}", file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001 - anything else is a bug of ours, and is shown whole
        return _report_bug(verb)


def _require_text(arguments: Sequence[str]) -> None:
    """Raises ConfigError for an argument with bytes that are no text in this locale: no file could hold them."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"The argument {argument!a} has bytes that are no text in this locale ({sys.getfilesystemencoding()}). "
                "Set PYTHONUTF8=1, or use names in UTF-8."
            ) from None


def _without_secrets(text: str) -> str:
    from verl.config.secrets import hide  # not above: `verl --help` needs no config

    return hide(text)


def _refusal(error: OSError) -> str:
    """What the operating system would not do, as a sentence; what was saved before is untouched."""
    place = f" {error.filename}" if error.filename else ""
    advice = _REFUSALS[error.errno or 0]
    return f"Reading or writing{place} failed: {error.strerror}. {advice}, and run the same command again."


def _report_bug(verb: str) -> int:
    _show_traceback()
    print(f"verl {verb}: this is a bug in verl; please report it with the lines above.", file=sys.stderr)
    return 70


def _show_traceback() -> None:
    import traceback

    traceback.print_exc()


def usage() -> str:
    """The text of `verl --help`."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {what}" for name, what in VERBS.items())
    return f"usage: verl VERB ...\n\n{verbs}\n\n`verl VERB --help` says more."


if __name__ == "__main__":
    raise SystemExit(main())
