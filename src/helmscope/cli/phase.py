"""``helmscope phase``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helmscope.cli.trials import AllowMixed, MaxMemory, OnRay, Resume
from helmscope.types import HelmscopeError, MissingExtra, real_number, whole_number

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from helmscope.fields.attention import Attention
    from helmscope.runs.attempt import Engine
    from helmscope.runs.unit import Unit
    from helmscope.store.run_folder import RunFolder

MOST_VALUES = 100_000
UNITS_A_DIM = 8
USUAL_DIMS = "8,32"
AUTO = "auto"
# what decides the numbers of one dim and beta: the parameters of a unit of work
_PHYSICS = (
    *("field", "value", "causal", "nu", "spectrum", "n", "times", "samples", "delta", "published"),
    *("seed", "dtype", "device"),
)


def phase(
    field: Annotated[str, typer.Option(help="sa (softmax), usa (unnormalised) or sinkhorn (bistochastic).")] = "sa",
    value: Annotated[float, typer.Option(help="V = value * I; -1 repels.")] = 1.0,
    causal: Annotated[bool, typer.Option("--causal", help="Token i sees tokens j <= i only.")] = False,
    nu: Annotated[float, typer.Option(help="Isotropic noise with generator nu Lap; 0 for none.")] = 0.0,
    spectrum: Annotated[
        str | None, typer.Option(help="Eigenvalues of a symmetric B, dim of them, such as 1,0.5 [default: B = I].")
    ] = None,
    n: Annotated[int, typer.Option(help="Tokens in a system.")] = 32,
    dims: Annotated[
        str | None, typer.Option("--dims", "--dim", help=f"Dimensions of the space [default: {USUAL_DIMS}].")
    ] = None,
    betas: Annotated[str, typer.Option(help="Inverse temperatures: 1,4,9 or FROM:TO:COUNT.")] = "0.1:9:10",
    times: Annotated[str, typer.Option(help="Times: 0,1,5 or FROM:TO:COUNT.")] = "0:30:61",
    samples: Annotated[int, typer.Option(help="Independent systems behind each probability.")] = 64,
    delta: Annotated[float, typer.Option(help="Two tokens have met when <x,y> >= 1 - delta.")] = 1e-3,
    published: Annotated[
        bool | None,
        typer.Option(
            "--published/--no-published",
            help="Lay what the published scheme gives beside ours [default: for sa without noise].",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the starts and of the noise.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float64 or float32 [default: float64; on a GPU float32 where a kernel serves].")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of one unit of work; small systems use one.")] = 1,
    jobs: Annotated[int, typer.Option(help="Units of work at a time, each in a process of its own.")] = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/phase-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Have two tokens met? The probability over beta and time, with standard errors and the curve t*(beta).

    As it stands, a quick picture of two dimensions in about a minute. The whole figure 3 of arXiv:2312.10794:

    helmscope phase --dims 2,8,32,128,512,1024 --betas 0.1:9:90 --times 0:30:200 --samples 1024 --published
    """
    published = field == "sa" and nu == 0 if published is None else published
    physics = {key: each for key, each in locals().items() if key in _PHYSICS}
    from helmscope.cli.options import engine_of
    from helmscope.cli.output import run_folder
    from helmscope.runs.progress import say

    engine = engine_of(jobs, max_memory, threads, ray)
    spaces, values = _dims(dims, spectrum), _values("betas", betas)
    cost = _cost(physics, spaces, values, _checked(physics, spaces, values))
    units = _units(spaces, values, physics)
    run = run_folder("phase", out, resume=resume, allow_mixed=allow_mixed)
    say(f"{len(spaces) * len(values)} rows of {samples} samples{cost}")
    data = _carried_out(units, run, physics | {"dims": spaces, "betas": betas}, engine, allow_mixed=allow_mixed)
    _told(run, data, as_json)


def phase_part(dim: int, betas: list[float], physics: dict[str, Any]) -> xr.Dataset:
    """The diagram of one dimension at some betas: one unit of work."""
    from helmscope.cli.options import noise_of
    from helmscope.observe.phase import phase_diagram, published_probability

    shared = _shared(dim, betas, physics)
    flow = _flow(dim, physics)
    data = phase_diagram(flow, noise=noise_of(physics["nu"]), **shared)
    if physics["published"]:
        data = data.assign(published_probability(flow, **shared).data_vars)
    return data


