"""Depth as a flow: how perturbations of one token grow over depth, the others frozen.

With T(k) the derivative of the map from the direction of a token at the first depth to its direction at depth k
(``frozen_token``), and orthonormal random tangents w_1, ..., w_c at the first depth,

    T(k) [w_1 ... w_c] = Q(k) R(k)           QR at every depth
    growth_j(k)   = log R_jj(k) - log R_jj(k - 1),   exponent_j = sum_k growth_j(k) / duration
    stretch(k)    = (mean_j |T(k) w_j|^2)^(1/2),     whose square estimates |T(k)|_F^2 / dim without bias
    singular_value_j, the leading singular values of T at the last depth

growth_j is that of Benettin's method, in which the tangents are orthonormalized after every step: the j-th exponent is
the growth of the j-th direction orthogonal to those before it. Depth is finite, so these are finite-time exponents, per
half-step of a model and per unit of time of a simulation.

How to read it. An exponent below 0 means that a typical perturbation of the token is forgotten. The largest singular
value is that of the worst perturbation of all, and far above the stretch of a typical one where T is anisotropic. As
residual streams grow in radius, directions turn more slowly, and growth is below 0 without any contraction by a force.

How it fails. Other tokens do not respond, so this is not the stability of the whole cloud. The singular values of a
model are lower bounds, from ``iterations`` steps of subspace iteration; those of a simulation are exact. A token whose
derivative vanishes has exponents of minus infinity. Cost, with c directions, i iterations and t tokens per prompt, in
forward passes of the model: about t (4 c (1 + i) + (1 + 2 c) i), since a forward derivative takes about 4 forward
passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.recording import Recording
from helmscope.observe.depth_steps import check_finite, with_halves
from helmscope.observe.frozen_token import FrozenToken, flow_unsupported_reason, frozen_token, orthonormal
from helmscope.observe.labels import label_attributes
from helmscope.observe.pairs import without_first_token
from helmscope.observe.track import AT_LEAST_0, check_system, with_bounds, with_cumulative, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_integer, check_progress, check_seed

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import Progress, System, Trajectory
    from helmscope.types.progress import ProgressOption

LABELS = {
    "growth": "logarithmic growth of a perturbation in a step",
    "stretch": "root mean squared stretch of a random perturbation since the first state",
    "lyapunov_exponent": "finite-time Lyapunov exponent",
    "singular_value": "leading singular values of the map from first to last direction",
}
STREAM = 21  # of random numbers, different from those of starts
BOUNDS = {"stretch": AT_LEAST_0, "singular_value": AT_LEAST_0}


@shows_progress("depth flow")
def perturbation_growth(
    system: System,
    *,
    directions: int = 2,
    iterations: int = 2,
    sampled_tokens: int = 1,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Growth over (depth, prompt, direction) of perturbations of one token with the others frozen, its finite-time
    Lyapunov exponents and the leading singular values over (prompt, direction), and the stretch over (depth, prompt).

    ``directions`` perturbations in random directions are followed; ``sampled_tokens`` is the number of tokens per
    prompt, drawn at random among those that count, without the first one, each on its own; values are means over them,
    of singular values geometric ones. Exponents are per half-step of a model (in a decoder that reads an encoder, per
    third of a layer), and per unit of time of a simulation. ``iterations`` is the number of subspace iterations for the
    singular values of a model; with 0 they are left out. States are the directions of the residual stream as read, with
    gain and bias in a post-norm model. Raises HelmscopeError for a Trajectory, which cannot be run again, for
    simulations with noise, for more directions than there are, and where no token counts.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> north = torch.eye(3).double()[:1].expand(1, 4, 3)  # all tokens in one point, an attractor with exponents -1
    >>> measured = perturbation_growth(integrate(SA(beta=0.0), north, times=[0.0, 1.0, 2.0]))
    >>> measured.lyapunov_exponent.values.round(2).tolist()
    [[-0.75, -0.75]]
    """
    count = check_integer("directions", directions, at_least=1)
    iterations = check_integer("iterations", iterations, at_least=0)
    path = check_finite(check_system(system).trajectory)
    generator = _generator(check_seed(seed))
    chosen = _choose_tokens(path, check_integer("sampled_tokens", sampled_tokens, at_least=1), generator)
    report, parts = check_progress(progress), []
    for k, numbers in enumerate(chosen):
        token = frozen_token(system, numbers.to(path.states.device))
        if count > token.dim:
            raise HelmscopeError(f"directions is {count}, but the tangent space has dimension {token.dim}")
        parts.append(_measure(token, count, iterations, generator, _part(report, k, len(chosen))))
    means = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    return _as_measurement(means, path, system).assign_attrs(
        sampled_tokens=sampled_tokens, iterations=iterations, seed=seed, derivative="of one token, the others frozen"
    )


