"""``helmscope simulate``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helmscope.types import HelmscopeError, real_number, whole_number

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.runs.attempt import Engine
    from helmscope.runs.run import RunResult
    from helmscope.runs.unit import Unit
    from helmscope.solve.problem import Problem
    from helmscope.store.manifest import Manifest
    from helmscope.store.run_folder import RunFolder
    from helmscope.types import Trajectory

ELSEWHERE = ("seed", "dtype", "device", "threads")  # of the manifest they have places of their own


def simulate(
    field: Annotated[str, typer.Option(help="sa (softmax), usa (unnormalised) or sinkhorn (bistochastic).")] = "sa",
    beta: Annotated[float, typer.Option(help="Inverse temperature.")] = 4.0,
    value: Annotated[float, typer.Option(help="V = value * I; -1 repels.")] = 1.0,
    causal: Annotated[bool, typer.Option("--causal", help="Token i sees tokens j <= i only.")] = False,
    nu: Annotated[float, typer.Option(help="Isotropic noise with generator nu Lap; 0 for none.")] = 0.0,
    start: Annotated[str, typer.Option(help="uniform, vmf or orthonormal.")] = "uniform",
    n: Annotated[int, typer.Option(help="Tokens in a system.")] = 32,
    dim: Annotated[int, typer.Option(help="Dimension d of the space; tokens lie on S^(d-1).")] = 3,
    kappa: Annotated[float | None, typer.Option(help="Concentration of a vmf start [default: 1].")] = None,
    batch: Annotated[int, typer.Option(help="Independent systems.")] = 16,
    times: Annotated[str, typer.Option(help="Times to look at: 0,1,5 or FROM:TO:COUNT.")] = "0:10:101",
    stepper: Annotated[
        str | None,
        typer.Option(
            help="adaptive [default], euler, heun, rk4, layer, published, geodesic-...; with noise euler-maruyama "
            "[default], stochastic-heun, noisy-layer."
        ),
    ] = None,
    step: Annotated[
        float | None, typer.Option(help="Step size of the steppers that are not adaptive [default: 0.05].")
    ] = None,
    tol: Annotated[float | None, typer.Option(help="Local error of the adaptive stepper.")] = None,
    merge: Annotated[float | None, typer.Option(help="Merge tokens closer than so many radians.")] = None,
    kernel: Annotated[
        str, typer.Option(help="How sums over tokens are computed: auto, dense, streaming, harmonic or flash.")
    ] = "auto",
    delta: Annotated[float, typer.Option(help="Two tokens have met when <x,y> >= 1 - delta.")] = 1e-3,
    radius: Annotated[float, typer.Option(help="Scale of the cluster count, in radians.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the start and of the noise.")] = 0,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    chunk: Annotated[
        int | None, typer.Option(help="Systems in one unit of work [default: an eighth of the batch].")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of one unit of work; small systems use one.")] = 1,
    jobs: Annotated[int, typer.Option(help="Units of work at a time, each in a process of its own.")] = 1,
    max_memory: Annotated[str | None, typer.Option(help="Memory for all jobs together, such as 4GB.")] = None,
    ray: Annotated[str | None, typer.Option(help="Run on Ray: local, or the address of a cluster.")] = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/simulate-DATE-TIME].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the interrupted run in --out.")] = False,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Resume under other versions, threads or CPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Integrate self-attention on the sphere; write a run folder with numbers, states and a picture."""
    from helmscope.cli.options import engine_of, usual_kappa, usual_step

    kappa, step = usual_kappa(start, kappa), usual_step(stepper, step, nu)
    asked = {key: value for key, value in locals().items() if key in (*_PHYSICS, *_LOOKS, *ELSEWHERE)}

    for name, number in (("delta", delta), ("radius", radius)):
        real_number(name, number, at_least=0)
    problem = _problem(**{key: asked[key] for key in _PHYSICS})
    units = _units({key: asked[key] for key in _PHYSICS}, len(problem.start), chunk)
    engine = engine_of(jobs, max_memory, threads, ray)
    _carry_out(asked, problem, units, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json)


# what decides the states: the parameters of a unit of work
_PHYSICS = (
    *("field", "beta", "value", "causal", "nu", "start", "n", "dim", "kappa", "batch", "times", "stepper", "step"),
    *("tol", "merge", "kernel", "seed", "dtype", "device"),
)


# what is made of the states, and how they are cut into units
_LOOKS = ("delta", "radius", "chunk")


