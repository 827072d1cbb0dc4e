"""`fitgpt completion`: what a shell needs to complete verbs, flags and their values, printed as a script for it."""

from __future__ import annotations

from typing import Any

from ..config.command_options import CompletionOptions
from ..config.fields import Knob, knobs_of

BASH = """\
_fitgpt() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="" flag="" before=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
        return
    fi
    case "$word" in  # bash takes --flag=value for three words, unless it was told otherwise
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
SWITCHES = {"bool": ("True", "False"), "auto": ("auto", "True", "False")}  # what kinds of knobs can be
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # it reads bash's own


def completion(options: CompletionOptions) -> int:
    print({"bash": bash, "zsh": lambda: ZSH + bash(), "fish": fish}[options.shell](), end="")
    return 0


def bash() -> str:
    flags = _flags()
    cases = "\n".join(f"        {verb}) words=\"{' '.join(_words(knobs))}\" ;;" for verb, (_, knobs) in flags.items())
    values: dict[str, list[Any]] = {}  # those that every verb takes which has the flag
    for knob in (knob for _, knobs in flags.values() for knob in knobs if knob.choices or knob.kind in SWITCHES):
        taken, flag = knob.choices or SWITCHES[knob.kind], f"--{knob.name}"
        values[flag] = [each for each in values.get(flag, taken) if each in taken]
    return BASH.format(verbs=" ".join(flags), cases=cases, values="\n".join(
        f"        {flag}) words=\"{' '.join(map(str, each))}\" ;;" for flag, each in values.items()))


def fish() -> str:
    lines = ["complete -c fitgpt -e"]
    for verb, (summary, knobs) in _flags().items():
        lines.append(f"complete -c fitgpt -n __fish_use_subcommand -f -a {verb} -d {_quoted(summary)}")
        for knob in knobs:
            choices = f" -a {_quoted(' '.join(knob.choices))}" if knob.choices else ""
            value = "" if knob.kind == "bool" else f" -r{choices}"
            lines.append(f"complete -c fitgpt -n '__fish_seen_subcommand_from {verb}' -l {knob.name}{value} "
                         f"-d {_quoted(knob.help)}")
    return "\n".join(lines) + "\n"


def _flags() -> dict[str, tuple[str, list[Knob]]]:
    """Each verb with its summary and what it can be told."""
    from .main import VERBS, options_of  # cli imports what it runs, so this waits until it is asked

    return {name: (verb.summary, list(knobs_of(options_of(verb)).values())) for name, verb in VERBS.items()}


def _words(knobs: list[Knob]) -> list[str]:
    return [f"--{knob.name}" if knob.kind == "bool" else f"--{knob.name}=" for knob in knobs] + ["--help"]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
