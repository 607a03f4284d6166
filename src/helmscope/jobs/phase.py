"""A phase diagram: have two tokens met, over inverse temperature and time, in one dimension after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from helmscope.jobs import checks, names
from helmscope.jobs.checks import Check, each, number, optional, switch, whole
from helmscope.jobs.job import Drawings, Job, Result, Work
from helmscope.jobs.spec import Spec
from helmscope.runs.unit import Unit
from helmscope.types import HelmscopeError, fits_memory, seed_number

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.fields.attention import Attention
    from helmscope.jobs.cost import Estimate

USUAL_DIMS = (8, 32)
UNITS_PER_DIM = 8


class Phase(Spec, frozen=True, kw_only=True, tag="phase"):
    """The probability that two tokens have met, <x, y> >= 1 - ``delta``, over ``betas`` and ``times`` (lists, or
    "FROM:TO:COUNT"), in each of ``dims``, from ``samples`` uniform starts of ``n`` tokens each.

    ``field`` is sa, usa or sinkhorn, with V = ``value`` I and isotropic noise of strength ``nu``. ``spectrum`` holds
    the eigenvalues of a symmetric B, I where None; ``dims`` is then their number. ``published`` lays what the published
    scheme gives beside ours, by default for sa without noise. ``dtype`` is float64 where None, and on a GPU float32
    where a kernel serves.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(Phase(n=4, dims=[64], betas=[0, 1], times=[0, 9], samples=8), folder=f"{root}/run")
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

    verb: ClassVar = ("phase",)
    checks: ClassVar[Mapping[str, Check]] = {
        "field": lambda _, value: names.FIELDS.check(value),
        "value": number(),
        "causal": switch,
        "nu": number(at_least=0),
        "spectrum": optional(each(number(), least=2)),
        "n": whole(1),
        "dims": optional(each(whole(2), least=1)),
        "betas": checks.betas,
        "times": checks.times,
        "samples": whole(1),
        "delta": number(at_least=0),
        "published": optional(switch),
        "seed": lambda _, value: seed_number(value),
        "dtype": optional(lambda _, value: names.DTYPES.check(value)),
        "device": checks.text,
    }

    def _complete(self) -> None:
        if self.dims is None:
            self._set("dims", USUAL_DIMS if self.spectrum is None else (len(self.spectrum),))
        if len(set(self.spaces)) < len(self.spaces):
            raise HelmscopeError(f"dims is {list(self.spaces)}, but every dimension may stand there once")
        for dim in () if self.spectrum is None else self.spaces:
            if len(self.spectrum or ()) != dim:
                raise HelmscopeError(
                    f"spectrum has {len(self.spectrum or ())} eigenvalues, but in dimension {dim} B has {dim}"
                )
        if self.published is None:
            self._set("published", self.field == "sa" and self.nu == 0)
        if self.published and self.nu > 0:
            raise HelmscopeError(f"nu is {self.nu:g}, but the published scheme knows no noise: set published to false")

    @property
    def spaces(self) -> tuple[int, ...]:
        """The dimensions, also where they went unsaid.

        >>> Phase().spaces, Phase(spectrum=[1, 0.5, 0.25]).spaces
        ((8, 32), (3,))
        """
        return self.dims or ()

    @property
    def temperatures(self) -> list[float]:
        """The inverse temperatures, one by one.

        >>> Phase(betas="1:3:3").temperatures
        [1.0, 2.0, 3.0]
        """
        return checks.spread("betas", self.betas)

    @property
    def physics(self) -> dict[str, Any]:
        """What decides the numbers of one dimension and beta: the fields but these two."""
        return {name: value for name, value in self.fields.items() if name not in ("dims", "betas")}

    def flow(self, dim: int) -> Callable[[float], Attention]:
        """beta -> field. A uniform start looks the same in every basis, so B may be diagonal.

        >>> Phase(causal=True).flow(8)(4.0).causal
        True
        """
        import torch

        # without noise or B the tokens stay in their span, and there V = value I needs no more axes than that
        free = self.nu == 0 and self.spectrum is None
        options: dict[str, Any] = {"causal": self.causal}
        options["value"] = names.value_matrix(self.value, min(dim, max(2, self.n)) if free else dim)
        if self.spectrum is not None:
            eigenvalues = torch.tensor(self.spectrum, dtype=torch.float64, device="cpu")
            options["query_key"] = torch.diag(eigenvalues)
        kind = names.FIELDS.load(self.field)
        return lambda beta: kind(beta, **options)

    def diagram(self, dim: int) -> xr.Dataset:
        """The diagram of one dimension, over (beta, time)."""
        from helmscope.fields.noise import IsotropicNoise
        from helmscope.observe.phase import phase_diagram, published_probability
        from helmscope.theory.starts import Uniform

        shared: dict[str, Any] = {
            "betas": self.temperatures,
            "times": checks.spread("times", self.times),
            "start": Uniform(self.n, dim),
            "dtype": None if self.dtype is None else names.DTYPES.load(self.dtype),
            "device": names.usable_device(self.device),
            **{name: getattr(self, name) for name in ("samples", "delta", "seed")},
        }
        flow = self.flow(dim)
        data = phase_diagram(flow, noise=IsotropicNoise(self.nu) if self.nu > 0 else None, **shared)
        if self.published:
            data = data.assign(published_probability(flow, **shared).data_vars)
        return data

    def prepare(self) -> PhaseJob:
        """The units, blocks of betas of each dimension; what cannot be computed is refused."""
        times = len(checks.spread("times", self.times))
        numbers = self.samples * max(self.n * min(self.n, max(self.spaces)), times)
        fits_memory(f"samples is {self.samples}, n is {self.n} and times holds {times}", numbers)
        little = msgspec.structs.replace(self, samples=2, times=(0.0,))
        for dim in self.spaces:  # by carrying two systems nowhere
            little.diagram(dim)
        betas = self.temperatures
        size = -(-len(betas) // UNITS_PER_DIM)
        units = [
            Unit(f"d{dim}-{k:05d}", phase_unit, {"dim": dim, "betas": betas[k : k + size], "physics": self.physics})
            for dim in self.spaces
            for k in range(0, len(betas), size)
        ]
        elsewhere = ("seed", "dtype", "device")  # which have places of their own in a manifest
        return PhaseJob(
            spec=self,
            units=units,
            dtype=self.dtype or usual_dtype(self.device),
            device=self.device,
            parameters={name: value for name, value in self.fields.items() if name not in elsewhere},
        )

    def estimate(self) -> Estimate:
        """Time on one core and memory of one process."""
        from helmscope.jobs.cost import phase_cost

        return phase_cost(self)


def usual_dtype(device: str) -> str:
    """On a GPU each unit takes float32 where a kernel serves it, which shows only when it runs.

    >>> usual_dtype("cpu"), usual_dtype("cuda:1")
    ('float64', 'auto')
    """
    return names.AUTO if device.startswith("cuda") else "float64"


def phase_unit(dim: int, betas: list[float], physics: dict[str, Any]) -> xr.Dataset:
    """The diagram of one dimension at some betas: one unit of work."""
    return Phase(dims=(dim,), betas=tuple(betas), **physics).diagram(dim)


@dataclass(frozen=True, eq=False, kw_only=True)
class PhaseResult(Result):
    """The diagram over (dim, beta, time), its half-times, how many samples were lost on the way, and where the pictures
    are.
    """

    diagram: xr.Dataset
    half_time: xr.Dataset
    lost: int
    picture: Path | None = None
    page: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every sample was carried to the end."""
        return self.lost == 0


@dataclass(frozen=True, eq=False, kw_only=True)
class PhaseJob(Job):
    """A phase diagram that waits to be computed."""

    spec: Phase

    says_cost: ClassVar[bool] = True

    def carry_out(self, work: Work) -> PhaseResult:
        """Runs the units, joins them to one diagram, and writes phase.nc, half-time.nc, phase.png and phase.html. What
        was used is added to the manifest.
        """
        from helmscope.observe.half_times import half_time
        from helmscope.plots import style
        from helmscope.plots.phase import phase_figure, phase_page

        folder = work.folder
        result = self.run_units(work, "phase diagram")
        data = self._with_curve(joined([result[name] for name in result]))
        begun = folder.read_manifest()
        kept = ("kernel", "stepper", *(("dtype",) if begun.dtype == names.AUTO else ()))
        used = {name: data.attrs[name] for name in kept}
        folder.write_manifest(replace(begun, parameters={**begun.parameters, **used}))
        half = half_time(data)
        folder.write_results("phase", data)
        folder.write_results("half-time", half)
        drawn = Drawings(folder)
        return PhaseResult(
            spec=self.spec,
            folder=folder,
            diagram=data,
            half_time=half,
            lost=int(data.lost.sum()),
            picture=drawn.add("picture", "phase.png", lambda: style.png(phase_figure(data))),
            page=drawn.add("page", "phase.html", lambda: phase_page(data).encode()),
            notes=tuple(drawn.notes),
        )

    def _with_curve(self, data: xr.Dataset) -> xr.Dataset:
        """With t* between the asked betas too, so that a picture draws a curve and not its chords."""
        from helmscope.observe.hitting_curve import hitting_curve

        spec = self.spec
        if spec.nu > 0 or not any(math.isfinite(t) for t in data.curve.values.flat):
            return data
        fine = hitting_curve(spec.flow(spec.spaces[0]), betas=spec.temperatures, n=spec.n, delta=spec.delta)
        return data.assign_coords(fine.coords)


def joined(parts: list[xr.Dataset]) -> xr.Dataset:
    """One diagram over (dim, beta, time) of those of the units, which come dimension by dimension."""
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
    attrs = {key: getattr(value, "item", lambda value=value: value)() for key, value in data.attrs.items()}
    attrs = {key: value for key, value in attrs.items() if key not in ("dim", "carried_in")}
    return data.drop_attrs(deep=False).assign_attrs(attrs | told)
