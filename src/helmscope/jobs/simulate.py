"""A simulation: tokens on the sphere under self-attention, looked at at chosen times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.jobs import checks, names
from helmscope.jobs.checks import Check, number, optional, switch, whole
from helmscope.jobs.job import Drawings, Job, Result, Work
from helmscope.jobs.spec import Spec
from helmscope.runs.unit import Unit
from helmscope.types import HelmscopeError, seed_number

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.jobs.cost import Estimate
    from helmscope.runs.run import RunResult
    from helmscope.solve.problem import Problem
    from helmscope.solve.stepper import Stepper
    from helmscope.types import Outcome, Trajectory

USUAL_STEP = 0.05
UNITS = 8
LOOKS = ("delta", "radius", "chunk")  # what is made of the states, and how they are cut into units


class Simulate(Spec, frozen=True, kw_only=True, tag="simulate"):
    """Integrate ``batch`` systems of ``n`` tokens in dimension ``dim`` under ``field`` (sa, usa or sinkhorn) with
    V = ``value`` I, isotropic noise of strength ``nu``, from ``start`` (uniform, vmf with ``kappa``, or orthonormal),
    and look at them at ``times``: a list, or "FROM:TO:COUNT".

    ``stepper`` is adaptive where None, with the local error ``tol``, or euler-maruyama where there is noise; the
    others take ``step``. Tokens closer than ``merge`` are merged. ``delta`` and ``radius`` are those of the overview,
    and a unit of work holds ``chunk`` systems, an eighth of them where None.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(Simulate(n=8, batch=2, times=[0, 5]), folder=f"{root}/run")
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
    kernel: str = names.AUTO
    delta: float = 1e-3
    radius: float = 0.1
    chunk: int | None = None
    seed: int = 0
    dtype: str = "float64"
    device: str = "cpu"

    verb: ClassVar = ("simulate",)
    checks: ClassVar[Mapping[str, Check]] = {
        "field": lambda _, value: names.FIELDS.check(value),
        "beta": number(at_least=0),
        "value": number(),
        "causal": switch,
        "nu": number(at_least=0),
        "start": lambda _, value: names.STARTS.check(value),
        "n": whole(1),
        "dim": whole(2),
        "kappa": optional(number(at_least=0)),
        "batch": whole(1),
        "times": checks.times,
        "stepper": optional(lambda _, value: names.STEPPERS.check(value)),
        "step": optional(number(above=0)),
        "tol": optional(number(above=0)),
        "merge": optional(number(at_least=0)),
        "kernel": lambda _, value: names.KERNELS.check(value),
        "delta": number(at_least=0),
        "radius": number(at_least=0),
        "chunk": optional(whole(1)),
        "seed": lambda _, value: seed_number(value),
        "dtype": lambda _, value: names.DTYPES.check(value),
        "device": checks.text,
    }

    @property
    def method(self) -> str:
        """The name of the stepper, also where it goes unsaid.

        >>> Simulate().method, Simulate(nu=0.1).method
        ('adaptive', 'euler-maruyama')
        """
        usual = names.NOISY_STEPPERS[0] if self.nu > 0 else "adaptive"
        return usual if self.stepper is None else self.stepper

    def _complete(self) -> None:
        if self.start != "vmf" and self.kappa is not None:
            raise HelmscopeError(
                f"kappa is {self.kappa}, but the start '{self.start}' has no concentration: choose the start 'vmf'"
            )
        if self.start == "vmf" and self.kappa is None:
            self._set("kappa", 1.0)
        method, noisy = self.method, ", ".join(names.NOISY_STEPPERS[:2])
        if method in names.NOISY_STEPPERS and self.nu == 0:
            raise HelmscopeError(f"stepper is '{method}', but it is for noise: set nu, such as nu = 0.1")
        if method not in names.NOISY_STEPPERS and self.nu > 0:
            raise HelmscopeError(
                f"stepper is '{method}' and nu is {self.nu:g}, but noise needs {noisy} or {names.NOISY_STEPPERS[2]}"
            )
        if method == "adaptive":
            if self.step is not None:
                raise HelmscopeError(
                    f"step is {self.step}, but the adaptive stepper chooses its own: name another stepper, such as rk4"
                )
            return
        if self.tol is not None:
            raise HelmscopeError(
                f"tol is {self.tol}, but the stepper '{method}' takes steps of fixed size: give step instead"
            )
        if self.step is None:
            self._set("step", USUAL_STEP)

    @property
    def unit_size(self) -> int:
        """How many systems a unit of work holds.

        >>> Simulate(batch=100).unit_size, Simulate(chunk=5).unit_size
        (13, 5)
        """
        return self.chunk or -(-self.batch // UNITS)

    @property
    def physics(self) -> dict[str, Any]:
        """What decides the states: the fields but those of the overview and of the units.

        >>> "delta" in Simulate().physics
        False
        """
        return {name: value for name, value in self.fields.items() if name not in LOOKS}

    def problem(self) -> Problem:
        """The integration, checked and ready to run.

        >>> Simulate(n=4, batch=2).problem().start.shape
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
            checks.spread("times", self.times),
            stepper=stepper_of(self),
            merge=self.merge,
            noise=IsotropicNoise(self.nu) if self.nu > 0 else None,
            seed=self.seed,
            kernel=None if self.kernel == names.AUTO else names.KERNELS.load(self.kernel)(),
        )

    def prepare(self) -> SimulateJob:
        """The problem and its units; what cannot be integrated is refused."""
        from helmscope.store.manifest import hash_bytes

        problem = self.problem()
        with enough_memory(n=self.n, batch=1):
            kernels = ", ".join(problem.kernels())
        size = self.unit_size
        units = [
            Unit(
                f"systems-{k:06d}",
                simulate_unit,
                {"first": k, "last": min(k + size, self.batch), "physics": self.physics},
            )
            for k in range(0, self.batch, size)
        ]
        elsewhere = ("seed", "dtype", "device")  # which have places of their own in a manifest
        return SimulateJob(
            spec=self,
            units=units,
            dtype=self.dtype,
            device=self.device,
            inputs={"start": hash_bytes(problem.start.cpu().numpy().tobytes())},
            parameters={k: v for k, v in self.fields.items() if k not in elsewhere} | {"kernels": kernels},
            problem=problem,
        )

    def estimate(self) -> Estimate:
        """Time on one core and memory of one process."""
        from helmscope.jobs.cost import simulation_cost

        return simulation_cost(self)


def stepper_of(spec: Simulate) -> Stepper:
    """The stepper that a spec names.

    >>> stepper_of(Simulate(stepper="rk4", step=0.1))
    RK4(h=0.1)
    """
    made: Stepper = names.STEPPERS.load(spec.method)(spec.tol if spec.method == "adaptive" else spec.step)
    return made


def simulate_unit(first: int, last: int, physics: dict[str, Any]) -> xr.Dataset:
    """States of the systems ``first`` to ``last`` - 1, and how each ended: one unit of work. A system's bits do not
    depend on its unit.
    """
    import xarray as xr

    spec = Simulate(**physics)
    problem = spec.problem().part(first, last)
    with enough_memory(n=spec.n, batch=last - first):
        run = problem.run()
    return xr.Dataset(
        {
            "states": (("time", "system", "token", "axis"), run.trajectory.states.cpu().numpy()),
            "status": ("system", [status.name for status in run.outcome.statuses]),
            "ended": ("system", list(run.outcome.times)),
        },
        {"time": run.times.cpu().numpy()},
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulationResult(Result):
    """States, how the systems ended, the overview (None where one did not reach the end) and its picture."""

    trajectory: Trajectory
    outcome: Outcome
    overview: xr.Dataset | None = None
    picture: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every system reached the end."""
        return self.outcome.ok


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulateJob(Job):
    """A simulation that waits to be run."""

    spec: Simulate
    problem: Problem

    def carry_out(self, work: Work) -> SimulationResult:
        """Runs the units, joins their systems, and writes trajectory.nc, overview.nc and overview.png."""
        return self._finished(work, *self._joined(self.run_units(work, "integrating")))

    def _finished(self, work: Work, trajectory: Trajectory, outcome: Outcome) -> SimulationResult:
        import xarray as xr

        from helmscope.observe.overview import overview
        from helmscope.plots.overview import overview_figure
        from helmscope.plots.style import png
        from helmscope.runs.progress import ProgressBar

        spec, folder = self.spec, work.folder
        states = (("time", "system", "token", "axis"), trajectory.states.numpy())
        folder.write_data("trajectory", xr.Dataset({"states": states}, {"time": trajectory.times.numpy()}))
        made: dict[str, Any] = {"spec": spec, "folder": folder, "trajectory": trajectory, "outcome": outcome}
        if not outcome.ok:
            return SimulationResult(**made)
        bar = ProgressBar("measuring") if work.show_progress else None
        measured = overview(trajectory, beta=spec.beta, delta=spec.delta, radius=spec.radius, progress=bar)
        folder.write_results("overview", measured)
        noisy = f", nu = {spec.nu:g}" if spec.nu else ""
        name = type(self.problem.field).__name__
        title = f"{name}  beta = {spec.beta:g}{noisy}, {spec.n} tokens in dimension {spec.dim}"
        drawn = Drawings(folder)
        path = drawn.add("picture", "overview.png", lambda: png(overview_figure(measured, title=title)))
        return SimulationResult(**made, overview=measured, picture=path, notes=tuple(drawn.notes))

    def _joined(self, result: RunResult) -> tuple[Trajectory, Outcome]:
        """The units' systems in one trajectory."""
        import torch

        from helmscope.types import Outcome, Status, Trajectory

        parts = [result[name] for name in result]
        states = torch.cat([torch.from_numpy(part.states.values) for part in parts], dim=1)
        statuses = tuple(Status[str(name)] for part in parts for name in part.status.values)
        outcome = Outcome(statuses, tuple(float(t) for part in parts for t in part.ended.values))
        return Trajectory(self.problem.times.cpu(), states, outcome=outcome), outcome


@contextmanager
def enough_memory(*, n: int, batch: int) -> Iterator[None]:
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
