"""measure-flow: attention acts on the empirical measure of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.alibi import alibi_bias
from helmscope.fields.attention import SA, USA
from helmscope.geometry.sphere import project, retract

if TYPE_CHECKING:
    from torch import Tensor

CASES = ("permuted", "repeated or weighted", "permuted, causal mask", "permuted, bias by position")


@experiment("measure-flow", seconds=2)
def measure_flow(case: TrialCase) -> Finding:
    """X[mu](x) = P_x V int e^(beta <Qx, Ky>) y dmu / int e^(beta <Qx, Ky>) dmu, and USA without the quotient.

    Random Q^T K and V, with one permutation and one set of multiplicities 1 to 4 for each. The difference of a cloud is
    max abs(f - f') / max abs(f), where f' is computed from the permuted tokens and permuted back, or from repeated
    tokens and compared with weighted ones. The error of a cloud is the larger of the two, over SA and USA. The printed
    numerator lacks y, so its quotient is a scalar, here used in every coordinate.
    """
    dim, tokens, count, betas = (case.constant(name) for name in ("dim", "tokens", "clouds", "betas"))
    slope = case.constant("bias_slope")  # by distance, as in the first of ALiBi's eight heads
    matrices = case.count(64, quick=16)
    orders, picks = (case.normal(len(betas), matrices, tokens, index=k).argsort(-1) for k in (0, 1))
    square = case.normal(2, len(betas), matrices, dim, dim, index=2) / dim**0.5
    clouds = retract(case.normal(len(betas), matrices, count, tokens, dim, index=3))
    by_case: list[list[Tensor]] = [[] for _ in CASES]
    printed = []
    for b, beta in enumerate(betas):
        for m in range(matrices):
            x, order, counts = clouds[b, m], orders[b, m], picks[b, m] % 4 + 1
            qk, v = square[:, b, m]
            sa, usa = SA(beta, query_key=qk, value=v), USA(beta, query_key=qk, value=v)
            causal = SA(beta, query_key=qk, value=v, causal=True)
            biased = SA(beta, query_key=qk, value=v, bias=alibi_bias(tokens, slope))
            found = [torch.maximum(_permutation_error(sa, x, order), _permutation_error(usa, x, order))]
            found.append(torch.maximum(_repetition_error(sa, x, counts), _repetition_error(usa, x, counts)))
            found += [_permutation_error(causal, x, order), _permutation_error(biased, x, order)]
            for errors_of_case, error in zip(by_case, found, strict=True):
                errors_of_case.append(error)
            quotient = sa.kernel(x).sum(-1, keepdim=True)  # of the two integrals, without y
            printed.append(_difference(sa(x), project(x, quotient * v.sum(-1))))
    errors = torch.stack([torch.stack(errors_of_case) for errors_of_case in by_case])  # (case, field, cloud)
    permuted = errors[2:].median(-1).values.median(-1).values
    worst = errors.amax(-1).reshape(len(CASES), len(betas), matrices)
    return Finding(
        evidence=IdentityErrors(errors[:2].amax(0), "relative difference"),
        controls={"causal mask": IdentityErrors(errors[2]), "bias by position": IdentityErrors(errors[3])},
        printed=IdentityErrors(torch.cat(printed)),
        data=curve(
            "difference",
            worst.permute(2, 1, 0),
            {"beta": betas, "change": CASES},
            label=f"largest relative difference over {count} clouds",
            log=True,
        ),
        remark=f"Median error under a permutation: causal mask {permuted[0]:.2g}, bias by position {permuted[1]:.2g}.",
        setting=f"simulation on the unit sphere: fields at random clouds, n = {tokens}, d = {dim}, "
        f"beta = {', '.join(f'{beta:g}' for beta in betas)}, random Q^T K and V; nothing is integrated",
    )


def _permutation_error(field: SA | USA, x: Tensor, order: Tensor) -> Tensor:
    return _difference(field(x), field(x[:, order])[:, order.argsort()])


def _repetition_error(field: SA | USA, x: Tensor, counts: Tensor) -> Tensor:
    weighted = field(x, weights=counts.to(x))
    return _difference(weighted.repeat_interleave(counts, 1), field(x.repeat_interleave(counts, 1)))


def _difference(velocity: Tensor, other: Tensor) -> Tensor:
    return (velocity - other).abs().amax((-1, -2)) / velocity.abs().amax((-1, -2))
