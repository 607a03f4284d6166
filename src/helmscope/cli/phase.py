"""``helmscope phase``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from helmscope.cli.options import (
    AllowMixed,
    AsJson,
    Causal,
    Delta,
    Device,
    Field,
    MaxMemory,
    Nu,
    OnRay,
    Resume,
    Threads,
    Tokens,
    Value,
    Workers,
)

if TYPE_CHECKING:
    from helmscope.jobs import PhaseResult
    from helmscope.plots.figure import Figure


def phase(
    field: Field = "sa",
    value: Value = 1.0,
    causal: Causal = False,
    nu: Nu = 0.0,
    spectrum: Annotated[
        str | None, typer.Option(help="The dim eigenvalues of a symmetric B, for example 1,0.5 [default: B = I].")
    ] = None,
    n: Tokens = 32,
    dims: Annotated[
        str | None, typer.Option("--dims", "--dim", help="Dimensions of the space [default: 8,32].")
    ] = None,
    betas: Annotated[str, typer.Option(help="Inverse temperatures: 1,4,9 or FROM:TO:COUNT.")] = "0.1:9:10",
    times: Annotated[str, typer.Option(help="Times: 0,1,5 or FROM:TO:COUNT.")] = "0:30:61",
    samples: Annotated[int, typer.Option(help="Independent systems per probability.")] = 64,
    delta: Delta = 1e-3,
    published: Annotated[
        bool | None,
        typer.Option(
            "--published/--no-published",
            help="Add the result of the published scheme [default: for sa without noise].",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of starts and noise.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="float64 or float32 [default: float64; on a GPU float32 where a kernel applies]."),
    ] = None,
    device: Device = "cpu",
    threads: Threads = 1,
    workers: Workers = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    plot: Annotated[str | None, typer.Option(help="Also write the picture to this file: .pdf, .svg or .png.")] = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/phase-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: AsJson = False,
) -> None:
    """Compute the probability that two tokens have met, over beta and time, with standard errors and t*(beta).

    The defaults give a coarse diagram of two dimensions in about a minute. Figure 3 of arXiv:2312.10794 in full:

    helmscope phase --dims 2,8,32,128,512,1024 --betas 0.1:9:90 --times 0:30:200 --samples 1024 --published
    """
    options = locals()
    from helmscope.cli.options import check_plot, make_engine, make_spec, parse_numbers
    from helmscope.cli.output import run_and_show
    from helmscope.jobs import PhaseSpec

    picture: dict[str, Any] = {"plot": check_plot(plot), "draw": _draw}
    engine = make_engine(workers, max_memory, threads, ray)
    lists = {name: parse_numbers(options[name]) for name in ("spectrum", "dims", "betas", "times")}
    spec = make_spec(PhaseSpec, options | lists)
    run_and_show(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json, **picture)


def _draw(result: PhaseResult) -> Figure:
    from helmscope.plots.phase import phase_figure

    return phase_figure(result.diagram)
