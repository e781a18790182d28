"""Print a script that lets bash, zsh or fish complete the commands of kvbench.

Examples:
  source <(kvbench completion bash)                 in ~/.bashrc
  source <(kvbench completion zsh)                  in ~/.zshrc, below compinit
  kvbench completion fish > ~/.config/fish/completions/kvbench.fish

The script contains the commands, their options, and the names of models, methods, tasks, … of this version, so that it
starts no Python when Tab is pressed.
"""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module

from kvbench.cli import COMMANDS, GROUPS
from kvbench.cli.command import CommandParser, run_command
from kvbench.cli.run_help import list_names, read_settings
from kvbench.config.paths import GROUPS as SETTING_GROUPS
from kvbench.validation import require_choice

# a place is what stands between `kvbench` and the word that is completed, as far as it names a command
BASH = """_kvbench() {
    local line="${COMP_LINE:0:COMP_POINT}" words names= value= before=
    local token="${line##* }"
    read -ra words <<<"${line%"$token"}"
    if [[ $token == *=* ]]; then
        case "${token%%=*}" in
VALUES
        esac
        value="${token#*=}"
        if [[ $value == *,* ]]; then before="${value%,*},"; fi
        COMPREPLY=($(compgen -P "$before" -W "$names" -- "${value##*,}"))
    else
        case "${words[*]:1:2}" in
PLACES
        esac
        COMPREPLY=($(compgen -W "$names" -- "$token"))
        if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2>/dev/null; fi
    fi
}
complete -o default -F _kvbench kvbench
"""
ZSH = """#compdef kvbench
_kvbench() {
    local names= key="${PREFIX%%=*}"
    local -a typed=("${(@)words[2,CURRENT-1]}")
    if [[ $PREFIX == *=* ]]; then
        case "$key" in
VALUES
        esac
        compset -P '*[=,]'
        compadd -S '' -- ${=names} || _files
    else
        case "${typed[1,2]}" in
PLACES
        esac
        compadd -S '' -- ${(M)${=names}:#*=}
        compadd -- ${${=names}:#*=} || _files
    fi
}
compdef _kvbench kvbench
"""
FISH = """function __kvbench
    set -l token (commandline -ct)
    set -l words (commandline -opc)
    set -l names
    if string match -q '*=*' -- $token
        switch (string split -m 1 = -- $token)[1]
VALUES
        end
        set -l before (string replace -r '[^=,]*$' '' -- $token)
        printf '%s\\n' $before$names
    else
        switch "$words[2..3]"
PLACES
        end
        printf '%s\\n' $names
    end
end
complete -c kvbench -a '(__kvbench)'
"""
TEMPLATES = {"bash": BASH, "fish": FISH, "zsh": ZSH}


def make_parser() -> CommandParser:
    parser = CommandParser("completion", __doc__)
    parser.add_argument("shell", metavar="SHELL", help=", ".join(TEMPLATES))
    return parser


def list_places() -> Iterator[tuple[str, str]]:
    """Yield a place and the words that can follow there, separated by blanks."""
    yield "", " ".join([*(command.word for command in COMMANDS if not command.group), *GROUPS])
    for group in GROUPS:
        yield group, " ".join(command.word for command in COMMANDS if command.group == group)
    settings = [f"{name}=" for name in dict.fromkeys((*SETTING_GROUPS, *read_settings()))]
    for command in COMMANDS:
        usage = import_module(f"kvbench.cli.{command.module}").make_parser().format_usage()
        words = [*re.findall(r"--[a-z-]+", usage), "--help"]
        if "SETTING=VALUE" in usage:
            words += settings
        elif command.name == "completion":
            words += TEMPLATES
        yield command.name, " ".join(words)


def format_branch(shell: str, place: str, words: str) -> str:
    """Return a branch of a shell's `case` for a place. Arguments may follow a command that is no group's."""
    has_arguments = place in [command.name for command in COMMANDS if not command.group]
    if shell == "fish":
        more = f" '{place} *'" if has_arguments else ""
        return f"        case '{place}'{more}\n            set names {words}"
    more = f"|'{place} '*" if has_arguments else ""
    return f"        '{place}'{more}) names='{words}' ;;"


def make_script(shell: str) -> str:
    """Return the script for a shell of TEMPLATES."""
    branches = {"PLACES": list_places(), "VALUES": [(group, " ".join(list_names(group))) for group in SETTING_GROUPS]}
    script = TEMPLATES[shell]
    for key, pairs in branches.items():
        script = script.replace(key, "\n".join(format_branch(shell, place, words) for place, words in pairs))
    return script


def print_script(arguments: Sequence[str]) -> None:
    """Print the script."""
    shell = make_parser().parse(arguments).shell
    require_choice("SHELL", shell, TEMPLATES)
    print(make_script(shell), end="")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_script(arguments))