def _carry_out(
    asked: dict[str, Any],
    problem: Problem,
    units: list[Unit],
    engine: Engine,
    *,
    out: str | None,
    resume: bool,
    allow_mixed: bool,
    as_json: bool,
) -> None:
    """Run the units; write and say what came of them."""
    from helmscope.cli.output import listed, manifest_of, picture, run_folder, say
    from helmscope.observe.overview import overview
    from helmscope.runs.progress import ProgressBar
    from helmscope.store.manifest import hash_bytes

    with _enough_memory(n=asked["n"], batch=1):
        kernels = ", ".join(problem.kernels())
    manifest = manifest_of(
        **{key: asked[key] for key in ELSEWHERE},
        inputs={"start": hash_bytes(problem.start.cpu().numpy().tobytes())},
        parameters={key: value for key, value in asked.items() if key not in ELSEWHERE} | {"kernels": kernels},
    )
    run = run_folder("simulate", out, resume=resume, allow_mixed=allow_mixed)
    trajectory = _joined(problem, _run(units, run, manifest, engine, allow_mixed))
    run.write_data("trajectory", _dataset(trajectory))
    outcome = trajectory.outcome
    assert outcome is not None
    report = {"folder": str(run.path), "ok": outcome.ok, "outcome": str(outcome), "seed": asked["seed"]}
    if outcome.ok:
        beta, nu, n, dim = (asked[key] for key in ("beta", "nu", "n", "dim"))
        bar = ProgressBar("measuring")
        measured = overview(trajectory, beta=beta, delta=asked["delta"], radius=asked["radius"], progress=bar)
        run.write_results("overview", measured)
        report |= listed(measured)
        noisy = f", nu = {nu:g}" if nu else ""
        title = f"{type(problem.field).__name__}  beta = {beta:g}{noisy}, {n} tokens in dimension {dim}"
        picture(report, run, measured, title)
    say(report, as_json)


def _problem(
    *, stepper: str | None, step: float | None, tol: float | None, times: str, nu: float, **physics: Any
) -> Problem:
    """The problem that the options pose; everything that can be refused is refused here."""
    from helmscope.cli.options import (
        device_named,
        dtype_named,
        field_named,
        kernel_named,
        noise_of,
        start_named,
        stepper_named,
        times_of,
    )
    from helmscope.solve.integrate import pose

    flow = field_named(physics["field"], **{key: physics[key] for key in ("beta", "value", "causal", "dim")})
    noise = noise_of(nu)
    method = stepper_named(stepper, step=step, tol=tol, nu=nu)
    clock = times_of(times)
    begin = start_named(physics["start"], **{key: physics[key] for key in ("n", "dim", "kappa")})
    dtype, device, seed = dtype_named(physics["dtype"]), device_named(physics["device"]), physics["seed"]
    tokens = begin.sample(physics["batch"], seed=seed, dtype=dtype, device=device)
    kernel = kernel_named(physics["kernel"])
    return pose(flow, tokens, clock, stepper=method, merge=physics["merge"], noise=noise, seed=seed, kernel=kernel)


def _units(physics: dict[str, Any], systems: int, chunk: int | None) -> list[Unit]:
    """The systems in chunks. A system's bits do not depend on its chunk."""
    from helmscope.runs.unit import Unit

    size = -(-systems // 8) if chunk is None else whole_number("chunk", chunk, at_least=1)
    size = max(size, 1)
    return [
        Unit(f"systems-{k:06d}", simulate_part, {"first": k, "last": min(k + size, systems), "physics": physics})
        for k in range(0, systems, size)
    ]


def simulate_part(first: int, last: int, physics: dict[str, Any]) -> xr.Dataset:
    """States of the systems ``first`` to ``last`` - 1, and how each ended: one unit of work."""
    import xarray as xr

    problem = _problem(**physics).part(first, last)
    with _enough_memory(n=physics["n"], batch=last - first):
        run = problem.run()
    return xr.Dataset(
        {
            "states": (("time", "system", "token", "axis"), run.trajectory.states.cpu().numpy()),
            "status": ("system", [status.name for status in run.outcome.statuses]),
            "ended": ("system", list(run.outcome.times)),
        },
        {"time": run.times.cpu().numpy()},
    )


def _run(units: list[Unit], folder: RunFolder, manifest: Manifest, engine: Engine, allow_mixed: bool) -> RunResult:
    from helmscope.cli.output import resumable
    from helmscope.runs.run import run

    with resumable(manifest, folder):
        return run(units, folder, manifest=manifest, engine=engine, heading="integrating", allow_mixed=allow_mixed)


def _joined(problem: Problem, result: RunResult) -> Trajectory:
    """The units' systems in one trajectory."""
    import torch

    from helmscope.types import Outcome, Status, Trajectory

    parts = [result[name] for name in result]
    states = torch.cat([torch.from_numpy(part.states.values) for part in parts], dim=1)
    statuses = tuple(Status[str(name)] for part in parts for name in part.status.values)
    ended = tuple(float(t) for part in parts for t in part.ended.values)
    return Trajectory(problem.times.cpu(), states, outcome=Outcome(statuses, ended))


def _dataset(trajectory: Trajectory) -> xr.Dataset:
    import xarray as xr

    axes = ("time", "system", "token", "axis")
    return xr.Dataset({"states": (axes, trajectory.states.numpy())}, {"time": trajectory.times.numpy()})


@contextmanager
def _enough_memory(*, n: int, batch: int) -> Iterator[None]:
    """torch says in many words that memory ran out; a user needs one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        raise HelmscopeError(
            f"n is {n} and chunk is {batch}, but {batch * n * n * 8 / 1e9:.3g} GB for each matrix of pairs is more "
            "than there is: lower n or chunk"
        ) from None
