"""The diffusion matrix of attention in modes A and B, on the tangent space of every token, with W_O folded in.

    A, token sampling     Sigma_A = (1/2) W_O Cov_P(v) W_O^T              one key J ~ P_i is drawn per head
    B, random values      Sigma_B = (1/2) W_O [sum_j P_ij^2 (v_j - m_i)(v_j - m_i)^T] W_O^T

[Helmholtz Transformer, no. 2]; mode C, over contexts, is ``observe/context_noise.py``. Real attention draws nothing:
these are the covariances of two chance models, under their own names. Heads that draw independently add: Sigma = sum_h
Sigma_h. With T the projector to the tangent space and d_t its dimension (d - 1, or d - 2 where LayerNorm removes the
mean), all divided by |y|^2,

    nu = tr(T Sigma T) / d_t,    anisotropy = tr(S^2) / (tr S)^2 with S = T Sigma T, in [1 / d_t, 1].

Traces come from Gram matrices for all tokens (``AttentionDiffusion``); what needs the matrix itself - anisotropy, rank
and eigenvalues - is computed for a few tokens of each prompt, drawn by a seed (``AttentionDiffusionSpectrum``). The
rank of one head is at most min(number of keys - 1, d_head); for tokens with few keys that bound, and not the model,
decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.attention_drift import described
from helmscope.observe.head_moments import (
    HEADS_NEED,
    ROUNDING,
    HeadMoments,
    TangentSpaces,
    centered_output,
    with_heads,
)
from helmscope.observe.kernel import ROW_SUM_TOLERANCE
from helmscope.observe.token_choice import sample_tokens, taken
from helmscope.observe.track import AT_LEAST_0, SHARE, replayed, token_mean, token_weights, with_bounds
from helmscope.types import HelmscopeError, Instrument, check_integer, check_real

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

TRACE_NAMES = {
    "nu_token_sampling": "diffusivity nu of Sigma_A of a head (squared radians per layer)",
    "nu_random_values": "diffusivity nu of Sigma_B of a head (squared radians per layer)",
    "total_nu_token_sampling": "diffusivity nu of Sigma_A, summed over heads (squared radians per layer)",
    "total_nu_random_values": "diffusivity nu of Sigma_B, summed over heads (squared radians per layer)",
    "total_nu_as_printed": "tr Sigma_A / d as printed, summed over heads (squared radians per layer)",
}
SPECTRUM_NAMES = {
    "anisotropy": "anisotropy tr S^2 / (tr S)^2 of a head's Sigma_A",
    "sigma_rank": "numerical rank of a head's tangent Sigma_A",
    "sigma_rank_bound": "bound min(keys - 1, d_head) of the rank of a head's Sigma_A",
    "key_count": "number of keys of a sampled token",
    "total_anisotropy": "anisotropy tr S^2 / (tr S)^2 of Sigma_A summed over heads",
    "total_sigma_rank": "numerical rank of the tangent Sigma_A summed over heads",
    "smallest_eigenvalue": "smallest tangent eigenvalue of the summed Sigma_A over its mean tangent eigenvalue",
    "smallest_eigenvalue_of_range": "smallest over mean eigenvalue of the summed Sigma_A on its range",
    "effective_dimension_share": "effective share 1 / (anisotropy d_t) of the tangent directions",
    "effective_dimension_share_of_range": "effective share 1 / (anisotropy rank) of the range of the summed Sigma_A",
    "eigenvalue_share": "share of tr S in the k-th largest eigenvalue of the summed Sigma_A",
    "token_count": "number of tokens sampled per prompt",
}


class AttentionDiffusion(Instrument):
    """Instrument: the diffusivity nu of attention in modes A and B, averaged over the tokens of each prompt.

    ``nu_token_sampling`` and ``nu_random_values`` are per head; ``total_nu_token_sampling``, ``total_nu_random_values``
    and ``total_nu_as_printed`` (tr Sigma / d, with the radial direction) are summed over heads. NaN where rows of a
    kernel sum to more than 1; a sink outside the tokens is a key of value 0. In a flow, Sigma is per unit of time.

    The cost is that of the attention weights once more, shared with ``AttentionDrift``.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2, dtype=torch.float64).expand(1, 2, 2), times=[0.0])
    >>> measured = run.replay(AttentionDiffusion())["attention_diffusion"]
    >>> names = ("nu_token_sampling", "nu_random_values", "total_nu_as_printed")
    >>> tuple(round(measured[name].item(), 6) for name in names)
    (0.125, 0.0625, 0.125)
    """

    name = "attention_diffusion"
    needs = HEADS_NEED

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the diffusivities of a layer."""
        moments = HeadMoments.of(context, tensors)
        dim, width = moments.spaces.dim, tensors.state.shape[-1]
        weights = token_weights(tensors.state, context.weights)
        heads = {"nu_token_sampling": moments.sampling / (2 * dim), "nu_random_values": moments.random / (2 * dim)}
        totals = {f"total_{name}": value.sum(1) for name, value in heads.items()}
        totals["total_nu_as_printed"] = moments.sampling_ambient.sum(1) / (2 * width)
        per_head = weights.unsqueeze(1).expand(moments.drift.shape)
        means = {name: moments.dropped_heads(token_mean(value, per_head)) for name, value in heads.items()}
        self.keep(context, means, axes=("head",) if moments.has_heads else ())
        self.keep(context, {name: token_mean(value, weights) for name, value in totals.items()})

    def result(self) -> xr.Dataset:
        """The diffusivities of every head (if there are several), layer and replicate."""
        return described(with_bounds(super().result(), dict.fromkeys(TRACE_NAMES, AT_LEAST_0)), TRACE_NAMES)


