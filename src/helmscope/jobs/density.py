"""The density of infinitely many tokens under self-attention, or a force, with noise, at chosen times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.jobs import checks, names
from helmscope.jobs.checks import Check, boolean, integer, number, optional
from helmscope.jobs.job import Job, PictureWriter, Result, Work
from helmscope.jobs.spec import Spec
from helmscope.runs.unit import Unit
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.fields.attention import Attention
    from helmscope.fields.noise import Noise
    from helmscope.jobs.cost import Estimate
    from helmscope.meanfield.axis_force import AxisForce
    from helmscope.meanfield.density import Density
    from helmscope.meanfield.evolve import DensityPath
    from helmscope.meanfield.grid import Grid
    from helmscope.types import Outcome

DEGREES = {2: 64, 3: 32}  # the default degree, by dimension; 64 for zonal densities
ZONAL_DEGREE = 64
ATTENTION_DEFAULTS = {"beta": 4.0, "value": 1.0}
FORCE_DEFAULTS = {"strength": 1.0, "swirl": 0.0}
PROCESS = "chain"
START_FIELDS = {"uniform": {"perturbation": 0.1, "perturbation_degree": 1}, "vmf": {"kappa": 1.0}}


class DensitySpec(Spec, frozen=True, kw_only=True, tag="density"):
    """Spec for the density of infinitely many tokens in dimension ``dim`` under ``field`` with noise, with its state at
    ``times``: a list or "FROM:TO:COUNT".

    ``field`` is sa or usa with V = ``value`` I, none for pure diffusion, or force (the Fokker-Planck equation):
    ``strength`` h times the gradient of <x, e>, e the first axis, plus a rotation of speed ``swirl`` from the first
    axis to the second, which zonal densities do not allow. Noise is isotropic of strength ``nu``, or has the strength
    ``nu_axis`` along e, M = nu I + (nu_axis - nu) e e^T; its ``process`` is then chain, stratonovich, ito or
    divergence.

    ``start`` is uniform with a perturbation, 1 + ``perturbation`` P_k(<x, e>) for the harmonic of degree k =
    ``perturbation_degree`` along the first axis e, or vmf with concentration ``kappa`` around e. The density is a sum
    of harmonics up to ``degree``: on the circle and on S^2 of all, with ``zonal`` of those that depend on <x, e> only,
    which is the only choice, and the default, in more than three dimensions. With ``positive`` its logarithm is
    evolved. Steps have the local error ``tol``.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(DensitySpec(field="usa", beta=1, dim=8, times=[0, 1]), folder=f"{root}/run")
    >>> str(result.outcome), result.path[-1].grid
    ('finished at t=1', ZonalGrid(dim=8, degree=64))
    """

    field: str = "sa"
    beta: float | None = None
    value: float | None = None
    strength: float | None = None
    swirl: float | None = None
    nu: float = 0.1
    nu_axis: float | None = None
    process: str | None = None
    start: str = "uniform"
    perturbation: float | None = None
    perturbation_degree: int | None = None
    kappa: float | None = None
    dim: int = 2
    zonal: bool | None = None
    degree: int | None = None
    times: str | tuple[float, ...] = "0:40:201"
    positive: bool = False
    tol: float = 1e-9

    main_fields: ClassVar = ("field", "beta", "nu", "dim", "degree", "times")
    verb: ClassVar = ("density",)
    checks: ClassVar[Mapping[str, Check]] = {
        "field": lambda _, value: names.DENSITY_FIELDS.check(value),
        "beta": optional(number(at_least=0)),
        "value": optional(number()),
        "strength": optional(number()),
        "swirl": optional(number()),
        "nu": number(at_least=0),
        "nu_axis": optional(number(at_least=0)),
        "process": optional(lambda _, value: names.PROCESSES.check(value)),
        "start": lambda _, value: names.DENSITY_STARTS.check(value),
        "perturbation": optional(number()),
        "perturbation_degree": optional(integer(1)),
        "kappa": optional(number(at_least=0)),
        "dim": integer(2),
        "zonal": optional(boolean),
        "degree": optional(integer(1)),
        "times": checks.times,
        "positive": boolean,
        "tol": number(above=0),
    }

    def _complete(self) -> None:
        attends, forced = self.field not in (names.NONE, names.FORCE), self.field == names.FORCE
        if self.field == names.NONE and self.nu == 0 and not self.nu_axis:
            raise HelmscopeError("field is 'none' and nu is 0, but then no token moves: set nu, for example nu = 0.1")
        self._complete_options(ATTENTION_DEFAULTS, attends, f"the field '{self.field}' has no attention: omit it")
        self._complete_options(FORCE_DEFAULTS, forced, f"the field '{self.field}' is not a force: omit it")
        if self.nu_axis is None and self.process is not None:
            raise HelmscopeError(
                f"process is '{self.process}', but it makes a difference for anisotropic noise only: omit it, or set "
                "nu_axis"
            )
        if self.nu_axis is not None and self.process is None:
            self._set("process", PROCESS)
        for start, options in START_FIELDS.items():
            reason = f"it belongs to the start '{start}', not to '{self.start}': omit it, or set start to '{start}'"
            self._complete_options(options, self.start == start, reason)
        if self.perturbation is not None and not -1 <= self.perturbation <= 1:
            raise HelmscopeError(
                f"perturbation is {self.perturbation:g}, but it must be in [-1, 1], so that the density is not negative"
            )
        if self.zonal is None:
            self._set("zonal", self.dim > 3)
        if not self.zonal and self.dim > 3:
            raise HelmscopeError(
                f"dim is {self.dim} and zonal is false, but in more than 3 dimensions only zonal densities can be "
                "evolved: set zonal to true"
            )
        if self.zonal and self.swirl:
            raise HelmscopeError(
                f"swirl is {self.swirl:g} and zonal is true, but a rotation from the first axis to the second does not "
                "keep densities zonal: set swirl to 0, or in at most 3 dimensions zonal to false"
            )
        if self.degree is None:
            self._set("degree", ZONAL_DEGREE if self.zonal else DEGREES[self.dim])

    def _complete_options(self, defaults: Mapping[str, object], apply: bool, reason: str) -> None:
        """Fill in the defaults of fields that apply; raise ``HelmscopeError`` for those that are set but do not."""
        for name, default in defaults.items():
            given = getattr(self, name)
            if apply and given is None:
                self._set(name, default)
            elif not apply and given is not None:
                raise HelmscopeError(f"{name} is {given:g}, but {reason}")

    def flow(self) -> Attention | AxisForce | None:
        """The field, or None for pure diffusion.

        >>> DensitySpec(field="usa", beta=2).flow(), DensitySpec(field="none").flow()
        (USA(beta=2.0), None)
        >>> DensitySpec(field="force", swirl=0.5).flow()
        AxisForce(swirl=0.5)
        """
        if self.field == names.NONE:
            return None
        if self.field == names.FORCE:
            force: AxisForce = names.DENSITY_FIELDS.load(self.field)(self.strength, self.swirl)
            return force
        attention: Attention = names.DENSITY_FIELDS.load(self.field)(
            self.beta, value=names.value_matrix(1.0 if self.value is None else self.value, self.dim)
        )
        return attention

    def noise(self) -> Noise | None:
        """The noise, or None.

        >>> DensitySpec(nu=0.5).noise(), DensitySpec(nu=0).noise()
        (IsotropicNoise(nu=0.5), None)
        >>> DensitySpec(nu=0.5, nu_axis=0.1, process="ito").noise()
        MatrixNoise(diffusion=<2 x 2>, process=Ito())
        """
        import torch

        from helmscope.fields.noise import IsotropicNoise, MatrixNoise

        if self.nu_axis is not None and self.process is not None:
            diagonal = torch.full((self.dim,), self.nu, dtype=torch.float64, device="cpu")
            diagonal[0] = self.nu_axis
            return MatrixNoise(torch.diag(diagonal), process=names.PROCESSES.load(self.process)())
        return IsotropicNoise(self.nu) if self.nu > 0 else None

    def grid(self) -> Grid:
        """The grid of the density.

        >>> DensitySpec(dim=3, degree=16).grid(), DensitySpec(dim=3, zonal=True).grid()
        (SphereGrid(degree=16), ZonalGrid(dim=3, degree=64))
        """
        from helmscope.meanfield.circle_grid import CircleGrid
        from helmscope.meanfield.sphere_grid import SphereGrid
        from helmscope.meanfield.zonal_grid import ZonalGrid

        degree = self.degree or 0
        if self.zonal:
            return ZonalGrid(dim=self.dim, degree=degree)
        return CircleGrid(degree=degree) if self.dim == 2 else SphereGrid(degree=degree)

    def initial_density(self) -> Density:
        """The density at t = 0.

        >>> DensitySpec(perturbation=0.5).initial_density().mean.norm().round(decimals=12)
        tensor(0.2500, dtype=torch.float64)
        """
        start: Density = names.DENSITY_STARTS.load(self.start)(self, self.grid())
        return start

    def evolve(self, times: list[float]) -> DensityPath:
        """The density at these times.

        >>> DensitySpec(field="none").evolve([0.0, 1.0])
        <DensityPath on S^1, degree 64: 2 times, 0 to 1; finished>
        """
        from helmscope.meanfield.evolve import evolve

        options: dict[str, Any] = {"noise": self.noise(), "positive": self.positive, "tol": self.tol}
        return evolve(self.flow(), self.initial_density(), times=times, **options)

    def prepare(self) -> DensityJob:
        """Return the job, which has one unit; a density that the grid cannot represent raises ``HelmscopeError``."""
        from helmscope.store.manifest import hash_bytes

        start = self.evolve([0.0])
        return DensityJob(
            spec=self,
            units=[Unit("density", density_unit, {"fields": self.fields})],
            inputs={"start": hash_bytes(start.modes.numpy().tobytes())},
            parameters=self.fields,
        )

    def estimate(self) -> Estimate:
        """Estimate the time on one core and the memory of one process."""
        from helmscope.jobs.cost import density_cost

        return density_cost(self)


def perturbed_uniform(spec: DensitySpec, grid: Grid) -> Density:
    """The start ``uniform``: the uniform density times 1 + eps P_k(<x, e>).

    >>> spec = DensitySpec(perturbation=1.0)
    >>> perturbed_uniform(spec, spec.grid()).minimum < 1e-3
    True
    """
    from helmscope.geometry.harmonics import gegenbauer
    from helmscope.meanfield.density import Density

    size, k = spec.perturbation or 0.0, spec.perturbation_degree or 1
    if k > grid.degree:
        raise HelmscopeError(f"perturbation_degree is {k}, but it must be at most degree, {grid.degree}")

    def values(x: Any) -> Any:
        return 1 + size * gegenbauer(x[..., 0].clamp(-1, 1), k, dim=grid.dim)[..., k]

    return Density.from_function(grid, values, normalize=True)


def von_mises_fisher(spec: DensitySpec, grid: Grid) -> Density:
    """The start ``vmf``, around the first axis.

    >>> spec = DensitySpec(start="vmf", kappa=2.0, dim=3)
    >>> von_mises_fisher(spec, spec.grid()).entropy
    2.0516...
    """
    from helmscope.meanfield.density import Density

    return Density.von_mises_fisher(grid, kappa=0.0 if spec.kappa is None else spec.kappa)


def density_unit(fields: dict[str, Any]) -> xr.Dataset:
    """Unit of work: the coefficients of the density at the times that were reached, and how the run ended."""
    import xarray as xr

    spec = DensitySpec(**fields)
    path = spec.evolve(checks.expand_range("times", spec.times))
    modes = {"modes": path.modes} | ({} if path.log_modes is None else {"log_modes": path.log_modes})
    return xr.Dataset(
        {
            **{name: (("time", "harmonic"), value.numpy()) for name, value in modes.items()},
            "degree": ("harmonic", path.grid.degrees.numpy()),
            "status": path.outcome.statuses[0].name,
            "ended": path.outcome.times[0],
            "steps": path.steps,
            "mass_error": path.mass_error,
            "truncation_error": path.truncation_error,
        },
        {"time": path.times.numpy()},
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DensityResult(Result):
    """The result of ``DensitySpec``: the ``path`` of the density over the times that were reached, the ``overview``
    of its observables, and the path of its ``picture``. Both are None if not even the first time was reached, and the
    picture also if it could not be drawn.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(DensitySpec(field="none", times=[0, 1]), folder=f"{root}/run")
    >>> result.ok, result.path, "free_energy" in result.overview
    (True, <DensityPath on S^1, degree 64: 2 times, 0 to 1; finished>, True)
    """

    path: DensityPath
    overview: xr.Dataset | None = None
    picture: Path | None = None

    @property
    def outcome(self) -> Outcome:
        """How the integration ended."""
        return self.path.outcome

    @property
    def ok(self) -> bool:
        """Whether the last time was reached."""
        return self.outcome.ok

    @property
    def summary(self) -> str:
        """The grid and the times, and how the integration ended."""
        return repr(self.path)[1:-1].removeprefix("DensityPath ")

    def _tables(self) -> list[str]:
        """The observables at the last time."""
        from helmscope.stats.summary import summary

        return [] if self.overview is None else [summary(self.overview.isel(time=[-1]))._repr_html_()]


@dataclass(frozen=True, eq=False, kw_only=True)
class DensityJob(Job):
    """A prepared evolution of a density."""

    spec: DensitySpec

    def execute(self, work: Work) -> DensityResult:
        """Run the unit, and write density.nc, overview.nc and density.png."""
        from helmscope.observe.density_overview import density_overview
        from helmscope.plots.style import png
        from helmscope.runs.bar import ProgressBar

        data = self.run_units(work, "evolving")["density"]
        path, folder = self._path(data), work.folder
        folder.write_data("density", data)
        fields: dict[str, Any] = {"spec": self.spec, "folder": folder, "path": path}
        if len(path) == 0:
            return DensityResult(**fields)
        bar = ProgressBar("measuring") if work.show_progress else None
        measured = density_overview(path, progress=bar)
        folder.write_results("overview", measured)
        pictures = PictureWriter(folder, work.show_progress)
        picture = pictures.write("picture", "density.png", lambda: png(path.plot()))
        return DensityResult(**fields, overview=measured, picture=picture, notes=tuple(pictures.notes))

    def _path(self, data: xr.Dataset) -> DensityPath:
        """The path from the result of the unit."""
        import torch

        from helmscope.meanfield.evolve import DensityPath
        from helmscope.types import Outcome, Status

        return DensityPath(
            self.spec.grid(),
            torch.tensor(data.time.values.copy()),  # arrays from a file cannot be written to
            torch.tensor(data.modes.values.copy()),
            Outcome((Status[str(data.status.values)],), (float(data.ended),)),
            self.spec.flow(),
            self.spec.noise(),
            int(data.steps),
            float(data.mass_error),
            torch.tensor(data.log_modes.values.copy()) if "log_modes" in data else None,
            float(data.truncation_error),
        )
