"""Completion of commands, options and files in bash, zsh and fish, generated from the argument parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")

_BASH = """_megarl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" path="" part
    for part in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
        case " {paths} " in *" ${{path:+$path/}}$part "*) path="${{path:+$path/}}$part" ;; esac
    done
    case "$path" in
{cases}
    esac
}}
complete -o filenames -F _megarl megarl
"""
_CASE = """        "{path}") COMPREPLY=($(compgen -W "{words}" {files}-- "$word")) ;;"""
_FISH = """function __megarl_at --description 'whether these are the commands so far'
    set -l path ""
    set -l words (commandline -opc)
    set -e words[1]
    for part in $words
        set -l next (string trim --left --chars=/ "$path/$part")
        contains -- $next {paths}
        and set path $next
    end
    test "$path" = "$argv[1]"
end"""


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for ``eval "$(megarl completion bash)"``, the same in zsh, or ``megarl completion fish | source``."""
    table = dict(_words("", parser))
    if shell == "fish":
        return "\n".join(_fish(table))
    cases = (
        _CASE.format(path=path, words=" ".join(words), files="" if _has_commands(words) else "-f ")
        for path, words in table.items()
    )
    text = _BASH.format(paths=" ".join(path for path in table if path), cases="\n".join(cases))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def _words(path: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Yield (commands so far, such as "stage/pack"; the words that may follow) for a parser and its subcommands."""
    words: list[str] = []
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        words += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
    yield path, [*below, *words]
    for name, sub in below.items():
        yield from _words(f"{path}/{name}" if path else name, sub)


def _has_commands(words: list[str]) -> bool:
    return not words[0].startswith("-")


def _fish(table: dict[str, list[str]]) -> Iterator[str]:
    yield _FISH.format(paths=" ".join(path for path in table if path))
    for path, words in table.items():
        here = f"complete -c megarl -n '{f'__megarl_at {path}'.rstrip()}'"
        if _has_commands(words):
            names = [word for word in words if not word.startswith("-")]
            yield f"{here} -f -a '{' '.join(names)}'"
        yield from (f"{here} -l {word[2:]}" for word in words if word.startswith("--"))
