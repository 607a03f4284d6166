"""How far an attention kernel is from doubly stochastic: its divergence from the Sinkhorn-balanced kernel.

The balanced kernel of the same logits, B_ij = e^{f_i} P_ij e^{g_j} with rows and columns of sum 1, is the doubly
stochastic kernel nearest to P in relative entropy; ``balance_kl`` is the mean over rows of

    KL(P_i || B_i) = sum_j P_ij log(P_ij / B_ij),    0 if and only if P is doubly stochastic.

The only causal kernel that is doubly stochastic is the identity [Helmholtz Transformer, no. 11]: a causal kernel has no
balanced form, and its divergence is NaN. Its reference is the causal-uniform kernel P_ij = 1/i (j <= i, counted from
1), whose column sums are sum_{i >= j} 1/i: 5.4 for the first of 128 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import softmax_kernel
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.observe.attention_drift import described
from helmscope.observe.kernel import check_kernel, normalized_rows, used_tokens, visible_tokens
from helmscope.observe.track import AT_LEAST_0, replayed, token_mean, token_weights, with_bounds
from helmscope.types import Instrument, Needs, check_integer, check_real

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

NAMES = {
    "balance_kl": "mean KL divergence of the attention rows from the Sinkhorn-balanced kernel (nats)",
    "column_sum_deviation_causal_uniform": "RMS deviation from 1 of the column sums of the causal-uniform kernel",
}


def causal_uniform_column_sums(n: int) -> Float[Tensor, " n"]:
    """Column sums sum_{i >= j} 1/i, j = 1..n, of the causal-uniform kernel; they sum to n.

    >>> causal_uniform_column_sums(3)
    tensor([1.8333, 0.8333, 0.3333], dtype=torch.float64)
    """
    check_integer("n", n, at_least=1)
    terms = 1 / torch.arange(1, n + 1, dtype=torch.float64, device="cpu")
    return terms.flip(0).cumsum(0).flip(0)


def balanced_kernel(
    kernel: Float[Tensor, "*batch n n"],
    *,
    visible: Bool[Tensor, "*batch n"] | None = None,
    tol: float = 1e-9,
    max_iterations: int = 100,
) -> Float[Tensor, "*batch n n"]:
    """The Sinkhorn-balanced kernel of the same logits among visible tokens, in float64, by sweeps and Newton steps in
    the log domain until the column sums are off by less than ``tol`` of their total.

    NaN where the pattern of zeros admits none (every causal kernel but a diagonal one) and where ``max_iterations``
    were not enough.

    >>> balanced_kernel(torch.tensor([[0.5, 0.5], [0.2, 0.8]])).round(decimals=4)
    tensor([[0.6667, 0.3333],
            [0.3333, 0.6667]], dtype=torch.float64)
    >>> balanced_kernel(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).isnan().all()
    tensor(True)
    """
    check_real("tol", tol, above=0)
    check_integer("max_iterations", max_iterations, at_least=1)
    logits = normalized_rows(check_kernel(kernel).double()).log()
    m = used_tokens(kernel, visible).to(logits)
    logits = logits.masked_fill((m == 0).unsqueeze(-1), 0.0)  # rows of padding, which balance nothing
    dual = SinkhornAttention(beta=0.0, tol=tol, max_iterations=max_iterations).solve(logits, m)
    balanced = softmax_kernel(logits + dual.potential.unsqueeze(-2), m)
    return torch.where(dual.converged[..., None, None], balanced, torch.nan)


def balance_kl(
    kernel: Float[Tensor, "*batch n n"],
    *,
    visible: Bool[Tensor, "*batch n"] | None = None,
    tol: float = 1e-9,
    max_iterations: int = 100,
) -> Float[Tensor, "*batch n"]:
    """KL divergence KL(P_i || B_i) of every row from the balanced kernel, in nats; NaN where there is none
    (``balanced_kernel``).

    >>> balance_kl(torch.full((3, 3), 1 / 3)).abs().max() < 1e-9
    tensor(True)
    """
    p = normalized_rows(check_kernel(kernel).double())
    balanced = balanced_kernel(kernel, visible=visible, tol=tol, max_iterations=max_iterations)
    return row_divergence(p, balanced)


def row_divergence(p: Float[Tensor, "*batch n n"], q: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """sum_j p_ij log(p_ij / q_ij) of every row; terms with p_ij = 0 are 0.

    >>> row_divergence(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
    tensor([0.6931])
    """
    ratio = torch.where(p > 0, p, 1.0).log() - torch.where((p > 0) | q.isnan(), q, 1.0).log()
    return (p * ratio).sum(-1)


def is_causal(
    kernel: Float[Tensor, "*batch n n"], visible: Bool[Tensor, "*batch n"] | None = None
) -> Bool[Tensor, "*batch"]:
    """Whether no visible token attends to a later one.

    >>> is_causal(torch.eye(2)), is_causal(torch.ones(2, 2))
    (tensor(True), tensor(False))
    """
    mask = visible_tokens(kernel, visible)
    later = kernel.triu(1) * mask.unsqueeze(-1)
    return (later.sum(-1) == 0).all(-1)


class Bistochasticity(Instrument):
    """Instrument: the divergence of attention from the Sinkhorn-balanced kernel, in every layer and head, averaged over
    the tokens of a prompt.

    ``balance_kl`` is NaN for causal kernels, for which no balanced kernel exists, and where ``max_iterations`` do not
    reach ``tol``; no other value is invented. ``column_sum_deviation_causal_uniform`` is the reference value of causal
    kernels: the RMS deviation from 1 of the column sums of the causal-uniform kernel of as many tokens.

    The cost is that of a few linear systems of n unknowns for every head, layer and prompt, for full attention only.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(3).expand(2, 3, 3), times=[0.0])
    >>> run.replay(Bistochasticity())["bistochasticity"].balance_kl.values.round(9).tolist()
    [[0.0, 0.0]]
    """

    name = "bistochasticity"
    needs = Needs.KERNEL

    def __init__(self, *, tol: float = 1e-9, max_iterations: int = 100) -> None:
        self.tol = check_real("tol", tol, above=0)
        self.max_iterations = check_integer("max_iterations", max_iterations, at_least=1)

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the divergences of a layer."""
        kernel = check_kernel(tensors.kernel)
        heads = kernel.shape[1] if kernel.ndim == 4 else None
        weights = token_weights(tensors.state, context.weights).double()
        shape = kernel.shape[:-1]
        visible = context.visible
        if heads is not None:
            weights = weights.unsqueeze(1).expand(shape)
            visible = None if visible is None else visible.unsqueeze(1).expand(shape)
        divergence = torch.full(shape, torch.nan, dtype=torch.float64, device=kernel.device)
        full = ~is_causal(kernel, visible)
        if bool(full.any()):
            seen = None if visible is None else visible[full]
            options = {"tol": self.tol, "max_iterations": self.max_iterations}
            divergence[full] = balance_kl(kernel[full], visible=seen, **options)  # type: ignore[arg-type]
        self.keep(
            context,
            {"balance_kl": token_mean(divergence, weights).clamp(min=0)},
            axes=() if heads is None else ("head",),
        )
        self.keep(context, {"column_sum_deviation_causal_uniform": _causal_uniform_deviation(kernel, context.visible)})

    def result(self) -> xr.Dataset:
        """The divergences of every head (if there are several), layer and replicate."""
        return described(with_bounds(super().result(), dict.fromkeys(NAMES, AT_LEAST_0)), NAMES)


def bistochasticity(system: System, *, tol: float = 1e-9, progress: ProgressOption = None) -> xr.Dataset:
    """The divergence of attention from the balanced kernel, with replicates: ``Bistochasticity`` by one replay.

    ``progress`` is called with the share of the work done.

    >>> from helmscope import record
    >>> bool(bistochasticity(record("A", ["Once upon a time"])).balance_kl.isnull().all())  # causal
    True
    """
    instrument = Bistochasticity(tol=tol)
    return replayed(system, instrument, progress)


def _causal_uniform_deviation(kernel: Tensor, visible: Tensor | None) -> Float[Tensor, " rows"]:
    """The RMS deviation of the column sums of the causal-uniform kernel of as many tokens as each text has."""
    rows, n = len(kernel), kernel.shape[-1]
    counts = [n] * rows if visible is None else visible.sum(-1).tolist()
    deviations = {count: float((causal_uniform_column_sums(count) - 1).square().mean().sqrt()) for count in set(counts)}
    return torch.tensor([deviations[count] for count in counts], dtype=torch.float64, device=kernel.device)
