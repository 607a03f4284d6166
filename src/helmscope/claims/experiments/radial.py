"""radial: the radial eigenvalue of a norm layer's Jacobian."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.func import jacrev, vmap

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.norms import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

RATIOS = tuple(10.0**k for k in range(-4, 9, 2))  # s^2 / eps


class Eigenvalues(NamedTuple):
    """Values at inputs (ratio, repeat), relative to the tangential eigenvalue (s^2 + eps)^(-1/2): the radial eigenvalue
    <x, J x> and its theoretical value, the length of the part of J x orthogonal to x, the error of J at a tangent, and
    the length of J 1 / sqrt(d).
    """

    radial: Tensor
    theory: Tensor
    orthogonal: Tensor
    tangent: Tensor
    mean: Tensor


@experiment("radial", seconds=1)
def radial(case: TrialCase) -> Finding:
    """J x = eps / (s^2 + eps)^(3/2) x with x = y / |y|, s^2 = |y|^2 / d, for RMSNorm; for LayerNorm with y minus its
    mean, whose direction J maps to 0. Tangents t keep their direction, J t = (s^2 + eps)^(-1/2) t.

    J is the derivative of the norm itself, by autograd, with a random gain and bias folded out: row i over gain_i.
    Random y scaled to each s^2 / eps, over twelve decades, for several eps and d.
    """
    epsilons, dims = case.constant("epsilons"), case.constant("dims")
    repeats, cells = case.count(64, quick=16), list(product(epsilons, dims))
    rms = _concatenate([_rms_norm(case, k, repeats, eps, d) for k, (eps, d) in enumerate(cells)])
    layer = _concatenate([_layer_norm(case, 100 + k, repeats, eps, d) for k, (eps, d) in enumerate(cells)])
    eps_zero = _concatenate([norm(case, 200 + d, 24, 0.0, d) for norm, d in product((_rms_norm, _layer_norm), dims)])
    both = _concatenate([rms, layer])
    typical = float(both.radial[RATIOS.index(1e4)].median())
    return Finding(
        evidence={
            "radial eigenvalue": IdentityErrors((both.radial - both.theory).abs()),
            "relative error": IdentityErrors((both.radial / both.theory - 1).abs(), "relative error"),
            "orthogonal part": IdentityErrors(both.orthogonal, "orthogonal part"),
            "tangents": IdentityErrors(both.tangent),
            "mean direction of LayerNorm": IdentityErrors(layer.mean, "image of the mean direction"),
        },
        controls={
            "the value 0": IdentityErrors(both.radial.abs()),
            "mean direction of RMSNorm": IdentityErrors(rms.mean, "image of the mean direction"),
            "eps = 0": IdentityErrors(eps_zero.radial.abs(), "eigenvalue"),
        },
        printed=IdentityErrors(eps_zero.radial.abs(), "eigenvalue"),
        data=curve(
            "radial",
            torch.stack([rms.radial.mT, layer.radial.mT], -1),
            {"s2_over_eps": RATIOS, "norm": ("RMSNorm", "LayerNorm")},
            label="radial over tangential eigenvalue",
            log=True,
        ),
        remark=f"At s^2 = 10^4 eps the radial eigenvalue is {typical:.3g} of the tangential one.",
        setting=(
            f"simulation: norms of random vectors, d = {', '.join(map(str, dims))}, eps = {epsilons[0]:g} to "
            f"{epsilons[-1]:g}, s^2/eps = {RATIOS[0]:g} to {RATIOS[-1]:g}, gain and bias folded out"
        ),
    )


def _rms_norm(case: TrialCase, index: int, repeats: int, eps: float, d: int) -> Eigenvalues:
    gain, y, t = _sample(case, index, repeats, d)
    norm = RMSNorm(gain=gain, eps=eps)
    y = y * _sizes(eps) / y.square().mean(-1, keepdim=True).sqrt()
    return _measure(vmap(vmap(jacrev(norm)))(y) / gain[:, None], y, t, eps)


def _layer_norm(case: TrialCase, index: int, repeats: int, eps: float, d: int) -> Eigenvalues:
    gain, y, t = _sample(case, index, repeats, d)
    norm = LayerNorm(gain=gain, bias=case.normal(d, index=1_000 + index), eps=eps)
    y = y * _sizes(eps) / y.std(-1, keepdim=True, correction=0)
    jacobian = vmap(vmap(jacrev(norm)))(y) / gain[:, None]
    return _measure(jacobian, y - y.mean(-1, keepdim=True), t - t.mean(-1, keepdim=True), eps)


def _sample(case: TrialCase, index: int, repeats: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """A positive gain (d,), and vectors y and t (ratio, repeat, d)."""
    rows = case.normal(1 + 2 * len(RATIOS) * repeats, d, index=index)
    y, t = rows[1:].reshape(2, len(RATIOS), repeats, d)
    return (rows[0] / 2).exp(), y, t


def _sizes(eps: float) -> Tensor:
    """s for every ratio; at eps = 0 the ratios are taken as s^2."""
    return (torch.tensor(RATIOS, dtype=torch.float64) * (eps or 1.0)).sqrt()[:, None, None]


def _measure(jacobian: Tensor, y: Tensor, t: Tensor, eps: float) -> Eigenvalues:
    """The eigenvalues at ``y``, with a tangent from ``t``; both without their mean if the norm removes it."""
    ones, x = torch.ones_like(y) / y.shape[-1] ** 0.5, y / y.norm(dim=-1, keepdim=True)
    t = t - (t * x).sum(-1, keepdim=True) * x
    t = t / t.norm(dim=-1, keepdim=True)
    s2 = y.square().mean(-1)
    relative = jacobian * (s2 + eps).sqrt()[..., None, None]
    image, tangent_image, mean = ((relative @ v[..., None])[..., 0] for v in (x, t, ones))
    along = (x * image).sum(-1)
    return Eigenvalues(
        radial=along,
        theory=eps / (s2 + eps),
        orthogonal=(image - along[..., None] * x).norm(dim=-1),
        tangent=(tangent_image - t).norm(dim=-1),
        mean=mean.norm(dim=-1),
    )


def _concatenate(parts: list[Eigenvalues]) -> Eigenvalues:
    return Eigenvalues(*(torch.cat(field, 1) for field in zip(*parts, strict=True)))
