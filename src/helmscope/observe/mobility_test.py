"""Whether the drift of a block is its Sigma_A times a gradient: the antisymmetric share of the Jacobian of Sigma^-1 b.

At a few tokens of each prompt, b is what the block writes to the token, attention and MLP, and Sigma its Sigma_A (mode
A, summed over heads), both as functions of the direction x of the token at its recorded radius, with the cloud frozen:
keys and values, those of the token itself included, stay fixed and only its query moves. In a sequential block the MLP
reads the state after attention, and its derivative is taken through attention. With J the Jacobian of Sigma^-1 b on
the range of Sigma in the tangent space (``sigma_field`` has the formulas),

    antisymmetric_share  |A|^2 / |J|^2, A the antisymmetric part of J: 0 if and only if b = Sigma grad V near x, on that
    range outside_range        share of the squared tangential drift outside the range of Sigma, which no mobility Sigma
    can move.

How to read it. A random field has a share of (r - 1) / (2 r) on r dimensions (``antisymmetric_share_null``);
``antisymmetric_share_attention`` is that of the write of attention alone.
How it fails. Where Sigma is 0, as for a token with a single key, there is no share: NaN, and means leave such tokens
out. Eigenvalues of Sigma near ``tol`` of the largest are divided by, and dominate J; in float32 nothing smaller
than about 1e-6 of the largest is known.
Cost. One forward pass with derivatives of the queries, one vector-Jacobian product for each of their coordinates, and
for every layer, prompt and token an eigendecomposition of a d x d matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.recording import Recording
from helmscope.observe.head_moments import HEADS_NEED, ROUNDING, TangentSpaces, centered_output, with_heads
from helmscope.observe.kernel import ROW_SUM_TOLERANCE
from helmscope.observe.labels import label_attributes
from helmscope.observe.mlp_force import MlpForce, unit_points
from helmscope.observe.mlp_jacobian import force_jacobians
from helmscope.observe.query_slopes import RecordedSlopes, simulated_slopes, slopes_unsupported
from helmscope.observe.sigma_field import SigmaField, antisymmetric_share_of
from helmscope.observe.token_choice import sample_tokens, taken
from helmscope.observe.track import SHARE, check_system, token_mean, token_weights, with_bounds
from helmscope.runs.bar import shows_progress
from helmscope.solve.replay import select_systems
from helmscope.types import HelmscopeError, Instrument, Needs, check_integer, check_real

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext, ReplayPlan, System
    from helmscope.types.progress import ProgressOption

NAMES = {
    "antisymmetric_share": "antisymmetric share of the Jacobian of Sigma_A^-1 b, b the drift of the block",
    "antisymmetric_share_null": "antisymmetric share of a random field on the range of Sigma_A",
    "antisymmetric_share_attention": "antisymmetric share of the Jacobian of Sigma_A^-1 b, b the drift of attention",
    "outside_range": "share of the squared drift of the block outside the range of Sigma_A",
    "sigma_rank": "rank of the tangent Sigma_A of a token",
}


@shows_progress("measuring mobilities")
def mobility_test(
    system: System, *, sampled_tokens: int = 4, seed: int = 0, tol: float = 1e-6, progress: ProgressOption = None
) -> xr.Dataset:
    """The antisymmetric share of the Jacobian of Sigma^-1 b at ``sampled_tokens`` tokens of each prompt, in every layer
    (at every time of a simulation); one value per replicate, the mean over the tokens.

    Tokens are drawn by ``seed`` among those that count, without the first; all of them where there are fewer. Without
    an MLP, as for a simulation of SA, b is the drift of attention. Raises HelmscopeError for a system without
    attention, for heads that are hidden or write through a norm, for families outside the attention registry of
    transformers, and for decoders that read an encoder.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=1.0), torch.eye(3, dtype=torch.float64).expand(1, 3, 3), times=[0.0])
    >>> measured = mobility_test(run)
    >>> measured["sigma_rank"].item(), bool(measured.antisymmetric_share.item() < 1)
    (2.0, True)
    """
    instrument = _Mobility(
        check_system(system),
        sampled_tokens=check_integer("sampled_tokens", sampled_tokens, at_least=1),
        seed=check_integer("seed", seed, at_least=0),
        tol=check_real("tol", tol, above=0),
    )
    reason = system.unsupported_reason(instrument)
    if reason is not None:
        raise HelmscopeError(reason)
    if not isinstance(system, Recording):
        return system.replay(instrument, progress=progress)[instrument.name]
    slopes = RecordedSlopes(system, instrument.sampled)
    instrument.slopes = slopes
    slopes.feed(instrument, progress)
    return instrument.result()


def mobility_unsupported(system: System) -> str | None:
    """One sentence that says why a system does not support ``mobility_test``; None if it does.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> mobility_unsupported(integrate(SA(beta=0.0), torch.eye(2), times=[0.0]))
    """
    return system.unsupported_reason(_Mobility(system, sampled_tokens=1, seed=0, tol=1e-6))


@dataclass(frozen=True, eq=False)
class _Attended:
    """The attention half of a chunk at the sampled tokens, in float64; ``derivative`` is D_x of the write."""

    fields: list[list[SigmaField | None]]
    state: Tensor
    write: Tensor
    radius: Tensor


class _Mobility(Instrument):
    """Collects both halves of a layer at the sampled tokens, then solves for Sigma^-1 b."""

    name = "mobility_test"
    slopes: RecordedSlopes | None

    def __init__(self, system: System, *, sampled_tokens: int, seed: int, tol: float) -> None:
        self.sampled_tokens, self.seed, self.tol = sampled_tokens, seed, tol
        self.system, self.slopes = system, None
        # a model without an MLP is refused, since a force cannot be asked for
        self.has_mlp = isinstance(system, Recording) or system.force(layer=0) is not None
        self._halves: dict[str, Any] = {}

    @property
    def needs(self) -> Needs:
        return HEADS_NEED | Needs.FORCE if self.has_mlp else HEADS_NEED

    def unsupported_reason(self, system: System) -> str | None:
        if isinstance(system, Recording) and system.anatomy.has_cross:
            return f"system is a decoder that reads an encoder, but {self.name} needs blocks of attention and MLP"
        reason = MlpForce().unsupported_reason(system) if self.has_mlp else None
        return (reason and reason.replace("mlp_force", self.name)) or slopes_unsupported(system, self.name)

    def start(self, plan: ReplayPlan) -> None:
        super().start(plan)
        self._halves = {}

    def sampled(self, context: ReplayContext, state: Tensor) -> tuple[Tensor, Tensor]:
        """The sampled tokens of a chunk, and which of them count."""
        weights = token_weights(state, context.weights)
        return sample_tokens(context, weights, self.sampled_tokens, seed=self.seed, first_position=1)

    @full_precision
    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        chosen, counts = self.sampled(context, tensors.state)
        if self.slopes is not None:
            slopes = self.slopes.of(context.layer)
        else:
            slopes = simulated_slopes(select_systems(self.system, context.rows), tensors.state, chosen)  # type: ignore[arg-type]
        spaces = TangentSpaces.of(context, tensors)
        assert tensors.write is not None
        self._halves["attention"] = _Attended(
            _fields(tensors, spaces, chosen, counts, slopes),
            taken(tensors.state, chosen).double(),
            taken(tensors.write, chosen).double(),
            taken(spaces.radius.unsqueeze(-1), chosen).double().squeeze(-1),
        )
        self._keep(context, counts)

    @full_precision
    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        chosen, counts = self.sampled(context, tensors.state)
        points = unit_points(self, context, tensors.point, token_weights(tensors.state, context.weights))
        u = taken(points, chosen).double()
        jacobians = torch.stack([force_jacobians(tensors.force, each) for each in u])
        self._halves["mlp"] = (taken(tensors.state, chosen).double(), u, tensors.force.ambient(u), jacobians)
        self._keep(context, counts)

    def _keep(self, context: ReplayContext, counts: Tensor) -> None:
        """Records a layer once both halves are known; their order differs between families."""
        if "attention" not in self._halves or (self.has_mlp and "mlp" not in self._halves):
            return
        attended: _Attended = self._halves["attention"]
        columns = {name: torch.full(counts.shape, torch.nan, dtype=torch.float64, device="cpu") for name in NAMES}
        for row, token in counts.nonzero().tolist():
            for name, value in self._at(context, attended, row, token).items():
                columns[name][row, token] = value
        self.keep(context, {name: token_mean(value, torch.isfinite(value).double()) for name, value in columns.items()})
        self._halves = {}

    def _at(self, context: ReplayContext, attended: _Attended, row: int, token: int) -> dict[str, float]:
        """The quantities of one token."""
        field = attended.fields[row][token]
        if field is None:
            return {}
        radius = attended.radius[row, token]
        write, slopes = attended.write[row, token] / radius, field.drift_slopes
        drifts = [(write, slopes)]
        if self.has_mlp:
            more = self._force(context, attended, field, row, token)
            drifts.append((write + more[0] / radius, slopes + more[1] / radius))
        solved = field.solved(drifts, self.tol)
        if solved is None:
            return {"sigma_rank": 0.0}
        rank = len(solved[0].jacobian)
        key = (context.layer, context.rows.start + row, token)
        source = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key)))
        random = torch.from_numpy(source.standard_normal((rank, rank)))
        return {
            "antisymmetric_share": solved[-1].share,
            "antisymmetric_share_null": antisymmetric_share_of(random),
            "antisymmetric_share_attention": solved[0].share,
            "outside_range": solved[-1].outside,
            "sigma_rank": float(rank),
        }

    @full_precision
    def _force(
        self, context: ReplayContext, attended: _Attended, field: SigmaField, row: int, token: int
    ) -> tuple[Tensor, Tensor]:
        """The force of the MLP, and its derivative by the direction that attention reads."""
        states, points, forces, jacobians = self._halves["mlp"]
        y, write, radius = attended.state[row, token], attended.write[row, token], attended.radius[row, token]
        moved = radius * field.onto
        if not torch.equal(states[row, token], y):  # the MLP reads the state after attention
            moved, y = moved + radius * field.drift_slopes, y + write
        length = torch.linalg.vector_norm(y - y.mean() if context.centered else y)
        u = points[row, token]
        turned = moved - torch.outer(u, u @ moved)
        turned = turned - turned.mean(0) if context.centered else turned
        return forces[row, token], jacobians[row, token] @ turned / length

    def result(self) -> xr.Dataset:
        """The shares of every layer and replicate."""
        measured = super().result()
        for name, value in measured.data_vars.items():
            value.attrs |= label_attributes(NAMES[str(name)])
        measured.attrs["radius"] = "recorded radius of each token"
        measured.attrs["frozen"] = "keys and values, those of the token itself included"
        return with_bounds(measured, dict.fromkeys([name for name in NAMES if name != "sigma_rank"], SHARE))


@full_precision
def _fields(
    tensors: AttentionTensors, spaces: TangentSpaces, chosen: Tensor, counts: Tensor, slopes: Tensor
) -> list[list[SigmaField | None]]:
    """Sigma near every sampled token that counts; None where rows of a kernel sum to more than 1."""
    kernel, value, raw = with_heads(tensors)
    output = centered_output(raw.double(), centered=spaces.centered)
    index = chosen[:, None, :, None].expand(-1, kernel.shape[1], -1, kernel.shape[-1])
    weights = kernel.gather(2, index).double().transpose(1, 2)  # (rows, tokens, heads, n)
    rest = 1 - weights.sum(-1, keepdim=True)
    rest = torch.where(rest.abs() <= ROW_SUM_TOLERANCE, 0.0, rest)
    weights = torch.where(rest == 0, weights / weights.sum(-1, keepdim=True), weights)
    x = taken(spaces.x, chosen).double()
    radius = taken(spaces.radius.unsqueeze(-1), chosen).double()
    # the rest of a row belongs to a key of value 0, the sink of some families
    weights = torch.cat([weights, rest], -1)
    slopes = torch.cat([slopes, -slopes.sum(-2, keepdim=True)], -2) * radius[..., None, None]
    values = torch.cat([value.double(), torch.zeros_like(value[..., :1, :]).double()], -2)
    written = torch.einsum("bhns,hds->bhnd", values, output)
    rounding = (ROUNDING * torch.finfo(kernel.dtype).eps) ** 2
    found: list[list[SigmaField | None]] = []
    for row in range(len(x)):
        line: list[SigmaField | None] = []
        for token in range(x.shape[1]):
            p = weights[row, token]
            if not bool(counts[row, token]) or bool((p < 0).any()):
                line.append(None)
                continue
            spread = written[row] - (p.unsqueeze(-1) * written[row]).sum(-2, keepdim=True)
            trace, second = ((p * each.square().sum(-1)).sum(-1) for each in (spread, written[row]))
            spread = torch.where((trace > rounding * second)[:, None, None], spread, 0.0)
            seen = p > 0  # the weight of a masked key is 0, and so is its derivative
            deviations, own = spread[seen] / radius[row, token], slopes[row, token][seen]
            line.append(SigmaField(x[row, token], p[seen], deviations, own, spaces.centered))
        found.append(line)
    return found
