"""`verl completion SHELL`: the script for bash, zsh or fish to complete verbs, options and keys."""

import argparse
import contextlib
import io
import re
from collections.abc import Sequence

from verl.cli.parser import Parser
from verl.config import PREFERENCE, RM, SCHEMAS, SFT, RunConfig, Schema

_ABOUT = """Print the completion script of a shell. To use it:
  bash: eval "$(verl completion bash)" in ~/.bashrc
  zsh:  eval "$(verl completion zsh)" in ~/.zshrc, after compinit
  fish: verl completion fish > ~/.config/fish/completions/verl.fish"""

# no space follows a completion that ends in a point or an equals sign
SCRIPTS = {
    "bash": """_verl() {
    mapfile -t COMPREPLY < <("${COMP_WORDS[0]}" completion --candidates "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [[ ${COMPREPLY[0]-} == *[.=] ]] && compopt -o nospace
}
complete -o default -F _verl verl""",
    "zsh": """_verl() {
    local -a candidates
    candidates=("${(@f)$("${words[1]}" completion --candidates "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -- ${(M)candidates:#*[.=]}
    compadd -- ${candidates:#*[.=]}
    [[ -n $candidates ]] || _files
}
compdef _verl verl""",
    "fish": """function __verl_candidates
    set -l typed (commandline -opc) (commandline -ct)
    $typed[1] completion --candidates $typed[2..-1] 2>/dev/null
end
complete -c verl -a '(__verl_candidates)'""",
}
_PROGRAMS: dict[str, Schema[RunConfig]] = {  # verb -> its keys, if it takes other keys than verl train
    "sft": SFT,
    "rm": RM,
    **dict.fromkeys(("preference", "dpo", "kto", "orpo", "simpo", "cpo"), PREFERENCE),
}
_TAKES_KEYS = ("train", "rejection", "eval", "generate", "check", "plan", *_PROGRAMS)


def run_completion(argv: list[str]) -> int:
    """Print a script, or the completions of a command line: the exit code."""
    if argv[:1] == ["--candidates"]:  # words of any form, options too
        for name in completions_of(argv[1:]):
            print(name)
        return 0
    parser = Parser(prog="verl completion", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=tuple(SCRIPTS))
    print(SCRIPTS[parser.parse_args(argv).shell])
    return 0


def completions_of(words: Sequence[str]) -> list[str]:
    """Completions of the last of `words` after `verl` on a command line."""
    from verl.cli.main import VERBS

    *before, begun = words or [""]
    if not before or before == ["help"]:
        return [name for name in ("help", *VERBS) if name.startswith(begun)]
    if begun.startswith("-"):
        return [option for option in _options(before[0]) if option.startswith(begun)]
    return _keys(_PROGRAMS.get(before[0], SCHEMAS["ppo"]), begun) if before[0] in _TAKES_KEYS else []


def _options(verb: str) -> list[str]:
    """The options that the help of `verb` lists."""
    from verl.cli.main import run_verb

    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        run_verb(verb, ["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.getvalue())))


def _keys(schema: Schema[RunConfig], begun: str) -> list[str]:
    """Keys and sections that begin with `begun`, down to the next point."""
    level = begun.count(".") + 1
    names = {".".join(path.split(".")[:level]) for path in schema.leaves if path.startswith(begun)}
    return sorted(f"{name}=" if name in schema.leaves else f"{name}." for name in names)