def growth_unsupported(system: System) -> str | None:
    """One sentence that says why a system does not support ``perturbation_growth``; None if it does.

    >>> growth_unsupported(None)
    'system is a NoneType, but it must be a Recording or a Simulation'
    """
    reason = flow_unsupported_reason(system)
    if reason is not None:
        return reason
    try:
        _choose_tokens(system.trajectory, 1, _generator(0))
    except HelmscopeError as error:
        return str(error)
    return None


def _generator(seed: int) -> torch.Generator:
    """A generator of its own: with that of a start of the same seed, the first tangent could be the token itself."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, STREAM]).generate_state(1)[0]))


def _part(report: Progress, k: int, count: int) -> Progress:
    return lambda share: report((k + share) / count)


def _choose_tokens(path: Trajectory, count: int, generator: torch.Generator) -> list[Tensor]:
    """Different tokens of each prompt at random, among those that count; with replacement where there are fewer."""
    weights = without_first_token(path).weights
    assert weights is not None
    counted = (weights > 0).all(0).double().cpu()
    missing = counted.sum(-1) == 0
    if bool(missing.any()):
        raise HelmscopeError(
            f"{path.replicate} {int(missing.nonzero()[0])} has no token that counts besides the first, but the flow of "
            "a token needs one"
        )
    enough = bool((counted.sum(-1) >= count).all())
    chosen = torch.multinomial(counted, count, replacement=not enough, generator=generator)
    return list(chosen.unbind(-1))


def _measure(
    token: FrozenToken, count: int, iterations: int, generator: torch.Generator, report: Progress
) -> dict[str, Tensor]:
    """The logarithms of growth and singular values, and the squared stretch, of one token per prompt."""
    start = token.tangents(count, generator)
    work, done = count * (1 + 2 * iterations), 0

    def images(w: Tensor) -> Tensor:
        nonlocal done
        found = []
        for each in w:
            found.append(token.images(each))
            done += 1
            report(min(1.0, done / work))
        return torch.stack(found)

    carried = images(start)
    sizes = _log_diagonal(carried)
    values = {"growth": sizes.diff(dim=0), "square": carried.square().sum(-1).mean(0)}
    last = carried[:, -1]
    if token.dim <= count:
        values["log_singular_value"] = _log_singular_values(last)
    for k in range(iterations if token.dim > count else 0):
        back = token.transposed(orthonormal(last))
        if back is None:  # all directions, so that the singular values are exact
            last = images(token.tangents(token.dim, generator))[:, -1]
            values["log_singular_value"] = _log_singular_values(last)[..., :count]
            break
        done += count
        last = images(orthonormal(back))[:, -1]
        if k == iterations - 1:
            values["log_singular_value"] = _log_singular_values(last)
    report(1.0)
    return values


@full_precision
def _log_diagonal(carried: Float[Tensor, "count depth batch d"]) -> Float[Tensor, "depth batch count"]:
    """log |R_jj| of the QR decomposition at every depth and prompt."""
    r: Tensor = torch.linalg.qr(carried.permute(1, 2, 3, 0), mode="r")[1]
    return r.diagonal(dim1=-2, dim2=-1).abs().log()


@full_precision
def _log_singular_values(images: Float[Tensor, "count batch d"]) -> Float[Tensor, "batch count"]:
    values: Tensor = torch.linalg.svdvals(images.permute(1, 2, 0))
    return values.log()


def _as_measurement(means: dict[str, Tensor], path: Trajectory, system: System) -> xr.Dataset:
    growth = means["growth"]
    undefined = torch.full_like(growth.sum(0, keepdim=True), torch.nan)
    axes = {"direction": np.arange(growth.shape[-1])}
    over_depth = with_replicates({"growth": torch.cat([undefined, growth])}, path, axes)
    stretch = with_replicates({"stretch": means["square"].sqrt()}, path)
    duration = float(path.times[-1] - path.times[0])
    single = {"lyapunov_exponent": growth.sum(0) / duration if duration > 0 else undefined[0]}
    if "log_singular_value" in means:
        single["singular_value"] = means["log_singular_value"].exp()
    dims = (path.replicate, "direction")
    data = {name: (dims, value.double().cpu().numpy()) for name, value in single.items()}
    measurement = with_bounds(over_depth.merge(stretch, compat="override", join="override").assign(data), BOUNDS)
    measurement = with_cumulative(measurement, path.axis, {"stretch"})
    unit = "unit of time" if not isinstance(system, Recording) else path.unit.rstrip("s")
    for name in measurement.data_vars:
        measurement[name].attrs |= label_attributes(LABELS[str(name)])
    measurement.lyapunov_exponent.attrs["units"] = f"per {unit}"
    return with_halves(measurement, system)
