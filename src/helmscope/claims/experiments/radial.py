"""radial: what a norm layer leaves of the radial direction of its input."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.func import jacrev, vmap

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Count, Finding, Identity
from helmscope.claims.registry import Case, experiment
from helmscope.fields.norms import LayerNorm, RMSNorm
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

EPSILONS, DIMS = (1e-12, 1e-8, 1e-5), (4, 8, 64)
RATIOS = tuple(10.0**k for k in range(-4, 9, 2))  # s^2 / eps
ZERO = Region(text="The radial eigenvalue is 0 within 1e-12 of the tangential one at most inputs.", low=0.5)
DIGITS = Region(text="Equality within a relative error of 1e-6.", high=1e-6)
NOTHING = Region(text="0 within 1e-12 of the tangential eigenvalue.", high=1e-12)


class Seen(NamedTuple):
    """At inputs (ratio, repeat), over the tangential eigenvalue (s^2 + eps)^(-1/2): the radial eigenvalue <x, J x>,
    what theory says of it, the length of J x aside from x, the error of J at a tangent, the length of J 1 / sqrt(d).
    """

    radial: Tensor
    theory: Tensor
    aside: Tensor
    tangent: Tensor
    mean: Tensor


@experiment("radial", seconds=1)
def radial(case: Case) -> Finding:
    """J x = eps / (s^2 + eps)^(3/2) x with x = y / |y|, s^2 = |y|^2 / d, for RMSNorm; for LayerNorm with y less its
    mean, whose direction J takes to 0. Tangents t keep their direction, J t = (s^2 + eps)^(-1/2) t.

    J is the derivative of the norm itself, by autograd, with a random gain and bias folded out: row i over gain_i.
    Random y of the size that s^2 / eps asks for, over twelve decades, for several eps and d.
    """
    each, cells = case.count(64, quick=16), list(product(EPSILONS, DIMS))
    rms = _joined([_rms(case, k, each, eps, d) for k, (eps, d) in enumerate(cells)])
    layer = _joined([_layer(case, 100 + k, each, eps, d) for k, (eps, d) in enumerate(cells)])
    exact = _joined([look(case, 200 + d, 24, 0.0, d) for look, d in product((_rms, _layer), DIMS)])
    seen = _joined([rms, layer])
    usual = float(seen.radial[RATIOS.index(1e4)].median())
    zeros = int((seen.radial.abs() <= 1e-12).sum())
    return Finding(
        evidence=Identity((seen.radial - seen.theory).abs()),
        null=Check("error of the printed value 0, over the tangential eigenvalue", Identity(seen.radial.abs())),
        data=curve(
            "radial",
            torch.stack([rms.radial.mT, layer.radial.mT], -1),
            {"s2_over_eps": RATIOS, "norm": ("RMSNorm", "LayerNorm")},
            label="radial over tangential eigenvalue",
            log=True,
        ),
        printed=Check(
            "share of inputs with radial eigenvalue 0", Count(zeros, seen.radial.numel(), "inputs"), region=ZERO
        ),
        also=_parts(seen, rms, layer, exact),
        remark=f"At s^2 = 10^4 eps the radial eigenvalue is {usual:.3g} of the tangential one.",
        where=(
            f"simulation: norms of random vectors, d = {', '.join(map(str, DIMS))}, eps = {EPSILONS[0]:g} to "
            f"{EPSILONS[-1]:g}, s^2/eps = {RATIOS[0]:g} to {RATIOS[-1]:g}, gain and bias folded out"
        ),
    )


def _parts(seen: Seen, rms: Seen, layer: Seen, exact: Seen) -> tuple[Check, ...]:
    """The other directions: tangents, the mean, and the radial one at eps = 0."""
    held = Ruling.BY_CONSTRUCTION
    return (
        Check(
            "relative error of eps/(s^2+eps) for what the printed 0 misses",
            Identity((seen.radial / seen.theory - 1).abs(), "relative error"),
            held,
            DIGITS,
        ),
        Check("part of J x aside from x, over the tangential eigenvalue", Identity(seen.aside, "part"), held, NOTHING),
        Check(
            "error of J t = (s^2+eps)^(-1/2) t at tangents, over that eigenvalue",
            Identity(seen.tangent),
            held,
            NOTHING,
        ),
        Check(
            "what LayerNorm leaves of the mean, over the tangential eigenvalue",
            Identity(layer.mean, "rest of the mean"),
            held,
            NOTHING,
        ),
        Check(
            "what RMSNorm leaves of the mean, over the tangential eigenvalue",
            Identity(rms.mean, "rest of the mean"),
            region=NOTHING,
        ),
        Check(
            "radial over tangential eigenvalue at eps = 0",
            Identity(exact.radial.abs(), "eigenvalue"),
            held,
            NOTHING,
        ),
    )


def _rms(case: Case, stream: int, each: int, eps: float, d: int) -> Seen:
    gain, y, t = _draw(case, stream, each, d)
    norm = RMSNorm(gain=gain, eps=eps)
    y = y * _sizes(eps) / y.square().mean(-1, keepdim=True).sqrt()
    return _look(vmap(vmap(jacrev(norm)))(y) / gain[:, None], y, t, eps)


def _layer(case: Case, stream: int, each: int, eps: float, d: int) -> Seen:
    gain, y, t = _draw(case, stream, each, d)
    norm = LayerNorm(gain=gain, bias=case.normal(d, stream=1_000 + stream), eps=eps)
    y = y * _sizes(eps) / y.std(-1, keepdim=True, correction=0)
    jacobian = vmap(vmap(jacrev(norm)))(y) / gain[:, None]
    return _look(jacobian, y - y.mean(-1, keepdim=True), t - t.mean(-1, keepdim=True), eps)


def _draw(case: Case, stream: int, each: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """A positive gain (d,), and vectors y and t (ratio, each, d)."""
    draws = case.normal(1 + 2 * len(RATIOS) * each, d, stream=stream)
    y, t = draws[1:].reshape(2, len(RATIOS), each, d)
    return (draws[0] / 2).exp(), y, t


def _sizes(eps: float) -> Tensor:
    """s for every ratio; at eps = 0 the ratios are s^2 itself."""
    return (torch.tensor(RATIOS, dtype=torch.float64) * (eps or 1.0)).sqrt()[:, None, None]


def _look(jacobian: Tensor, y: Tensor, t: Tensor, eps: float) -> Seen:
    """``y`` and ``t`` without mean where the norm removes it."""
    ones, x = torch.ones_like(y) / y.shape[-1] ** 0.5, y / y.norm(dim=-1, keepdim=True)
    t = t - (t * x).sum(-1, keepdim=True) * x
    t = t / t.norm(dim=-1, keepdim=True)
    s2 = y.square().mean(-1)
    over = jacobian * (s2 + eps).sqrt()[..., None, None]
    image, kept, mean = ((over @ v[..., None])[..., 0] for v in (x, t, ones))
    along = (x * image).sum(-1)
    return Seen(
        radial=along,
        theory=eps / (s2 + eps),
        aside=(image - along[..., None] * x).norm(dim=-1),
        tangent=(kept - t).norm(dim=-1),
        mean=mean.norm(dim=-1),
    )


def _joined(parts: list[Seen]) -> Seen:
    return Seen(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))