def attention_diffusion(system: System, *, progress: ProgressOption = None) -> xr.Dataset:
    """The diffusivity of attention in modes A and B, with replicates: ``AttentionDiffusion`` by one replay.

    ``progress`` is called with the share of the work done.

    >>> from helmscope import record
    >>> measured = attention_diffusion(record("A", ["Once upon a time there was a cat"]))
    >>> measured.nu_token_sampling.dims
    ('layer', 'prompt', 'head')
    >>> bool((measured.total_nu_token_sampling > measured.total_nu_random_values)[1:].all())
    True
    """
    instrument = AttentionDiffusion()
    return replayed(system, instrument, progress)


class AttentionDiffusionSpectrum(Instrument):
    """Instrument: anisotropy, rank and eigenvalues of the tangent Sigma_A, averaged over a few tokens of each prompt.

    ``sampled_tokens`` of each prompt are drawn by ``seed`` among those that count, without the first ``first_position``
    of them, which see few keys under a causal mask; all of them where there are fewer. The same tokens are used in
    every layer, and they do not depend on the chunk size. Per head: ``anisotropy``, ``sigma_rank`` (eigenvalues above
    ``tol`` times the largest), its bound ``sigma_rank_bound`` and the number of keys, ``key_count``. Summed over heads:
    ``total_anisotropy``, ``total_sigma_rank``, ``smallest_eigenvalue`` over the mean one, ``effective_dimension_share``
    = 1 / (total_anisotropy d_t), and ``eigenvalue_share`` of the ``top`` largest eigenvalues. With fewer keys than
    dimensions the smallest eigenvalue is 0 whatever the model does, as ``sigma_rank_bound`` says:
    ``smallest_eigenvalue_of_range`` and ``effective_dimension_share_of_range`` are those of the range of Sigma, with
    the rank in place of d_t. NaN where Sigma is 0: where a row has entropy 0, and where all values are the same up to
    rounding.

    The cost is one eigendecomposition of a d x d matrix for every layer, prompt and token.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(3, dtype=torch.float64).expand(1, 3, 3), times=[0.0])
    >>> measured = run.replay(AttentionDiffusionSpectrum())["attention_diffusion_spectrum"]
    >>> measured.total_sigma_rank.item(), round(measured.total_anisotropy.item(), 4)  # eigenvalues 1/2 and 1/6 of Cov
    (2.0, 0.625)
    """

    name = "attention_diffusion_spectrum"
    needs = HEADS_NEED

    def __init__(
        self, *, sampled_tokens: int = 2, seed: int = 0, first_position: int = 0, top: int = 4, tol: float = 1e-6
    ) -> None:
        self.sampled_tokens = check_integer("sampled_tokens", sampled_tokens, at_least=1)
        self.seed = check_integer("seed", seed, at_least=0)
        self.first_position = check_integer("first_position", first_position, at_least=0)
        self.top = check_integer("top", top, at_least=1)
        self.tol = check_real("tol", tol, above=0)

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the spectra of the sampled tokens of a layer."""
        spaces = TangentSpaces.of(context, tensors)
        weights = token_weights(tensors.state, context.weights)
        chosen, counts = sample_tokens(
            context, weights, self.sampled_tokens, seed=self.seed, first_position=self.first_position
        )
        per_head, keys = head_covariances(tensors, chosen)
        output = centered_output(with_heads(tensors)[2].double(), centered=context.centered)
        x = taken(spaces.x, chosen).double()
        scale = taken(spaces.radius.unsqueeze(-1), chosen).squeeze(-1).double() ** -2
        heads = _head_spectra(per_head, output, x, keys, self.tol)
        sigma = tangent_covariance(per_head, output, x) * scale[..., None, None]
        totals = _total_spectra(sigma, spaces.dim, self.tol)
        shares = totals.pop("eigenvalue_share")[..., : self.top]
        m = counts.double()
        has_heads = tensors.kernel is not None and tensors.kernel.ndim == 4
        means = {name: _mean_defined(value.movedim(1, -1), m.unsqueeze(1)) for name, value in heads.items()}
        means = means if has_heads else {name: value.squeeze(1) for name, value in means.items()}
        self.keep(context, means, axes=("head",) if has_heads else ())
        self.keep(
            context, {name: _mean_defined(value, m) for name, value in totals.items()} | {"token_count": m.sum(-1)}
        )
        self.keep(context, {"eigenvalue_share": _mean_defined(shares.mT, m.unsqueeze(1))}, axes=("eigenvalue",))

    def result(self) -> xr.Dataset:
        """The spectra of every head (if there are several), layer and replicate."""
        shares = ("anisotropy", "total_anisotropy", "eigenvalue_share")
        bounds = dict.fromkeys(SPECTRUM_NAMES, AT_LEAST_0) | dict.fromkeys(shares, SHARE)
        return described(with_bounds(super().result(), bounds), SPECTRUM_NAMES)


def attention_diffusion_spectrum(
    system: System, *, sampled_tokens: int = 2, seed: int = 0, first_position: int = 0, progress: ProgressOption = None
) -> xr.Dataset:
    """Anisotropy, rank and eigenvalues of Sigma_A, with replicates: ``AttentionDiffusionSpectrum`` by one replay.

    ``progress`` is called with the share of the work done.

    >>> from helmscope import record
    >>> measured = attention_diffusion_spectrum(record("A", ["Once upon a time there was a cat"]), sampled_tokens=1)
    >>> bool((measured.sigma_rank <= measured.sigma_rank_bound).all())
    True
    """
    instrument = AttentionDiffusionSpectrum(sampled_tokens=sampled_tokens, seed=seed, first_position=first_position)
    return replayed(system, instrument, progress)


@full_precision
def head_covariances(
    tensors: AttentionTensors, chosen: Tensor
) -> tuple[Float[Tensor, "rows tokens heads s s"], Float[Tensor, "rows tokens heads"]]:
    """Cov_P of the values of each head for chosen queries, in float64, and the number of their keys of positive weight.
    A covariance of the size of the rounding of the values is 0.

    >>> from helmscope.types import AttentionTensors
    >>> x, half = torch.eye(2).expand(1, 2, 2), torch.full((1, 2, 2), 0.5)
    >>> head_covariances(AttentionTensors(x, x, half, x, x, x, x, torch.eye(2)), torch.tensor([[0]]))[0][0, 0, 0]
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]], dtype=torch.float64)
    """
    kernel, value, _ = with_heads(tensors)
    index = chosen[:, None, :, None].expand(-1, kernel.shape[1], -1, kernel.shape[-1])
    rows, value = kernel.gather(2, index).double(), value.double()
    rest = 1 - rows.sum(-1)
    rest = torch.where(rest.abs() <= ROW_SUM_TOLERANCE, 0.0, rest)
    rows = torch.where((rest < 0).unsqueeze(-1), torch.nan, rows)
    # in float64 again: rows that sum to 1 only up to single precision would add a rank
    rows = torch.where((rest == 0).unsqueeze(-1), rows / rows.sum(-1, keepdim=True), rows)
    mean = rows @ value
    deviation = value.unsqueeze(2) - mean.unsqueeze(3)
    covariance = (rows.unsqueeze(-1) * deviation).mT @ deviation
    covariance = covariance + rest[..., None, None] * mean.unsqueeze(-1) * mean.unsqueeze(-2)
    second = (rows @ value.square().sum(-1, keepdim=True)).squeeze(-1)
    rounding = (ROUNDING * torch.finfo(kernel.dtype).eps) ** 2 * second
    vanishes = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) <= rounding
    covariance = torch.where(vanishes[..., None, None], 0.0, covariance)
    return covariance.transpose(1, 2), (rows > 0).sum(-1).transpose(1, 2).double() + (rest > 0).transpose(1, 2)


@full_precision
def tangent_covariance(
    covariances: Float[Tensor, "rows tokens heads s s"],
    output: Float[Tensor, "heads d s"],
    x: Float[Tensor, "rows tokens d"],
) -> Float[Tensor, "rows tokens d d"]:
    """T Sigma_A T summed over heads, (1/2) sum_h T W_O^h Cov_h W_O^hT T.

    >>> cov = torch.eye(2).expand(1, 1, 1, 2, 2)
    >>> tangent_covariance(cov, torch.eye(2)[None], torch.tensor([[[1.0, 0.0]]]))[0, 0]
    tensor([[0.0000, 0.0000],
            [0.0000, 0.5000]])
    """
    d, heads = x.shape[-1], len(output)
    sigma = x.new_zeros(*x.shape, d)
    for head in range(heads):
        sigma = sigma + output[head] @ covariances[:, :, head] @ output[head].mT
    along = (sigma @ x.unsqueeze(-1)).squeeze(-1)
    radial = (along * x).sum(-1)[..., None, None]
    outer = x.unsqueeze(-1) * along.unsqueeze(-2)
    return (sigma - outer - outer.mT + radial * x.unsqueeze(-1) * x.unsqueeze(-2)) / 2


def spectrum_statistics(
    eigenvalues: Float[Tensor, "*batch k"], dim: int, tol: float
) -> dict[str, Float[Tensor, "*batch"]]:
    """Anisotropy, rank, smallest eigenvalue over the mean one and effective share of directions, of the ``dim`` largest
    eigenvalues in ascending order, the last two also ``of_range``: of those above ``tol`` times the largest. Where all
    are 0, the rank is 0 and the others are NaN.

    >>> statistics = spectrum_statistics(torch.tensor([0.0, 1.0, 1.0]), 2, 1e-6)
    >>> {name: value.item() for name, value in statistics.items()}
    {'anisotropy': 0.5, 'sigma_rank': 2.0, 'smallest_eigenvalue': 1.0, ..., 'effective_dimension_share_of_range': 1.0}
    """
    if eigenvalues.shape[-1] < dim:
        raise HelmscopeError(f"eigenvalues are {eigenvalues.shape[-1]}, but there must be at least dim, {dim}")
    values = eigenvalues[..., eigenvalues.shape[-1] - dim :].clamp(min=0)
    trace, squares = values.sum(-1), (values**2).sum(-1)
    some = trace > 0
    anisotropy = squares / torch.where(some, trace, torch.nan) ** 2
    in_range = values > tol * values[..., -1:]
    rank = torch.where(trace.isnan(), torch.nan, in_range.sum(-1).to(values))
    total = torch.where(some, trace, torch.nan)
    kept = torch.where(in_range, values, 0.0).sum(-1)
    least = torch.where(in_range, values, torch.inf).amin(-1)
    return {
        "anisotropy": anisotropy,
        "sigma_rank": rank,
        "smallest_eigenvalue": values[..., 0] * dim / total,
        "smallest_eigenvalue_of_range": torch.where(some, least * rank / kept, torch.nan),
        "effective_dimension_share": 1 / (anisotropy * dim),
        "effective_dimension_share_of_range": 1 / (anisotropy * rank),
    }


@full_precision
def _head_spectra(
    covariances: Tensor, output: Tensor, x: Tensor, keys: Tensor, tol: float
) -> dict[str, Float[Tensor, "rows tokens heads"]]:
    """Spectra of T W_O Cov W_O^T T from those of A^T W_O^T T W_O A with Cov = A A^T, in the space of a head."""
    s = output.shape[-1]
    gram = torch.einsum("hds,hdt->hst", output, output)
    g = torch.einsum("btd,hds->bths", x, output)
    inner = gram - g.unsqueeze(-1) * g.unsqueeze(-2)
    size, basis = torch.linalg.eigh(_finite(covariances))
    root = basis * size.clamp(min=0).sqrt().unsqueeze(-2)
    values = torch.linalg.eigvalsh(root.mT @ inner @ root)
    values = torch.where(torch.isfinite(covariances).all(-1).all(-1).unsqueeze(-1), values, torch.nan)
    found = spectrum_statistics(values, s, tol)
    bound = (keys - 1).clamp(max=float(s))
    return {
        "anisotropy": found["anisotropy"],
        "sigma_rank": found["sigma_rank"],
        "sigma_rank_bound": bound,
        "key_count": keys,
    }


def _total_spectra(sigma: Tensor, dim: int, tol: float) -> dict[str, Tensor]:
    values = torch.linalg.eigvalsh(_finite(sigma))
    values = torch.where(torch.isfinite(sigma).all(-1).all(-1).unsqueeze(-1), values, torch.nan)
    found = spectrum_statistics(values, dim, tol)
    top = values.flip(-1)[..., :dim].clamp(min=0)
    total = top.sum(-1, keepdim=True)
    return {
        "total_anisotropy": found["anisotropy"],
        "total_sigma_rank": found["sigma_rank"],
        "smallest_eigenvalue": found["smallest_eigenvalue"],
        "smallest_eigenvalue_of_range": found["smallest_eigenvalue_of_range"],
        "effective_dimension_share": found["effective_dimension_share"],
        "effective_dimension_share_of_range": found["effective_dimension_share_of_range"],
        "eigenvalue_share": top / torch.where(total > 0, total, torch.nan),
    }


def _finite(matrices: Tensor) -> Tensor:
    """Matrices with 0 for entries that are not finite, on which eigenvalue solvers fail."""
    return torch.where(torch.isfinite(matrices), matrices, 0.0)


def _mean_defined(values: Tensor, m: Tensor) -> Tensor:
    """The mean over the last axis, the sampled tokens, of the values that are defined."""
    return token_mean(values, m.expand(values.shape) * torch.isfinite(values))
