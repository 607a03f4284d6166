"""Planted faults: every one of them must be caught by the loop oracle, or the oracle's agreement means little.

To add a fault, plant it as ``planting`` explains, put it into ``FAULTS`` under the kind of mistake it is, and count it
in ``test_every_kind_of_fault_is_planted``; where the oracle misses it, add a case that shows it. Invariants alone
(tangency, rotation and permutation equivariance) are tried on the same faults, to show what they miss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from helmscope.fields.attention import SA, USA
from helmscope.geometry.sphere import project
from helmscope.kernels.dense import untransformed_logits
from helmscope.kernels.request import AttentionSum, Request
from support import oracles
from support.attention_cases import F64, listed, normal, tokens
from support.planting import (
    ANSWERS,
    MOTION,
    Plant,
    hiding,
    is_scalar,
    misread,
    outcome,
    own_mass,
    terms,
    token_sum,
    weights_of,
    wrong_answer,
    wrong_request,
    wrong_sum,
)

BOTH = (SA, USA)


def transposed(matrix):
    return None if matrix is None else matrix.mT


def wrong_bias(change):
    return wrong_request(
        lambda request: request if request.bias is None else replace(request, bias=change(request.bias))
    )


def wrong_mask(change):
    """Fields that take ``change(mask)`` for the mask they are called with."""

    def wrong(right, field, x, *, mask=None, **given):
        return right(field, x, mask=None if mask is None else change(mask), **given)

    return Plant(wrong, *((kind, ["__call__"]) for kind in BOTH))


def wrong_projection(wrong):
    return Plant(lambda right, x, v: wrong(x, v), project)


def wrong_causal_mask(hidden, causal):
    """A causal mask that hides these pairs (i, j), and later keys only if ``causal``."""

    def change(request: Request) -> Request:
        n = request.key.shape[-2]
        return replace(hiding(request, hidden(torch.ones(n, n).bool())), causal=causal) if request.causal else request

    return wrong_request(change)


def wrong_total_weight(factor, names=ANSWERS):
    """Division by M / ``factor(n, d, m)`` in place of M."""
    return wrong_answer(lambda answer, field, x, m: factor(*x.shape[-2:], m) * answer, USA, names=names)


def counted(request: Request) -> torch.Tensor:
    """Weight 1 for every token of positive weight."""
    return (request.weights > 0).to(request.weights)


def weights_not_applied(request: Request) -> Request:
    return request if request.weights is None else replace(request, weights=counted(request))


def padding_hides_queries(request: Request) -> Request:
    return request if request.weights is None else hiding(request, (request.weights == 0).unsqueeze(-1))


def weights_of_the_query(result: AttentionSum, request: Request) -> AttentionSum:
    if request.weights is None:
        return result
    even, m = token_sum(replace(request, weights=counted(request))), request.weights.unsqueeze(-1)
    return replace(even, total=m * even.total, mass=m * even.mass)


def own_term(result: AttentionSum, request: Request) -> torch.Tensor:
    """The part of token i in its own mass where the total leaves it out."""
    return own_mass(result, request) * request.skip_self


def mass_not_brought_to_its_scale(result: AttentionSum, request: Request) -> AttentionSum:
    own = own_term(result, request)
    return replace(result, mass=(result.mass - own) * torch.exp(result.mass_shift - result.shift) + own)


def own_term_without_weight(result: AttentionSum, request: Request) -> AttentionSum:
    own = own_mass(result, request, weighted=False) * request.skip_self
    return replace(result, mass=result.mass - own_term(result, request) + own)


def softmax_over_queries(result: AttentionSum, request: Request) -> AttentionSum:
    pairs = terms(request)
    excess = pairs.sum(-2).unsqueeze(-1) - pairs.sum(-1, keepdim=True)
    return replace(result, mass=result.mass + excess * torch.exp(result.shift - result.mass_shift))


def unseen_key_sets_the_scale(result: AttentionSum, request: Request) -> AttentionSum:
    top = untransformed_logits(replace(request, weights=None)).amax(-1, keepdim=True)
    total, mass = result.total * torch.exp(result.shift - top), result.mass * torch.exp(result.mass_shift - top)
    return AttentionSum(total, top, mass, top)


def mean_without_its_scale(right, own: AttentionSum) -> torch.Tensor:
    return own.total / own.mass.clamp(min=torch.finfo(own.mass.dtype).tiny)


class Fault(NamedTuple):
    kind: str
    plant: Plant


FAULTS = {
    "projection adds": Fault("sign", wrong_projection(lambda x, v: v + (x * v).sum(-1, keepdim=True) * x)),
    "beta negative": Fault("sign", wrong_request(lambda request: replace(request, query=-request.query))),
    "bias negative": Fault("sign", wrong_bias(lambda bias: -bias)),
    "value scale without sign": Fault(
        "sign", misread(*BOTH, value=lambda v: v.abs() if v is not None and is_scalar(v) else v)
    ),
    "causal triangle flipped": Fault("sign", wrong_causal_mask(lambda all_pairs: all_pairs.tril(-1), causal=False)),
    "mask inverted": Fault("sign", wrong_mask(lambda mask: ~mask)),
    "beta twice": Fault("factor", wrong_request(lambda request: replace(request, query=2 * request.query))),
    "value scale lost": Fault("factor", misread(*BOTH, value=lambda v: None if is_scalar(v) else v)),
    "no 1/n": Fault("factor", wrong_total_weight(lambda n, d, m: n if m is None else 1)),
    "M counts tokens": Fault(
        "factor", wrong_total_weight(lambda n, d, m: 1 if m is None else m.sum(-1)[..., None, None] / n)
    ),
    "mass without the own term": Fault(
        "factor", wrong_sum(lambda result, request: replace(result, mass=result.mass - own_term(result, request)))
    ),
    "mass not brought to its scale": Fault("factor", wrong_sum(mass_not_brought_to_its_scale)),
    "mean not brought to its scale": Fault("factor", Plant(mean_without_its_scale, (AttentionSum, ["mean"]))),
    "velocity without its scale": Fault(
        "factor",
        wrong_answer(lambda answer, field, x, m: field.scaled_velocity(x, weights=m).direction, USA, names=MOTION),
    ),
    "ambient without its scale": Fault(
        "factor",
        wrong_sum(lambda result, request: replace(result, shift=0 * result.shift)).during(USA, names=["ambient"]),
    ),
    "projection forgotten": Fault("factor", wrong_projection(lambda x, v: v).during(SA, names=MOTION)),
    "query_key transposed": Fault("transpose", misread(*BOTH, query_key=transposed)),
    "value transposed": Fault("transpose", misread(*BOTH, value=transposed)),
    "bias transposed": Fault("transpose", wrong_bias(transposed)),
    "logits transposed": Fault(
        "transpose", wrong_request(lambda request: replace(request, query=request.key, key=request.query))
    ),
    "kernel transposed": Fault("transpose", wrong_answer(lambda answer, field, x, m: answer.mT, USA, names=["kernel"])),
    "sum transposed": Fault(
        "transpose", wrong_sum(lambda result, request: replace(result, total=terms(request).mT @ request.value))
    ),
    "softmax over queries": Fault("axis", wrong_sum(softmax_over_queries)),
    "1/d for 1/n": Fault(
        "axis", wrong_total_weight(lambda n, d, m: n / d if m is None else 1, names=(*MOTION, "ambient"))
    ),
    "weights of the query": Fault("axis", wrong_sum(weights_of_the_query)),
    "projection over tokens": Fault("axis", wrong_projection(lambda x, v: v - (x * v).sum(-2, keepdim=True) * x)),
    "padding hides queries": Fault("axis", wrong_request(padding_hides_queries)),
    "mask ignored": Fault("mask", wrong_mask(lambda mask: None)),
    "causal diagonal hidden": Fault("mask", wrong_causal_mask(lambda all_pairs: all_pairs.triu().tril(), causal=True)),
    "causal mask ignored": Fault("mask", wrong_request(lambda request: replace(request, causal=False))),
    "weights not applied": Fault("mask", wrong_request(weights_not_applied)),
    "own term without weight": Fault("mask", wrong_sum(own_term_without_weight)),
    "unseen key sets the scale": Fault("mask", wrong_sum(unseen_key_sets_the_scale)),
    "own term skipped for any V": Fault(
        "mask", wrong_request(lambda request: replace(request, skip_self=True)).during(*BOTH, names=MOTION)
    ),
    "own term skipped before projection": Fault(
        "mask",
        wrong_request(lambda request: replace(request, skip_self=True)).during(
            *BOTH, names=["ambient"], where=lambda field: is_scalar(field.value)
        ),
    ),
}


class Case(NamedTuple):
    x: torch.Tensor
    beta: float
    field: dict
    measure: dict


PADDED = torch.tensor([True, True, False, True, False])
HEAVY = torch.tensor([1.0, 0.0, 2.5, 0.5, 1.5], dtype=F64)
CASES = [
    Case(tokens(5, 3, seed=1), 2.0, {}, {}),
    Case(tokens(3, 3, seed=2), 2.0, {"value": -0.5 * torch.eye(3, dtype=F64)}, {}),
    Case(tokens(3, 3, seed=3), 1.5, {"query_key": normal(3, 3, seed=4), "value": normal(3, 3, seed=5)}, {}),
    Case(tokens(5, 3, seed=6), 2.0, {"bias": normal(5, 5, seed=7)}, {"weights": HEAVY}),
    Case(tokens(5, 3, seed=8), 2.0, {"causal": True}, {"weights": HEAVY, "mask": PADDED}),
    Case(tokens(5, 3, seed=9), 2.0, {"value": normal(3, 3, seed=10)}, {"mask": PADDED}),
    # keys repel, so the padded one opposite to token 0 has a logit of 900 where token 0 sees no other above 0
    Case(
        torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]], dtype=F64),
        900.0,
        {"query_key": -torch.eye(2, dtype=F64)},
        {"mask": torch.tensor([True, True, False])},
    ),
]


def kinds_for(case: Case) -> list[type]:
    return [SA] if case.beta > 700 else [SA, USA]  # the oracle of USA would overflow


def agrees_with_oracle() -> bool:
    """Velocity, ambient and kernel of SA and USA at 1e-12 of the oracle's greatest value, in every case."""
    for case in CASES:
        x, beta, given, measure = case
        weights = weights_of(x, **measure)
        for kind in kinds_for(case):
            field = kind(beta, **given)
            values = {"velocity": field(x, **measure), "ambient": field.ambient(x, weights=weights)}
            values["kernel"] = field.kernel(x, weights=weights)
            for quantity, value in values.items():
                options = {key: part for key, part in given.items() if quantity != "kernel" or key != "value"}
                loop = getattr(oracles, f"{kind.__name__.lower()}_{quantity}")
                expected = torch.tensor(loop(x.tolist(), beta, **listed(options), **listed(measure)), dtype=F64)
                if not (value - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1):
                    return False
    return True


