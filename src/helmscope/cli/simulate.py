"""``helmscope simulate``."""

from __future__ import annotations

from typing import Annotated, Any

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
    Plot,
    Resume,
    Threads,
    Tokens,
    Value,
    Workers,
)

Stepper = Annotated[
    str | None,
    typer.Option(
        help="adaptive [default], euler, heun, rk4, layer, unprojected-euler, geodesic-...; with noise "
        "euler-maruyama [default], stochastic-heun, noisy-layer."
    ),
]
Step = Annotated[
    float | None, typer.Option(help="Step size of the non-adaptive steppers [default: 0.05, with noise 0.02].")
]


def simulate(
    field: Field = "sa",
    beta: Annotated[float, typer.Option(help="Inverse temperature.")] = 4.0,
    value: Value = 1.0,
    causal: Causal = False,
    nu: Nu = 0.0,
    start: Annotated[
        str, typer.Option(help="Distribution of the start: uniform, vmf (von Mises-Fisher) or orthonormal.")
    ] = "uniform",
    n: Tokens = 32,
    dim: Annotated[int, typer.Option(help="Dimension d of the space; tokens are on S^(d-1).")] = 3,
    kappa: Annotated[float | None, typer.Option(help="Concentration of a vmf start [default: 1].")] = None,
    batch: Annotated[int, typer.Option(help="Number of independent systems.")] = 16,
    times: Annotated[str, typer.Option(help="Times of the stored states: 0,1,5 or FROM:TO:COUNT.")] = "0:10:101",
    stepper: Stepper = None,
    step: Step = None,
    tol: Annotated[float | None, typer.Option(help="Local error tolerance of the adaptive stepper.")] = None,
    merge: Annotated[float | None, typer.Option(help="Merge tokens that are closer than this, in radians.")] = None,
    summation: Annotated[
        str, typer.Option(help="How sums over tokens are computed: auto, dense, blockwise, harmonic or flash.")
    ] = "auto",
    delta: Delta = 1e-3,
    max_angle: Annotated[float, typer.Option(help="Linkage distance of the cluster count, in radians.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed of start and noise.")] = 0,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    device: Device = "cpu",
    chunk: Annotated[
        int | None, typer.Option(help="Systems per unit of work [default: an eighth of the batch].")
    ] = None,
    threads: Threads = 1,
    workers: Workers = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    plot: Plot = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/simulate-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: AsJson = False,
) -> None:
    """Integrate self-attention on the sphere and write states, measurements and a picture to a run folder."""
    options = locals()
    from helmscope.cli.options import check_plot, make_engine, make_spec, parse_numbers
    from helmscope.cli.output import run_and_show
    from helmscope.jobs import SimulationSpec

    def draw(result: Any) -> Any:
        from helmscope.jobs.simulate import picture_title
        from helmscope.plots.overview import overview_figure

        if result.overview is None:
            return None
        return overview_figure(result.overview, title=picture_title(result.spec))

    picture: dict[str, Any] = {"plot": check_plot(plot), "draw": draw}
    spec = make_spec(SimulationSpec, options | {"times": parse_numbers(times)})
    engine = make_engine(workers, max_memory, threads, ray)
    run_and_show(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json, **picture)
