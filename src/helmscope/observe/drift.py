"""The action of the MLP on tokens: its drift, its potential and its swirl.

For a force f = grad U + R + harmonic ([Helmholtz Transformer, no. 3]; ``helmholtz``) at unit vectors x, with Df = S + A
its symmetric and antisymmetric parts:

    tangential part P f,  radial part <x, f>,  swirl index |A|_F^2 / |Df|_F^2,
    div_S(P f) = tr Df - x^T Df x - (d - 1) <x, f>.

grad U and R depend on the weights, not on f alone: different weights that define the same f can have different ones.
The swirl index depends only on f.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.hodge_jacobian import jacobian_split
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens, project
from helmscope.observe.track import AT_LEAST_0, SHARE, check_system, token_mean, token_weights, with_bounds
from helmscope.types import HelmscopeError, Instrument, Needs

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext, System


LENGTHS = ("force", "tangential_speed", "gradient", "swirl", "harmonic", "attention_speed")
BOUNDS = {**dict.fromkeys((*LENGTHS, "swirl_fraction_as_printed"), AT_LEAST_0), "swirl_index": SHARE}


class DriftAndSwirl(Instrument):
    """Instrument: the MLP's force in each layer (at each time of a simulation), averaged over the tokens of each system
    by their weights.

    ``force`` |f|, ``tangential_speed`` |P f|, ``radial_force`` <x, f>, ``potential`` U, ``gradient`` |grad U|,
    ``swirl`` |R|, ``harmonic`` |f - grad U - R|; ``swirl_fraction_as_printed`` = sum |R|^2 / sum |f|^2 over the tokens
    of a system, which is not a fraction: it depends on the weights that define f and can exceed 1 [Helmholtz
    Transformer, no. 3]. With ``derivatives`` also ``swirl_index`` |A|^2 / |Df|^2 in [0, 1] (0 where Df = 0) and
    ``surface_divergence`` div_S(P f), at the cost of d derivatives of f. Where there is attention also
    ``attention_speed`` |P a|, with a the write of attention (after a norm, if one follows) for a layer of step size 1.

    f is the MLP as a force on unit vectors, ``system.force``, evaluated at the input of the MLP: under ``Layer()`` the
    state between the halves of a sequential block. Raises HelmscopeError for a system without an MLP.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.solve.integrate import integrate
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]), activation=Identity())
    >>> run = integrate(turn, torch.eye(2).expand(3, 2, 2), times=[0.0])
    >>> run.replay(DriftAndSwirl(derivatives=False))["drift_and_swirl"].tangential_speed.values.tolist()
    [[1.0, 1.0, 1.0]]
    """

    name = "drift_and_swirl"
    needs = Needs.FORCE | Needs.ATTENTION_WRITE

    def __init__(self, *, derivatives: bool = True) -> None:
        if not isinstance(derivatives, bool):
            raise HelmscopeError(f"derivatives is {derivatives!r}, but it must be True or False")
        self.derivatives = derivatives

    def __repr__(self) -> str:
        return f"DriftAndSwirl(derivatives={self.derivatives})"

    def refusal(self, system: System) -> str | None:
        """Why a system cannot be measured: only an MLP or a gated MLP has a potential, a mixture of experts has not."""
        for layer in system.layers:
            kind = type(system.force(layer=layer))
            if not issubclass(kind, MLP | GatedMLP):
                return f"system has a {kind.__name__} as force(layer={layer}), but drift and swirl need a plain MLP"
        return None

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the speed of the write of attention."""
        assert tensors.write is not None
        speed = torch.linalg.vector_norm(project(tensors.direction, tensors.write), dim=-1)
        speed = speed if context.step is None else speed / context.step
        self.keep(context, {"attention_speed": token_mean(speed, token_weights(tensors.state, context.weights))})

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the force at the inputs of the MLP."""
        force, weights = tensors.force, token_weights(tensors.state, context.weights)
        x = _unit_points(tensors.point, weights, name=f"points of layer {context.layer}")
        quantities = _force_quantities(force, x)
        if self.derivatives:
            quantities |= _jacobian_quantities(force, x)
        fraction = _ratio_of_squared_sums(quantities["swirl"], quantities["force"], weights)
        means = {name: token_mean(value, weights) for name, value in quantities.items()}
        self.keep(context, {**means, "swirl_fraction_as_printed": fraction})

    def result(self) -> xr.Dataset:
        """The quantities of every layer and replicate."""
        return with_bounds(super().result(), BOUNDS)


def drift_and_swirl(system: System, *, derivatives: bool = True) -> xr.Dataset:
    """Force, potential and swirl of a system's MLPs, with replicates: ``DriftAndSwirl`` by one replay.

    Arguments, quantities and errors are those of ``DriftAndSwirl``.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.solve.integrate import integrate
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]), activation=Identity())
    >>> measured = drift_and_swirl(integrate(turn, torch.eye(2), times=[0.0, 1.0]))
    >>> measured.tangential_speed.values.round(6).tolist(), measured.swirl_index.values.round(6).tolist()
    ([[1.0], [1.0]], [[1.0], [1.0]])
    """
    instrument = DriftAndSwirl(derivatives=derivatives)
    return check_system(system).replay(instrument)[instrument.name]


def _unit_points(points: Tensor | None, weights: Tensor, name: str) -> Tensor:
    """The points at which the force is evaluated, as unit vectors. Tokens of weight 0, such as padding, may have no
    direction: they are replaced by the first basis vector.
    """
    assert points is not None
    axis = torch.zeros_like(points)
    axis[..., 0] = 1.0
    points = torch.where((weights > 0).unsqueeze(-1), points, axis)
    length = torch.linalg.vector_norm(points, dim=-1)
    if bool(((length - 1).abs() > 0.1).any()):
        raise HelmscopeError(
            f"system has an MLP that reads points of length {float(length.min()):.3g} to {float(length.max()):.3g}, "
            "but drift on a sphere needs a norm before it"
        )
    unit: Tensor = points / length.unsqueeze(-1)
    return check_tokens(unit, name=name)


def _force_quantities(mlp: MLP | GatedMLP, x: Tensor) -> dict[str, Float[Tensor, "batch n"]]:
    """Quantities of each token that do not need derivatives."""
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
def _jacobian_quantities(mlp: MLP | GatedMLP, x: Tensor) -> dict[str, Float[Tensor, "batch n"]]:
    """Quantities of each token that need Df, computed for one system at a time, since Df has n d^2 entries."""
    index, divergence = [], []
    for cloud in x:
        split = jacobian_split(mlp.ambient, cloud)
        index.append(split.swirl_index.nan_to_num(0.0))
        radial = (cloud * (split.symmetric @ cloud.unsqueeze(-1)).squeeze(-1)).sum(-1)
        inward = (cloud.shape[-1] - 1) * (cloud * mlp.ambient(cloud)).sum(-1)
        divergence.append(split.symmetric.diagonal(dim1=-2, dim2=-1).sum(-1) - radial - inward)
    return {"swirl_index": torch.stack(index), "surface_divergence": torch.stack(divergence)}


def _ratio_of_squared_sums(numerator: Tensor, denominator: Tensor, weights: Tensor) -> Tensor:
    above, below = (torch.where(weights > 0, weights * value * value, 0.0) for value in (numerator, denominator))
    return above.sum(-1) / below.sum(-1)
