"""Shell completion of a command line, made from its argparse parser: a script for bash, zsh or fish.

The scripts hold everything they need, so that completing starts no Python. All three read the words typed so far in one way: a command's
name leads to that command, an option with a value takes the word after it, and a command that runs somebody's program (its arguments are
`argparse.REMAINDER`) leaves what comes after the program alone.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["SHELLS", "completion_script"]

_FILES = {"file", "script", "yaml"}
"""Names of values, in lower case, for which file names are offered."""

_PROGRAM = " *"
"""Ends the place of a command whose program has been named: what follows is not ours."""


@dataclass(frozen=True, slots=True)
class _Option:
    flags: tuple[str, ...]
    help: str
    value: Literal["none", "files", "other"]
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A command, or the command line before the first one. `at`: a blank and a name for each step that leads there."""

    at: str
    commands: Mapping[str, str]
    options: tuple[_Option, ...]
    choices: tuple[str, ...]
    files: bool
    program: bool


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The text to evaluate in the shell, one of `SHELLS`."""
    return SHELLS[shell](parser.prog, list(_places(parser, "")))


def _places(parser: argparse.ArgumentParser, at: str) -> Iterator[_Place]:
    options: list[_Option] = []
    commands: dict[str, str] = {}
    below: dict[str, argparse.ArgumentParser] = {}
    choices: tuple[str, ...] = ()
    files = program = False
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        named = {str(name).lower() for name in (action.dest, action.metavar)}
        if isinstance(action, argparse._SubParsersAction):
            commands = {choice.dest: choice.help or "" for choice in action._choices_actions}
            below = {name: action.choices[name] for name in commands}
        elif action.option_strings:
            # An option that may stand alone is treated as if it did: the next word is then looked at for itself.
            value: Literal["none", "files", "other"] = "none" if action.nargs in (0, "?") else "files" if named & _FILES else "other"
            text = (action.help or "") % {**vars(action), "prog": parser.prog}
            options.append(_Option(tuple(action.option_strings), text, value, tuple(map(str, action.choices or ()))))
        elif action.nargs == argparse.REMAINDER:
            program = True
        else:
            choices += tuple(map(str, action.choices or ()))
            files = files or bool(named & _FILES)
    yield _Place(at, commands, tuple(options), choices, files, program)
    for name, child in below.items():
        yield from _places(child, f"{at} {name}")


def _with_value(places: list[_Place], *kinds: str) -> list[str]:
    """Where each option that takes such a value stands."""
    return [f"{place.at} {flag}" for place in places for option in place.options if option.value in kinds for flag in option.flags]


def _quoted(words: Iterable[str], between: str = " ") -> str:
    return between.join(map(shlex.quote, words))


def _scan(places: list[_Place], take: str) -> Iterator[str]:
    """For bash and zsh: what one more word, `word`, does to `at` and `open`, the option that waits for its value."""
    yield '        case "$at $word" in'
    yield f"            {_quoted([f'{place.at} {name}' for place in places for name in place.commands], '|')}) {take} ;;"
    yield f'            {_quoted(_with_value(places, "files", "other"), "|")}) open="$at $word" ;;'
    for place in places:
        yield f"            {shlex.quote(f'{place.at} -')}*) ;;"
        if place.program:
            yield f"            {shlex.quote(f'{place.at} ')}*) at={shlex.quote(place.at + _PROGRAM)} ;;"
    yield "        esac"


def _values(places: list[_Place]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For options with a choice of values: the pattern of the shell's `case`, and the values."""
    for place in places:
        for option in place.options:
            if option.choices:
                yield _quoted((f"{place.at} {flag}" for flag in option.flags), "|"), option.choices


def _bash(prog: str, places: list[_Place]) -> str:
    function = f"_{prog}"
    lines = [
        f'# {prog} for bash: eval "$({prog} completion bash)"',
        f"{function}() {{",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" at="" open="" words="" options="" files="" word i',
        "    COMPREPLY=()",
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        '        word="${COMP_WORDS[i]}"',
        '        [[ $word == "=" ]] && continue  # bash makes three words of --option=value',
        '        if [[ -n $open ]]; then open=""; continue; fi',
        *_scan(places, 'at="$at $word"'),
        "    done",
        '    [[ $cur == "=" ]] && cur=""',
        '    case "$open" in',
        *(f"        {pattern}) words={shlex.quote(' '.join(values))} ;;" for pattern, values in _values(places)),
        f"        {_quoted(_with_value(places, 'files'), '|')}) return ;;",
        "        ?*) compopt +o default +o bashdefault 2>/dev/null; return ;;",
        "        *)",
        '            case "$at" in',
    ]
    for place in places:
        words = _quoted([" ".join([*place.commands, *place.choices])])
        options = _quoted([" ".join(flag for option in place.options for flag in option.flags)])
        lines.append(f"                {_quoted([place.at])}) words={words} options={options} files={'yes' if place.files else ''} ;;")
    lines += [
        "                *) return ;;",
        "            esac ;;",
        "    esac",
        '    [[ -z $open && $cur == -* ]] && words="$options"',
        '    if [[ -n $words ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); fi',
        "    if [[ -z $files || $cur == -* ]]; then compopt +o default +o bashdefault 2>/dev/null; fi",
        "}",
        f"complete -o bashdefault -o default -F {function} {prog}",
    ]
    return "\n".join(lines) + "\n"


