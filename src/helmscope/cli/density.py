"""``helmscope density``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from helmscope.cli.options import AllowMixed, AsJson, MaxMemory, Nu, OnRay, Plot, Resume, Threads, Workers

Strength = Annotated[
    float | None,
    typer.Option(help="Strength h of the force, whose potential is U = h <x, e>, e the first axis [default: 1]."),
]
Swirl = Annotated[
    float | None, typer.Option(help="Speed of the force's rotation from the first axis to the second [default: 0].")
]
Process = Annotated[
    str | None,
    typer.Option(help="Process of anisotropic noise: chain, stratonovich, ito or divergence [default: chain]."),
]


def density(
    field: Annotated[
        str, typer.Option(help="sa (softmax), usa (unnormalized), force (Fokker-Planck) or none (pure diffusion).")
    ] = "sa",
    beta: Annotated[float | None, typer.Option(help="Inverse temperature [default: 4].")] = None,
    value: Annotated[
        float | None, typer.Option(help="Value matrix V = value * I; negative values repel [default: 1].")
    ] = None,
    strength: Strength = None,
    swirl: Swirl = None,
    nu: Nu = 0.1,
    nu_axis: Annotated[
        float | None, typer.Option(help="Strength of the noise along the first axis [default: nu, isotropic noise].")
    ] = None,
    process: Process = None,
    start: Annotated[
        str, typer.Option(help="Density at t = 0: uniform with a perturbation, or vmf (von Mises-Fisher).")
    ] = "uniform",
    perturbation: Annotated[
        float | None, typer.Option(help="Largest relative perturbation of a uniform start [default: 0.1].")
    ] = None,
    perturbation_degree: Annotated[
        int | None, typer.Option(help="Degree of the perturbation, a harmonic [default: 1].")
    ] = None,
    kappa: Annotated[float | None, typer.Option(help="Concentration of a vmf start [default: 1].")] = None,
    dim: Annotated[int, typer.Option(help="Dimension d of the space; the density is on S^(d-1).")] = 2,
    zonal: Annotated[
        bool | None,
        typer.Option("--zonal/--no-zonal", help="Only densities of <x, e>, in any dimension [default: if dim > 3]."),
    ] = None,
    degree: Annotated[
        int | None, typer.Option(help="Largest degree of the harmonics [default: 64; 32 on S^2].")
    ] = None,
    times: Annotated[str, typer.Option(help="Times of the stored densities: 0,1,5 or FROM:TO:COUNT.")] = "0:40:201",
    positive: Annotated[
        bool, typer.Option("--positive", help="Evolve the logarithm of the density, which keeps it positive.")
    ] = False,
    tol: Annotated[float, typer.Option(help="Local error tolerance of a step.")] = 1e-9,
    threads: Threads = 1,
    workers: Workers = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    plot: Plot = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/density-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: AsJson = False,
) -> None:
    """Evolve the density of infinitely many tokens under self-attention or a force with noise, the mean-field limit of
    simulate, and write it to a run folder with measurements and a picture.
    """
    options = locals()
    from helmscope.cli.options import check_plot, make_engine, make_spec, parse_numbers
    from helmscope.cli.output import run_and_show
    from helmscope.jobs import DensitySpec

    picture: dict[str, Any] = {"plot": check_plot(plot), "draw": lambda result: result.path.plot()}
    spec = make_spec(DensitySpec, options | {"times": parse_numbers(times)})
    engine = make_engine(workers, max_memory, threads, ray)
    run_and_show(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json, **picture)
