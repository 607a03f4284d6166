"""The command line: one file per verb, no mathematics. Results go to standard output, progress to standard error.

Heavy modules are imported inside the verbs, so that ``helmscope --help`` responds at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from helmscope.cli.claims import claims
from helmscope.cli.density import density
from helmscope.cli.doctor import doctor
from helmscope.cli.measure import measure
from helmscope.cli.phase import phase
from helmscope.cli.report import report
from helmscope.cli.run import run
from helmscope.cli.runs import runs
from helmscope.cli.simulate import simulate
from helmscope.types import HelmscopeError

NUMBERS = {
    "float_parsing": "a number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
}  # of pydantic
INTERRUPTED = 130  # the exit code of typer after Ctrl-C

app = typer.Typer(
    name="helmscope",
    context_settings={"help_option_names": ["-h", "--help"]},  # also for every verb
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# the help of the program cuts longer summaries off in the middle of a sentence
SUMMARIES: dict[Callable[..., None], str] = {
    report: "Test every claim and write one page, report.html.",
    simulate: "Integrate self-attention on the sphere.",
    density: "Evolve the density of infinitely many tokens.",
    phase: "Compute when tokens meet, over beta and time.",
    measure: "Measure a model: attention, MLPs, depth and transport.",
    run: "Run a job from a TOML file.",
    doctor: "Check whether recordings of a model can be trusted.",
    runs: "List earlier runs, and how to resume them.",
}
for verb, summary in SUMMARIES.items():
    app.command(short_help=summary)(verb)
app.add_typer(claims, short_help="List, show and test claims.")


def main() -> None:
    """Entry point of the command ``helmscope``: bad input prints one sentence to standard error and exits with 2."""
    # otherwise the last bits of a matrix product depend on the memory address of a system, and so on its batch
    os.environ.setdefault("MKL_CBWR", "AUTO")
    try:
        arguments = sys.argv[1:]
        if arguments in ([], ["claims"]):  # a group of verbs without a verb
            arguments = [*arguments, "--help"]
        code = app(arguments, standalone_mode=False)
        if sys.stdout is not None:  # it is None in a process without one
            sys.stdout.flush()
        if code == INTERRUPTED:
            _print_error("interrupted; all files already written are complete")
        _exit(code)
    except HelmscopeError as error:
        sentence = str(error)
    except typer.TyperException as error:  # rejected by the parser
        sentence = _parser_message(error)
    except OSError as error:  # standard output cannot be written
        sentence = f"cannot write: {error.strerror}"
    _print_error(sentence)
    _exit(2)


def _exit(code: int | None) -> None:
    """Exit with this code even if the output buffers cannot be flushed, where Python would exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # full, closed, or None
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _print_error(sentence: str) -> None:
    from helmscope.runs.progress import print_status

    print_status(f"helmscope: {sentence}")


def _parser_message(error: typer.TyperException) -> str:
    """The message of the parser; for an invalid value a sentence like those of the library, with the value, which the
    parser omits but pydantic reports.
    """
    message = error.format_message()
    invalid = getattr(error.__cause__, "errors", None)
    if not invalid:
        return message
    first, option = invalid()[0], re.match(r"Invalid value for '?([^':]+)'?:", message)
    kind = NUMBERS.get(first["type"])
    if option is None or kind is None:
        return message.replace("Invalid value", f"Invalid value {first['input']!r:.80}", 1)
    return f"{option[1]} is {first['input']!r:.80}, but it must be {kind}"


def _print_version(requested: bool) -> None:
    if requested:
        print(f"helmscope {sys.modules['helmscope'].__version__}")
        raise typer.Exit


def _print_completion(shell: str | None) -> None:
    if shell is not None:
        from helmscope.cli.completion import completion_script

        print(completion_script(shell, typer.main.get_command(app)), end="")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    completion: Annotated[
        str | None,
        typer.Option(
            callback=_print_completion,
            is_eager=True,
            help='Print a completion script for bash, zsh or fish: eval "$(helmscope --completion bash)".',
        ),
    ] = None,
) -> None:
    """A laboratory for the dynamics of transformers."""
