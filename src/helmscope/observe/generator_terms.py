"""What a generator test needs from the mechanism of a block: both updates at the first state, and Sigma_A.

A block writes a(y) by attention and then m(y + a(y)) by its MLP. The sum of the generators of both halves at the first
state belongs to a(y) + m(y); the difference is the splitting defect, a commutator [Helmholtz Transformer, no. 8].
Sigma_A = (1/2) sum_h T W_O^h Cov_P W_O^hT T / |y|^2 is the covariance of attention if one token were sampled (mode A of
``attention_diffusion``), T the projector to the tangent space; attention is deterministic, and has no such term.

Of a change C_i of a probe at the tokens i of a prompt, a prediction T_i explains 1 - E (C - T)^2 / E C^2, with E the
mean over tokens, whatever the scale of the probe; a share of several probes is the mean of theirs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.fields.block import Block
from helmscope.fields.norms import UnitNorm
from helmscope.geometry.arithmetic import full_precision
from helmscope.models.recording import Recording
from helmscope.observe.attention_diffusion import head_covariances
from helmscope.observe.generator import convergence_order
from helmscope.observe.head_moments import HEADS_NEED, centered_output, with_heads
from helmscope.observe.token_choice import sample_tokens, taken
from helmscope.observe.track import token_mean
from helmscope.solve.simulation import Simulation
from helmscope.types import Instrument, Needs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.observe.block_steps import BlockSteps
    from helmscope.observe.probes import ProbeBank, ScaledStep
    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext, System

SCALES = tuple(2.0**-k for k in range(7))
LONGEST = 0.25  # length of the longest step from which orders are extrapolated
REPRODUCES = 1e-2  # relative distance of the MLP's write from its force, beyond which something else acts on it


def over_tokens(values: Float[Tensor, "rows n p"], m: Float[Tensor, "rows n"]) -> Float[Tensor, "rows p"]:
    """The mean over tokens of values of every probe.

    >>> over_tokens(torch.tensor([[[1.0], [3.0]]]), torch.ones(1, 2))
    tensor([[2.]])
    """
    return token_mean(values.mT, m.unsqueeze(-2).expand(values.mT.shape))


def missed(
    change: Float[Tensor, "rows n p"], predicted: Float[Tensor, "rows n p"], m: Float[Tensor, "rows n"]
) -> Float[Tensor, "rows p"]:
    """E (C - T)^2 / E C^2 of every probe, E the mean over tokens; NaN where a probe does not change.

    >>> missed(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[1.0], [2.0]]]), torch.ones(1, 2))
    tensor([[0.1000]])
    """
    size = over_tokens(change**2, m)
    return over_tokens((change - predicted) ** 2, m) / torch.where(size > 0, size, torch.nan)


def short_scales(path: ScaledStep, m: Float[Tensor, "rows n"]) -> list[Float[Tensor, "rows 1 1"]]:
    """Scales s for which the longest step of a prompt has the length 1/4, and its halves, from which orders in s are
    extrapolated.

    >>> from helmscope.observe.probes import Cosine
    >>> x = torch.tensor([[[1.0, 0.0]]])
    >>> path = Cosine(torch.eye(2), torch.zeros(2)).along(x, 2 * x)
    >>> [round(s.item(), 5) for s in short_scales(path, torch.ones(1, 1))][:3]
    [0.125, 0.0625, 0.03125]
    """
    longest = torch.where(m > 0, path.square.squeeze(-1), 0.0).amax(-1).sqrt()[:, None, None]
    return [s * LONGEST / torch.where(longest > 0, longest, 1.0) for s in SCALES]


class _Terms(Instrument):
    """Measures predictions of the change of probes by the steps of blocks."""

    def __init__(self, steps: BlockSteps, bank: ProbeBank) -> None:
        self.steps, self.bank = steps, bank

    def unsupported_reason(self, system: System) -> str | None:
        """Why the halves of a system do not add to one state."""
        if isinstance(system, Recording) and system.anatomy.post_norm:
            return f"system is a post-norm model, but {self.name} needs halves that add to one residual stream"
        return None


class SplittingTerms(_Terms):
    """Instrument: ``explained_share_first_state`` of the change of probes that the drifts of both updates at the first
    state explain, and ``splitting_defect``, the relative distance of the change by their sum from that by the
    half-steps in sequence; NaN where the force of the MLP does not reproduce what it writes.
    """

    name = "splitting_terms"
    needs = Needs.ATTENTION | Needs.ATTENTION_WRITE | Needs.FORCE | Needs.MLP_WRITE

    def __init__(self, steps: BlockSteps, bank: ProbeBank) -> None:
        super().__init__(steps, bank)
        self._read: tuple[int, AttentionTensors] | None = None  # what attention read in the layer before its MLP

    def unsupported_reason(self, system: System) -> str | None:
        """Why a system has no sum of two updates."""
        if isinstance(system, Recording) and system.anatomy.has_cross:
            return f"system has cross-attention, but {self.name} needs blocks of two halves"
        if isinstance(system, Simulation) and not isinstance(system.field, Block):
            return f"field is {type(system.field).__name__}, but {self.name} needs a Block of attention and MLP"
        return super().unsupported_reason(system)

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Remembers the state that attention reads, and its write."""
        self._read = context.layer, tensors

    @full_precision
    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Evaluates the MLP at the first state."""
        layer, attention = self._read or (None, None)
        if context.layer not in self.steps.states or layer != context.layer or attention is None:
            return
        assert attention.write is not None
        assert tensors.write is not None
        x, whole, m = self.steps.at(context.layer, context.rows)
        counts, size = (m > 0).unsqueeze(-1), context.step or 1.0
        first = tensors.write
        if not torch.equal(tensors.state, attention.state):
            first = size * tensors.force.ambient(_point(tensors, attention.state))
        step = (attention.write + first).double() / attention.radius.unsqueeze(-1).double()
        step = step - step.mean(-1, keepdim=True) if context.centered else step
        off = size * tensors.force.ambient(tensors.point) - tensors.write
        lengths = [torch.linalg.vector_norm(torch.where(counts, each, 0.0)) for each in (off, tensors.write)]
        step = torch.where(counts, step, 0.0) if bool(lengths[0] <= REPRODUCES * lengths[1]) else step * torch.nan
        drift_missed, sum_missed = [], []
        for kind in self.bank.kinds:
            change, path = kind.along(x, whole).change(1.0), kind.along(x, step)
            drift_missed.append(missed(change, path.drift, m))
            sum_missed.append(missed(change, path.change(1.0), m))
        share = 1 - torch.cat(drift_missed, -1).nanmean(-1)
        self.keep(
            context,
            {"explained_share_first_state": share, "splitting_defect": torch.cat(sum_missed, -1).nanmean(-1).sqrt()},
        )


def _point(tensors: MlpTensors, state: Tensor) -> Tensor:
    """Where the folded force is evaluated for a state: normalized(y) / sqrt(d), or y itself where there is no norm."""
    if tensors.norm is None:
        return state
    normalized: Tensor = tensors.norm.without_affine()(state)
    return normalized if isinstance(tensors.norm, UnitNorm) else normalized / math.sqrt(state.shape[-1])


class SamplingTerms(_Terms):
    """Instrument: what Sigma_A:Hess_S phi does to predictions at some tokens of each replicate.

    ``explained_share_sigma`` has it in place of the second moment, ``explained_share_second_moment_and_sigma`` beside
    it, as a step with noise would have both, ``sigma_term_ratio`` is its mean square over that of the change, and
    ``order_sigma`` the order in s of the remainder with Sigma_A in place of the second moment.
    """

    name = "sampling_terms"
    needs = HEADS_NEED

    def __init__(self, steps: BlockSteps, bank: ProbeBank, *, sampled_tokens: int, seed: int) -> None:
        super().__init__(steps, bank)
        self.sampled_tokens, self.seed = sampled_tokens, seed

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the terms of the sampled tokens of a layer."""
        if context.layer not in self.steps.states:
            return
        x, step, m = self.steps.at(context.layer, context.rows)
        chosen, counts = sample_tokens(context, m, min(self.sampled_tokens, m.shape[1]), seed=self.seed)
        x, step = (taken(each, chosen) for each in (x, step))
        sigma = HeadCovariance.of(context, tensors, chosen, x)
        trace = sigma.trace()
        m = m.gather(1, chosen) * counts
        found: dict[str, list[Tensor]] = {name: [] for name in ("in_place", "beside", "alone", "left")}
        for kind in self.bank.kinds:
            path, noise = kind.along(x, step), kind.under(x, sigma.form, trace)
            change = path.change(1.0)
            found["in_place"].append(missed(change, path.drift + noise, m))
            found["beside"].append(missed(change, path.drift + path.second + noise, m))
            found["alone"].append(missed(change, change - noise, m))
            rest = [path.change(s) - s * path.drift - s**2 * noise for s in short_scales(path, m)]
            found["left"].append(torch.stack([missed(change, change - each, m) for each in rest], -1))
        means = {name: torch.cat(parts, 1).nanmean(1) for name, parts in found.items()}
        values = {
            "explained_share_sigma": 1 - means["in_place"],
            "explained_share_second_moment_and_sigma": 1 - means["beside"],
            "sigma_term_ratio": means["alone"],
            "order_sigma": convergence_order(means["left"].sqrt()),
        }
        self.keep(context, values)