def _shared(dim: int, betas: list[float], physics: dict[str, Any]) -> dict[str, Any]:
    from helmscope.cli.options import device_named, dtype_named, times_of
    from helmscope.theory.starts import Uniform

    return {
        "betas": betas,
        "times": times_of(physics["times"]),
        "start": Uniform(physics["n"], dim),
        "dtype": None if physics["dtype"] is None else dtype_named(physics["dtype"]),
        "device": device_named(physics["device"]),
        **{key: physics[key] for key in ("samples", "delta", "seed")},
    }


def _flow(dim: int, physics: dict[str, Any]) -> Callable[[float], Attention]:
    """beta -> the field that the options name. A uniform start looks the same in every basis: B may be diagonal."""
    from dataclasses import replace

    import torch

    from helmscope.cli.options import field_named

    options = {key: physics[key] for key in ("value", "causal")}
    if physics["spectrum"] is None:
        # without noise the tokens stay in their span, and there V = value I needs no more axes than that
        size = dim if physics["nu"] else min(dim, max(2, physics["n"]))
        return lambda beta: field_named(physics["field"], beta=beta, dim=size, **options)
    metric: torch.Tensor = torch.diag(torch.tensor(_spectrum(physics["spectrum"], dim), dtype=torch.float64))
    return lambda beta: replace(field_named(physics["field"], beta=beta, dim=dim, **options), query_key=metric)


def _checked(physics: dict[str, Any], dims: list[int], betas: list[float]) -> list[float]:
    """The times; everything that can be refused is refused here, before there is a folder."""
    from helmscope.cli.options import noise_of

    if physics["published"] and noise_of(physics["nu"]) is not None:
        raise HelmscopeError(f"nu is {physics['nu']:g}, but the published scheme knows no noise: add --no-published")
    whole_number("samples", physics["samples"], at_least=1)
    for dim in dims:  # by carrying two systems nowhere
        phase_part(dim, betas, physics | {"samples": 2, "times": "0"})
    clock: list[float] = _shared(dims[0], betas, physics)["times"]
    return clock


def _cost(physics: dict[str, Any], dims: list[int], betas: list[float], clock: list[float]) -> str:
    """About how long it takes on one core of a CPU, from a few steps on trial and a count of steps: one at each time
    and one each 0.4 / rate, where USA has the rate e^beta; it was within a factor of 2 where it was tried.
    """
    if physics["device"] != "cpu":
        return ""
    seconds = 0.0
    for dim in dims:
        one = _seconds_a_step(dim, physics, betas[0])
        for beta in betas:
            rate = abs(physics["value"]) * (math.exp(min(beta, 40.0)) if physics["field"] == "usa" else 1.0)
            count = 50 * clock[-1] / 4 if physics["nu"] else len(clock) + clock[-1] * rate / 0.4
            seconds += one * (count + (2.5 * clock[-1] if physics["published"] else 0))
    if seconds > 1e6:
        return ": more than a week on one core"
    return (
        f": roughly {seconds:.0f} s on one core" if seconds < 100 else f": roughly {seconds / 60:.0f} min on one core"
    )


def _seconds_a_step(dim: int, physics: dict[str, Any], beta: float) -> float:
    """Of all samples, by four stages."""
    from helmscope.solve.integrate import integrate
    from helmscope.solve.rk4 import RK4
    from helmscope.theory.starts import Uniform

    size = dim if physics["nu"] or physics["spectrum"] else min(dim, physics["n"])
    x = Uniform(physics["n"], size).sample(min(physics["samples"], 256))
    h = 1e-3
    integrate(_flow(dim, physics)(beta), x, [h], stepper=RK4(h))
    begun = time.perf_counter()
    integrate(_flow(dim, physics)(beta), x, [4 * h], stepper=RK4(h))
    return (time.perf_counter() - begun) / 4 * (int(physics["samples"]) / len(x))


