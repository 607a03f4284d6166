"""A simulation: tokens on the sphere under self-attention, with their states at chosen times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.jobs import checks, names
from helmscope.jobs.checks import Check, boolean, integer, number, optional
from helmscope.jobs.job import Job, PictureWriter, Result, Work
from helmscope.jobs.spec import Spec
from helmscope.runs.unit import Unit
from helmscope.solve.stepper import NOISY_STEP
from helmscope.types import HelmscopeError, check_seed

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.jobs.cost import Estimate
    from helmscope.runs.run_units import RunResult
    from helmscope.solve.problem import Problem
    from helmscope.solve.stepper import Stepper
    from helmscope.types import Outcome, Trajectory

DETERMINISTIC_STEP = 0.05
UNITS = 8
OVERVIEW_FIELDS = ("delta", "max_angle", "chunk")  # do not affect the states


class SimulationSpec(Spec, frozen=True, kw_only=True, tag="simulate"):
    """Spec for integrating ``batch`` systems of ``n`` tokens in dimension ``dim`` under ``field`` (sa, usa or sinkhorn)
    with V = ``value`` I and isotropic noise of strength ``nu``, from ``start`` (uniform, vmf with concentration
    ``kappa``, or orthonormal), with states at ``times``: a list or "FROM:TO:COUNT".

    ``stepper`` defaults to adaptive, with local error ``tol``, or with noise to euler-maruyama; all others use the step
    size ``step``, which defaults to 0.05, or with noise to 0.02, the step size of ``integrate``. Tokens closer than
    ``merge`` radians are merged. ``delta`` and ``max_angle`` are parameters of the overview. A unit of work has
    ``chunk`` systems, by default an eighth of the batch.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(SimulationSpec(n=8, batch=2, times=[0, 5]), folder=f"{root}/run")
    >>> str(result.outcome), result.trajectory.states.shape
    ('finished at t=5', torch.Size([2, 2, 8, 3]))
    """

    field: str = "sa"
    beta: float = 4.0
    value: float = 1.0
    causal: bool = False
    nu: float = 0.0
    start: str = "uniform"
    n: int = 32
    dim: int = 3
    kappa: float | None = None
    batch: int = 16
    times: str | tuple[float, ...] = "0:10:101"
    stepper: str | None = None
    step: float | None = None
    tol: float | None = None
    merge: float | None = None
    summation: str = names.AUTO
    delta: float = 1e-3
    max_angle: float = 0.1
    chunk: int | None = None
    seed: int = 0
    dtype: str = "float64"
    device: str = "cpu"

    main_fields: ClassVar = ("field", "beta", "nu", "n", "dim", "batch", "times")
    verb: ClassVar = ("simulate",)
    checks: ClassVar[Mapping[str, Check]] = {
        "field": lambda _, value: names.FIELDS.check(value),
        "beta": number(at_least=0),
        "value": number(),
        "causal": boolean,
        "nu": number(at_least=0),
        "start": lambda _, value: names.STARTS.check(value),
        "n": integer(1),
        "dim": integer(2),
        "kappa": optional(number(at_least=0)),
        "batch": integer(1),
        "times": checks.times,
        "stepper": optional(lambda _, value: names.STEPPERS.check(value)),
        "step": optional(number(above=0)),
        "tol": optional(number(above=0)),
        "merge": optional(number(at_least=0)),
        "summation": lambda _, value: names.SUMMATIONS.check(value),
        "delta": number(at_least=0),
        "max_angle": number(at_least=0),
        "chunk": optional(integer(1)),
        "seed": lambda _, value: check_seed(value),
        "dtype": lambda _, value: names.DTYPES.check(value),
        "device": checks.text,
    }

    @property
    def stepper_name(self) -> str:
        """The name of the stepper, with the default filled in.

        >>> SimulationSpec().stepper_name, SimulationSpec(nu=0.1).stepper_name
        ('adaptive', 'euler-maruyama')
        """
        default = names.NOISY_STEPPERS[0] if self.nu > 0 else "adaptive"
        return default if self.stepper is None else self.stepper

    def _complete(self) -> None:
        if self.start != "vmf" and self.kappa is not None:
            raise HelmscopeError(
                f"kappa is {self.kappa}, but the start '{self.start}' has no concentration: set start to 'vmf'"
            )
        if self.start == "vmf" and self.kappa is None:
            self._set("kappa", 1.0)
        method, noisy = self.stepper_name, ", ".join(names.NOISY_STEPPERS[:2])
        if method in names.NOISY_STEPPERS and self.nu == 0:
            raise HelmscopeError(f"stepper is '{method}', but it requires noise: set nu, for example nu = 0.1")
        if method not in names.NOISY_STEPPERS and self.nu > 0:
            raise HelmscopeError(
                f"stepper is '{method}' and nu is {self.nu:g}, but noise requires {noisy} or {names.NOISY_STEPPERS[2]}"
            )
        if method == "adaptive":
            if self.step is not None:
                raise HelmscopeError(
                    f"step is {self.step}, but the adaptive stepper chooses its own: use another stepper, such as rk4"
                )
            return
        if self.tol is not None:
            raise HelmscopeError(
                f"tol is {self.tol}, but the stepper '{method}' has a fixed step size: set step instead"
            )
        if self.step is None:
            self._set("step", NOISY_STEP if self.nu > 0 else DETERMINISTIC_STEP)

    @property
    def unit_size(self) -> int:
        """The number of systems per unit of work.

        >>> SimulationSpec(batch=100).unit_size, SimulationSpec(chunk=5).unit_size
        (13, 5)
        """
        return self.chunk or -(-self.batch // UNITS)

    @property
    def state_parameters(self) -> dict[str, Any]:
        """The fields that the states depend on: all except ``delta``, ``max_angle`` and ``chunk``.

        >>> "delta" in SimulationSpec().state_parameters
        False
        """
        return {name: value for name, value in self.fields.items() if name not in OVERVIEW_FIELDS}

    def problem(self) -> Problem:
        """The checked integration problem.

        >>> SimulationSpec(n=4, batch=2).problem().start.shape
        torch.Size([2, 4, 3])
        """
        from helmscope.fields.noise import IsotropicNoise
        from helmscope.solve.integrate import make_problem

        dtype, device = names.DTYPES.load(self.dtype), names.usable_device(self.device)
        matrix = names.value_matrix(self.value, self.dim)
        flow = names.FIELDS.load(self.field)(self.beta, value=matrix, causal=self.causal)
        concentration = () if self.kappa is None else (self.kappa,)
        start = names.STARTS.load(self.start)(self.n, self.dim, *concentration)
        return make_problem(
            flow,
            start.sample(self.batch, seed=self.seed, dtype=dtype, device=device),
            checks.expand_range("times", self.times),
            stepper=make_stepper(self),
            merge=self.merge,
            noise=IsotropicNoise(self.nu) if self.nu > 0 else None,
            seed=self.seed,
            summation=None if self.summation == names.AUTO else names.SUMMATIONS.load(self.summation)(),
        )

    def prepare(self) -> SimulateJob:
        """Return the job, whose units are chunks of the batch; what cannot be integrated raises ``HelmscopeError``."""
        from helmscope.store.manifest import hash_bytes

        problem = self.problem()
        with explain_memory_error(n=self.n, batch=1):
            summations = ", ".join(problem.summations())
        size = self.unit_size
        units = [
            Unit(
                f"systems-{k:06d}",
                simulate_unit,
                {"first": k, "last": min(k + size, self.batch), "state_parameters": self.state_parameters},
            )
            for k in range(0, self.batch, size)
        ]
        own_entries = ("seed", "dtype", "device")  # stored in the manifest itself
        return SimulateJob(
            spec=self,
            units=units,
            dtype=self.dtype,
            device=self.device,
            inputs={"start": hash_bytes(problem.start.cpu().numpy().tobytes())},
            parameters={k: v for k, v in self.fields.items() if k not in own_entries} | {"summations": summations},
            problem=problem,
        )

    def estimate(self) -> Estimate:
        """Estimate the time on one core and the memory of one process."""
        from helmscope.jobs.cost import simulation_cost

        return simulation_cost(self)


def make_stepper(spec: SimulationSpec) -> Stepper:
    """The stepper of a spec.

    >>> make_stepper(SimulationSpec(stepper="rk4", step=0.1))
    RK4(h=0.1)
    """
    stepper: Stepper = names.STEPPERS.load(spec.stepper_name)(
        spec.tol if spec.stepper_name == "adaptive" else spec.step
    )
    return stepper


def simulate_unit(first: int, last: int, state_parameters: dict[str, Any]) -> xr.Dataset:
    """Unit of work: the states of the systems ``first`` to ``last`` - 1, and the status of each at its end. The result
    of a system does not depend on its unit.
    """
    import xarray as xr

    spec = SimulationSpec(**state_parameters)
    problem = spec.problem().part(first, last)
    with explain_memory_error(n=spec.n, batch=last - first):
        run = problem.run()
    return xr.Dataset(
        {
            "states": (("time", "system", "token", "axis"), run.trajectory.states.cpu().numpy()),
            "status": ("system", [status.name for status in run.outcome.statuses]),
            "ended": ("system", list(run.outcome.times)),
        },
        {"time": run.times.cpu().numpy()},
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SimulationResult(Result):
    """The result of ``SimulationSpec``: the ``trajectory`` of states (time, system, token, dim), the ``outcome`` of
    each system, the ``overview`` (None unless all systems reached the last time), and the path of its ``picture``, None
    if it could not be drawn.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(SimulationSpec(n=8, batch=2, times=[0, 5]), folder=f"{root}/run")
    >>> result.ok, result.trajectory.states.shape, "cluster_count" in result.overview
    (True, torch.Size([2, 2, 8, 3]), True)
    """

    trajectory: Trajectory
    outcome: Outcome
    overview: xr.Dataset | None = None
    picture: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every system reached the last time."""
        return self.outcome.ok

    @property
    def summary(self) -> str:
        """The systems and times, and how the integration ended."""
        return f"{repr(self.trajectory)[1:-1].removeprefix('Trajectory: ')}; {self.outcome.summary}"

    def _tables(self) -> list[str]:
        """The observables at the last time."""
        from helmscope.stats.summary import summary

        if self.overview is None:
            return []
        scalars = self.overview.drop_dims("inner_product").isel(time=[-1])
        return [summary(scalars)._repr_html_()]


