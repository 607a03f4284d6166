"""Phase diagrams: the close-pair probability over inverse temperature and time [Geshkovski et al. 2023, figure 3]."""

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
from helmscope.kernels.choose import pinned, using_summation
from helmscope.observe.diagram import PhaseDiagram
from helmscope.observe.fused_shares import FusedShares
from helmscope.observe.inner_products import close_pair_share
from helmscope.runs.bar import shows_progress
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import default_stepper, make_problem
from helmscope.solve.threads import fitting_threads
from helmscope.solve.unprojected_euler import UnprojectedEuler
from helmscope.theory.equiangular import EquiangularFlow, hitting_time
from helmscope.theory.starts import Start, in_span
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_measurement,
    check_memory,
    check_real,
    check_times,
    short_repr,
    type_with_article,
)
from helmscope.types.progress import Progress, ProgressOption, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.solve.stepper import Stepper

logger = logging.getLogger(__name__)

# measured for beta <= 9, d = 2, 8, 32 and 48 samples: every cell equals that at tolerance 1e-9; at 1e-5 some differ by
# 8e-5, still far below their standard errors of about 1e-2
TOL = 1e-6
PAIRS = {"cpu": 2**18}  # entries of the pair matrices integrated at once, which fit in a cache
PAIRS_ELSEWHERE = 2**24


@shows_progress("phase diagram")
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
    progress: ProgressOption = None,
) -> PhaseDiagram:
    """Estimates the close-pair probability P(<x_i, x_j> >= 1 - delta) over (beta, time) [Geshkovski et al. 2023, figure
    3].

    ``field`` is any callable beta -> field: SA, USA, ``lambda beta: SA(beta, causal=True)``. The standard error is over
    the ``samples`` starts, since pairs of the same sample are not independent. All betas use the same starts and the
    same noise, so cells at one time are correlated over beta. The coordinate ``hitting_time`` is t*(beta), the time at
    which orthogonal tokens reach 1 - delta, where it has a closed form, else NaN; ``lost_samples`` counts the samples
    whose integration failed: they are excluded from their entire row and listed in the log. Bad input: HelmscopeError.

    Without noise, a flow that commutes with rotations is integrated in the span of its tokens, starting from
    ``start.sample_in_span``: any dim > n costs as much as dim = n. Where V = c I with c > 0 and delta <= 1, pairs that
    have all met stay together, so a terminal event ends the system at the first requested time at which they have, and
    its share is 1 from then on. ``stepper`` defaults to ``DormandPrince(tol=1e-6)`` (1e-5 in float32; with noise, or
    for a discontinuous field, the default of ``integrate``), ``dtype`` to float64. On CUDA, SA
    and USA whose matrices are multiples of I use the fused float32 kernel unless a stepper, kernel or float64 is
    specified. The attributes record the method; as in every Measurement, ``n`` is the number of replicates, here the
    samples, and ``tokens`` is the n of ``start``. Only mean and standard error are stored, not individual samples.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.theory.starts import Uniform
    >>> diagram = phase_diagram(SA, betas=[0, 1], times=[0, 9], start=Uniform(n=4, dim=64), samples=8)
    >>> diagram.probability.dims, diagram.probability.values.tolist()
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
    report = check_progress(progress)
    flows = _fields_by_beta(field, betas)
    fused = sweep.fused(flows)
    shares = sweep.shares(flows, report) if fused is None else fused.shares(report)
    diagram = _measurement(sweep, flows, sweep.times, shares, "probability")
    return PhaseDiagram.of(diagram if fused is None else diagram.assign_attrs(fused.method_attributes))


@shows_progress("published probability")
def published_scheme_probability(
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
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Close-pair probability by the scheme of the published figure 3, from the same starts: ``probability_published``.

    ``UnprojectedEuler(0.1)``: forward Euler without tangent projection, then normalization, as in the script of
    arXiv:2312.10794. The scheme has states at multiples of 0.1 only; shares at other times are interpolated linearly.
    Arguments and errors are those of ``phase_diagram``, and the result has the same axes (beta, time);
    ``diagram.assign(published.data_vars)`` combines the two.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.theory.starts import Uniform
    >>> published = published_scheme_probability(SA, betas=[1], times=[9.05], start=Uniform(n=4, dim=64), samples=8)
    >>> float(published.probability_published[0, 0])
    1.0
    """
    scheme = UnprojectedEuler(0.1)
    requested = np.array(check_times(times))
    # times that are multiples of 0.1 must not be interpolated because of rounding
    ticks = requested / scheme.h
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
    report = check_progress(progress)
    flows = _fields_by_beta(field, betas)
    below, above = (torch.from_numpy(np.searchsorted(whole, side)) for side in (np.floor(ticks), np.ceil(ticks)))
    weight = torch.from_numpy(ticks - np.floor(ticks))
    shares = ((1 - weight) * share[..., below] + weight * share[..., above] for share in sweep.shares(flows, report))
    return _measurement(sweep, flows, requested.tolist(), shares, "probability_published")


