"""The flags that verbs share, and what the words behind them mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from helmscope.types import HelmscopeError, whole_number

if TYPE_CHECKING:
    from helmscope.jobs import Spec
    from helmscope.runs.attempt import Engine

S = TypeVar("S", bound="Spec")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Field = Annotated[str, typer.Option(help="sa (softmax), usa (unnormalised) or sinkhorn (bistochastic).")]
Value = Annotated[float, typer.Option(help="V = value * I; -1 repels.")]
Causal = Annotated[bool, typer.Option("--causal", help="Token i sees tokens j <= i only.")]
Nu = Annotated[float, typer.Option(help="Isotropic noise with generator nu Lap; 0 for none.")]
Tokens = Annotated[int, typer.Option("--n", help="Tokens in a system.")]
Delta = Annotated[float, typer.Option(help="Two tokens have met when <x,y> >= 1 - delta.")]

# of claims
Quick = Annotated[bool, typer.Option("--quick", help="Fewer replicates, though never under 32.")]
From = Annotated[
    str | None,
    typer.Option("--from", help="A folder with your own claims: ID.toml each, and Python files, WHICH ARE RUN."),
]
Model = Annotated[
    str | None,
    typer.Option(help="Try the claims on this model: A, B, tied, a folder or a Hub id [default: as each claim says]."),
]
Texts = Annotated[
    str | None,
    typer.Option(help="Texts for the model: a file with one on each line, or a JSON list [default: those in the box]."),
]
Other = Annotated[str | None, typer.Option(help="A second model, for claims that take two.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are longer than the model's context.")]
TrialSeed = Annotated[int, typer.Option(help="Seed of every trial.")]

# of runs
Threads = Annotated[int, typer.Option(help="Threads of one unit of work; small systems use one.")]
Jobs = Annotated[int, typer.Option(help="Units of work at a time, each in a process of its own.")]
MaxMemory = Annotated[str | None, typer.Option(help="Memory for all jobs together, such as 4GB.")]
OnRay = Annotated[str | None, typer.Option("--ray", help="Run on Ray: local, or the address of a cluster.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the interrupted run in --out.")]
AllowMixed = Annotated[bool, typer.Option("--allow-mixed", help="Resume under other versions, threads or CPU.")]


def engine_of(jobs: int, max_memory: str | None, threads: int, ray: str | None) -> Engine:
    """One process, several where jobs > 1, or Ray."""
    from helmscope.runs.limits import parse_size
    from helmscope.runs.on_ray import Ray
    from helmscope.runs.processes import Processes
    from helmscope.runs.serial import Serial

    limit = None if max_memory is None else parse_size("max_memory", max_memory)
    if ray is not None:
        if limit is not None:
            raise HelmscopeError(f"max_memory is {max_memory}, but with --ray memory is for Ray to watch: leave it out")
        return Ray(jobs, None if ray == "local" else ray, threads=threads)
    if whole_number("jobs", jobs, at_least=1) == 1:
        return Serial(max_memory=limit, threads=threads)
    return Processes(jobs, max_memory=limit, threads=threads)


def spec_of(kind: type[S], given: Mapping[str, Any]) -> S:
    """The spec whose fields are among the values of a verb's flags."""
    return kind(**{name: given[name] for name in kind.__struct_fields__ if name in given})


def numbers_of(text: str | None) -> Any:
    """1,4,9 as numbers; a range FROM:TO:COUNT stays as it is, and so does a word that is not a number, which the spec
    refuses by name.
    """
    from helmscope.jobs.checks import as_number

    return text if text is None or ":" in text else [as_number(word) for word in text.split(",")]
