"""From functions of tokens to Measurements over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.types import HelmscopeError, System, Trajectory, check_measurement

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float
    from torch import Tensor


def track(trajectory: Trajectory | System, **quantities: Callable[[Tensor], Tensor]) -> xr.Dataset:
    """Mean and standard error over the systems, at each time, of functions (time, batch, n, d) -> (time, batch).

    The systems are the replicates: n is their number. With one system there is no standard error (NaN). Where a system
    stopped early its states are NaN, which observables refuse: cut the trajectory first.

    >>> x = torch.eye(2).expand(1, 3, 2, 2)
    >>> seen = track(Trajectory(torch.zeros(1), x), radius=lambda x: x.norm(dim=-1).mean(-1))
    >>> float(seen.radius[0]), float(seen.radius_stderr[0]), seen.attrs["n"]
    (1.0, 0.0, 3)
    """
    path = trajectory_of(trajectory)
    return mean_and_stderr(path, {name: f(path.states) for name, f in quantities.items()})


def trajectory_of(seen: object) -> Trajectory:
    """The trajectory itself, or that of a System; anything else is refused.

    >>> trajectory_of(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2))).times
    tensor([0.])
    """
    path = getattr(seen, "trajectory", seen)
    if not isinstance(path, Trajectory):
        raise HelmscopeError(
            f"trajectory is a {type(seen).__name__}, but it must be a Trajectory or a System such as a Simulation"
        )
    return path


def mean_and_stderr(
    trajectory: Trajectory, values: Mapping[str, Tensor], *, extra: Mapping[str, np.ndarray] | None = None
) -> xr.Dataset:
    """The Measurement of per-system values (time, batch, ...), where ``extra`` names the axes behind the batch."""
    lead = trajectory.states.shape[:2]
    extra = {} if extra is None else extra
    data = {}
    for name, value in values.items():
        if tuple(value.shape) != (*lead, *(len(axis) for axis in extra.values())):
            raise HelmscopeError(
                f"{name} has shape {tuple(value.shape)}, but one value a time and system is {tuple(lead)}"
            )
        value = value.detach().to(torch.float64).cpu()
        spread = value.std(1, correction=1) if lead[1] > 1 else torch.full_like(value[:, 0], torch.nan)
        axes = ("time", *extra)
        data[name] = (axes, value.mean(1).numpy())
        data[f"{name}_stderr"] = (axes, (spread / lead[1] ** 0.5).numpy())
    coords = {"time": trajectory.times.cpu().numpy(), **extra}
    return check_measurement(xr.Dataset(data, coords, {"n": int(lead[1])}))


def real_tokens(x: Float[Tensor, "*batch n d"], mask: Bool[Tensor, "*batch n"] | None) -> Bool[Tensor, "*batch n"]:
    """The mask, or all True: which tokens are not padding.

    >>> real_tokens(torch.eye(2), None)
    tensor([True, True])
    """
    if mask is None:
        return torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if not isinstance(mask, torch.Tensor):
        raise HelmscopeError(f"mask is a {type(mask).__name__}, but it must be a tensor of torch.bool")
    if mask.dtype != torch.bool or mask.shape != x.shape[-1 - mask.ndim : -1]:
        raise HelmscopeError(
            f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}, but tokens of shape {tuple(x.shape)} need "
            f"torch.bool and {tuple(x.shape[:-1])}"
        )
    if not bool(mask.any(-1).all()):
        raise HelmscopeError("mask leaves a system without any real token, but every system needs one")
    return mask.expand(x.shape[:-1])
