"""A phase diagram: the probability that two tokens have met, over dimension, inverse temperature and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from helmscope.jobs import checks, names
from helmscope.jobs.checks import Check, boolean, integer, list_of, number, optional
from helmscope.jobs.job import Job, PictureWriter, Result, Work
from helmscope.jobs.spec import Spec
from helmscope.runs.unit import Unit
from helmscope.types import HelmscopeError, check_memory, check_seed, pluralized

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.fields.attention import Attention
    from helmscope.jobs.cost import Estimate

DEFAULT_DIMS = (8, 32)
UNITS_PER_DIM = 8
AXES = {"dim": "dimension", "beta": "beta", "time": "time"}


class PhaseSpec(Spec, frozen=True, kw_only=True, tag="phase"):
    """Spec for the probability that two tokens have met, <x, y> >= 1 - ``delta``, over ``betas`` and ``times`` (lists,
    or "FROM:TO:COUNT") in each of the dimensions ``dims``, from ``samples`` uniform starts of ``n`` tokens each.

    ``field`` is sa, usa or sinkhorn, with V = ``value`` I and isotropic noise of strength ``nu``. ``spectrum`` gives
    the eigenvalues of a symmetric B (default: B = I); ``dims`` is then their number. ``published`` adds the result of
    the published scheme, by default for sa without noise. ``dtype`` defaults to float64, and on a GPU to float32 where
    a GPU kernel applies.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(PhaseSpec(n=4, dims=[64], betas=[0, 1], times=[0, 9], samples=8), folder=f"{root}/run")
    >>> result.diagram.probability.values.tolist()
    [[[0.0, 1.0], [0.0, 1.0]]]
    """

    field: str = "sa"
    value: float = 1.0
    causal: bool = False
    nu: float = 0.0
    spectrum: tuple[float, ...] | None = None
    n: int = 32
    dims: tuple[int, ...] | None = None
    betas: str | tuple[float, ...] = "0.1:9:10"
    times: str | tuple[float, ...] = "0:30:61"
    samples: int = 64
    delta: float = 1e-3
    published: bool | None = None
    seed: int = 0
    dtype: str | None = None
    device: str = "cpu"

    samples_cost: ClassVar = True
    main_fields: ClassVar = ("field", "betas", "nu", "n", "dims", "samples", "times")
    verb: ClassVar = ("phase",)
    checks: ClassVar[Mapping[str, Check]] = {
        "field": lambda _, value: names.FIELDS.check(value),
        "value": number(),
        "causal": boolean,
        "nu": number(at_least=0),
        "spectrum": optional(list_of(number(), min_length=2)),
        "n": integer(1),
        "dims": optional(list_of(integer(2), min_length=1)),
        "betas": checks.betas,
        "times": checks.times,
        "samples": integer(1),
        "delta": number(at_least=0),
        "published": optional(boolean),
        "seed": lambda _, value: check_seed(value),
        "dtype": optional(lambda _, value: names.DTYPES.check(value)),
        "device": checks.text,
    }

    def _complete(self) -> None:
        if self.dims is None:
            self._set("dims", DEFAULT_DIMS if self.spectrum is None else (len(self.spectrum),))
        if len(set(self.dim_values)) < len(self.dim_values):
            raise HelmscopeError(f"dims is {list(self.dim_values)}, but each dimension may occur only once")
        for dim in () if self.spectrum is None else self.dim_values:
            if len(self.spectrum or ()) != dim:
                raise HelmscopeError(
                    f"spectrum has {len(self.spectrum or ())} eigenvalues, but B has {dim} in dimension {dim}"
                )
        if self.published is None:
            self._set("published", self.field == "sa" and self.nu == 0)
        if self.published and self.nu > 0:
            raise HelmscopeError(f"nu is {self.nu:g}, but the published scheme has no noise: set published to false")

    @property
    def dim_values(self) -> tuple[int, ...]:
        """The dimensions, with the default filled in.

        >>> PhaseSpec().dim_values, PhaseSpec(spectrum=[1, 0.5, 0.25]).dim_values
        ((8, 32), (3,))
        """
        return self.dims or ()

    @property
    def beta_values(self) -> list[float]:
        """The inverse temperatures as a list.

        >>> PhaseSpec(betas="1:3:3").beta_values
        [1.0, 2.0, 3.0]
        """
        return checks.expand_range("betas", self.betas)

    @property
    def shared_parameters(self) -> dict[str, Any]:
        """The fields other than ``dims`` and ``betas``: what the result at one dimension and beta depends on."""
        return {name: value for name, value in self.fields.items() if name not in ("dims", "betas")}

    def flow(self, dim: int) -> Callable[[float], Attention]:
        """The function beta -> field. Uniform starts are isotropic, so B can be taken to be diagonal.

        >>> PhaseSpec(causal=True).flow(8)(4.0).causal
        True
        """
        import torch

        # without noise or B the tokens stay in their span, so that V = value I needs only its dimension
        spans = self.nu == 0 and self.spectrum is None
        options: dict[str, Any] = {"causal": self.causal}
        options["value"] = names.value_matrix(self.value, min(dim, max(2, self.n)) if spans else dim)
        if self.spectrum is not None:
            eigenvalues = torch.tensor(self.spectrum, dtype=torch.float64, device="cpu")
            options["query_key"] = torch.diag(eigenvalues)
        kind = names.FIELDS.load(self.field)
        return lambda beta: kind(beta, **options)

    def diagram(self, dim: int) -> xr.Dataset:
        """Compute the diagram of one dimension, over (beta, time).

        >>> PhaseSpec(n=4, betas=[1], times=[0, 9], samples=4).diagram(8).probability.dims
        ('beta', 'time')
        """
        from helmscope.fields.noise import IsotropicNoise
        from helmscope.observe.phase import phase_diagram, published_scheme_probability
        from helmscope.theory.starts import Uniform

        shared: dict[str, Any] = {
            "betas": self.beta_values,
            "times": checks.expand_range("times", self.times),
            "start": Uniform(self.n, dim),
            "dtype": None if self.dtype is None else names.DTYPES.load(self.dtype),
            "device": names.usable_device(self.device),
            **{name: getattr(self, name) for name in ("samples", "delta", "seed")},
        }
        flow = self.flow(dim)
        data = phase_diagram(flow, noise=IsotropicNoise(self.nu) if self.nu > 0 else None, **shared)
        if self.published:
            data = data.assign(published_scheme_probability(flow, **shared).data_vars)
        return data

    def prepare(self) -> PhaseJob:
        """Return the job, whose units are blocks of betas of each dimension; what cannot be computed raises
        ``HelmscopeError``.
        """
        times = len(checks.expand_range("times", self.times))
        numbers = self.samples * max(self.n * min(self.n, max(self.dim_values)), times)
        check_memory(f"samples is {self.samples}, n is {self.n} and times has {times} values", numbers)
        tiny = msgspec.structs.replace(self, samples=2, times=(0.0,))
        for dim in self.dim_values:  # check by integrating two systems up to t = 0
            tiny.diagram(dim)
        betas = self.beta_values
        size = -(-len(betas) // UNITS_PER_DIM)
        units = [
            Unit(
                f"d{dim}-{k:05d}",
                phase_unit,
                {"dim": dim, "betas": betas[k : k + size], "shared_parameters": self.shared_parameters},
            )
            for dim in self.dim_values
            for k in range(0, len(betas), size)
        ]
        own_entries = ("seed", "dtype", "device")  # stored in the manifest itself
        return PhaseJob(
            spec=self,
            units=units,
            dtype=self.dtype or default_dtype(self.device),
            device=self.device,
            parameters={name: value for name, value in self.fields.items() if name not in own_entries},
        )

    def estimate(self) -> Estimate:
        """Estimate the time on one core and the memory of one process."""
        from helmscope.jobs.cost import phase_cost

        return phase_cost(self)


def default_dtype(device: str) -> str:
    """The dtype in the manifest. On a GPU each unit uses float32 where a kernel applies, which is known only when it
    runs.

    >>> default_dtype("cpu"), default_dtype("cuda:1")
    ('float64', 'auto')
    """
    return names.AUTO if device.startswith("cuda") else "float64"


def phase_unit(dim: int, betas: list[float], shared_parameters: dict[str, Any]) -> xr.Dataset:
    """Unit of work: the diagram of one dimension at some betas."""
    return PhaseSpec(dims=(dim,), betas=tuple(betas), **shared_parameters).diagram(dim)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PhaseResult(Result):
    """The result of ``PhaseSpec``: the ``diagram`` over (dim, beta, time), the ``half_time`` at which the probability
    is 1/2, the number of ``lost_samples``, which were not integrated to the last time, and the paths of
    ``picture`` and ``page``, None if they could not be drawn.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(PhaseSpec(n=4, dims=[8], betas=[1], times=[0, 9], samples=4), folder=f"{root}/run")
    >>> result.ok, result.lost_samples, dict(result.diagram.probability.sizes)
    (True, 0, {'dim': 1, 'beta': 1, 'time': 2})
    """

    diagram: xr.Dataset
    half_time: xr.Dataset
    lost_samples: int
    picture: Path | None = None
    page: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every sample was integrated to the last time."""
        return self.lost_samples == 0

    @property
    def summary(self) -> str:
        """The axes of the diagram, the number of samples, and how many of them were lost."""
        sizes = self.diagram.probability.sizes
        axes = " x ".join(pluralized(sizes[name], word) for name, word in AXES.items())
        lost = "complete" if self.ok else f"{pluralized(self.lost_samples, 'sample')} lost"
        return f"{axes}; {pluralized(int(self.diagram.attrs['n']), 'sample')}; {lost}"

    def _tables(self) -> list[str]:
        """The half time of each dimension and beta."""
        from helmscope.stats.summary import summary

        return [summary(self.half_time)._repr_html_()]