def _fields_by_beta(field: object, betas: object) -> dict[float, Field]:
    """The field at every beta; raises HelmscopeError unless ``field`` is a callable beta -> field."""
    sequence = betas.tolist() if hasattr(betas, "tolist") else betas
    if not isinstance(sequence, Sequence) or isinstance(sequence, str | bytes) or not sequence:
        raise HelmscopeError(f"betas is {betas!r}, but it must be a sequence of at least one number, such as [1, 4, 9]")
    values = [check_real(f"betas[{i}]", beta, at_least=0) for i, beta in enumerate(sequence)]
    for i in range(1, len(values)):
        if values[i] <= values[i - 1]:
            raise HelmscopeError(f"betas[{i}] is {values[i]:g} after {values[i - 1]:g}, but betas must increase")
    if hasattr(field, "velocity") and not isinstance(field, type):
        kind = type(field).__name__
        raise HelmscopeError(
            f"field is {short_repr(field)}, but it must be a callable beta -> field: pass {kind}, not {kind}(...)"
        )
    if not callable(field):
        raise HelmscopeError(
            f"field is {type_with_article(field)}, but it must be a callable beta -> field, such as SA"
        )
    flows = {beta: field(beta) for beta in values}
    for beta, flow in flows.items():
        if isinstance(flow, type) or not callable(flow):
            raise HelmscopeError(f"field returns {flow!r} at beta = {beta:g}, but it must return a field like SA(beta)")
    return {beta: as_field(flow) for beta, flow in flows.items()}


def _check_any_shape(flow: Field, *shapes: tuple[int, int]) -> None:
    """Raises the error for the first shape unless the flow accepts tokens of at least one of the shapes."""
    errors: list[HelmscopeError] = []
    for shape in shapes:
        try:
            return flow.check_size(torch.empty((), device="meta").expand(shape))  # a meta tensor takes no memory
        except HelmscopeError as error:
            errors.append(error)
    raise errors[0]


def _check_delta(delta: object) -> float:
    value = check_real("delta", delta, at_least=0)
    if value > 2:
        raise HelmscopeError(f"delta is {value:g}, but it must be at most 2: inner products are between -1 and 1")
    return value


