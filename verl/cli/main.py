"""`verl VERB ...`: runs the verb's function, and turns errors into one sentence and an exit code.

It imports nothing heavy: `verl --help` and `verl VERB --help` start without torch.
"""

import contextlib
import importlib
import io
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl.distributions import check_releases, require_part
from verl.errors import SYSTEM_ERRORS, ConfigError, MissingExtraError, VerlError, nearest, os_error_of
from verl.foreign_text import clean, printable
from verl.parallel.process_settings import keep_freed_memory, spin_briefly


class Verb(NamedTuple):
    """A verb: `function(arguments) -> exit code` as "module:name", and its line of `verl --help`."""

    function: str
    meaning: str
    supervised: bool = False  # if it has the process to itself, it may fork and is called with supervised=True


VERBS = {
    "train": Verb("verl.cli.train:run_train", "train a policy with PPO, GRPO or another estimator", supervised=True),
    "rejection": Verb("verl.cli.train:run_rejection", "fine-tune a policy on its own best samples", supervised=True),
    "sft": Verb("verl.cli.train:run_sft", "fine-tune a model on conversations or texts", supervised=True),
    "preference": Verb("verl.cli.train:run_preference", "train on preferences with any loss", supervised=True),
    "dpo": Verb("verl.cli.train:run_dpo", "train on preference pairs with DPO", supervised=True),
    "kto": Verb("verl.cli.train:run_kto", "train on labelled completions with KTO", supervised=True),
    "orpo": Verb("verl.cli.train:run_orpo", "train on preference pairs with ORPO", supervised=True),
    "simpo": Verb("verl.cli.train:run_simpo", "train on preference pairs with SimPO", supervised=True),
    "cpo": Verb("verl.cli.train:run_cpo", "train on preference pairs with CPO", supervised=True),
    "rm": Verb(
        "verl.cli.train:run_rm", "train a reward model on preferences, ratings or labelled steps", supervised=True
    ),
    "eval": Verb("verl.cli.train:run_eval", "validate a model on held-out prompts"),
    "generate": Verb("verl.cli.train:run_generate", "print or write responses of a model to prompts"),
    "chat": Verb("verl.cli.chat:run_chat", "chat with a model in the terminal"),
    "scale": Verb("verl.cli.scale:run_scale", "change the devices of rollout or reward of a run on Ray while it runs"),
    "show": Verb("verl.cli.show:run_show", "show a run: progress, bottleneck, advice, learning curves"),
    "view": Verb("verl.cli.view:run_view", "show runs in a browser: curves, groups, samples, tokens"),
    "serve": Verb("verl.cli.serve:run_serve", "serve a model to clients of the Tinker SDK, who train and sample"),
    "check": Verb("verl.cli.check:run_check", "check a config, its model and its data before training"),
    "plan": Verb("verl.cli.plan:run_plan", "plan placement, layouts, memory and time of a run on a cluster"),
    "import-check": Verb(
        "verl.cli.import_check:run_import_check", "report which scripts and files of other verl releases run here"
    ),
    "data": Verb(
        "verl.cli.data:run_data", "prepare data files (GSM8K, reasoning-gym, counting letters, AI preferences)"
    ),
    "convert": Verb("verl.cli.model_folders:run_convert", "turn a GGUF model into a Hugging Face folder"),
    "export": Verb("verl.cli.model_folders:run_export", "turn a checkpoint into a Hugging Face folder or GGUF file"),
    "doctor": Verb("verl.cli.doctor:run_doctor", "report this machine's hardware, packages and problems"),
    "completion": Verb("verl.cli.completion:run_completion", "print the completion script of bash, zsh or fish"),
}
# title in `verl --help` -> its verbs
_GROUPS = {
    "train": ("train", "sft", "rm", "preference", "dpo", "kto", "orpo", "simpo", "cpo", "rejection", "serve"),
    "before a run": ("check", "plan", "data", "convert", "import-check", "doctor", "completion"),
    "a run and its model": ("show", "view", "scale", "eval", "generate", "chat", "export"),
}
_EXAMPLES = """examples:
  verl sft model.path=MODEL data.train_files=conversations.jsonl trainer.default_local_dir=runs/sft
  verl train algorithm.adv_estimator=grpo actor_rollout_ref.model.path=MODEL data.train_files=train.jsonl \\
      reward.custom_reward_function.path=my_reward.py trainer.default_local_dir=runs/grpo
  verl show runs/grpo"""

