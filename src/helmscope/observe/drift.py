"""What the MLP does to tokens on their way: its drift, its potential and its swirl.

For a force f = grad U + R + harmonic (source 000-3; ``helmholtz``) at unit vectors x, with Df = S + A its symmetric and
antisymmetric parts:

    tangential part P f,  radial part <x, f>,  swirl index |A|_F^2 / |Df|_F^2,
    div_S(P f) = tr Df - x^T Df x - (d - 1) <x, f>.

grad U and R belong to the weights: other weights for the same f give others. The swirl index belongs to f.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.fields.block import Block
from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.hodge_jacobian import jacobian_split
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.fields.placement import Half
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens, project
from helmscope.observe.kernel import check_system
from helmscope.observe.track import layer_axis, mean_and_stderr, token_weights, trajectory_of
from helmscope.solve.simulation import Simulation
from helmscope.types import HelmscopeError, System

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def drift_and_swirl(system: System, *, derivatives: bool = True) -> xr.Dataset:
    """The MLP's force along a trajectory: for each system the mean over its tokens by their weights, then mean and
    standard error over the systems, in each layer (at each time of a simulation).

    ``force`` |f|, ``tangential_speed`` |P f|, ``radial_force`` <x, f>, ``potential`` U, ``gradient`` |grad U|,
    ``swirl`` |R|, ``harmonic`` |f - grad U - R|; ``swirl_fraction_as_printed`` = sum |R|^2 / sum |f|^2 over the tokens
    of a system, which is no share: it depends on the weights behind f and can exceed 1 (source 000-3 (c)). With
    ``derivatives`` also ``swirl_index`` |A|^2 / |Df|^2 in [0, 1] (0 where Df = 0) and ``surface_divergence``
    div_S(P f), at the cost of d derivatives of f. Along a ``Block`` also ``attention_speed`` |P a|, where a is what
    attention gives before any norm behind it.

    f is the MLP as a force on unit vectors, ``system.force``. A system without an MLP is refused.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.solve.integrate import integrate
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]), activation=Identity())
    >>> seen = drift_and_swirl(integrate(turn, torch.eye(2), times=[0.0, 1.0]))
    >>> seen.tangential_speed.values.round(6).tolist(), seen.swirl_index.values.round(6).tolist()
    ([1.0, 1.0], [1.0, 1.0])
    """
    if not isinstance(derivatives, bool):
        raise HelmscopeError(f"derivatives is {derivatives!r}, but it must be True or False")
    path = trajectory_of(check_system(system))
    weights = token_weights(path.states[0], None if path.weights is None else path.weights[0])
    rows = []
    for layer in system.layers:
        force = system.force(layer=layer)
        if not isinstance(force, MLP | GatedMLP):
            asked = f"force(layer={layer})"
            given = f"no MLP: {asked} is None" if force is None else f"a {type(force).__name__} as {asked}"
            raise HelmscopeError(
                f"system has {given}, but drift and swirl need the MLP of a system: that of a Block, or an MLP itself"
            )
        x = check_tokens(_places(system, layer).detach(), name=f"points of layer {layer}")
        with torch.no_grad():
            seen = {**_pointwise(force, x), **_attention_speed(system, layer, x)}
            if derivatives:
                seen |= _derived(force, x)
            fraction = _ratio_of_sums(seen["swirl"], seen["force"], weights)
        rows.append(
            {name: _mean(value, weights) for name, value in seen.items()} | {"swirl_fraction_as_printed": fraction}
        )
    return mean_and_stderr({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, layer_axis(system))


def _places(system: System, layer: int) -> Tensor:
    """Where the force is read: the states, or what a recorded model's norm makes of them, as unit vectors."""
    points = getattr(system, "points", None)
    if points is None:
        return system.trajectory.states[layer]
    found: Tensor = points(layer=layer)
    length = torch.linalg.vector_norm(found, dim=-1)
    if not bool(((length - 1).abs() <= 0.1).all()):
        raise HelmscopeError(
            f"system has an MLP that reads points of length {float(length.min()):.3g} to {float(length.max()):.3g}, "
            "but drift on a sphere needs a norm before it"
        )
    unit: Tensor = found / length.unsqueeze(-1)
    return unit


def _pointwise(mlp: MLP | GatedMLP, x: Tensor) -> dict[str, Float[Tensor, "batch n"]]:
    """Quantities of each token that need no derivative."""
    f, split = mlp(x), helmholtz(mlp)
    vectors = {
        "force": f,
        "tangential_speed": project(x, f),
        "gradient": split.gradient(x),
        "swirl": split.swirl(x),
        "harmonic": split.harmonic(x),
    }
    lengths = {name: torch.linalg.vector_norm(value, dim=-1) for name, value in vectors.items()}
    return {**lengths, "radial_force": (x * f).sum(-1), "potential": split.potential(x)}


@full_precision
def _derived(mlp: MLP | GatedMLP, x: Tensor) -> dict[str, Float[Tensor, "batch n"]]:
    """Quantities of each token that need Df, one system at a time: Df has n d^2 entries."""
    index, divergence = [], []
    for cloud in x:
        split = jacobian_split(mlp.ambient, cloud)
        index.append(split.swirl_index.nan_to_num(0.0))
        radial = (cloud * (split.symmetric @ cloud.unsqueeze(-1)).squeeze(-1)).sum(-1)
        inward = (cloud.shape[-1] - 1) * (cloud * mlp.ambient(cloud)).sum(-1)
        divergence.append(split.symmetric.diagonal(dim1=-2, dim2=-1).sum(-1) - radial - inward)
    return {"swirl_index": torch.stack(index), "surface_divergence": torch.stack(divergence)}


def _attention_speed(system: System, layer: int, x: Tensor) -> dict[str, Float[Tensor, "batch n"]]:
    """|P a| where the system is a simulated block; nothing elsewhere."""
    if not (isinstance(system, Simulation) and isinstance(system.field, Block)):
        return {}
    block = system.field
    seen = block.placement.read(Half.ATTENTION, system.stream(depth=layer).detach())
    out = block.attention.ambient(seen, weights=system.problem.weights)
    return {"attention_speed": torch.linalg.vector_norm(project(x, out), dim=-1)}


def _mean(value: Tensor, weights: Tensor) -> Tensor:
    return (value * weights).sum(-1) / weights.sum(-1)


def _ratio_of_sums(part: Tensor, whole: Tensor, weights: Tensor) -> Tensor:
    return (part * part * weights).sum(-1) / (whole * whole * weights).sum(-1)
