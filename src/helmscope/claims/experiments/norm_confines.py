"""norm-confines: the radius of tokens along depth, with post-norm, without a norm, and with pre-norm."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count, IdentityErrors, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP
from helmscope.fields.norms import LayerNorm, RMSNorm, UnitNorm
from helmscope.fields.placement import PostNorm, PreNorm
from helmscope.stats.scales import LogScale
from helmscope.types import Half

if TYPE_CHECKING:
    from torch import Tensor

    Norm = UnitNorm | RMSNorm | LayerNorm

SIGNS = (1.0, -1.0, None)  # V = +I, -I, and a random one in every layer
VALUES = ("V = +I", "V = -I", "V random")
PLACES = ("post-norm", "the same without norm", "pre-norm: the stream", "pre-norm: what the norm hands on")
SIZES = (2, 8, 32, 128)


class Radii(NamedTuple):
    """The largest and the smallest radius over the tokens, relative to the norm's sphere (start, layer, place)."""

    largest: Tensor
    smallest: Tensor


@experiment("norm-confines", seconds=2)
def norm_confines(case: TrialCase) -> Finding:
    """Post-norm y <- N(y + f(y)) has |y| = radius of N's sphere, 1 or sqrt(d), gain and bias folded out; without N,
    y <- y + f(y); with pre-norm y <- y + f(N y), where N y is confined and y is not. f is attention, then an MLP. With
    V = -I and no norm an average that is mostly the token itself is subtracted from it: its radius does not grow.

    Layers of random weights with V = +I, -I or random, under UnitNorm, RMSNorm and LayerNorm, the last with and without
    eps, from random starts. The softmax average alone, sum_j P_ij V x_j, is compared with its longest value |V x_j|: it
    cannot grow beyond it, and an average of n unit tokens is shorter than they are, by the lengths given in the remark.
    """
    tokens, dim, depth = (case.constant(name) for name in ("tokens", "dim", "depth"))
    starts = case.count(256, quick=128)
    norms = _norms(case)
    runs = {(n, v): _run(case, norms[n], 10 * n + v, SIGNS[v], starts) for n, v in product(range(4), range(3))}
    largest = torch.cat([run.largest for run in runs.values()])
    exact = torch.cat([run.smallest[..., 0] for (n, _), run in runs.items() if norms[n].eps == 0])
    top = largest.amax(1)
    growth = [_growth([runs[n, v].largest for n in range(4)]) for v in range(3)]  # (start, place) for each V
    averages = torch.cat([_average_length(case, 200 + v, sign, starts) for v, sign in enumerate(SIGNS)])
    longer = int((averages > 1 + 1e-12).sum())
    final = largest[:, -1].median(0).values
    factors = ", ".join(
        f"{float(f[:, 1].log().mean().exp()):.3g} with {v}" for v, f in zip(VALUES, growth, strict=True)
    )
    lengths = ", ".join(f"{_unit_average_length(case, n, starts):.2g} at n = {n}" for n in SIZES)
    return Finding(
        evidence={
            "largest radius": IdentityErrors(top[:, 0], "radius ratio"),
            "smallest radius": IdentityErrors((1 - exact.amin(1)).abs(), "shortfall"),
            "output of the pre-norm": IdentityErrors(top[:, 3], "radius ratio"),
        },
        controls={
            "without the norm": IdentityErrors(top[:, 1], "radius ratio"),
            "pre-norm stream": IdentityErrors(top[:, 2], "radius ratio"),
            "growth in the pre-norm stream": _every_value(growth, 2, VALUES),
            "growth without the norm, V = -I": Replicates(growth[1][:, 1], "starts", scale=LogScale()),
        },
        described={"share of softmax averages longer than their longest value": Count(longer, len(averages), "starts")},
        printed=_every_value(growth[::2], 1, VALUES[::2]),
        data=_curves(largest, [torch.cat([runs[n, v].largest[..., 1] for n in range(4)]) for v in range(3)]),
        remark=(
            f"After {depth} layers the median of the largest radius is {float(final[1]):.3g} without the norm and "
            f"{float(final[2]):.3g} in the pre-norm stream. Without the norm a layer multiplies it by {factors}; "
            f"below 1 it shrinks. A softmax average has a median of {float(averages.median()):.2f} of its longest "
            f"value; of n unit tokens it has the mean length {lengths}."
        ),
        setting=(
            f"simulation: n = {tokens}, d = {dim}, beta = {_beta(dim):g}, {depth} layers of attention and MLP, random "
            "weights, gain and bias folded out"
        ),
    )


def _beta(dim: int) -> float:
    return float(dim**-0.5)


