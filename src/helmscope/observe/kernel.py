"""What an attention kernel says: how far a token looks, how much mass arrives where, how far from symmetric it is.

A kernel K has rows of weights K_ij >= 0, query i and key j: (*batch, n, n), with heads (*batch, heads, n, n). Rows of
SA sum to 1; those of USA do not, nor those of a model whose sink takes mass away. So shares are read off the normalized
rows P_ij = K_ij / sum_k K_ik, and the row mass is reported apart. A query that sees no key has no shares: NaN.
``visible`` is False at tokens that attention does not see, padding: they are neither queries nor keys. Which queries a
mean counts is another matter, and that of the weights of a trajectory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.observe.track import (
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE,
    check_system,
    token_mean,
    token_weights,
    with_bounds,
)
from helmscope.types import HelmscopeError, Instrument, Needs

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types import AttentionPass, Moment, System


def check_kernel(kernel: object) -> Float[Tensor, "*batch n n"]:
    """A kernel as it may enter: a float tensor (..., n, n), n >= 1, of finite weights >= 0; else a ``HelmscopeError``.

    >>> check_kernel(torch.eye(2)).shape
    torch.Size([2, 2])
    """
    if not isinstance(kernel, torch.Tensor):
        raise HelmscopeError(f"kernel is a {type(kernel).__name__}, but it must be a torch tensor of shape (..., n, n)")
    shape = tuple(kernel.shape)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 1:
        raise HelmscopeError(f"kernel has shape {shape}, but it must be (..., n, n) with n >= 1 tokens")
    if kernel.dtype not in (torch.float64, torch.float32):
        raise HelmscopeError(f"kernel has dtype {kernel.dtype}, but it must be torch.float64 or torch.float32")
    good = torch.isfinite(kernel) & (kernel >= 0)
    if not bool(good.all()):
        raise HelmscopeError(
            f"kernel holds the weight {kernel[~good][0].item():g}, but every weight must be finite and >= 0"
        )
    return kernel


def row_mass(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """sum_j K_ij: 1 for a softmax, 1 minus what a sink outside the tokens takes, Z_i / M for USA.

    >>> row_mass(torch.tensor([[0.5, 0.25], [0.0, 1.0]]))
    tensor([0.7500, 1.0000])
    """
    return check_kernel(kernel).sum(-1)


def normalized_rows(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """P_ij = K_ij / sum_k K_ik; a row of mass 0 stays 0.

    >>> normalized_rows(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.7500],
            [0.0000, 0.0000]])
    """
    mass = row_mass(kernel).unsqueeze(-1)
    return kernel / torch.where(mass > 0, mass, 1.0)


# a model of float64 may take its softmax in float32, so that its rows sum to 1 within 3e-7 only
LAW = 1e-4


def laws(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Rows as laws to draw a key from: normalized where they sum to 1 up to single precision, 0 where they are 0 (a
    query that sees no key); any other row is refused.

    >>> laws(torch.tensor([[0.50001, 0.5], [0.0, 0.0]])).sum(-1)
    tensor([1., 0.])
    """
    mass = row_mass(kernel).detach()
    lawless = ((mass - 1).abs() > LAW) & (mass != 0)
    if bool(lawless.any()):
        raise HelmscopeError(
            f"kernel has a row of mass {mass[lawless][0].item():.6g}, but a key is drawn from rows of mass 1 (or 0): "
            "call normalized_rows(kernel) first"
        )
    return normalized_rows(kernel)


