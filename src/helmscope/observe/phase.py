"""Phase diagrams: the clustering probability over inverse temperature and time (source 001, figure 3)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr

from helmscope.fields.field import Field, as_field
from helmscope.kernels.choose import pinned, using_kernel
from helmscope.observe.diagram import PhaseDiagram
from helmscope.observe.fused_shares import FusedShares
from helmscope.observe.inner_products import clustering_fraction
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.solve.integrate import make_problem
from helmscope.solve.published import PublishedEuler
from helmscope.solve.threads import fitting_threads
from helmscope.theory.equiangular import EquiangularFlow, hitting_time
from helmscope.theory.starts import Start, in_span
from helmscope.types import HelmscopeError, check_measurement, fits_memory, increasing_times, real_number, whole_number
from helmscope.types.progress import Progress, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.solve.stepper import Stepper

logger = logging.getLogger(__name__)

# measured for beta <= 9, d = 2, 8, 32 and 48 samples: no cell differs from that of 1e-9; at 1e-5 some do by 8e-5, which
# is still far below the standard errors there, 1e-2
TOL = 1e-6
NOISY_STEP = 0.02
PAIRS = {"cpu": 2**18}  # entries of the matrices of pairs carried at once, which fit a cache
PAIRS_ELSEWHERE = 2**24


def phase_diagram(
    field: Callable[[float], Field],
    *,
    betas: Sequence[float],
    times: Sequence[float],
    start: Start,
    samples: int = 1024,
    delta: float = 1e-3,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    stepper: Stepper | None = None,
    noise: Noise | None = None,
    merge: float | None = None,
    progress: Progress | None = None,
) -> PhaseDiagram:
    """P(<x_i, x_j> >= 1 - delta) over (beta, time), estimated from ``samples`` starts: source 001, figure 3.

    ``field`` is any callable beta -> field: SA, USA, ``lambda beta: SA(beta, causal=True)``. ``probability_stderr`` is
    over samples, since the pairs of one are not independent. All betas see the same starts (and the same noise), so
    the cells of one time are correlated over beta. The coordinate ``curve`` holds t*(beta), when tokens at right angles
    pass 1 - delta, in closed form where there is one, else NaN; ``lost`` counts the samples that could not be carried
    to the end: they are left out of their whole row and named in the log.

    Without noise, a flow that commutes with rotations is carried in the span of its tokens, from
    ``start.sample_in_span``: any dim > n costs what dim = n costs; and where V = c I with c > 0, a system whose pairs
    have all met at an asked time stays so (delta <= 1): a terminal event ends it there, and its share is 1 from then
    on. ``stepper`` is ``DormandPrince(tol=1e-6)`` where None (float32: 1e-5; with noise ``EulerMaruyama(0.02)``; a
    field that jumps: that of ``integrate``). ``dtype`` is float64 where None; SA and USA with multiples of I go to the
    fused kernel on a CUDA device, in float32, unless a method, a kernel or float64 is asked for. The attributes say
    what was done, and ``plot()`` draws the diagram. Samples are not kept: of so many cells that would be a lot.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.theory.starts import Uniform
    >>> seen = phase_diagram(SA, betas=[0, 1], times=[0, 9], start=Uniform(n=4, dim=64), samples=8)
    >>> seen.probability.dims, seen.probability.values.tolist()
    (('beta', 'time'), [[0.0, 1.0], [0.0, 1.0]])
    """
    sweep = _Sweep.checked(
        times=times,
        start=start,
        samples=samples,
        delta=delta,
        seed=seed,
        device=device,
        dtype=dtype,
        stepper=stepper,
        noise=noise,
        merge=merge,
    )
    check_progress(progress)
    flows = _flows(field, betas)
    fused = sweep.fused(flows)
    shares = sweep.shares(flows, progress) if fused is None else fused.shares(progress)
    seen = _measured(sweep, flows, sweep.times, shares, "probability")
    return PhaseDiagram.of(seen if fused is None else seen.assign_attrs(fused.told))


def published_probability(
    field: Callable[[float], Field],
    *,
    betas: Sequence[float],
    times: Sequence[float],
    start: Start,
    samples: int = 1024,
    delta: float = 1e-3,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """What the scheme behind the published figure 3 gives from the same starts: ``probability_published``.

    ``PublishedEuler(0.1)``: forward Euler without tangent projection, then renormalise, as in the script of
    arXiv:2312.10794. It is a map, so each sample is looked at at multiples of 0.1, and linearly between them. Arguments
    as those of ``phase_diagram``; ``data.assign(published.data_vars)`` lays the two side by side.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.theory.starts import Uniform
    >>> seen = published_probability(SA, betas=[1], times=[9.05], start=Uniform(n=4, dim=64), samples=8)
    >>> float(seen.probability_published[0, 0])
    1.0
    """
    scheme = PublishedEuler(0.1)
    asked = np.array(increasing_times(times))
    # the quotient of a multiple of 0.1 lies within rounding of a whole number
    ticks = asked / scheme.h
    ticks = np.where(np.abs(ticks - ticks.round()) < 1e-9, ticks.round(), ticks)
    whole = np.unique(np.concatenate([np.floor(ticks), np.ceil(ticks)]))
    sweep = _Sweep.checked(
        times=[k / 10 for k in whole.tolist()],
        start=start,
        samples=samples,
        delta=delta,
        seed=seed,
        device=device,
        dtype=dtype,
        stepper=scheme,
        noise=None,
        merge=None,
    )
    check_progress(progress)
    flows = _flows(field, betas)
    below, above = (torch.from_numpy(np.searchsorted(whole, side)) for side in (np.floor(ticks), np.ceil(ticks)))
    weight = torch.from_numpy(ticks - np.floor(ticks))
    between = ((1 - weight) * share[..., below] + weight * share[..., above] for share in sweep.shares(flows, progress))
    return _measured(sweep, flows, asked.tolist(), between, "probability_published")


def _flows(field: object, betas: object) -> dict[float, Field]:
    """The field at every beta; what is no callable beta -> field is refused."""
    listed = betas.tolist() if hasattr(betas, "tolist") else betas
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or not listed:
        raise HelmscopeError(f"betas is {betas!r}, but it must be a sequence of at least one number, such as [1, 4, 9]")
    values = [real_number(f"betas[{i}]", beta, at_least=0) for i, beta in enumerate(listed)]
    for i in range(1, len(values)):
        if values[i] <= values[i - 1]:
            raise HelmscopeError(f"betas[{i}] is {values[i]:g} after {values[i - 1]:g}, but betas must increase")
    if not callable(field) or (hasattr(field, "velocity") and not isinstance(field, type)):
        raise HelmscopeError(f"field is a {type(field).__name__}, but it must be a callable beta -> field, such as SA")
    flows = {beta: field(beta) for beta in values}
    for beta, flow in flows.items():
        if isinstance(flow, type) or not callable(flow):
            raise HelmscopeError(f"field gives {flow!r} at beta = {beta:g}, but it must give a field such as SA(beta)")
    return {beta: as_field(flow) for beta, flow in flows.items()}


def _check_either(flow: Field, *shapes: tuple[int, int]) -> None:
    """Refuse a flow that fits tokens of none of the shapes; the first one speaks."""
    said: list[HelmscopeError] = []
    for shape in shapes:
        try:
            return flow.check_size(torch.empty((), device="meta").expand(shape))  # which has no size of its own
        except HelmscopeError as error:
            said.append(error)
    raise said[0]


def _delta(delta: object) -> float:
    found = real_number("delta", delta, at_least=0)
    if found > 2:
        raise HelmscopeError(f"delta is {found:g}, but inner products lie between -1 and 1: take at most 2")
    return found


@dataclass(frozen=True, eq=False, kw_only=True)
class _Sweep:
    """What every beta of a diagram shares."""

    times: list[float]
    start: Start
    samples: int
    delta: float
    seed: int
    device: str
    dtype: torch.dtype | None
    stepper: Stepper | None
    noise: Noise | None
    merge: float | None

    @classmethod
    def checked(cls, **given: Any) -> _Sweep:
        """Refuses what cannot be a diagram; ``sample`` and ``make_problem`` refuse the rest."""
        start = given["start"]
        if isinstance(start, type) or not isinstance(start, Start):
            shown = start.__name__ if isinstance(start, type) else f"a {type(start).__name__}"
            raise HelmscopeError(f"start is {shown}, but it must be a law of tokens such as Uniform(n=32, dim=128)")
        if start.n < 2:
            raise HelmscopeError(f"n of start is {start.n}, but a pair needs two tokens")
        times, samples = increasing_times(given["times"]), whole_number("samples", given["samples"], at_least=1)
        numbers = samples * max(start.n * min(start.n, start.dim), len(times))
        fits_memory(f"samples is {samples}, n of start is {start.n} and times holds {len(times)}", numbers)
        return cls(**given | {"times": times, "samples": samples, "delta": _delta(given["delta"])})

    def shares(
        self, flows: dict[float, Field], progress: Progress | None
    ) -> Iterator[Float[Tensor, "beta sample time"]]:
        """Share of pairs that have met in each sample, for some betas after others; NaN where a sample was lost."""
        starts: dict[bool, Tensor] = {}
        for done, flow in enumerate(flows.values()):
            small = self.in_span(flow)
            spanned = small is not None
            if spanned not in starts:
                starts[spanned] = self.tokens(spanned=spanned, dtype=self.dtype or torch.float64)
            x = starts[spanned]
            size = max(1, PAIRS.get(x.device.type, PAIRS_ELSEWHERE) // self.start.n**2)
            parts = []
            for first in range(0, len(x), size):
                systems = range(first, min(first + size, len(x)))
                carried = flow if small is None else small
                with fitting_threads(carried, x[first : systems.stop]):  # for the pairs that are looked at, too
                    parts.append(self._carried(carried, x, systems))
                if progress is not None:
                    progress((done + systems.stop / len(x)) / len(flows))
            yield torch.cat(parts).unsqueeze(0)

    def fused(self, flows: dict[float, Field]) -> FusedShares | None:
        """All flows by the fused kernel, where it serves them in the precision and by the method asked for."""
        dtype = self.dtype or (torch.float32 if str(self.device).startswith("cuda") else torch.float64)
        asked = (self.stepper, self.noise, self.merge, pinned())
        if dtype != torch.float32 or any(each is not None for each in asked):
            return None
        small = {self.in_span(flow) is not None for flow in flows.values()}
        if len(small) > 1:
            return None
        spanned = small.pop()
        x = self.tokens(spanned=spanned, dtype=dtype)
        for flow in flows.values():
            if not spanned:
                flow.check_size(x)
        return FusedShares.of(list(flows.values()), x, self.times, self.delta)

    def in_span(self, flow: Field) -> Field | None:
        """The flow on R^n where it commutes with rotations and dim > n; else None."""
        n, dim = self.start.n, self.start.dim
        small = None if self.noise is not None or dim <= n else flow.restricted(n)
        if small is not None:
            _check_either(flow, (n, dim), (n, n))  # V = c I may be given on R^n, as in a million dimensions it must be
        return small

    def tokens(self, *, spanned: bool, dtype: torch.dtype) -> Float[Tensor, "sample n d"]:
        """The starts of all samples."""
        place: Any = {"seed": self.seed, "dtype": dtype, "device": self.device}
        if not spanned:
            return self.start.sample(self.samples, **place)
        law = getattr(self.start, "sample_in_span", None)
        return in_span(self.start.sample(self.samples, **place)) if law is None else law(self.samples, **place)

    def method(self, flow: Field, dtype: torch.dtype) -> Stepper | None:
        """The stepper asked for, or that of a phase diagram; None leaves it to ``integrate``."""
        if self.stepper is not None or (self.noise is None and not flow.continuous):
            return self.stepper
        if self.noise is not None:
            return EulerMaruyama(NOISY_STEP)
        return DormandPrince(tol=TOL if dtype == torch.float64 else None)

    def _carried(self, flow: Field, x: Tensor, systems: range) -> Float[Tensor, "sample time"]:
        """Shares of the samples ``systems``. One whose pairs have all met, and will stay so, is carried no further."""
        met = _AllMet(self.delta)
        problem = make_problem(
            flow,
            x[systems.start : systems.stop],
            self.times,
            stepper=self.method(flow, x.dtype),
            events=[met] if self._stays(flow) else [],
            merge=self.merge,
            noise=self.noise,
            seed=self.seed,
            stores=False,
        )
        share, outcome = replace(problem, systems=tuple(systems)).read(met.share)
        share = share.to("cpu", torch.float64).mT
        failed = torch.tensor([[status.failed] for status in outcome.statuses], device="cpu")
        return torch.where(failed, torch.nan, share.nan_to_num(nan=1.0))  # NaN after the end of one that has met

    def _stays(self, flow: Field) -> bool:
        """Whether pairs that have all met stay so: V = c I with c > 0 draws the two tokens farthest apart together as
        long as they are at most a right angle apart, and nothing else moves them.
        """
        value = getattr(flow, "value_scale", None)
        return self.noise is None and value is not None and value > 0 and self.delta <= 1


@dataclass(frozen=True)
class _AllMet:
    """All pairs have met at an asked time."""

    delta: float
    terminal: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    def share(self, x: Float[Tensor, "system n d"]) -> Float[Tensor, " system"]:
        """The share of pairs that have met."""
        return clustering_fraction(x, delta=self.delta)

    def signal(self, x: Float[Tensor, "system n d"]) -> Float[Tensor, " system"]:
        """0 where all pairs have met, below it elsewhere."""
        return self.share(x) - 1


def _measured(
    sweep: _Sweep,
    flows: dict[float, Field],
    times: list[float],
    shares: Iterable[Float[Tensor, "beta sample time"]],
    name: str,
) -> xr.Dataset:
    """Mean and standard error over the samples that were not lost."""
    with using_kernel() as kernels:
        rows = [_row(share) for share in shares]
    mean, stderr = (torch.cat([row[k] for row in rows]).numpy() for k in (0, 1))
    lost = torch.cat([row[2] for row in rows])
    for beta, gone in zip(flows, lost, strict=True):
        if bool(gone.any()):
            which = gone.nonzero().flatten().tolist()
            logger.warning("beta = %g: %d of %d samples are lost: %s", beta, len(which), len(gone), which)
    axes, long_name = ("beta", "time"), f"P(<x_i, x_j> >= 1 - {sweep.delta:g})"
    data = {name: (axes, mean, {"long_name": long_name}), f"{name}_stderr": (axes, stderr)}
    curve = ("beta", [_curve(flow, sweep) for flow in flows.values()])
    coords = {"beta": list(flows), "time": times, "curve": curve, "lost": ("beta", lost.sum(-1).numpy())}
    told = _told(sweep, next(iter(flows.values())), kernels)
    told["flow"] = " / ".join(dict.fromkeys(_flow_name(flow, sweep.noise) for flow in flows.values()))
    return check_measurement(xr.Dataset(data, coords, told))


def _row(share: Float[Tensor, "beta sample time"]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard error (beta, time), and which samples are lost (beta, sample), on the CPU."""
    lost = torch.isnan(share).any(-1)
    kept = (~lost).sum(-1, keepdim=True).to(share.dtype)
    mean = share.masked_fill(lost.unsqueeze(-1), 0.0).sum(1) / kept
    off = (share - mean.unsqueeze(1)).masked_fill(lost.unsqueeze(-1), 0.0)
    stderr = (off.square().sum(1) / (kept - 1) / kept).sqrt()  # of one sample 0/0: there is none
    return mean.cpu(), stderr.cpu(), lost.cpu()


