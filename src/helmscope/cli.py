"""The command line: verbs only, no mathematics. Results go to standard output, progress to standard error.

Everything heavy is imported inside a verb, so that ``helmscope --help`` answers at once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helmscope.types import HelmscopeError, MissingExtra, increasing_times, known_name, real_number, whole_number

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from helmscope.fields.attention import Attention
    from helmscope.solve.stepper import Stepper
    from helmscope.theory.starts import Start

NOT_PARAMETERS = ("out", "as_json", "seed", "dtype", "device")  # of the result: they stand elsewhere in the manifest
MOST_TIMES = 1_000_000
INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    name="helmscope",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point of the command ``helmscope``: bad input is one sentence on standard error and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        if code == INTERRUPTED:
            print("helmscope: interrupted; what was written before is whole", file=sys.stderr)
        sys.exit(code)
    except HelmscopeError as error:
        sentence = str(error)
    except typer.TyperException as error:  # what the parser refuses
        sentence = error.format_message()
    except OSError as error:  # standard output cannot be written
        sentence = f"cannot write: {error.strerror}"
    print(f"helmscope: {sentence}", file=sys.stderr)
    sys.exit(2)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"helmscope {sys.modules['helmscope'].__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """A laboratory for the dynamics of transformers."""


@app.command()
def simulate(
    field: Annotated[str, typer.Option(help="sa (softmax) or usa (unnormalised).")] = "sa",
    beta: Annotated[float, typer.Option(help="Inverse temperature.")] = 4.0,
    value: Annotated[float, typer.Option(help="V = value * I; -1 repels.")] = 1.0,
    causal: Annotated[bool, typer.Option("--causal", help="Token i sees tokens j <= i only.")] = False,
    start: Annotated[str, typer.Option(help="uniform, vmf or orthonormal.")] = "uniform",
    n: Annotated[int, typer.Option(help="Tokens in a system.")] = 32,
    dim: Annotated[int, typer.Option(help="Dimension d of the space; tokens lie on S^(d-1).")] = 3,
    kappa: Annotated[float, typer.Option(help="Concentration of a vmf start.")] = 1.0,
    batch: Annotated[int, typer.Option(help="Independent systems.")] = 16,
    times: Annotated[str, typer.Option(help="Times to look at: 0,1,5 or FROM:TO:COUNT.")] = "0:10:101",
    stepper: Annotated[
        str, typer.Option(help="adaptive, euler, heun, rk4, layer, published, or geodesic-...")
    ] = "adaptive",
    step: Annotated[float, typer.Option(help="Step size of the steppers that are not adaptive.")] = 0.05,
    tol: Annotated[float | None, typer.Option(help="Local error of the adaptive stepper.")] = None,
    merge: Annotated[float | None, typer.Option(help="Merge tokens closer than so many radians.")] = None,
    delta: Annotated[float, typer.Option(help="Two tokens have met when <x,y> >= 1 - delta.")] = 1e-3,
    radius: Annotated[float, typer.Option(help="Scale of the cluster count, in radians.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the start.")] = 0,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/simulate-DATE-TIME].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Integrate self-attention on the sphere; write a run folder with numbers, states and a picture."""
    parameters = {key: value for key, value in locals().items() if key not in NOT_PARAMETERS}
    from helmscope.observe.overview import overview
    from helmscope.solve.integrate import pose
    from helmscope.store.manifest import hash_bytes

    flow = _field(field, beta=beta, value=value, causal=causal, dim=dim)
    method = _stepper(stepper, step=step, tol=tol)
    clock = _times(times)
    tokens = _start(start, n=n, dim=dim, kappa=kappa).sample(
        batch, seed=seed, dtype=_dtype(dtype), device=_device(device)
    )
    problem = pose(flow, tokens, clock, stepper=method, merge=merge)
    for name, number in (("delta", delta), ("radius", radius)):
        real_number(name, number, at_least=0)
    run = _new_run("simulate", out)
    inputs = {"start": hash_bytes(tokens.cpu().numpy().tobytes())}
    run.write_manifest(_manifest(seed=seed, dtype=dtype, device=device, inputs=inputs, parameters=parameters))
    with _bar("integrating") as progress, _enough_memory(n=n, batch=batch):
        simulation = problem.run(progress)
    run.write_data("trajectory", _trajectory(simulation.times, simulation.states))
    report: dict[str, Any] = {
        "folder": str(run.path),
        "ok": simulation.outcome.ok,
        "outcome": str(simulation.outcome),
        "seed": seed,
    }
    if simulation.outcome.ok:
        measured = overview(simulation.trajectory, beta=beta, delta=delta, radius=radius)
        run.write_results("overview", measured)
        report |= _listed(measured)
        _picture(report, run, measured, f"{type(flow).__name__}  beta = {beta:g}, {n} tokens in dimension {dim}")
    _say(report, as_json)


