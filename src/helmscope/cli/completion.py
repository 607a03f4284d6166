"""Completion scripts for shells, made from the parser itself: verbs, options, and the names that options take.

A script holds all words, so that completing starts no Python; after an update it is to be made again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from helmscope.jobs import names
from helmscope.types import known_name

NAMED: Mapping[str, tuple[str, ...]] = {
    "--field": tuple(names.FIELDS),
    "--start": tuple(names.STARTS),
    "--stepper": tuple(names.STEPPERS),
    "--kernel": tuple(names.KERNELS),
    "--dtype": tuple(names.DTYPES),
    "--device": ("cpu", "cuda"),
    "--completion": ("bash", "zsh", "fish"),
}
CLAIMS = ("claims show", "claims test")  # the verbs that take ids of claims


@dataclass(frozen=True)
class Option:
    """The spellings of an option, what it does, and whether a value follows."""

    spellings: tuple[str, ...]
    help: str
    takes_value: bool


@dataclass(frozen=True)
class Verb:
    """A verb by its words, such as "claims test"; the program itself has none."""

    path: str
    help: str
    options: tuple[Option, ...]
    below: tuple[str, ...]


def completion_script(shell: str, command: Any) -> str:
    """The script that completes ``command``, a parser of typer's, in bash, zsh or fish.

    >>> from typer.main import get_command
    >>> from helmscope.cli import app
    >>> "complete -o default -F _helmscope helmscope" in completion_script("bash", get_command(app))
    True
    """
    makers: dict[str, Callable[[list[Verb]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return makers[known_name("shell", shell, makers)](_verbs(command))


def _verbs(command: Any, path: str = "") -> list[Verb]:
    """The command and everything below it."""
    below: Mapping[str, Any] = getattr(command, "commands", {})
    options = [
        Option((*param.opts, *param.secondary_opts), param.help or "", not param.is_flag)
        for param in command.params
        if param.opts[0].startswith("-")
    ]
    options.append(Option(("--help",), "Show this message and exit.", takes_value=False))
    help = (command.help or "").strip().split("\n")[0]
    verbs = [Verb(path, help, tuple(options), tuple(below))]
    for name, each in below.items():
        verbs += _verbs(each, f"{path} {name}".strip())
    return verbs


def _claims() -> tuple[str, ...]:
    from helmscope.claims.reading import read_catalogue

    return tuple(read_catalogue())


def _words(verb: Verb) -> list[str]:
    """What may follow a verb."""
    words = [*verb.below, *(_claims() if verb.path in CLAIMS else ())]
    return [*words, *(spelling for option in verb.options for spelling in option.spellings)]


def _bash(verbs: list[Verb]) -> str:
    steps = " | ".join(f'"{verb.path} {name}"' for verb in verbs for name in verb.below)
    valued, words = [], []
    for verb in verbs:
        for option in (each for each in verb.options if each.takes_value):
            pattern = " | ".join(f'"{verb.path} {spelling}"' for spelling in option.spellings)
            known = NAMED.get(option.spellings[0])
            # without names of its own, -o default completes the value as a file
            reply = f'COMPREPLY=($(compgen -W "{" ".join(known)}" -- "$current")); ' if known else ""
            valued.append(f"        {pattern}) {reply}return ;;")
        words.append(f'        "{verb.path}") words="{" ".join(_words(verb))}" ;;')
    return "\n".join(
        [
            "_helmscope() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" verb="" words="" at',
            "    COMPREPLY=()",
            "    for ((at = 1; at < COMP_CWORD; at++)); do",
            '        case "$verb ${COMP_WORDS[at]}" in',
            f'        {steps}) verb="${{verb:+$verb }}${{COMP_WORDS[at]}}" ;;',
            "        esac",
            "    done",
            '    case "$verb $previous" in',
            *valued,
            "    esac",
            '    case "$verb" in',
            *words,
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _helmscope helmscope",
            "",
        ]
    )


def _zsh(verbs: list[Verb]) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(verbs)}"


def _fish(verbs: list[Verb]) -> str:
    lines = []
    for verb in verbs:
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in verb.path.split())
        below = f"not __fish_seen_subcommand_from {' '.join(verb.below)}" if verb.below else ""
        here = f"complete -c helmscope -n {shlex.quote('; and '.join(filter(None, (seen, below))))}"
        described = {each.path.split()[-1]: each.help for each in verbs if each.path and each.path != verb.path}
        lines += [f"{here} -f -a {name} -d {_quoted(described.get(name, ''))}" for name in verb.below]
        if verb.path in CLAIMS:
            lines.append(f"{here} -f -a {_quoted(' '.join(_claims()))}")
        for option in verb.options:
            known = NAMED.get(option.spellings[0]) if option.takes_value else None
            value = f" -x -a {_quoted(' '.join(known))}" if known else " -r" if option.takes_value else ""
            spelled = "".join(f" -l {spelling.removeprefix('--')}" for spelling in option.spellings)
            lines.append(f"{here}{spelled}{value} -d {_quoted(option.help)}")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """As fish quotes: only the quote and the backslash are special."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
