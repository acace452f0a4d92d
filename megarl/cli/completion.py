"""Completion of commands, options and files in bash, zsh and fish, from the parser itself."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")

_BASH = """_megarl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" path="" part
    for part in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case " {paths} " in *" ${{path:+$path/}}$part "*) path="${{path:+$path/}}$part" ;; esac
    done
    case "$path" in
{cases}
    esac
}}
complete -o filenames -F _megarl megarl
"""
_CASE = """        "{path}") COMPREPLY=($(compgen -W "{words}" {files}-- "$word")) ;;"""


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """For ``eval "$(megarl completion bash)"``, the same in zsh, or ``megarl completion fish | source``."""
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
    """(commands so far, as "stage/pack"; what may follow) of a parser and all below it."""
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
    for path, words in table.items():
        seen = "".join(f"; and __fish_seen_subcommand_from {part}" for part in path.split("/")) if path else ""
        names = [word for word in words if not word.startswith("-")]
        if names:
            none = f"; and not __fish_seen_subcommand_from {' '.join(names)}"
            yield f"complete -c megarl -f -n 'true{seen}{none}' -a '{' '.join(names)}'"
        for option in (word[2:] for word in words if word.startswith("--")):
            yield f"complete -c megarl -n 'true{seen}' -l {option}"