def _picture(report: dict[str, Any], run: Any, measured: xr.Dataset, title: str) -> None:
    """A picture beside the numbers. Without the extra that draws it the numbers still stand, and the reason is said."""
    from helmscope.plots.overview import overview_figure
    from helmscope.plots.style import png

    try:
        run.write_bytes("overview.png", png(overview_figure(measured, title=title)))
        report["picture"] = str(run.path / "overview.png")
    except MissingExtra as error:
        print(f"no picture: {error}", file=sys.stderr)


def _say(report: dict[str, Any], as_json: bool) -> None:
    """Print the report; a run that did not finish leaves with exit code 1."""
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _say_plainly(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _say_plainly(report: dict[str, Any]) -> None:
    print(report["outcome"])
    for name, rows in report.get("measured", {}).items():
        last, error = rows["value"][-1], rows["stderr"][-1]
        value = "undefined" if last is None else f"{last:.6g}"
        print(f"{name:>20} at the end: {value}" + ("" if error is None else f" +- {error:.2g}"))
    for key in ("picture", "folder"):
        if key in report:
            print(f"{key}: {report[key]}")


def _listed(measured: xr.Dataset) -> dict[str, Any]:
    """Curves over time as plain lists; JSON has neither NaN nor infinity, so what is not a number is null."""

    def plain(name: str) -> list[float | None]:
        return [v if math.isfinite(v) else None for v in measured[name].values.tolist()]

    curves = [str(name) for name in measured.data_vars if measured[name].dims == ("time",)]
    names = [name for name in curves if f"{name}_stderr" in curves]
    rows = {name: {"value": plain(name), "stderr": plain(f"{name}_stderr")} for name in names}
    return {"systems": measured.attrs["n"], "times": measured.time.values.tolist(), "measured": rows}


def _field(name: str, *, beta: float, value: float, causal: bool, dim: int) -> Attention:
    import torch

    from helmscope.fields.attention import SA, USA

    kind = {"sa": SA, "usa": USA}[known_name("field", name, ("sa", "usa"))]
    eye = torch.eye(whole_number("dim", dim, at_least=2), dtype=torch.float64)
    return kind(beta, value=real_number("value", value) * eye, causal=causal)


def _start(name: str, *, n: int, dim: int, kappa: float) -> Start:
    from helmscope.theory.starts import Orthonormal, Uniform, VonMisesFisher

    kappa = real_number("kappa", kappa, at_least=0)
    makers: dict[str, Callable[[], Start]] = {
        "uniform": lambda: Uniform(n, dim),
        "vmf": lambda: VonMisesFisher(n, dim, kappa),
        "orthonormal": lambda: Orthonormal(n, dim),
    }
    return makers[known_name("start", name, makers)]()


def _stepper(name: str, *, step: float, tol: float | None) -> Stepper:
    from helmscope.solve.dormand_prince import DormandPrince
    from helmscope.solve.euler import ProjectedEuler
    from helmscope.solve.geodesic_euler import GeodesicEuler
    from helmscope.solve.geodesic_heun import GeodesicHeun
    from helmscope.solve.geodesic_rk4 import GeodesicRK4
    from helmscope.solve.heun import Heun
    from helmscope.solve.layer import Layer
    from helmscope.solve.published import PublishedEuler
    from helmscope.solve.rk4 import RK4

    step = real_number("step", step, above=0)
    tol = None if tol is None else real_number("tol", tol, above=0)
    makers: dict[str, Callable[[], Stepper]] = {
        "adaptive": lambda: DormandPrince(tol=tol),
        "euler": lambda: ProjectedEuler(step),
        "heun": lambda: Heun(step),
        "rk4": lambda: RK4(step),
        "geodesic-euler": lambda: GeodesicEuler(step),
        "geodesic-heun": lambda: GeodesicHeun(step),
        "geodesic-rk4": lambda: GeodesicRK4(step),
        "layer": lambda: Layer(step),
        "published": lambda: PublishedEuler(step),
    }
    return makers[known_name("stepper", name, makers)]()


def _times(text: str) -> list[float]:
    """0,1,5 or FROM:TO:COUNT."""
    if ":" not in text:
        return increasing_times([_number(part) for part in text.split(",")])
    parts = text.split(":")
    if len(parts) != 3 or not parts[2].isdigit() or not 2 <= int(parts[2]) <= MOST_TIMES:
        raise HelmscopeError(
            f"times is '{text}', but it must be numbers such as 0,1,5 or a range FROM:TO:COUNT such as 0:10:101, with "
            f"COUNT from 2 to {MOST_TIMES}"
        )
    first, last = (real_number("times", _number(part)) for part in parts[:2])
    count = int(parts[2])
    return increasing_times([first + (last - first) * k / (count - 1) for k in range(count)])


def _number(text: str) -> float | str:
    """The number, or the text itself for whoever refuses it by name."""
    try:
        return float(text)
    except ValueError:
        return text


def _dtype(name: str) -> torch.dtype:
    import torch

    return {"float64": torch.float64, "float32": torch.float32}[known_name("dtype", name, ("float64", "float32"))]


def _device(name: str) -> str:
    import torch

    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise HelmscopeError(f"device is '{name}', but torch cannot use it here: cpu always works") from None
    return name


def _new_run(what: str, out: str | None) -> Any:
    from helmscope.store.run_folder import RunFolder

    if out == "":
        raise HelmscopeError("out is '', but it must name a new or an empty folder")
    return RunFolder.new("runs", what) if out is None else RunFolder.create(out)


def _manifest(**details: Any) -> Any:
    import torch

    from helmscope.store.manifest import Manifest

    return Manifest.collect(command=["helmscope", *sys.argv[1:]], threads=torch.get_num_threads(), **details)


def _trajectory(times: torch.Tensor, states: torch.Tensor) -> xr.Dataset:
    import xarray as xr

    axes = ("time", "system", "token", "axis")
    return xr.Dataset({"states": (axes, states.cpu().numpy())}, {"time": times.cpu().numpy()})


@contextmanager
def _enough_memory(*, n: int, batch: int) -> Iterator[None]:
    """torch says in many words that memory ran out; a user needs one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        raise HelmscopeError(
            f"n is {n} and batch is {batch}, but {batch * n * n * 8 / 1e9:.3g} GB for each matrix of pairs is more "
            "than there is: lower n or batch"
        ) from None


@contextmanager
def _bar(what: str) -> Iterator[Callable[[float], None]]:
    """A progress bar on a terminal, a plain line every tenth elsewhere."""
    if not sys.stderr.isatty():
        tenths = [0]

        def tell(share: float) -> None:
            if int(share * 10) > tenths[0]:
                tenths[0] = int(share * 10)
                print(f"{what}: {tenths[0] * 10} %", file=sys.stderr)

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)
