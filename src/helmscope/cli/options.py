"""The options shared by several verbs, and how their values are parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from helmscope.types import HelmscopeError, check_integer

if TYPE_CHECKING:
    from pathlib import Path

    from helmscope.jobs import Spec
    from helmscope.runs.attempt import Engine

S = TypeVar("S", bound="Spec")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Field = Annotated[str, typer.Option(help="sa (softmax), usa (unnormalized) or sinkhorn (doubly stochastic).")]
Value = Annotated[float, typer.Option(help="Value matrix V = value * I; negative values repel.")]
Causal = Annotated[bool, typer.Option("--causal", help="Causal mask: token i attends to tokens j <= i only.")]
Nu = Annotated[float, typer.Option(help="Strength of isotropic noise, with generator nu * Laplacian; 0 for none.")]
Tokens = Annotated[int, typer.Option("--n", help="Tokens per system.")]
Delta = Annotated[float, typer.Option(help="Two tokens have met when <x,y> >= 1 - delta.")]

# options for claims
Quick = Annotated[bool, typer.Option("--quick/--full", help="Use fewer replicates, but at least 32, or all of them.")]
From = Annotated[
    str | None,
    typer.Option("--from", help="Folder with your own claims: one ID.toml per claim, and Python files, WHICH ARE RUN."),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Model to test the claims on: A, B, tied, a folder or a Hub id; may be repeated [default: by claim].",
    ),
]
NamedModels = Annotated[
    list[str] | None, typer.Option("--model", help="The same as the argument, as in claims test; may be repeated.")
]
NamedModel = Annotated[str | None, typer.Option("--model", help="The same as the argument, as in claims test.")]
Texts = Annotated[
    str | None,
    typer.Option(help="Texts for the model: a file with one per line, or a JSON list [default: the packaged texts]."),
]
Other = Annotated[str | None, typer.Option(help="Second model, for claims that compare two.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Truncate texts that are longer than the model's context.")]
HeldOut = Annotated[
    bool,
    typer.Option("--held-out", help="Use the held-out texts of the bundled models, as report does."),
]
TrialSeed = Annotated[int, typer.Option(help="Random seed of the trials.")]

# options for runs
Threads = Annotated[int, typer.Option(help="Threads per unit of work; small systems use one.")]
Workers = Annotated[int, typer.Option(help="Units of work to run in parallel, each in its own process.")]
MaxMemory = Annotated[str | None, typer.Option(help="Memory limit for all workers together, for example 4GB.")]
OnRay = Annotated[str | None, typer.Option("--ray", help="Run on Ray: local, or the address of a cluster.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the interrupted run in --out.")]
Plot = Annotated[str | None, typer.Option(help="Also write the picture to this file: .pdf, .svg or .png.")]
AllowMixed = Annotated[bool, typer.Option("--allow-mixed", help="Allow resuming with other versions, threads or CPU.")]


def make_engine(workers: int, max_memory: str | None, threads: int, ray: str | None) -> Engine:
    """The engine that these options select: this process, several processes if workers > 1, or Ray."""
    from helmscope.runs.limits import parse_size
    from helmscope.runs.on_ray import Ray
    from helmscope.runs.processes import Processes
    from helmscope.runs.serial import Serial

    limit = None if max_memory is None else parse_size("max_memory", max_memory)
    if ray is not None:
        if limit is not None:
            raise HelmscopeError(f"max_memory is {max_memory}, but with --ray memory is managed by Ray: omit it")
        return Ray(workers, None if ray == "local" else ray, threads=threads)
    if check_integer("workers", workers, at_least=1) == 1:
        return Serial(max_memory=limit, threads=threads)
    return Processes(workers, max_memory=limit, threads=threads)


def make_spec(kind: type[S], options: Mapping[str, Any]) -> S:
    """The spec whose fields have the values of a verb's options."""
    return kind(**{name: options[name] for name in kind.__struct_fields__ if name in options})


def parse_names(words: Sequence[str] | None) -> list[str]:
    """The names in an option that may be repeated, and whose values are lists separated by commas: ``--only a,b``."""
    return [name.strip() for word in words or [] for name in word.split(",")]


def chosen_models(argument: Sequence[str], option: Sequence[str] | None) -> list[str]:
    """The models given as arguments or with ``--model``; raises ``HelmscopeError`` if both are given."""
    if argument and option:
        raise HelmscopeError(f"--model is {option[0]}, but {argument[0]} is named without it: name all models one way")
    return [*argument, *(option or [])]


def parse_numbers(text: str | None) -> Any:
    """Parse numbers such as 1,4,9. A range FROM:TO:COUNT is returned unchanged, and so are a range written in another
    way, such as 0-2, and a word that is not a number, which the spec then rejects by name.
    """
    from helmscope.jobs.checks import parse_number

    if text is None or ":" in text:
        return text
    numbers = [parse_number(word) for word in text.split(",")]
    looks_like_a_range = re.fullmatch(r"\s*[\d.]+\s*(-|\.\.)\s*[\d.]+\s*", text)
    return text if looks_like_a_range and isinstance(numbers[0], str) else numbers


def check_plot(plot: str | None) -> Path | None:
    """The path of ``--plot``; checked before hours of computing."""
    if plot is None:
        return None  # without matplotlib too
    from helmscope.plots.figure import check_figure_path

    return check_figure_path("--plot", plot)