def _norms(case: TrialCase) -> list[Norm]:
    dim = case.constant("dim")
    gain, bias = (case.normal(dim, index=100) / 4).exp(), case.normal(dim, index=101)
    return [UnitNorm(), RMSNorm(gain=gain), *(LayerNorm(gain=gain, bias=bias, eps=eps) for eps in (0.0, 1e-5))]


def _run(case: TrialCase, norm: Norm, index: int, sign: float | None, starts: int) -> Radii:
    """Run the same layers from the same points with post-norm, without a norm and with pre-norm."""
    tokens, dim, hidden, depth = (case.constant(name) for name in ("tokens", "dim", "hidden", "depth"))
    z = case.normal(starts, tokens, dim, index=300 + index)
    after, bare, residual = norm(z), norm.without_affine()(z), norm.without_affine()(z)
    radii = [_radii(norm, after, bare, residual)]
    for weights in case.normal(depth, dim + 2 * hidden, dim, index=index):
        v, w_in, w_out = weights.split([dim, hidden, hidden])
        value = v / dim**0.5 if sign is None else sign * torch.eye(dim, dtype=v.dtype)
        parts = SA(_beta(dim), value=value), MLP(w_in=w_in / dim**0.5, w_out=w_out.mT / hidden**0.5)
        post = Block(*parts, placement=PostNorm(attention_norm=norm, mlp_norm=norm))
        pre = Block(*parts, placement=PreNorm(attention_norm=norm, mlp_norm=norm))
        after, residual = post.layer(after), pre.layer(residual)
        for half in (Half.ATTENTION, Half.MLP):
            bare = bare + post.write(half, bare)
        radii.append(_radii(norm, after, bare, residual))
    radius = torch.stack(radii, 1)
    return Radii(radius.amax(-1), radius.amin(-1))


def _radii(norm: Norm, after: Tensor, bare: Tensor, residual: Tensor) -> Tensor:
    """Token lengths relative to the radius of the norm's sphere (start, place, token)."""
    sphere = 1.0 if isinstance(norm, UnitNorm) else after.shape[-1] ** 0.5
    points = _fold_out(norm, after), bare, residual, _fold_out(norm, norm(residual))
    return torch.stack([point.norm(dim=-1) / sphere for point in points], 1)


def _fold_out(norm: Norm, y: Tensor) -> Tensor:
    """(y - bias) / gain."""
    shifted = y if norm.bias is None else y - norm.bias
    return shifted if norm.gain is None else shifted / norm.gain


def _growth(largest: list[Tensor]) -> Tensor:
    """The growth factor of the radius per layer (start, place), as a geometric mean over the norms."""
    depth = largest[0].shape[1] - 1
    return torch.stack([(radius[:, -1] / radius[:, 0]).log() / depth for radius in largest]).mean(0).exp()


def _every_value(growth: list[Tensor], place: int, names: tuple[str, ...]) -> ReplicatesInEveryCase:
    return ReplicatesInEveryCase([factor[:, place] for factor in growth], "starts", names, scale=LogScale())


def _average_length(case: TrialCase, index: int, sign: float | None, starts: int) -> Tensor:
    """The longest softmax average of each start over its longest value; the tokens are not normalized."""
    tokens, dim = case.constant("tokens"), case.constant("dim")
    y, v = case.normal(starts, tokens, dim, index=index), case.normal(dim, dim, index=200 + index)
    value = v / dim**0.5 if sign is None else sign * torch.eye(dim, dtype=v.dtype)
    longest: Tensor = (y @ value.mT).norm(dim=-1).amax(-1)
    average: Tensor = SA(_beta(dim), value=value).ambient(y).norm(dim=-1).amax(-1)
    return average / longest


def _unit_average_length(case: TrialCase, n: int, starts: int) -> float:
    """The mean length of a softmax average of n unit tokens."""
    dim = case.constant("dim")
    x = UnitNorm()(case.normal(starts, n, dim, index=500 + n))
    return float(SA(_beta(dim)).ambient(x).norm(dim=-1).mean())


def _curves(largest: Tensor, bare: list[Tensor]) -> xr.Dataset:
    """The radius along depth for each place, and without the norm for each V."""
    layers, label = range(largest.shape[1]), "largest radius over that of the sphere"
    radius = curve("radius", largest, {"layer": layers, "place": PLACES}, label=label, log=True)
    values = {"layer": layers, "value": VALUES}
    without = curve("without_norm", torch.stack(bare, -1), values, label=f"{label}, without norm", log=True)
    return xr.merge([radius, without], join="outer")
