"""An MLP at given tokens: its force, its algebraic split in two coordinates, and the invariants of its Jacobian, with
everything that they share computed once.

With x the unit vector that the folded force f reads, and z = sqrt(d) G x + b the output of the norm, which the module
reads, f(x) = F(z). Both have the same neurons, but different rows (v = sqrt(d) G v_z), hence different splits: grad U
and R of ``unit_sphere`` are those of f in x, those of ``mlp_input`` are those of F in z. They are vectors of the same
space; U has the unit of f times that of x or z. b_out and constant neurons, the harmonic part, are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.fields.jacobian_algebra import JacobianAlgebra, JacobianInvariants, jacobian_algebra, slopes_of
from helmscope.fields.mlp import MLP, GatedMLP, affine, linear
from helmscope.fields.norms import LayerNorm, UnitNorm
from helmscope.observe.token_choice import taken
from helmscope.observe.track import row_blocks

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.fields.mlp import Force
    from helmscope.fields.norms import Norm

UNIT_SPHERE, MLP_INPUT = "unit_sphere", "mlp_input"


@dataclass(frozen=True, eq=False)
class Split:
    """U, grad U and R at each token, in one of the two coordinates.

    >>> Split(torch.zeros(1), torch.zeros(1, 2), torch.ones(1, 2)).swirl.norm(dim=-1)
    tensor([1.4142])
    """

    potential: Float[Tensor, "*batch"]
    gradient: Float[Tensor, "*batch d"]
    swirl: Float[Tensor, "*batch d"]


@dataclass(frozen=True, eq=False)
class Parts:
    """What an MLP does at each token: ``force``, ``harmonic`` (a part of it), ``splits`` by coordinates (empty if the
    neurons have no potential), the invariants of its ``jacobian`` in the unit-sphere coordinates, x^T J x
    (``radial_slope``) and 1^T J 1 / d (``mean_slope``), the trace of the part of J that acts along (1, ..., 1). At
    tokens that were not sampled, all of the Jacobian but its traces is NaN.

    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    >>> prepare_mlp(turn).at(torch.eye(2)).splits["unit_sphere"].potential
    tensor([0., 0.])
    """

    force: Float[Tensor, "*batch d"]
    harmonic: Float[Tensor, "*batch d"]
    splits: Mapping[str, Split]
    jacobian: JacobianInvariants
    radial_slope: Float[Tensor, "*batch"]
    mean_slope: Float[Tensor, "*batch"]
    experts: Mapping[int, tuple[Tensor, Parts]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SplitWeights:
    """The coefficients of the algebraic split of an MLP in one of the coordinates: with v the rows (g, if gated)

        ungated  U = sum_j a psi(z),  grad U = sum_j a s(z) v,  a = w.v / |v|^2
        gated    U = sum_j alpha psi(z) t + kappa Psi(z) + lin s(z) t^2 / 2
                 grad U = sum_j s(z) t (alpha g + lin u) + psi(z) (alpha u + kappa g)

    lin = w.u / |u|^2 for neurons with g = 0, which are linear, and 0 for the others (``helmholtz``). Rows shorter than
    1e-150 (1e-19 in float32) count as 0.

    >>> SplitWeights.of(MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2)), torch.ones(1)).first
    tensor([0.5000, 0.5000])
    """

    rows: Float[Tensor, "hidden d"]
    partners: Float[Tensor, "hidden d"] | None
    first: Float[Tensor, " hidden"]
    second: Float[Tensor, " hidden"]
    linear: Float[Tensor, " hidden"]

    @staticmethod
    def of(mlp: MLP | GatedMLP, like: Tensor) -> SplitWeights:
        """The coefficients of an MLP, in the dtype and on the device of ``like``.

        >>> SplitWeights.of(MLP(w_in=torch.zeros(1, 2), w_out=torch.ones(2, 1)), torch.ones(1)).first  # constant
        tensor([0.])
        """
        rows, written = mlp.input_rows[0].to(like), mlp.w_out.to(like).mT
        first = _quotient((written * rows).sum(-1), rows.square().sum(-1))
        if isinstance(mlp, MLP):
            return SplitWeights(rows, None, first, torch.zeros_like(first), torch.zeros_like(first))
        up = mlp.w_up.to(like)
        second = _quotient((written * up).sum(-1) - 2 * first * (rows * up).sum(-1), rows.square().sum(-1))
        straight = _quotient((written * up).sum(-1), up.square().sum(-1))
        return SplitWeights(rows, up, first, second, torch.where(rows.any(-1), 0.0, straight))

    def potential(self, values: Neurons) -> Float[Tensor, "*batch"]:
        """U at each token.

        >>> mlp = MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2))
        >>> SplitWeights.of(mlp, torch.ones(1)).potential(Neurons.of(mlp, torch.zeros(1, 2)))
        tensor([0.])
        """
        assert values.psi is not None
        if self.partners is None:
            return (values.psi * self.first).sum(-1)
        assert values.t is not None
        assert values.double_psi is not None
        straight = self.linear * values.written * values.t / 2
        return (self.first * values.psi * values.t + self.second * values.double_psi + straight).sum(-1)

    @cached_property
    def along(self) -> Float[Tensor, "hidden d"]:
        """What grad U multiplies by the values of the neurons.

        >>> SplitWeights.of(MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2)), torch.ones(1)).along
        tensor([[1., 0.],
                [0., 1.]])
        """
        along = self.first[:, None] * self.rows
        return along if self.partners is None else along + self.linear[:, None] * self.partners

    @cached_property
    def across(self) -> Float[Tensor, "hidden d"] | None:
        """What grad U multiplies by psi, if the neurons are gated.

        >>> SplitWeights.of(MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2)), torch.ones(1)).across
        """
        if self.partners is None:
            return None
        return self.first[:, None] * self.partners + self.second[:, None] * self.rows


@dataclass(frozen=True, eq=False)
class Neurons:
    """The values of the neurons at tokens: ``written``, which w_out multiplies, their slopes in the order of
    ``jacobian_algebra``, psi(z) and, if gated, Psi(z) and t; psi is None if there is none. They do not depend on the
    coordinates. In float32 they have the accuracy of ``Activation.chain``. ``preactivations`` are z and, if gated, t;
    None for other neurons.

    >>> Neurons.of(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.zeros(1, 2)).written
    tensor([[0., 0.]])
    """

    written: Float[Tensor, "*batch hidden"]
    slopes: Float[Tensor, "*batch neurons"]
    psi: Float[Tensor, "*batch hidden"] | None = None
    double_psi: Float[Tensor, "*batch hidden"] | None = None
    t: Float[Tensor, "*batch hidden"] | None = None
    preactivations: tuple[Float[Tensor, "*batch hidden"], ...] | None = None

    @staticmethod
    def of(
        mlp: Force,
        x: Float[Tensor, "*batch d"],
        preactivations: tuple[Float[Tensor, "*batch hidden"], ...] | None = None,
    ) -> Neurons:
        """The values at tokens x, from the ``preactivations`` if they are known. Raises HelmscopeError if the
        activation has no psi (gated: or Psi).

        >>> Neurons.of(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.zeros(1, 2)).psi
        tensor([[0., 0.]])
        """
        if not isinstance(mlp, MLP | GatedMLP):
            return Neurons(mlp.neurons(x), slopes_of(mlp, x))
        if preactivations is None:
            preactivations = tuple(
                affine(x, rows, bias) for rows, bias in zip(mlp.input_rows, input_biases(mlp), strict=True)
            )
        if isinstance(mlp, MLP):
            slope, value, psi = mlp.activation.chain(preactivations[0])
            return Neurons(value, slope, psi, preactivations=preactivations)
        z, t = preactivations
        slope, value, psi, double_psi = mlp.activation.chain(z, double=True)
        return Neurons(value * t, torch.cat([slope * t, value], -1), psi, double_psi, t, preactivations)

    def of_jacobian(self, sample: Int[Tensor, "rows m"] | None) -> dict[str, Float[Tensor, "rows m neurons"]]:
        """The values that the Jacobian needs, at sampled tokens: ``slopes`` and, if known, ``preactivations``, side by
        side.

        >>> values = Neurons.of(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.zeros(1, 3, 2))
        >>> values.of_jacobian(torch.tensor([[2]]))["slopes"]
        tensor([[[0.5000, 0.5000]]])
        """
        found = {"slopes": [self.slopes]}
        if self.preactivations is not None:
            found["preactivations"] = list(self.preactivations)
        chosen = {
            name: parts if sample is None else [taken(part, sample) for part in parts] for name, parts in found.items()
        }
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts, -1) for name, parts in chosen.items()}


@dataclass(frozen=True, eq=False)
class PreparedMLP:
    """A single MLP with what its weights give once for all tokens; made by ``prepare_mlp``.

    >>> prepare_mlp(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).at(torch.zeros(1, 2)).force
    tensor([[0., 0.]])
    """

    mlp: Force
    weights: Mapping[str, SplitWeights]
    algebra: JacobianAlgebra
    harmonic: Float[Tensor, " d"]

    def at(
        self,
        x: Float[Tensor, "*batch d"],
        sample: Int[Tensor, "*batch m"] | None = None,
        *,
        preactivations: tuple[Float[Tensor, "*batch hidden"], ...] | None = None,
        force: Float[Tensor, "*batch d"] | None = None,
    ) -> Parts:
        """All parts at unit vectors x; with a ``sample``, indices of tokens, the invariants of the Jacobian beyond its
        trace at these tokens only. ``preactivations`` and ``force`` are those at x if they are known.

        >>> prepare_mlp(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).at(torch.zeros(1, 2)).harmonic
        tensor([[0., 0.]])
        """
        size = x[0].numel() // x.shape[-1] * len(self.algebra.rows)
        rows = []
        for block in row_blocks(len(x), size) if x.ndim > 2 else [slice(None)]:
            known = None if preactivations is None else tuple(each[block] for each in preactivations)
            values = Neurons.of(self.mlp, x[block], known)
            rows.append(self._block(values, x[block], None if force is None else force[block]))
            rows[-1] |= values.of_jacobian(None if sample is None else sample[block])
        joined = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        places = [id(each) for each in self._distinct]
        splits = {}
        for name, weights in self.weights.items():
            place = places.index(id(weights))
            splits[name] = Split(*(joined[f"{part} {place}"] for part in ("potential", "gradient", "swirl")))
        found = self.algebra.invariants(joined["slopes"])
        radial = self._radial(joined, x if sample is None else taken(x, sample))

        def spread(values: Tensor) -> Tensor:
            return values if sample is None else torch.full_like(joined["trace"], torch.nan).scatter(-1, sample, values)

        jacobian = JacobianInvariants(joined["trace"], spread(found.trace_of_square), spread(found.squared_norm))
        harmonic = self.harmonic.expand_as(joined["force"])
        return Parts(joined["force"], harmonic, splits, jacobian, spread(radial), joined["mean_slope"])

    def _block(self, values: Neurons, x: Tensor, force: Tensor | None) -> dict[str, Tensor]:
        """What is needed at every token of some systems."""
        if force is None:
            force = linear(values.written, self.mlp.w_out.to(x).mT)
            force = force if self.mlp.b_out is None else force + self.mlp.b_out.to(x)
        found = {
            "force": force,
            "trace": (values.slopes * self.algebra.diagonal).sum(-1),
            "mean_slope": (values.slopes * self._ones).sum(-1),
        }
        own = force - self.harmonic
        for place, (weights, gradient) in enumerate(zip(self._distinct, self._gradients(values), strict=True)):
            found[f"potential {place}"] = weights.potential(values)
            found |= {f"gradient {place}": gradient, f"swirl {place}": own - gradient}
        return found

    @cached_property
    def _ones(self) -> Float[Tensor, " neurons"]:
        """The products of these with the slopes add up to 1^T J 1 / d."""
        return self.algebra.rows.sum(-1) * self.algebra.columns.sum(0) / len(self.algebra.columns)

    @cached_property
    def _distinct(self) -> list[SplitWeights]:
        """The weights of the coordinates that differ."""
        return list({id(each): each for each in self.weights.values()}.values())

    @cached_property
    def _along(self) -> Float[Tensor, "hidden k"]:
        """What grad U in both coordinates multiplies by the neurons, side by side."""
        return torch.cat([each.along for each in self._distinct], 1)

    @cached_property
    def _across(self) -> Float[Tensor, "hidden k"] | None:
        parts = [each.across for each in self._distinct if each.across is not None]
        return torch.cat(parts, 1) if parts else None

    def _gradients(self, values: Neurons) -> list[Tensor]:
        """grad U with each of the distinct weights."""
        if not self._distinct:
            return []
        gradients = linear(values.written, self._along)
        if self._across is not None:
            assert values.psi is not None
            gradients = gradients + linear(values.psi, self._across)
        return list(torch.split(gradients, len(self.harmonic), -1))

    def _radial(self, values: dict[str, Tensor], x: Tensor) -> Tensor:
        """x^T J x, in which the products of the rows with x are the preactivations without biases."""
        if "preactivations" not in values:
            return self.algebra.radial(values["slopes"], x)
        written = linear(x, self.mlp.w_out.to(x))
        products = values["slopes"] * (values["preactivations"] - self._biases)
        return torch.stack([(part * written).sum(-1) for part in torch.split(products, written.shape[-1], -1)]).sum(0)

    @cached_property
    def _biases(self) -> Float[Tensor, " neurons"]:
        """What is added to the products of ``algebra.rows`` with x."""
        zero = torch.zeros_like(self.algebra.rows[: self.mlp.hidden, 0])
        return torch.cat([zero if bias is None else bias.to(zero) for bias in input_biases(self.mlp)])


def prepare_mlp(
    force: Force, *, like: Tensor | None = None, unfolded: Force | None = None, norm: Norm | None = None
) -> PreparedMLP:
    """What the weights of an MLP give once for all tokens. ``force`` reads unit vectors; ``unfolded`` is the same MLP
    as a function of the output of ``norm``. Without a norm, or with y / |y|, both coordinates are the same.

    >>> prepare_mlp(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).harmonic
    tensor([0., 0.])
    """
    unfolded = force if unfolded is None or norm is None or isinstance(norm, UnitNorm) else unfolded
    like = force.w_out if like is None else like
    zero = torch.zeros_like(force.w_out[:, 0].to(like))
    if not isinstance(force, MLP | GatedMLP):
        harmonic = zero if force.b_out is None else force.b_out.to(like)
        return PreparedMLP(force, {}, jacobian_algebra(force, like=like), harmonic)
    assert isinstance(unfolded, MLP | GatedMLP)
    own = SplitWeights.of(force, like)
    weights = {UNIT_SPHERE: own, MLP_INPUT: own if unfolded is force else SplitWeights.of(unfolded, like)}
    live = torch.stack([rows.to(like).any(-1) for rows in force.input_rows]).any(0)
    harmonic = affine(torch.where(live, 0.0, force.neurons(zero)), force.w_out, force.b_out)
    return PreparedMLP(force, weights, jacobian_algebra(force, like=like), harmonic)


def input_biases(mlp: Force) -> tuple[Float[Tensor, " hidden"] | None, ...]:
    """The biases that are added to each of ``mlp.input_rows``: (b_in,), or (b_gate, b_up).

    >>> input_biases(MLP(w_in=torch.eye(2), w_out=torch.eye(2)))
    (None,)
    """
    return (mlp.b_in,) if isinstance(mlp, MLP) else (mlp.b_gate, mlp.b_up)  # type: ignore[attr-defined]


def is_centered(norm: Norm | None) -> bool:
    """Whether tokens after this norm have mean 0 over their coordinates, and lie on S^(d-2).

    >>> is_centered(LayerNorm()), is_centered(None)
    (True, False)
    """
    return isinstance(norm, LayerNorm)


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """above / below, and 0 where below is 0."""
    return torch.where(below > 0, above / torch.where(below > 0, below, 1.0), 0.0)


def map_parts(parts: Parts, change: Callable[[Tensor], Tensor]) -> Parts:
    """The parts with a function applied to every tensor, always in the same order; without those of experts.

    >>> parts = prepare_mlp(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).at(torch.zeros(1, 2))
    >>> map_parts(parts, torch.ones_like).force
    tensor([[1., 1.]])
    """
    splits = {name: Split(change(s.potential), change(s.gradient), change(s.swirl)) for name, s in parts.splits.items()}
    j = parts.jacobian
    invariants = JacobianInvariants(change(j.trace), change(j.trace_of_square), change(j.squared_norm))
    return Parts(
        change(parts.force),
        change(parts.harmonic),
        splits,
        invariants,
        change(parts.radial_slope),
        change(parts.mean_slope),
    )
