"""Committors by Monte Carlo: the share of simulated paths that reach B before A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.noise import Noise
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import tangent_basis
from helmscope.meanfield.committor_cloud import check_cloud, particle_field
from helmscope.meanfield.sphere_sets import OVERSHOOT, SphereSet, check_regions
from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.solve.integrate import integrate
from helmscope.solve.stepper import NoisyStepper
from helmscope.stats.intervals import proportion_interval
from helmscope.types import HelmscopeError, Interval, check_integer, check_real, one_line_repr, pluralized, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.fields.field import Field
    from helmscope.types.progress import ProgressOption

STEP = 0.005
DEGENERATE = 1e-10  # the smallest accepted ratio of the eigenvalues of Sigma


@dataclass(frozen=True, eq=False, repr=False)
class HittingCounts:
    """How many of ``paths`` paths from each start reached a first, b first, or neither until the last time.

    >>> one = torch.tensor([1])
    >>> HittingCounts(one, 8 * one, one, paths=10)
    <HittingCounts: 1 start x 10 paths, 1 undecided at the last time>
    """

    reached_a: Int[Tensor, " k"]
    reached_b: Int[Tensor, " k"]
    undecided: Int[Tensor, " k"]
    paths: int

    def intervals(self, *, confidence: float = 0.95) -> tuple[Interval, ...]:
        """The committor of each start with Clopper and Pearson's interval.

        The estimate is the share of b among the decided paths. The interval allows the undecided ones to end in
        either set. Raises ``HelmscopeError`` for a start all of whose paths are undecided.

        >>> one = torch.tensor([1])
        >>> HittingCounts(one, 8 * one, one, paths=10).intervals()
        (Interval(estimate=0.888..., low=0.443..., high=0.997..., n=10),)
        """
        intervals = []
        for k, (a, b, open_) in enumerate(
            zip(self.reached_a.tolist(), self.reached_b.tolist(), self.undecided.tolist(), strict=True)
        ):
            if a + b == 0:
                raise HelmscopeError(f"undecided is {open_} of {self.paths} paths of start {k}: raise horizon")
            low = proportion_interval(b, self.paths, confidence=confidence).low
            high = proportion_interval(b + open_, self.paths, confidence=confidence).high
            intervals.append(Interval(b / (a + b), low, high, self.paths))
        return tuple(intervals)

    def __repr__(self) -> str:
        starts = pluralized(len(self.undecided), "start")
        return one_line_repr(
            f"HittingCounts: {starts} x {pluralized(self.paths, 'path')}, {int(self.undecided.sum())} undecided at the "
            "last time"
        )


def simulated_committor(
    field: Field | Callable[..., Tensor],
    x: Float[Tensor, "k d"],
    *,
    a: SphereSet,
    b: SphereSet,
    noise: Noise | None,
    horizon: float,
    paths: int = 1000,
    stepper: NoisyStepper | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> HittingCounts:
    """Simulate ``paths`` paths from each point of x, until they reach a or b, or to the time ``horizon``.

    ``field`` is the drift of one particle, as in ``kernel_transition_matrix``. ``stepper`` defaults to
    ``EulerMaruyama(h=0.005)``.
    Paths are observed at the steps only, so both sets are enlarged by 0.58 sqrt(2 nu h), the mean overshoot, with
    nu = tr Sigma / (d - 1): the error is then of order h instead of sqrt(h). Every path has its own random stream,
    keyed by ``seed``. Raises ``HelmscopeError`` without noise, or where Sigma is singular on the tangent space of a
    start: q solves L q = 0 only for Sigma > 0.

    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.meanfield.sphere_sets import Cap
    >>> west, east = (Cap(torch.tensor([sign, 0.0], dtype=torch.float64), min_cosine=0.8) for sign in (-1.0, 1.0))
    >>> north = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    >>> shares = simulated_committor(torch.zeros_like, north, a=west, b=east, noise=IsotropicNoise(nu=1.0), horizon=20,
    ...     paths=100)
    >>> interval, = shares.intervals()
    >>> interval.low < 0.5 < interval.high
    True
    """
    check_cloud(x)
    check_regions(a, b, x)
    drift = particle_field(field, x)
    checked = _check_noise(noise, x)
    horizon = check_real("horizon", horizon, above=0)
    paths = check_integer("paths", paths, at_least=1)
    if stepper is None:
        stepper = EulerMaruyama(STEP)
    if not isinstance(stepper, NoisyStepper):
        raise HelmscopeError(
            f"stepper is {short_repr(stepper)}, but it must be a stochastic one, such as EulerMaruyama(0.01)"
        )
    start = x.detach().repeat_interleave(paths, 0).unsqueeze(-2)
    events = [_Entry(region, checked, stepper.h) for region in (a, b)]
    run = integrate(
        drift, start, [horizon], stepper=stepper, noise=checked, seed=seed, events=events, progress=progress
    )
    if run.outcome.failed:
        raise HelmscopeError(f"field leads to a path that cannot be continued: {run.outcome}")
    hit_a, hit_b = (~torch.isnan(times).reshape(len(x), paths) for times in run.event_times)
    if bool((hit_a & hit_b).any()):
        raise HelmscopeError(
            f"stepper has h={stepper.h:g}, but with steps so large a and b cannot be told apart: use a smaller one"
        )
    in_a, in_b = hit_a.sum(-1), hit_b.sum(-1)
    return HittingCounts(in_a, in_b, paths - in_a - in_b, paths)


@dataclass(frozen=True)
class _Entry:
    """Event: a path enters a region, enlarged by the overshoot of steps of size h."""

    region: SphereSet
    noise: Noise
    h: float
    terminal: bool = True

    @full_precision
    def signal(self, x: Float[Tensor, "batch 1 d"]) -> Float[Tensor, " batch"]:
        """The signed distance to the enlarged region."""
        diffusion = self.noise.diffusion_matrix(x)[..., 0, :, :]
        point = x[..., 0, :]
        normal = (point * (diffusion @ point.unsqueeze(-1)).squeeze(-1)).sum(-1)
        nu = (diffusion.diagonal(dim1=-2, dim2=-1).sum(-1) - normal) / (x.shape[-1] - 1)
        return self.region.signed_distance(point) + OVERSHOOT * (2 * nu * self.h).sqrt()


@full_precision
def _check_noise(noise: Noise | None, x: Float[Tensor, "k d"]) -> Noise:
    if noise is None:
        raise HelmscopeError(
            "noise is None, but a committor needs noise, such as IsotropicNoise(nu=0.1): a deterministic path ends in "
            "one set or the other, see label_basins"
        )
    if not isinstance(noise, Noise):
        raise HelmscopeError(f"noise is {short_repr(noise)}, but it must be a noise such as IsotropicNoise(nu=0.1)")
    noise.check_size(x.unsqueeze(-2))
    basis = tangent_basis(x.detach())
    diffusion = noise.diffusion_matrix(x.detach().unsqueeze(-2)).squeeze(-3).expand(len(x), *basis.shape[-2:-1], -1)
    values = torch.linalg.eigvalsh(basis.mT @ diffusion @ basis)
    if not bool((values[:, 0] > DEGENERATE * values[:, -1]).all()):
        raise HelmscopeError(
            f"noise is {short_repr(noise)}, whose Sigma has the eigenvalue {float(values.min()):.3g} at a start, but a "
            "committor needs Sigma > 0 on the tangent space"
        )
    return noise
