"""`fitgpt completion`: prints a script that lets bash, zsh or fish complete commands, options and their values."""

from __future__ import annotations

from ..config.argv import listed_options
from ..config.command_options import COMMANDS, CompletionOptions
from ..config.fields import shown_flag

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
    flags: dict[str, list[str]] = {}   # of each command
    values: dict[str, list[str]] = {}  # of each option: those that every command with this option takes
    for name, cls in COMMANDS.items():
        specs = listed_options(cls, everything=True)
        flags[name] = [shown_flag(spec) if spec.kind == "bool" else f"{shown_flag(spec)}=" for spec in specs]
        flags[name] += ["--help", "--help-all"]
        for spec in specs:
            if accepted := spec.choices or SWITCHES.get(spec.kind, ()):
                flag = shown_flag(spec)
                values[flag] = [each for each in values.get(flag, accepted) if each in accepted]

    def cases(words: dict[str, list[str]]) -> str:
        return "\n".join(f"        {name}) words=\"{' '.join(each)}\" ;;" for name, each in words.items())

    return BASH.format(commands=" ".join(COMMANDS), cases=cases(flags), values=cases(values))


def fish() -> str:
    lines = ["complete -c fitgpt -e"]
    for name, cls in COMMANDS.items():
        lines.append(f"complete -c fitgpt -n __fish_use_subcommand -f -a {name} -d {_quoted(cls.summary)}")
        for spec in listed_options(cls, everything=True):
            choices = f" -a {_quoted(' '.join(spec.choices))}" if spec.choices else ""
            value = "" if spec.kind == "bool" else f" -r{choices}"
            flag = shown_flag(spec).removeprefix("--")
            lines.append(f"complete -c fitgpt -n '__fish_seen_subcommand_from {name}' -l {flag}{value} "
                         f"-d {_quoted(spec.help)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