def row_entropy(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """-sum_j P_ij log P_ij in nats: 0 for one key, log n for equal weights.

    >>> row_entropy(torch.ones(2, 2))  # log 2
    tensor([0.6931, 0.6931])
    """
    p = normalized_rows(kernel)
    # p log p is 0 at p = 0, where its slope is infinite: the gradient there is set to 0
    return _of_sighted(kernel, -(p * torch.log(torch.where(p > 0, p, 1.0))).sum(-1))


def effective_keys(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """n_eff = 1 / sum_j P_ij^2 (source 000-2), between 1 and n: so many independent terms has a weighted mean, whose
    covariance is Cov / n_eff.

    >>> effective_keys(torch.ones(2, 2))
    tensor([2., 2.])
    """
    p = normalized_rows(kernel)
    power = (p * p).sum(-1)
    return _of_sighted(kernel, 1 / torch.where(power > 0, power, 1.0))


def largest_weight(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """max_j P_ij. A central limit theorem for the sum over keys needs it to vanish (source 000-2): sinks forbid that.

    >>> largest_weight(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 0.5000])
    """
    return _of_sighted(kernel, normalized_rows(kernel).amax(-1))


def first_token_mass(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """P_i1, what each query gives to the first visible token, the usual sink. Under a causal mask the first token gives
    itself 1, whatever the model does.

    >>> first_token_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.2500, 0.5000])
    """
    p = normalized_rows(kernel)
    first = visible_tokens(p, visible).to(torch.int8).argmax(-1)
    column = first[..., None, None].expand(*p.shape[:-1], 1)
    return _of_sighted(kernel, p.gather(-1, column).squeeze(-1))


def future_mass(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """sum_{j > i} P_ij, what query i gives to later tokens: 0 for a causal kernel.

    >>> future_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 0.0000])
    """
    return _of_sighted(kernel, normalized_rows(kernel).triu(1).sum(-1))


def received_mass(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """sum_i P_ij over the visible queries i: the column sums. Where every query sees a visible key their mean is 1, so
    only their spread says something: see ``bistochastic_defect``.

    >>> received_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 1.2500])
    """
    p = normalized_rows(kernel)
    return (p * visible_tokens(p, visible).unsqueeze(-1)).sum(-2)


def bistochastic_defect(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """max_j |sum_i P_ij - 1| over visible tokens: 0 where the normalized kernel is doubly stochastic, n - 1 where all
    look at one token. A causal kernel reaches 0 only as the identity (source 000-11). Tokens count alike: a kernel of
    tokens with weights, bistochastic for their measure, is not so here.

    >>> bistochastic_defect(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor(0.2500)
    """
    off = (received_mass(kernel, visible=visible) - 1).abs()
    return (off * visible_tokens(kernel, visible)).amax(-1)


def symmetry_defect(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """|K - K^T|_F / (2 |K|_F), the share of the antisymmetric part among visible tokens: 0 for a symmetric kernel, at
    most 1 / sqrt 2 for weights >= 0; NaN for a kernel of zeros.

    Of the kernel as it is, not of its normalized rows: USA with B = B^T is symmetric, SA is not.

    >>> symmetry_defect(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    tensor(0.7071)
    """
    seen = visible_tokens(check_kernel(kernel), visible).to(kernel.dtype)
    block = seen.unsqueeze(-1) * kernel * seen.unsqueeze(-2)
    skew, whole = (torch.linalg.vector_norm(part, dim=(-1, -2)) for part in (block - block.mT, block))
    share: Tensor = skew / (2 * whole)
    return share


def visible_tokens(
    kernel: Float[Tensor, "*batch n n"], visible: Bool[Tensor, "*batch n"] | None
) -> Bool[Tensor, "*batch n"]:
    """Which tokens attention sees, checked; all where None.

    >>> visible_tokens(torch.eye(2), None)
    tensor([True, True])
    """
    if visible is None:
        return torch.ones(kernel.shape[:-1], dtype=torch.bool, device=kernel.device)
    if not isinstance(visible, torch.Tensor):
        raise HelmscopeError(f"visible is a {type(visible).__name__}, but it must be a tensor of torch.bool")
    if visible.dtype != torch.bool or visible.shape != kernel.shape[-1 - visible.ndim : -1]:
        raise HelmscopeError(
            f"visible has dtype {visible.dtype} and shape {tuple(visible.shape)}, but a kernel of shape "
            f"{tuple(kernel.shape)} needs torch.bool and {tuple(kernel.shape[:-1])}"
        )
    if not bool(visible.any(-1).all()):
        raise HelmscopeError("visible leaves a system without any token, but every system needs one")
    return visible.expand(kernel.shape[:-1])


BOUNDS = {
    **dict.fromkeys(("row_mass", "entropy", "bistochastic_defect"), AT_LEAST_0),
    **dict.fromkeys(("largest_weight", "first_token_mass", "future_mass", "symmetry_defect"), SHARE),
    "effective_keys": AT_LEAST_1,
}


class KernelStatistics(Instrument):
    """The quantities above in every layer (at every time of a simulation), and for every head where there are several:
    ``row_mass``, ``entropy``, ``effective_keys``, ``largest_weight``, ``first_token_mass``, ``future_mass``,
    ``bistochastic_defect`` and ``symmetry_defect``.

    Quantities of a query are averaged over the queries that see a key, by the weights of the trajectory: special tokens
    of a model are left out there, but they are keys, and so the first of them may be the sink. Columns and symmetry are
    those of all visible tokens.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(3).expand(2, 3, 3), times=[0.0, 1.0])
    >>> seen = run.replay(KernelStatistics())["kernel_statistics"]
    >>> seen.effective_keys.dims, seen.effective_keys.values.round(6).tolist()
    (('time', 'system'), [[3.0, 3.0], [3.0, 3.0]])
    """

    name = "kernel_statistics"
    needs = Needs.KERNEL

    def attention(self, moment: Moment, passed: AttentionPass) -> None:
        """Take in the kernel of a layer."""
        kernel, (rows, n) = check_kernel(passed.kernel), passed.state.shape[:2]
        if kernel.ndim not in (3, 4) or (kernel.shape[0], kernel.shape[-1]) != (rows, n):
            raise HelmscopeError(
                f"kernel of layer {moment.layer} has shape {tuple(kernel.shape)}, but {rows} systems of {n} tokens "
                f"need ({rows}, {n}, {n}) or ({rows}, heads, {n}, {n})"
            )
        weights = token_weights(passed.state, moment.weights)
        self.keep(moment, _statistics(kernel, weights.to(kernel), moment.visible))

    def result(self) -> xr.Dataset:
        """The statistics of every head (or of the one there is), layer and replicate."""
        return with_bounds(super().result(), BOUNDS)


def kernel_statistics(system: System) -> xr.Dataset:
    """``KernelStatistics`` of a system, with its replicates, by one replay. A system without attention is refused.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> seen = kernel_statistics(integrate(SA(beta=0.0), torch.eye(3), times=[0.0, 1.0]))
    >>> seen.effective_keys.values.round(6).tolist()
    [[3.0], [3.0]]
    """
    instrument = KernelStatistics()
    return check_system(system).replay(instrument)[instrument.name]


def _statistics(kernel: Tensor, weights: Tensor, visible: Tensor | None) -> dict[str, Tensor]:
    """One value per system, and per head where there are heads."""
    if kernel.ndim == 4:
        weights = weights.unsqueeze(1).expand(kernel.shape[:-1])
        visible = None if visible is None else visible.unsqueeze(1).expand(kernel.shape[:-1])
    of_query = {
        "row_mass": row_mass(kernel),
        "entropy": row_entropy(kernel),
        "effective_keys": effective_keys(kernel),
        "largest_weight": largest_weight(kernel),
        "first_token_mass": first_token_mass(kernel, visible=visible),
        "future_mass": future_mass(kernel),
    }
    sighted = weights * (kernel.sum(-1) > 0)
    means = {name: token_mean(value, weights if name == "row_mass" else sighted) for name, value in of_query.items()}
    return {
        **means,
        "bistochastic_defect": bistochastic_defect(kernel, visible=visible),
        "symmetry_defect": symmetry_defect(kernel, visible=visible),
    }


def _of_sighted(kernel: Tensor, value: Tensor) -> Tensor:
    return torch.where(kernel.sum(-1) > 0, value, torch.nan)