def picture_title(spec: SimulationSpec) -> str:
    """The title of the picture of a simulation.

    >>> picture_title(SimulationSpec(nu=0.1))
    'SA  beta = 4, nu = 0.1, 32 tokens in dimension 3'
    """
    noisy = f", nu = {spec.nu:g}" if spec.nu else ""
    name = names.FIELDS.load(spec.field).__name__
    return f"{name}  beta = {spec.beta:g}{noisy}, {spec.n} tokens in dimension {spec.dim}"


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulateJob(Job):
    """A prepared simulation."""

    spec: SimulationSpec
    problem: Problem

    def execute(self, work: Work) -> SimulationResult:
        """Run the units, combine their systems, and write trajectory.nc, overview.nc and overview.png."""
        return self._write_results(work, *self._join_units(self.run_units(work, "integrating")))

    def _write_results(self, work: Work, trajectory: Trajectory, outcome: Outcome) -> SimulationResult:
        import xarray as xr

        from helmscope.observe.overview import overview
        from helmscope.plots.overview import overview_figure
        from helmscope.plots.style import png
        from helmscope.runs.bar import ProgressBar

        spec, folder = self.spec, work.folder
        states = (("time", "system", "token", "axis"), trajectory.states.numpy())
        folder.write_data("trajectory", xr.Dataset({"states": states}, {"time": trajectory.times.numpy()}))
        fields: dict[str, Any] = {"spec": spec, "folder": folder, "trajectory": trajectory, "outcome": outcome}
        if not outcome.ok:
            return SimulationResult(**fields)
        bar = ProgressBar("measuring") if work.show_progress else None
        measured = overview(trajectory, beta=spec.beta, delta=spec.delta, max_angle=spec.max_angle, progress=bar)
        folder.write_results("overview", measured)
        title, pictures = picture_title(spec), PictureWriter(folder, work.show_progress)
        path = pictures.write("picture", "overview.png", lambda: png(overview_figure(measured, title=title)))
        return SimulationResult(**fields, overview=measured, picture=path, notes=tuple(pictures.notes))

    def _join_units(self, result: RunResult) -> tuple[Trajectory, Outcome]:
        """Combine the systems of all units into one trajectory."""
        import torch

        from helmscope.types import Outcome, Status, Trajectory

        parts = [result[name] for name in result]
        states = torch.cat([torch.from_numpy(part.states.values) for part in parts], dim=1)
        statuses = tuple(Status[str(name)] for part in parts for name in part.status.values)
        outcome = Outcome(statuses, tuple(float(t) for part in parts for t in part.ended.values))
        return Trajectory(self.problem.times.cpu(), states, outcome=outcome), outcome


@contextmanager
def explain_memory_error(*, n: int, batch: int) -> Iterator[None]:
    """Context manager: replace torch's out-of-memory error by one sentence that names the arguments to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        raise HelmscopeError(
            f"n is {n} and chunk is {batch}, but {batch * n * n * 8 / 1e9:.3g} GB for each matrix of pairs do not "
            "fit in memory: lower n or chunk"
        ) from None