def keeps_invariants() -> bool:
    """Tangency, rotation of tokens and matrices together, permutation of tokens, bias and weights together."""
    order = torch.tensor([3, 0, 4, 1, 2])
    for case in CASES:
        x, beta, given, measure = case
        n, d = x.shape
        turn, shuffle = torch.linalg.qr(normal(d, d, seed=20)).Q, order[order < n]
        # a multiple of I stays what it is under rotation; multiplied out, it would only by rounding
        matrices = {key: part for key, part in given.items() if key in ("query_key", "value") and not is_scalar(part)}
        turned = given | {key: turn @ part @ turn.mT for key, part in matrices.items()}
        shuffled = {key: part[shuffle][:, shuffle] if key == "bias" else part for key, part in given.items()}
        for kind in kinds_for(case):
            velocity = kind(beta, **given)(x, **measure)
            bound = 1e-9 * velocity.abs().max().clamp(min=1)
            gaps = [(velocity * x).sum(-1), kind(beta, **turned)(x @ turn.mT, **measure) - velocity @ turn.mT]
            if not given.get("causal"):
                moved = {key: part[shuffle] for key, part in measure.items()}
                gaps.append(kind(beta, **shuffled)(x[shuffle], **moved) - velocity[shuffle])
            if not all(gap.abs().max() <= bound for gap in gaps):
                return False
    return True


def test_the_unchanged_code_passes():
    assert agrees_with_oracle()
    assert keeps_invariants()


@pytest.mark.parametrize("name", FAULTS)
def test_oracle_catches(name):
    assert outcome(FAULTS[name].plant, agrees_with_oracle) == "seen"


def test_every_kind_of_fault_is_planted():
    kinds = [fault.kind for fault in FAULTS.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "sign": 6,
        "factor": 10,
        "transpose": 6,
        "axis": 5,
        "mask": 8,
    }
    assert len(FAULTS) == 35


def test_invariants_alone_catch_4_of_35():
    """Why there are oracles: a wrong field is tangent and equivariant too, unless its projection is at fault, or it
    divides by nothing.
    """
    found = {name: outcome(fault.plant, keeps_invariants) for name, fault in FAULTS.items()}
    caught = {name for name, result in found.items() if result in ("seen", "refused")}
    assert caught == {"projection adds", "projection forgotten", "projection over tokens", "softmax over queries"}
    assert {name for name, result in found.items() if result == "unreached"} == {  # velocities show nothing of them
        "ambient without its scale",
        "own term skipped before projection",
        "kernel transposed",
    }