@dataclass(frozen=True, eq=False, kw_only=True)
class _Sweep:
    """The arguments that all betas of a diagram have in common."""

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
    def checked(cls, **arguments: Any) -> _Sweep:
        """Checks what ``sample`` and ``make_problem`` do not check later."""
        start = arguments["start"]
        if isinstance(start, type) or not isinstance(start, Start):
            shown = start.__name__ if isinstance(start, type) else type_with_article(start)
            raise HelmscopeError(f"start is {shown}, but it must be a distribution such as Uniform(n=32, dim=128)")
        if start.n < 2:
            raise HelmscopeError(f"n of start is {start.n}, but a pair needs two tokens")
        times, samples = check_times(arguments["times"]), check_integer("samples", arguments["samples"], at_least=1)
        entries = samples * max(start.n * min(start.n, start.dim), len(times))
        check_memory(f"samples is {samples}, n of start is {start.n} and times has {len(times)} entries", entries)
        return cls(**arguments | {"times": times, "samples": samples, "delta": _check_delta(arguments["delta"])})

    def shares(self, flows: dict[float, Field], progress: Progress) -> Iterator[Float[Tensor, "beta sample time"]]:
        """Share of pairs that have met in each sample, one beta at a time; NaN where a sample was lost."""
        starts: dict[bool, Tensor] = {}
        for done, flow in enumerate(flows.values()):
            restricted = self.in_span(flow)
            spanned = restricted is not None
            if spanned not in starts:
                starts[spanned] = self.tokens(spanned=spanned, dtype=self.dtype or torch.float64)
            x = starts[spanned]
            size = max(1, PAIRS.get(x.device.type, PAIRS_ELSEWHERE) // self.start.n**2)
            chunks = []
            for first in range(0, len(x), size):
                systems = range(first, min(first + size, len(x)))
                integrated = flow if restricted is None else restricted
                with fitting_threads(integrated, x[first : systems.stop]):  # also covers counting the pairs
                    chunks.append(self._integrate_shares(integrated, x, systems))
                progress((done + systems.stop / len(x)) / len(flows))
            yield torch.cat(chunks).unsqueeze(0)

    def fused(self, flows: dict[float, Field]) -> FusedShares | None:
        """All flows by the fused kernel, or None where it does not support them or the requested method."""
        dtype = self.dtype or (torch.float32 if str(self.device).startswith("cuda") else torch.float64)
        requested = (self.stepper, self.noise, self.merge, pinned())
        if dtype != torch.float32 or any(choice is not None for choice in requested):
            return None
        spans = {self.in_span(flow) is not None for flow in flows.values()}
        if len(spans) > 1:
            return None
        spanned = spans.pop()
        x = self.tokens(spanned=spanned, dtype=dtype)
        for flow in flows.values():
            if not spanned:
                flow.check_size(x)
        return FusedShares.of(list(flows.values()), x, self.times, self.delta)

    def in_span(self, flow: Field) -> Field | None:
        """The flow on R^n where it commutes with rotations and dim > n; else None."""
        n, dim = self.start.n, self.start.dim
        restricted = None if self.noise is not None or dim <= n else flow.restricted(n)
        if restricted is not None:
            _check_any_shape(flow, (n, dim), (n, n))  # V = c I may be n x n: dim x dim may not fit into memory
        return restricted

    def tokens(self, *, spanned: bool, dtype: torch.dtype) -> Float[Tensor, "sample n d"]:
        """The starts of all samples."""
        options: Any = {"seed": self.seed, "dtype": dtype, "device": self.device}
        sample_in_span: Callable[..., Tensor] | None = getattr(self.start, "sample_in_span", None) if spanned else None
        if sample_in_span is not None:
            return sample_in_span(self.samples, **options)
        x = self.start.sample(self.samples, **options)
        return in_span(x) if spanned else x

    def method(self, flow: Field, dtype: torch.dtype) -> Stepper:
        """The requested stepper, or the default of a phase diagram."""
        if self.stepper is not None:
            return self.stepper
        if self.noise is not None or not flow.continuous:
            return default_stepper(flow, self.noise)
        return DormandPrince(tol=TOL if dtype == torch.float64 else None)

    def _integrate_shares(self, flow: Field, x: Tensor, systems: range) -> Float[Tensor, "sample time"]:
        """Shares of the samples ``systems``. A system ends once all its pairs have met and cannot separate again."""
        met = _AllMet(self.delta)
        problem = make_problem(
            flow,
            x[systems.start : systems.stop],
            self.times,
            stepper=self.method(flow, x.dtype),
            events=[met] if self._meeting_is_final(flow) else [],
            merge=self.merge,
            noise=self.noise,
            seed=self.seed,
            stores=False,
        )
        share, outcome = replace(problem, systems=tuple(systems)).read(met.share)
        share = share.to("cpu", torch.float64).mT
        failed = torch.tensor([[status.failed] for status in outcome.statuses], device="cpu")
        return torch.where(failed, torch.nan, share.nan_to_num(nan=1.0))  # NaN: ended early, all pairs have met

    def _meeting_is_final(self, flow: Field) -> bool:
        """Whether pairs that have all met stay together: V = c I with c > 0 attracts the two most distant tokens to
        each other as long as their angle is at most 90 degrees, and there is no noise.
        """
        value = getattr(flow, "value_scale", None)
        return self.noise is None and value is not None and value > 0 and self.delta <= 1


@dataclass(frozen=True)
class _AllMet:
    """Event: all pairs have met at a requested time."""

    delta: float
    terminal: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    def share(self, x: Float[Tensor, "system n d"]) -> Float[Tensor, " system"]:
        """The share of pairs that have met."""
        return close_pair_share(x, delta=self.delta)

    def signal(self, x: Float[Tensor, "system n d"]) -> Float[Tensor, " system"]:
        """0 where all pairs have met, negative elsewhere."""
        return self.share(x) - 1


def _measurement(
    sweep: _Sweep,
    flows: dict[float, Field],
    times: list[float],
    shares: Iterable[Float[Tensor, "beta sample time"]],
    name: str,
) -> xr.Dataset:
    """Mean and standard error over the samples that were not lost."""
    with using_summation() as summations:
        rows = [_mean_and_stderr(share) for share in shares]
    mean, stderr = (torch.cat([row[k] for row in rows]).numpy() for k in (0, 1))
    lost = torch.cat([row[2] for row in rows])
    for beta, is_lost in zip(flows, lost, strict=True):
        if bool(is_lost.any()):
            indices = is_lost.nonzero().flatten().tolist()
            logger.warning("beta = %g: %d of %d samples are lost: %s", beta, len(indices), len(is_lost), indices)
    axes, long_name = ("beta", "time"), f"P(<x_i, x_j> >= 1 - {sweep.delta:g})"
    data = {name: (axes, mean, {"long_name": long_name}), f"{name}_stderr": (axes, stderr)}
    curve = ("beta", [_hitting_time(flow, sweep) for flow in flows.values()])
    coords = {"beta": list(flows), "time": times, "hitting_time": curve, "lost_samples": ("beta", lost.sum(-1).numpy())}
    attributes = _attributes(sweep, next(iter(flows.values())), summations)
    attributes["flow"] = " / ".join(dict.fromkeys(_flow_name(flow, sweep.noise) for flow in flows.values()))
    return check_measurement(xr.Dataset(data, coords, attributes))


def _mean_and_stderr(share: Float[Tensor, "beta sample time"]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard error (beta, time), and which samples are lost (beta, sample), on the CPU."""
    lost = torch.isnan(share).any(-1)
    count = (~lost).sum(-1, keepdim=True).to(share.dtype)
    mean = share.masked_fill(lost.unsqueeze(-1), 0.0).sum(1) / count
    deviation = (share - mean.unsqueeze(1)).masked_fill(lost.unsqueeze(-1), 0.0)
    stderr = (deviation.square().sum(1) / (count - 1) / count).sqrt()  # NaN (0/0) for a single sample
    return mean.cpu(), stderr.cpu(), lost.cpu()


def _attributes(sweep: _Sweep, flow: Field, summations: set[str]) -> dict[str, Any]:
    """The arguments and the method, for the attributes of the diagram."""
    dtype, spanned = sweep.dtype or torch.float64, sweep.in_span(flow) is not None
    stepper = sweep.method(flow, dtype)
    return {
        "n": sweep.samples,  # of replicates, as in every reduced Measurement
        "replicate": "sample",
        "tokens": sweep.start.n,
        "dim": sweep.start.dim,
        "integration_dim": sweep.start.n if spanned else sweep.start.dim,
        "delta": sweep.delta,
        "seed": sweep.seed,
        "dtype": str(dtype).removeprefix("torch."),
        "stepper": repr(stepper),
        "summation": ", ".join(sorted(summations)) or "none",
    }


def _hitting_time(flow: Field, sweep: _Sweep) -> float:
    """t*, NaN where the flow has no closed form or the time overflows float64."""
    if not isinstance(flow, EquiangularFlow) or not flow.isotropic or sweep.noise is not None:
        return math.nan
    try:
        return hitting_time(flow, n=sweep.start.n, delta=sweep.delta)
    except HelmscopeError:
        return math.nan


def _flow_name(flow: Field, noise: Noise | None) -> str:
    """The field's class and how it differs from Q = K = V = I."""
    value = getattr(flow, "value_scale", 1.0)
    words = [type(flow).__name__]
    words += ["causal"] if getattr(flow, "causal", False) else []
    words += [] if getattr(flow, "query_key", None) is None else ["with query_key"]
    words += ["with value"] if value is None else [] if value == 1 else [f"V = {value:g} I"]
    words += [] if noise is None else [repr(noise)]
    return ", ".join(words)