@dataclass(frozen=True, eq=False, kw_only=True)
class PhaseJob(Job):
    """A prepared phase diagram."""

    spec: PhaseSpec

    prints_cost: ClassVar[bool] = True

    def execute(self, work: Work) -> PhaseResult:
        """Run the units, combine them into one diagram, and write phase.nc, half-time.nc, phase.png and phase.html.
        Adds the summation method and stepper used to the manifest.
        """
        from helmscope.observe.half_times import half_time
        from helmscope.plots import style
        from helmscope.plots.phase import phase_figure, phase_page

        folder = work.folder
        result = self.run_units(work, "phase diagram")
        data = self._with_curve(join_diagrams([result[name] for name in result]))
        manifest = folder.read_manifest()
        names_used = ("summation", "stepper", *(("dtype",) if manifest.dtype == names.AUTO else ()))
        used = {name: data.attrs[name] for name in names_used}
        folder.write_manifest(replace(manifest, parameters={**manifest.parameters, **used}))
        half = half_time(data)
        folder.write_results("phase", data)
        folder.write_results("half-time", half)
        pictures = PictureWriter(folder, work.show_progress)
        return PhaseResult(
            spec=self.spec,
            folder=folder,
            diagram=data,
            half_time=half,
            lost_samples=int(data.lost_samples.sum()),
            picture=pictures.write("picture", "phase.png", lambda: style.png(phase_figure(data))),
            page=pictures.write("page", "phase.html", lambda: phase_page(data).encode()),
            notes=tuple(pictures.notes),
        )

    def _with_curve(self, data: xr.Dataset) -> xr.Dataset:
        """Add t* between the betas, so that the picture shows a smooth curve instead of line segments."""
        from helmscope.observe.hitting_curve import hitting_curve

        spec = self.spec
        if spec.nu > 0 or not any(math.isfinite(t) for t in data.hitting_time.values.flat):
            return data
        fine = hitting_curve(spec.flow(spec.dim_values[0]), betas=spec.beta_values, n=spec.n, delta=spec.delta)
        return data.assign_coords(fine.coords)


def join_diagrams(parts: list[xr.Dataset]) -> xr.Dataset:
    """Combine the diagrams of the units into one over (dim, beta, time)."""
    import xarray as xr

    how: Any = {"data_vars": "all", "compat": "equals", "join": "exact", "combine_attrs": "override"}
    by_dim: dict[int, list[xr.Dataset]] = {}
    for part in parts:
        by_dim.setdefault(int(part.attrs["dim"]), []).append(part)
    rows = [
        xr.concat(blocks, dim="beta", coords="minimal", **how).expand_dims({"dim": [dim]})
        for dim, blocks in by_dim.items()
    ]
    data = xr.concat(rows, dim="dim", coords=["lost_samples"], **how)
    methods = {
        key: " / ".join(dict.fromkeys(str(part.attrs[key]) for part in parts)) for key in ("summation", "stepper")
    }
    # numbers read from a file are NumPy scalars, which JSON cannot encode
    attrs = {key: getattr(value, "item", lambda value=value: value)() for key, value in data.attrs.items()}
    attrs = {key: value for key, value in attrs.items() if key not in ("dim", "integration_dim")}
    return data.drop_attrs(deep=False).assign_attrs(attrs | methods)