def _told(sweep: _Sweep, flow: Field, kernels: set[str]) -> dict[str, Any]:
    """What was asked, and how it was done."""
    small = sweep.in_span(flow)
    dtype, carried = sweep.dtype or torch.float64, sweep.start.dim if small is None else sweep.start.n
    stepper = sweep.method(flow, dtype)
    return {
        "n": sweep.samples,
        "tokens": sweep.start.n,
        "dim": sweep.start.dim,
        "carried_in": carried,
        "delta": sweep.delta,
        "seed": sweep.seed,
        "dtype": str(dtype).removeprefix("torch."),
        "stepper": "that of integrate" if stepper is None else repr(stepper),
        "kernel": ", ".join(sorted(kernels)) or "none",
    }


def _curve(flow: Field, sweep: _Sweep) -> float:
    """t*, NaN where the flow has no closed form or the time leaves float64."""
    if not isinstance(flow, EquiangularFlow) or not flow.isotropic or sweep.noise is not None:
        return math.nan
    try:
        return hitting_time(flow, n=sweep.start.n, delta=sweep.delta)
    except HelmscopeError:
        return math.nan


def _flow_name(flow: Field, noise: Noise | None) -> str:
    """The field's class and what sets it apart from Q = K = V = I."""
    value = getattr(flow, "value_scale", 1.0)
    words = [type(flow).__name__]
    words += ["causal"] if getattr(flow, "causal", False) else []
    words += [] if getattr(flow, "query_key", None) is None else ["with query_key"]
    words += ["with value"] if value is None else [] if value == 1 else [f"V = {value:g} I"]
    words += [] if noise is None else [repr(noise)]
    return ", ".join(words)
