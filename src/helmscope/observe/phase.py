"""Phase diagrams: the close-pair probability over inverse temperature and time [Geshkovski et al. 2023, figure 3]."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.fields.field import Field, as_field
from helmscope.kernels.choose import using_summation
from helmscope.observe.diagram import PhaseDiagram
from helmscope.observe.labels import label_attributes
from helmscope.observe.phase_sweep import Sweep
from helmscope.runs.bar import shows_progress
from helmscope.solve.unprojected_euler import UnprojectedEuler
from helmscope.theory.equiangular import EquiangularFlow, hitting_time
from helmscope.theory.starts import Start
from helmscope.types import (
    HelmscopeError,
    check_measurement,
    check_real,
    check_times,
    short_repr,
    type_with_article,
)
from helmscope.types.progress import ProgressOption, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.solve.stepper import Stepper

logger = logging.getLogger(__name__)


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
    sweep = Sweep.checked(
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
    sweep = Sweep.checked(
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


def _measurement(
    sweep: Sweep,
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
    data = {name: (axes, mean, label_attributes(long_name)), f"{name}_stderr": (axes, stderr)}
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


def _attributes(sweep: Sweep, flow: Field, summations: set[str]) -> dict[str, Any]:
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


def _hitting_time(flow: Field, sweep: Sweep) -> float:
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