class HeadCovariance:
    """The tangent Sigma_A at some tokens, as a quadratic form: no d x d matrix is formed."""

    def __init__(
        self,
        covariances: Float[Tensor, "rows tokens heads s s"],
        output: Float[Tensor, "heads d s"],
        x: Float[Tensor, "rows tokens d"],
        scale: Float[Tensor, "rows tokens"],
    ) -> None:
        self.covariances, self.output, self.x, self.scale = covariances, output, x, scale

    @classmethod
    def of(cls, context: ReplayContext, tensors: AttentionTensors, chosen: Tensor, x: Tensor) -> HeadCovariance:
        """Sigma_A over |y|^2 of chosen queries."""
        covariances, _ = head_covariances(tensors, chosen)
        output = centered_output(with_heads(tensors)[2].double(), centered=context.centered)
        return cls(covariances, output, x, tensors.radius.gather(1, chosen).double() ** -2 / 2)

    @full_precision
    def form(self, vectors: Float[Tensor, "*rows_tokens k d"]) -> Float[Tensor, "rows tokens k"]:
        """<w, Sigma w> of vectors (k, d), the same for all tokens, or (rows, tokens, k, d)."""
        along = (self.x.unsqueeze(-2) * vectors).sum(-1) if vectors.ndim > 2 else self.x @ vectors.mT
        total = torch.zeros_like(along)
        for head, output in enumerate(self.output):
            image = vectors @ output - along.unsqueeze(-1) * (self.x @ output).unsqueeze(-2)
            total = total + ((image @ self.covariances[:, :, head]) * image).sum(-1)
        return total * self.scale.unsqueeze(-1)

    @full_precision
    def trace(self) -> Float[Tensor, "rows tokens"]:
        """tr Sigma on the tangent space."""
        total = torch.zeros_like(self.scale)
        for head, output in enumerate(self.output):
            along, covariance = self.x @ output, self.covariances[:, :, head]
            whole = (covariance * (output.mT @ output)).sum((-1, -2))
            total = total + whole - ((along.unsqueeze(-2) @ covariance).squeeze(-2) * along).sum(-1)
        return total * self.scale