def _units(dims: list[int], betas: list[float], physics: dict[str, Any]) -> list[Unit]:
    """Blocks of betas of each dimension."""
    from helmscope.runs.unit import Unit

    size = -(-len(betas) // UNITS_A_DIM)
    return [
        Unit(f"d{dim}-{k:05d}", phase_part, {"dim": dim, "betas": betas[k : k + size], "physics": physics})
        for dim in dims
        for k in range(0, len(betas), size)
    ]


def _carried_out(
    units: list[Unit], folder: RunFolder, asked: dict[str, Any], engine: Engine, *, allow_mixed: bool
) -> xr.Dataset:
    """Run the units, join them to one diagram over (dim, beta, time), and add what was used to the manifest."""
    from dataclasses import replace

    from helmscope.cli.output import manifest_of, resumable
    from helmscope.runs.run import run

    places = {
        "seed": asked["seed"],
        "dtype": asked["dtype"] or _usual_dtype(asked["device"]),
        "device": asked["device"],
    }
    parameters = {key: each for key, each in asked.items() if key not in places}
    manifest = manifest_of(**places, threads=engine.threads, inputs={}, parameters=parameters)
    with resumable(manifest, folder):
        result = run(units, folder, manifest=manifest, engine=engine, heading="phase diagram", allow_mixed=allow_mixed)
    data = _joined([result[name] for name in result])
    begun = folder.read_manifest()
    used = {key: data.attrs[key] for key in ("kernel", "stepper", *(("dtype",) if begun.dtype == AUTO else ()))}
    folder.write_manifest(replace(begun, parameters={**begun.parameters, **used}))
    return data


def _usual_dtype(device: str) -> str:
    """On a GPU each unit takes float32 where a kernel serves it, which shows only when it runs."""
    return AUTO if device.startswith("cuda") else "float64"


def _joined(parts: list[xr.Dataset]) -> xr.Dataset:
    """One diagram over (dim, beta, time) of those of the units."""
    import xarray as xr

    how: Any = {"data_vars": "all", "compat": "equals", "join": "exact", "combine_attrs": "override"}
    by_dim: dict[int, list[xr.Dataset]] = {}
    for part in parts:
        by_dim.setdefault(int(part.attrs["dim"]), []).append(part)
    rows = [
        xr.concat(some, dim="beta", coords="minimal", **how).expand_dims({"dim": [dim]}) for dim, some in by_dim.items()
    ]
    data = xr.concat(rows, dim="dim", coords=["lost"], **how)
    told = {key: " / ".join(dict.fromkeys(str(part.attrs[key]) for part in parts)) for key in ("kernel", "stepper")}
    # numbers come from a file as NumPy's, which JSON does not know
    attrs = {key: getattr(each, "item", lambda each=each: each)() for key, each in data.attrs.items()}
    attrs = {key: each for key, each in attrs.items() if key not in ("dim", "carried_in")}
    return data.drop_attrs(deep=False).assign_attrs(attrs | told)


def _told(run: RunFolder, data: xr.Dataset, as_json: bool) -> None:
    """Write the results and pictures; print them."""
    from helmscope.observe.half_time import half_time

    half = half_time(data)
    run.write_results("phase", data)
    run.write_results("half-time", half)
    lost = int(data.lost.sum())
    report: dict[str, Any] = {"folder": str(run.path), "ok": lost == 0, "lost": lost, **_pictures(run, data)}
    if as_json:
        print(json.dumps(report | _listed(data, half), indent=2))
    else:
        _print_table(data, half)
        print(*(f"{key}: {report[key]}" for key in ("picture", "page", "folder") if key in report), sep="\n")
    if lost:
        from helmscope.runs.progress import say

        say(f"{lost} samples could not be carried to the end and are left out: see the log, lower beta or the times")
        raise typer.Exit(1)


def _pictures(run: RunFolder, data: xr.Dataset) -> dict[str, str]:
    """phase.png and phase.html. Without the extra that draws them the numbers still stand, and the reason is said."""
    from helmscope.plots import style
    from helmscope.plots.phase import phase_figure, phase_page
    from helmscope.runs.progress import say

    made: dict[str, Callable[[], bytes]] = {
        "picture": lambda: style.png(phase_figure(data)),
        "page": lambda: phase_page(data).encode(),
    }
    paths = {}
    for (key, make), name in zip(made.items(), ("phase.png", "phase.html"), strict=True):
        try:
            run.write_bytes(name, make())
            paths[key] = str(run.path / name)
        except MissingExtra as error:
            say(f"no {key}: {error}")
    return paths


def _listed(data: xr.Dataset, half: xr.Dataset) -> dict[str, Any]:
    """All numbers as plain lists; JSON has neither NaN nor infinity, so what is not a number is null."""
    import numpy as np

    def plain(values: Any) -> Any:
        return [plain(each) for each in values] if isinstance(values, list) else values if np.isfinite(values) else None

    axes = {f"{name}s": data[name].values.tolist() for name in ("dim", "beta", "time")}
    numbers = {str(name): plain(each.values.tolist()) for part in (data, half) for name, each in part.data_vars.items()}
    attrs = {key: data.attrs[key] for key in ("delta", "tokens", "flow", "seed", "dtype", "stepper", "kernel")}
    curve = {"curve": plain(data.curve.values.tolist()), "censored": half.censored.values.tolist()}
    return attrs | {"samples": data.attrs["n"]} | axes | numbers | curve


def _print_table(data: xr.Dataset, half: xr.Dataset) -> None:
    last = float(data.time[-1])
    print(f"{'dim':>8} {'beta':>7} {'t*':>9}   {f'P at t = {last:g}':<22}  time of P = 1/2")
    for dim in data.dim.values:
        for beta in data.beta.values:
            row, found = data.sel(dim=dim, beta=beta), half.sel(dim=dim, beta=beta)
            end = row.isel(time=-1)
            if not bool(found.censored):
                reached = _half_time_text(found, data.attrs["n"])
            elif end.probability.isnull():
                reached = "all samples lost"
            else:
                late = float(end.probability) < 0.5
                reached = f"not by t = {last:g}" if late else f"before t = {float(data.time[0]):g}"
            error = float(end.probability_stderr)
            p = f"{float(end.probability):.4f}" + (f" +- {error:.2g}" if math.isfinite(error) else " of one sample")
            curve = "none" if row.curve.isnull() else f"{float(row.curve):.4g}"
            print(f"{dim:>8} {beta:>7.4g} {curve:>9}   {p:<22}  {reached}")


def _half_time_text(found: xr.Dataset, n: int) -> str:
    from helmscope.types import Interval, interval_text

    estimate, low, high = (float(found[f"half_time{side}"]) for side in ("", "_low", "_high"))
    known = not (math.isnan(low) or math.isnan(high))  # one sample has no standard error, and so no interval
    return interval_text(Interval(estimate, low, high, n)) if known else f"{estimate:.3g}, no interval"


def _dims(text: str | None, spectrum: str | None) -> list[int]:
    """The dimensions asked for; with a spectrum, as many as it has eigenvalues."""
    if text is None:
        text = USUAL_DIMS if spectrum is None else str(len(spectrum.split(",")))
    dims = [whole_number("dims", _number(part), at_least=2) for part in text.split(",")]
    if len(set(dims)) < len(dims):
        raise HelmscopeError(f"dims is '{text}', but every dimension may stand there once")
    return dims


def _spectrum(text: str, dim: int) -> list[float]:
    values = [real_number("spectrum", _number(part)) for part in text.split(",")]
    if len(values) != dim:
        raise HelmscopeError(f"spectrum has {len(values)} eigenvalues, but in dimension {dim} B has {dim}")
    return values


def _values(name: str, text: str) -> list[float]:
    """1,4,9 or FROM:TO:COUNT."""
    parts = text.split(":")
    if len(parts) == 1:
        return [real_number(name, _number(part)) for part in text.split(",")]
    if len(parts) != 3 or not parts[2].isdigit() or not 2 <= int(parts[2]) <= MOST_VALUES:
        raise HelmscopeError(
            f"{name} is '{text}', but it must be numbers such as 1,4,9 or a range FROM:TO:COUNT such as 0.1:9:90, with "
            f"COUNT from 2 to {MOST_VALUES}"
        )
    first, last = (real_number(name, _number(part)) for part in parts[:2])
    return [first + (last - first) * k / (int(parts[2]) - 1) for k in range(int(parts[2]))]


def _number(text: str) -> float | str:
    """The number, or the text itself for whoever refuses it by name."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