# verbs of other releases and trainers -> what to do here
_ELSEWHERE = {
    "bench": "is not available in this version. verl plan predicts the time of a run, and verl show reports where its time "
    "goes",
    "dashboard": "is verl view RUN",
    **dict.fromkeys(("ppo", "grpo"), "is verl train with algorithm.adv_estimator=gae (PPO) or grpo"),
    "merge": "is not needed: actor/huggingface in a checkpoint loads as it is, and verl export writes it elsewhere",
}

_CRASH = 70  # the exit code of an unexplained error; a supervised run is started again


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, the code of the error's type, 1 for a refusal of the system, 130 for an
    interrupt, 70 for a bug in verl or in the user's code."""
    try:
        _open_streams()
        try:
            arguments = list(sys.argv[1:] if argv is None else argv)
            if arguments[:1] == ["help"] and len(arguments) > 1:
                arguments = [arguments[1], "--help"]
            if arguments and arguments[0] in VERBS:
                return run_verb(arguments[0], arguments[1:], whole_process=argv is None)
            return _without_verb(arguments)
        finally:  # after --help too, which exits
            sys.stdout.flush()
    except BrokenPipeError:
        return _output_closed()


def _open_streams() -> None:
    """Open /dev/null in place of a standard stream that the process lacks: else the next file that is opened gets its number,
    and what a library or a child writes there."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _without_verb(arguments: list[str]) -> int:
    """The answer to a command that names no verb: the exit code."""
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    verb = arguments[0]
    if verb in ("-h", "--help", "help"):
        print(usage())
        return 0
    if verb == "--version":
        from verl._version import __version__

        print(__version__)
        return 0
    if verb in _ELSEWHERE:
        print(f"verl: {verb} {_ELSEWHERE[verb]}.", file=sys.stderr)
    else:
        print(f"verl: there is no verb {verb!r}{nearest(verb, VERBS) or '; see verl --help.'}", file=sys.stderr)
    return 2


def run_verb(verb: str, arguments: Sequence[str], *, whole_process: bool = False) -> int:
    """Run `verb`, with errors shown as `main` says. `whole_process`: this process has no other work, so the verb may fork
    it."""
    with _guard(verb) as end:
        _require_text(arguments)
        module, _, name = VERBS[verb].function.partition(":")
        check_releases()
        require_part(module, f"verl {verb}")
        if VERBS[verb].supervised:
            from verl.cli.machine.requirements import outdated_sentence

            if outdated := outdated_sentence():  # the run could fail much later
                print(f"verl {verb}: {outdated}", file=sys.stderr)
                return MissingExtraError.exit_code
        function: Any = getattr(importlib.import_module(module), name)
        options = {"supervised": True} if whole_process and VERBS[verb].supervised else {}
        end.code = function(list(arguments), **options) or 0
    return end.code


def run_guarded(verb: str, run: Callable[[list[str]], int], arguments: Sequence[str]) -> int:
    """The exit code of `run(arguments)`, with errors shown as `main` says, under the name `verb`."""
    with _guard(verb) as end:
        _require_text(arguments)
        end.code = run(list(arguments))
    return end.code


@dataclass
class _End:
    """The end of a verb."""

    code: int = 0


@contextlib.contextmanager
def _guard(verb: str) -> Iterator[_End]:
    """Inside, an error of `verb` is shown as `main` says, and sets the exit code. No function stands between a verb and its
    work, so a debugger shows few frames."""
    spin_briefly()
    keep_freed_memory()
    _accept_any_text()
    end = _End()
    try:
        yield end
    except VerlError as error:
        if _is_debugging():
            _show_traceback()
        problem = _install_problem(error.__cause__) if str(error).startswith("Importing verl.") else ""
        end.code = MissingExtraError.exit_code if problem else error.exit_code
        # every rank has read the same config, and one of each node says so
        if not isinstance(error, ConfigError) or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"verl {verb}: {problem or _shown(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"verl {verb}: interrupted.", file=sys.stderr)
        end.code = 130
    except BrokenPipeError:
        end.code = _output_closed()
    except Exception as error:  # noqa: BLE001 - of the system, of code of the user's, or a bug
        end.code = _show_cause(verb, error)


def _show_cause(verb: str, error: Exception) -> int:
    """Show an error that is no sentence of verl: the exit code."""
    refusal = os_error_of(error)
    if refusal is not None and refusal.errno in SYSTEM_ERRORS:
        print(f"verl {verb}: {_refusal(refusal)}", file=sys.stderr)
        return 1
    problem = _install_problem(error)
    if not problem or _is_debugging():
        _show_traceback()
    print(f"verl {verb}: {problem or _cause(error)}", file=sys.stderr)
    return MissingExtraError.exit_code if problem else _CRASH


def _output_closed() -> int:
    """The exit code if the reader of our output, for example `head`, has closed it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes buffered output at its end
    return 0


