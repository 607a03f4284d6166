"""Completion scripts for shells, generated from the parser: verbs, options, and the allowed values of options.

A script contains all words, so that completion does not start Python; it must be generated again after an update.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from helmscope.jobs import names
from helmscope.types import check_name

OPTION_VALUES: Mapping[str, tuple[str, ...]] = {
    "--field": tuple(names.FIELDS),
    "--start": tuple(names.STARTS),
    "--stepper": tuple(names.STEPPERS),
    "--summation": tuple(names.SUMMATIONS),
    "--dtype": tuple(names.DTYPES),
    "--process": tuple(names.PROCESSES),
    "--device": ("cpu", "cuda"),
    "--completion": ("bash", "zsh", "fish"),
    "density --field": tuple(names.DENSITY_FIELDS),  # of one verb only
    "density --start": tuple(names.DENSITY_STARTS),
    "measure --only": (*names.MEASUREMENTS, *names.INTERVENTIONS),
}
# bashcompinit defines ``complete`` by compdef, which exists only after compinit
ZSH_SETUP = """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }
autoload -U +X bashcompinit && bashcompinit
"""
CLAIMS = ("claims show", "claims test")  # verbs that take ids of claims


@dataclass(frozen=True)
class Option:
    """An option: its spellings, its help text, and whether it takes a value."""

    spellings: tuple[str, ...]
    help: str
    takes_value: bool


@dataclass(frozen=True)
class Verb:
    """A verb, where ``path`` is its words, such as "claims test", and "" for the program itself."""

    path: str
    help: str
    options: tuple[Option, ...]
    subcommands: tuple[str, ...]


def completion_script(shell: str, command: Any) -> str:
    """The completion script of ``command``, a typer parser, for bash, zsh or fish.

    >>> from typer.main import get_command
    >>> from helmscope.cli import app
    >>> "complete -o default -F _helmscope helmscope" in completion_script("bash", get_command(app))
    True
    """
    writers: dict[str, Callable[[list[Verb]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return writers[check_name("shell", shell, writers)](_verbs(command))


def _verbs(command: Any, path: str = "") -> list[Verb]:
    """The command and all its subcommands, recursively."""
    subcommands: Mapping[str, Any] = getattr(command, "commands", {})
    options = [
        Option((*param.opts, *param.secondary_opts), param.help or "", not param.is_flag)
        for param in command.params
        if param.opts[0].startswith("-")
    ]
    options.append(Option(("--help",), "Show this message and exit.", takes_value=False))
    help = (command.help or "").strip().split("\n")[0]
    verbs = [Verb(path, help, tuple(options), tuple(subcommands))]
    for name, subcommand in subcommands.items():
        verbs += _verbs(subcommand, f"{path} {name}".strip())
    return verbs


def _claim_ids() -> tuple[str, ...]:
    from helmscope.claims.reading import read_catalogue

    return tuple(read_catalogue())


def _known_values(verb: Verb, option: Option) -> tuple[str, ...]:
    """The allowed values of an option, if they are a list of names."""
    name = option.spellings[0]
    return OPTION_VALUES.get(f"{verb.path} {name}", OPTION_VALUES.get(name, ()))


def _words(verb: Verb) -> list[str]:
    """The words that may follow a verb."""
    words = [*verb.subcommands, *(_claim_ids() if verb.path in CLAIMS else ())]
    return [*words, *(spelling for option in verb.options for spelling in option.spellings)]


def _bash(verbs: list[Verb]) -> str:
    steps = " | ".join(f'"{verb.path} {name}"' for verb in verbs for name in verb.subcommands)
    valued, words = [], []
    for verb in verbs:
        for option in (option for option in verb.options if option.takes_value):
            pattern = " | ".join(f'"{verb.path} {spelling}"' for spelling in option.spellings)
            known = _known_values(verb, option)
            # a value without a list of names is completed as a file by -o default
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
    return ZSH_SETUP + _bash(verbs)


def _fish(verbs: list[Verb]) -> str:
    lines = []
    for verb in verbs:
        after_verb = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in verb.path.split())
        before_subcommand = f"not __fish_seen_subcommand_from {' '.join(verb.subcommands)}" if verb.subcommands else ""
        prefix = f"complete -c helmscope -n {shlex.quote('; and '.join(filter(None, (after_verb, before_subcommand))))}"
        help_texts = {each.path.split()[-1]: each.help for each in verbs if each.path and each.path != verb.path}
        lines += [f"{prefix} -f -a {name} -d {_fish_quote(help_texts.get(name, ''))}" for name in verb.subcommands]
        if verb.path in CLAIMS:
            lines.append(f"{prefix} -f -a {_fish_quote(' '.join(_claim_ids()))}")
        for option in verb.options:
            known = _known_values(verb, option) if option.takes_value else ()
            value = f" -x -a {_fish_quote(' '.join(known))}" if known else " -r" if option.takes_value else ""
            spelled = "".join(f" -l {spelling.removeprefix('--')}" for spelling in option.spellings)
            lines.append(f"{prefix}{spelled}{value} -d {_fish_quote(option.help)}")
    return "\n".join([*lines, ""])


def _fish_quote(text: str) -> str:
    """Quote for fish, where only the quote and the backslash are special."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
