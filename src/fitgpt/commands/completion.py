"""`fitgpt completion`: prints a script that lets bash, zsh or fish complete commands, options and their values."""

from __future__ import annotations

from typing import Any

from ..config.command_options import CompletionOptions
from ..config.fields import OptionSpec, option_specs

BASH = """\
_fitgpt() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="" flag="" before=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "$word" in  # bash splits --option=value into three words, unless COMP_WORDBREAKS says otherwise
        --*=*) flag="${{word%%=*}}" before="$flag=" word="${{word#*=}}" ;;
        =) flag="${{COMP_WORDS[COMP_CWORD-1]}}" word="" ;;
        *) [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "=" ] && flag="${{COMP_WORDS[COMP_CWORD-2]}}" ;;
    esac
    case "$flag" in
{values}
    esac
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -P "$before" -W "$words" -- "$word"))
        return
    fi
    word="$before$word"
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word"))
            case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _fitgpt fitgpt
"""
SWITCHES = {"bool": ("True", "False"), "auto": ("auto", "True", "False")}  # values of such options
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # zsh reads bash's script


def completion(options: CompletionOptions) -> int:
    """Prints the script; returns the exit code."""
    print({"bash": bash, "zsh": lambda: ZSH + bash(), "fish": fish}[options.shell](), end="")
    return 0


def bash() -> str:
    commands = _options_by_command()
    cases = "\n".join(f"        {name}) words=\"{' '.join(_words(specs))}\" ;;"
                      for name, (_, specs) in commands.items())
    values: dict[str, list[Any]] = {}  # per option, the values that every command with this option takes
    for spec in (spec for _, specs in commands.values() for spec in specs if spec.choices or spec.kind in SWITCHES):
        accepted, flag = spec.choices or SWITCHES[spec.kind], f"--{spec.name}"
        values[flag] = [each for each in values.get(flag, accepted) if each in accepted]
    return BASH.format(commands=" ".join(commands), cases=cases, values="\n".join(
        f"        {flag}) words=\"{' '.join(map(str, each))}\" ;;" for flag, each in values.items()))


def fish() -> str:
    lines = ["complete -c fitgpt -e"]
    for name, (summary, specs) in _options_by_command().items():
        lines.append(f"complete -c fitgpt -n __fish_use_subcommand -f -a {name} -d {_quoted(summary)}")
        for spec in specs:
            choices = f" -a {_quoted(' '.join(spec.choices))}" if spec.choices else ""
            value = "" if spec.kind == "bool" else f" -r{choices}"
            lines.append(f"complete -c fitgpt -n '__fish_seen_subcommand_from {name}' -l {spec.name}{value} "
                         f"-d {_quoted(spec.help)}")
    return "\n".join(lines) + "\n"


def _options_by_command() -> dict[str, tuple[str, list[OptionSpec]]]:
    """Each command with its summary and its options."""
    from .main import COMMANDS  # main imports this module when the command is called

    return {name: (command.summary, list(option_specs(command.options).values())) for name, command in COMMANDS.items()}


def _words(specs: list[OptionSpec]) -> list[str]:
    return [f"--{spec.name}" if spec.kind == "bool" else f"--{spec.name}=" for spec in specs] + ["--help"]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