def _zsh(prog: str, places: list[_Place]) -> str:
    function = f"_{prog}"
    lines = [
        f"#compdef {prog}",
        f'# {prog} for zsh: eval "$({prog} completion zsh)" after compinit, or a file named {function} in $fpath',
        f"{function}() {{",
        '    local at="" open="" word files=""',
        "    local -a commands options",
        "    local -i i",
        "    for ((i = 2; i < CURRENT; i++)); do",
        '        word="${words[i]}"',
        '        if [[ -n $open ]]; then open=""; continue; fi',
        *_scan(places, 'at="$at $word"'),
        "    done",
        '    case "$open" in',
        *(f"        {pattern}) compadd -- {_quoted(values)}; return ;;" for pattern, values in _values(places)),
        f"        {_quoted(_with_value(places, 'files'), '|')}) _files; return ;;",
        "        ?*) return 1 ;;",
        "    esac",
        '    case "$at" in',
    ]
    for place in places:
        commands = _quoted([f"{name}:{text}" for name, text in place.commands.items()] + list(place.choices))
        options = _quoted(f"{flag}:{option.help}" for option in place.options for flag in option.flags)
        lines.append(f"        {_quoted([place.at])}) commands=({commands}) options=({options}) files={'yes' if place.files else ''} ;;")
    lines += [
        "        *) _files; return ;;",
        "    esac",
        "    if [[ ${words[CURRENT]} == -* ]]; then _describe -o option options",
        "    elif (($#commands)); then _describe command commands",
        "    elif [[ -n $files ]]; then _files",
        "    else return 1; fi",
        "}",
        # Evaluated, it says what it is for; as a file in $fpath it is run as the function itself, the first time.
        f'if [[ $funcstack[1] == {function} ]]; then {function} "$@"; else compdef {function} {prog}; fi',
    ]
    return "\n".join(lines) + "\n"


def _fish(prog: str, places: list[_Place]) -> str:
    def quote(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        f"# {prog} for fish: {prog} completion fish | source",
        f"function __{prog}_at",
        "    set -l at ''",
        "    set -l open no",
        "    for word in (commandline -opc)[2..-1]",
        "        if test $open = yes",
        "            set open no",
        "            continue",
        "        end",
        '        switch "$at $word"',
        f"            case {' '.join(quote(f'{place.at} {name}') for place in places for name in place.commands)}",
        '                set at "$at $word"',
        f"            case {' '.join(map(quote, _with_value(places, 'files', 'other')))}",
        "                set open yes",
    ]
    for place in places:
        lines.append(f"            case {quote(f'{place.at} -*')}")
        if place.program:
            lines += [f"            case {quote(f'{place.at} *')}", f"                set at {quote(place.at + _PROGRAM)}"]
    lines += [
        "        end",
        "    end",
        '    test "$at" = "$argv[1]"',
        "end",
        f"complete -c {prog} -f",
    ]
    for place in places:
        here = f"complete -c {prog} -n {quote(f'__{prog}_at {quote(place.at)}')}"
        lines += [f"{here} -a {quote(name)} -d {quote(text)}" for name, text in place.commands.items()]
        lines += [f"{here} -a {quote(choice)}" for choice in place.choices]
        for option in place.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = {"none": "", "files": " -r -F", "other": " -x"}[option.value]
            chosen = f" -a {quote(' '.join(option.choices))}" if option.choices else ""
            lines.append(f"{here} {flags}{value}{chosen} -d {quote(option.help)}")
        if place.files:
            lines.append(f"{here} -F")
        if place.program:
            lines.append(f"complete -c {prog} -n {quote(f'__{prog}_at {quote(place.at + _PROGRAM)}')} -F")
    return "\n".join(lines) + "\n"


SHELLS: Mapping[str, Callable[[str, list[_Place]], str]] = {"bash": _bash, "fish": _fish, "zsh": _zsh}
"""The shells there are scripts for."""