def _accept_any_text() -> None:
    """Write characters that the locale of the terminal lacks as their escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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


def _shown(text: str) -> str:
    try:
        from verl.config.secrets import hide  # not above: `verl --help` needs no config
    except ImportError as error:  # a package is missing: nothing of a config was read
        if error.name and error.name.startswith("verl"):
            raise
        return printable(text)
    return printable(hide(text))


def _refusal(error: OSError) -> str:
    """An error of the operating system as a sentence."""
    place = f" {clean(error.filename)}" if error.filename else ""
    advice = SYSTEM_ERRORS[error.errno or 0]
    return f"Reading or writing{place} failed: {error.strerror}. {advice}, and run the same command again."


def _cause(error: Exception) -> str:
    """The cause of an error that is not a sentence."""
    text = clean(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text:
        return "there is not enough memory. Lower lengths or batch sizes; `verl check` estimates the memory of a run."
    place = _place_outside(error)
    if place:
        return f"{place} raised {type(error).__name__}: {text}. The file is not part of verl; correct it."
    return "this is a bug in verl; please report it with the lines above."


def _install_problem(error: BaseException | None) -> str:
    """A sentence for an error due to a missing, broken or too old package; "" for any other."""
    from verl.cli.machine.requirements import install_problem

    return "" if error is None else install_problem(error)


def _place_outside(error: BaseException) -> str:
    """File and line of the user's code that has raised `error`, itself or in a library that it called; "" for code of verl."""
    package = f"{Path(__file__).parents[1]}{os.sep}"
    libraries = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(package):
            return ""
        if not frame.filename.startswith(libraries):
            return f"{frame.filename}, line {frame.lineno},"
    return ""


def _is_debugging() -> bool:
    return os.environ.get("LOG_LEVEL", "").upper() == "DEBUG"


def _show_traceback() -> None:
    print(_shown(traceback.format_exc()), end="", file=sys.stderr)


def usage() -> str:
    """The text of `verl --help`."""
    width = max(map(len, VERBS))
    groups = (
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {VERBS[name].meaning}" for name in names)])
        for title, names in _GROUPS.items()
    )
    closing = "`verl help VERB` lists the arguments of a verb. docs/config.md has every key."
    return "\n\n".join(["usage: verl VERB [options] [key=value ...]", *groups, _EXAMPLES, closing])


if __name__ == "__main__":
    raise SystemExit(main())
