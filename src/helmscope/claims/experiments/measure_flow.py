"""measure-flow: attention acts on the empirical measure of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Finding, Identity
from helmscope.claims.registry import Case, experiment
from helmscope.fields.alibi import alibi_bias
from helmscope.fields.attention import SA, USA
from helmscope.geometry.sphere import project, retract

if TYPE_CHECKING:
    from torch import Tensor

DIM, TOKENS, CLOUDS = 6, 10, 16
BETAS = (0.0, 1.0, 2.0, 4.0)
SLOPE = 0.5  # of the bias by distance, that of the first of ALiBi's eight heads
CASES = ("permuted", "repeated or weighted", "permuted, causal mask", "permuted, bias by position")


@experiment("measure-flow", seconds=2)
def measure_flow(case: Case) -> Finding:
    """X[mu](x) = P_x V int e^(beta <Qx, Ky>) y dmu / int e^(beta <Qx, Ky>) dmu, and USA without the quotient.

    Random Q^T K and V, one order and one set of multiplicities 1 to 4 for each. The difference of a cloud is
    max abs(f - f') / max abs(f): f' of the tokens in another order, put back; or of repeated tokens, against the same
    tokens once with weights. A number a cloud: the larger of the two, over SA and USA. The printed numerator lacks
    y, so its quotient is a number, here in every coordinate.
    """
    matrices = case.count(64, quick=16)
    order, pick = (case.normal(len(BETAS), matrices, TOKENS, stream=k).argsort(-1) for k in (0, 1))
    square = case.normal(2, len(BETAS), matrices, DIM, DIM, stream=2) / DIM**0.5
    clouds = retract(case.normal(len(BETAS), matrices, CLOUDS, TOKENS, DIM, stream=3))
    seen: list[list[Tensor]] = [[] for _ in CASES]
    printed = []
    for b, beta in enumerate(BETAS):
        for m in range(matrices):
            x, turn, counts = clouds[b, m], order[b, m], pick[b, m] % 4 + 1
            qk, v = square[:, b, m]
            sa, usa = SA(beta, query_key=qk, value=v), USA(beta, query_key=qk, value=v)
            causal = SA(beta, query_key=qk, value=v, causal=True)
            biased = SA(beta, query_key=qk, value=v, bias=alibi_bias(TOKENS, SLOPE))
            pairs = [torch.maximum(_permuted(sa, x, turn), _permuted(usa, x, turn))]
            pairs.append(torch.maximum(_repeated(sa, x, counts), _repeated(usa, x, counts)))
            pairs += [_permuted(causal, x, turn), _permuted(biased, x, turn)]
            for part, error in zip(seen, pairs, strict=True):
                part.append(error)
            number = sa.kernel(x).sum(-1, keepdim=True)  # the quotient of the two integrals without y
            printed.append(_difference(sa(x), project(x, number * v.sum(-1))))
    errors = torch.stack([torch.stack(part) for part in seen])  # (case, field, cloud)
    broken = errors[2:].median(-1).values.median(-1).values
    worst = errors.amax(-1).reshape(len(CASES), len(BETAS), matrices)
    return Finding(
        evidence=Identity(errors[:2].amax(0), "relative difference"),
        null=Check("relative difference of the causal field, permuted", Identity(errors[2])),
        printed=Check("relative difference of SA from the numerator without y", Identity(torch.cat(printed))),
        also=(Check("relative difference of SA with a bias by position, permuted", Identity(errors[3])),),
        data=curve(
            "difference",
            worst.permute(2, 1, 0),
            {"beta": BETAS, "change": CASES},
            label=f"largest relative difference over {CLOUDS} clouds",
            log=True,
        ),
        remark=f"Median break under a permutation: causal mask {broken[0]:.2g}, bias by position {broken[1]:.2g}.",
        where=f"simulation on the unit sphere: fields at random clouds, n = {TOKENS}, d = {DIM}, "
        f"beta = {', '.join(f'{beta:g}' for beta in BETAS)}, random Q^T K and V; nothing is integrated",
    )


def _permuted(field: SA | USA, x: Tensor, order: Tensor) -> Tensor:
    return _difference(field(x), field(x[:, order])[:, order.argsort()])


def _repeated(field: SA | USA, x: Tensor, counts: Tensor) -> Tensor:
    once = field(x, weights=counts.to(x))
    return _difference(once.repeat_interleave(counts, 1), field(x.repeat_interleave(counts, 1)))


def _difference(velocity: Tensor, other: Tensor) -> Tensor:
    return (velocity - other).abs().amax((-1, -2)) / velocity.abs().amax((-1, -2))
