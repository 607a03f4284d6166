"""Whether whitening by the diffusion matrix of attention makes the drift of a layer a gradient.

At a few tokens of each prompt, Sigma is the Sigma_A of the block's attention (mode A, summed over heads, on the tangent
space of the token, over |y|^2), and J the covariant derivative T Df T - <u, f> T of the MLP's force f on the sphere, at
the direction u that the MLP reads, with T the projector to the tangent space. Attention is the noise and the MLP the
drift here, as in [Helmholtz Transformer, no. 7]. With the mean Sigma of the prompt, its eigenvalues above ``tol``
of the largest in L and their eigenvectors in the columns of E, the coordinates Sigma^(-1/2) x turn E^T J E into

    J' = L^(-1/2) E^T J E L^(1/2),

    antisymmetric_share_before    antisymmetric share |A|^2 / |.|^2 of E^T J E
    antisymmetric_share_after     that of J'
    variation                     Var_x Sigma / |mean Sigma|_F^2
    commutator                    |H Sigma - Sigma H| / (|H| |Sigma|)

with H = -(J + J^T) / 2, the Hessian of V = -U for the gradient part of the Jacobian. Both shares are on the range of
the same Sigma: a low rank would lower the second one alone otherwise. J is that of each token and Sigma their mean.

How to read it. Whitening helps where ``antisymmetric_share_after`` is below ``antisymmetric_share_before``;
``antisymmetric_share_after_null`` and ``commutator_null`` have Sigma with random eigenvectors in its range. The premise
of a constant Sigma holds where ``sigma_variation`` is near 0. For a symmetric J whitening gives a gradient only where
the commutator is 0. How it fails. Where Sigma is 0, as for a token with a single key, there is nothing to whiten by:
NaN. ``sigma_variation`` comes from few tokens. Eigenvalues near ``tol`` of the largest are divided by, and J' is
dominated by them. Cost. One replay, and one eigendecomposition of a d x d matrix for every layer and prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.attention_diffusion import head_covariances, tangent_covariance
from helmscope.observe.head_moments import HEADS_NEED, TangentSpaces, centered_output, with_heads
from helmscope.observe.labels import label_attributes
from helmscope.observe.mlp_force import MlpForce, unit_points
from helmscope.observe.mlp_jacobian import tangent_jacobians
from helmscope.observe.token_choice import sample_tokens, taken
from helmscope.observe.track import AT_LEAST_0, SHARE, replayed, token_weights, with_bounds
from helmscope.types import Instrument, Needs, check_integer, check_real

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext, ReplayPlan, System
    from helmscope.types.progress import ProgressOption

NAMES = {
    "antisymmetric_share_before": "antisymmetric share of the MLP's Jacobian on the range of Sigma_A",
    "antisymmetric_share_after": "antisymmetric share of the MLP's Jacobian, whitened by the mean Sigma_A",
    "antisymmetric_share_after_null": "antisymmetric share of the MLP's Jacobian, whitened with random eigenvectors",
    "antisymmetric_share_change": "change of the antisymmetric share by whitening",
    "antisymmetric_share_change_null": "change of the antisymmetric share by whitening with random eigenvectors",
    "sigma_variation": "variance of Sigma_A over tokens over the squared norm of its mean",
    "commutator": "commutator of Hess V and Sigma_A, relative to the product of their norms",
    "commutator_null": "commutator of Hess V and a Sigma_A with random eigenvectors, relative",
    "sigma_rank": "rank of the mean Sigma_A of a prompt",
}
SHARES = ("antisymmetric_share_before", "antisymmetric_share_after", "antisymmetric_share_after_null")


class LayerWhitening(Instrument):
    """Instrument: the antisymmetric share of the MLP's Jacobian before and after whitening by the mean Sigma_A of
    ``sampled_tokens`` tokens of each prompt, the variation of Sigma_A over them, and its commutator with Hess V.

    Tokens are drawn by ``seed`` among those that count, without the first; all of them where there are fewer. The
    quantities are those of the module's docstring, in every layer (at every time of a simulation) and replicate. Raises
    HelmscopeError for a system without attention or MLP, and for heads that are hidden or write through a norm.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.fields.block import Block
    >>> from helmscope.fields.mlp import MLP
    >>> from helmscope.solve.integrate import integrate
    >>> block = Block(SA(beta=0.0), MLP(w_in=torch.eye(3), w_out=torch.eye(3)))
    >>> start = torch.eye(3, dtype=torch.float64).expand(1, 3, 3)
    >>> seen = integrate(block, start, times=[0.0]).replay(LayerWhitening())["layer_whitening"]
    >>> seen["sigma_rank"].item(), round(seen.antisymmetric_share_before.item(), 12)
    (3.0, 0.0)
    """

    name = "layer_whitening"
    needs = HEADS_NEED | Needs.FORCE

    def __init__(self, *, sampled_tokens: int = 4, seed: int = 0, tol: float = 1e-6) -> None:
        self.sampled_tokens = check_integer("sampled_tokens", sampled_tokens, at_least=1)
        self.seed = check_integer("seed", seed, at_least=0)
        self.tol = check_real("tol", tol, above=0)
        self._halves: dict[str, Tensor] = {}

    def unsupported_reason(self, system: System) -> str | None:
        """Why a system cannot be measured, as for ``MlpForce``."""
        reason = MlpForce().unsupported_reason(system)
        return reason and reason.replace("mlp_force", self.name)

    def start(self, plan: ReplayPlan) -> None:
        """Start a new replay."""
        super().start(plan)
        self._halves = {}

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Computes Sigma at the sampled tokens."""
        chosen, _ = self._sampled(context, tensors.state)
        self._halves["sigma"] = token_sigma(context, tensors, chosen)
        self._keep(context, tensors.state)

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Computes the Jacobians at the sampled tokens."""
        chosen, _ = self._sampled(context, tensors.state)
        points = unit_points(self, context, tensors.point, token_weights(tensors.state, context.weights))
        x = taken(points, chosen).double()
        found = [tangent_jacobians(tensors.force, each, centered=context.centered)[1] for each in x]
        self._halves["jacobian"] = torch.stack(found)
        self._keep(context, tensors.state)

    def _sampled(self, context: ReplayContext, state: Tensor) -> tuple[Tensor, Tensor]:
        weights = token_weights(state, context.weights)
        return sample_tokens(context, weights, self.sampled_tokens, seed=self.seed, first_position=1)

    def _keep(self, context: ReplayContext, state: Tensor) -> None:
        """Records a layer once both halves are known; their order differs between families."""
        if len(self._halves) < 2:
            return
        sigma, jacobian, (_, counts) = self._halves["sigma"], self._halves["jacobian"], self._sampled(context, state)
        rows = []
        for k in range(len(sigma)):
            key = (context.layer, context.rows.start + k)
            source = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key)))
            rows.append(whitening_of(jacobian[k, counts[k]], sigma[k, counts[k]], self.tol, source))
        values = torch.tensor([[row[name] for row in rows] for name in NAMES], dtype=torch.float64, device="cpu")
        self.keep(context, dict(zip(NAMES, values, strict=True)))
        self._halves = {}

    def result(self) -> xr.Dataset:
        """The quantities of every layer and replicate."""
        measured = super().result()
        for name, value in measured.data_vars.items():
            value.attrs |= label_attributes(NAMES[str(name)])
        measured.attrs["radius"] = "recorded radius of each token; the Jacobian's factor 1/|y| cancels"
        measured.attrs["hessian"] = "minus the symmetric part of the MLP's Jacobian on the tangent space"
        bounds = dict.fromkeys(("sigma_variation", "commutator", "commutator_null", "sigma_rank"), AT_LEAST_0)
        return with_bounds(measured, bounds | dict.fromkeys(SHARES, SHARE))


def layer_whitening(
    system: System, *, sampled_tokens: int = 4, seed: int = 0, tol: float = 1e-6, progress: ProgressOption = None
) -> xr.Dataset:
    """Whitening of every layer of a system, with replicates: ``LayerWhitening`` by one replay.

    ``progress`` is called with the share of the work done.

    >>> from helmscope import record
    >>> measured = layer_whitening(record("A", ["Once upon a time there was a cat"]), sampled_tokens=2)
    >>> measured.antisymmetric_share_change.dims, bool((measured.antisymmetric_share_after <= 1).all())
    (('layer', 'prompt'), True)
    """
    instrument = LayerWhitening(sampled_tokens=sampled_tokens, seed=seed, tol=tol)
    return replayed(system, instrument, progress)


@full_precision
def token_sigma(context: ReplayContext, tensors: AttentionTensors, chosen: Tensor) -> Float[Tensor, "rows tokens d d"]:
    """T Sigma_A T / |y|^2, summed over heads, at chosen tokens (rows, tokens), in float64.

    >>> from helmscope.types import AttentionTensors, Half, ReplayContext
    >>> x, half = torch.eye(2).expand(1, 2, 2), torch.full((1, 2, 2), 0.5)
    >>> tensors = AttentionTensors(2 * x, x, half, x, x, x, x, torch.eye(2))
    >>> token_sigma(ReplayContext(0, Half.ATTENTION, 0.0, slice(0, 1)), tensors, torch.tensor([[0]]))[0, 0]
    tensor([[0.0000, 0.0000],
            [0.0000, 0.0312]], dtype=torch.float64)
    """
    spaces = TangentSpaces.of(context, tensors)
    covariances, _ = head_covariances(tensors, chosen)
    output = centered_output(with_heads(tensors)[2].double(), centered=context.centered)
    radius = taken(spaces.radius.unsqueeze(-1), chosen).double()
    return tangent_covariance(covariances, output, taken(spaces.x, chosen).double()) / radius.unsqueeze(-1) ** 2


@full_precision
def whitening_of(
    jacobian: Float[Tensor, "tokens d d"],
    sigma: Float[Tensor, "tokens d d"],
    tol: float,
    source: np.random.Generator,
) -> dict[str, float]:
    """The quantities of ``LayerWhitening`` for one prompt, from the Jacobians and the Sigma of its tokens; ``source``
    draws the random eigenvectors. NaN, with rank 0, where Sigma is 0.

    >>> drift, sigma = torch.tensor([[1.0, 0.5], [0.5, 2.0]]).double(), torch.diag(torch.tensor([1.0, 4.0]).double())
    >>> found = whitening_of(-drift[None], sigma[None], 1e-6, np.random.default_rng(0))
    >>> found["antisymmetric_share_before"]
    0.0
    >>> round(found["antisymmetric_share_after"], 6)  # 2 * 0.375^2 over 1 + 1 + 1/16 + 4
    0.046392
    """
    nothing = dict.fromkeys(NAMES, float("nan")) | {"sigma_rank": 0.0}
    if not len(sigma) or not bool(torch.isfinite(sigma).all()):
        return nothing
    mean = sigma.mean(0)
    values, vectors = torch.linalg.eigh(mean)
    if not float(values[-1]) > 0:
        return nothing
    kept = values > tol * values[-1]
    size, whole = values[kept], vectors.mT @ jacobian @ vectors
    inner = whole[:, kept][..., kept]
    noise = torch.from_numpy(source.standard_normal((len(size), len(size)))).to(inner)
    turn, upper = torch.linalg.qr(noise)
    turn = turn * upper.diagonal().sign()  # uniformly distributed
    turned = turn.mT @ inner @ turn
    before, after, null = (
        float(_share(each).mean()) for each in (inner, _whitened(inner, size), _whitened(turned, size))
    )
    hessian, across = -(whole + whole.mT) / 2, -(whole[:, ~kept][..., kept] + whole[:, kept][..., ~kept].mT) / 2
    length = hessian.square().sum((-2, -1))
    spread = float((sigma - mean).square().sum()) / (len(sigma) - 1) if len(sigma) > 1 else float("nan")
    return {
        "antisymmetric_share_before": before,
        "antisymmetric_share_after": after,
        "antisymmetric_share_after_null": null,
        "antisymmetric_share_change": after - before,
        "antisymmetric_share_change_null": null - before,
        "sigma_variation": spread / float(mean.square().sum()),
        "commutator": _commutator(length, values, hessian),
        "commutator_null": _commutator(length, size, -(turned + turned.mT) / 2, across @ turn),
        "sigma_rank": float(len(size)),
    }


def _whitened(inner: Tensor, size: Tensor) -> Tensor:
    roots = size.sqrt()
    return inner / roots.unsqueeze(-1) * roots


def _share(matrices: Tensor) -> Tensor:
    """|A|^2 / |M|^2; NaN where M = 0."""
    total = matrices.square().sum((-2, -1))
    part = (matrices - matrices.mT).square().sum((-2, -1)) / 4
    return torch.where(total > 0, part / torch.where(total > 0, total, 1.0), torch.nan)


def _commutator(length: Tensor, values: Tensor, hessian: Tensor, across: Tensor | None = None) -> float:
    """The mean of |[H, S]| / (|H| |S|) in coordinates in which S is diagonal with some ``values``, given |H|^2; where S
    has further eigenvalues 0, ``across`` is H between their eigenvectors and the others.
    """
    total = (hessian * (values - values.unsqueeze(-1))).square().sum((-2, -1))
    if across is not None:
        total = total + 2 * (across * values).square().sum((-2, -1))
    sizes = (length * values.square().sum()).sqrt()
    return float((total.sqrt() / torch.where(sizes > 0, sizes, torch.nan)).mean())
