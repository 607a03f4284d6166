"""Planted faults in the attention family: the loop oracles must catch every one.

To add a fault, plant it as ``planting`` explains and put it into ``FAULTS`` under the part of the family that it is in;
where the oracles miss it, add a field that shows it to ``fields_of_one_head`` or ``fields_of_heads``.
"""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import pad

import helmscope as hs
import support.attention_family_oracles as family
from helmscope.fields import sinkhorn
from helmscope.fields.alibi import alibi_bias
from helmscope.fields.attention import SA, USA
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.lowrank import LowRank
from helmscope.fields.multihead import MultiHead
from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.kernels.request import AttentionSum, Request
from support.attention_cases import F64, listed, measure, normal, tokens
from support.planting import (
    MOTION,
    Plant,
    Rewrite,
    is_scalar,
    misread,
    outcome,
    own_mass,
    terms,
    weights_of,
    wrong_answer,
    wrong_request,
    wrong_sum,
)

PARTS = ("lowrank", "attention", "hardmax", "sinkhorn", "alibi", "multihead", "dense")
ONE_HEAD = (SA, USA, Hardmax, SinkhornAttention)
TOTALS = (*MOTION, "ambient")  # sums over heads


def with_factors(change):
    """Changes the factors of a matrix of low rank, and leaves any other matrix alone."""
    return lambda matrix: LowRank(*change(matrix.left, matrix.right)) if isinstance(matrix, LowRank) else matrix


def wrong_heads(change, **options):
    """``MultiHead`` that takes ``change(head, first_head)`` for each of its heads."""
    return misread(MultiHead, heads=lambda heads: [change(head, heads[0]) for head in heads], **options)


def wrong_transform(kind, change):
    """A field that makes ``change(transform_logits, pairs, m)`` of its logits, where ``transform_logits`` is right."""

    def settled(request: Request) -> Request:
        return replace(request, transform_logits=lambda pairs, m: change(request.transform_logits, pairs, m))

    return wrong_request(settled).during(kind)


def potential(transform_logits, pairs, m):
    """g_j for every pair (i, j)."""
    return torch.where(pairs > -torch.inf, transform_logits(pairs, m) - pairs, 0.0)


def skipping_self():
    return wrong_request(lambda request: replace(request, skip_self=True))


def transposed(matrix):
    if isinstance(matrix, LowRank):
        return LowRank(matrix.right, matrix.left)
    return None if matrix is None else matrix.mT


def has_matrices(field):
    return not all(is_scalar(head.value) for head in field.heads)


def last_step(sign):
    """The last Newton step of Sinkhorn with this sign, from a potential that is off by 1e-7."""

    def wrong(right, *given, **named):
        dual = right(*given, **named)
        return dual._replace(potential=(1 + 1e-7) * dual.potential, response=sign * dual.response)

    return Plant(wrong, (SinkhornAttention, ["solve"]))


def found_after_one_sweep(right, field, *given, **named):
    dual = right(replace(field, max_iterations=1), *given, **named)
    return dual._replace(converged=torch.ones_like(dual.converged))


def whole_logarithm(node: ast.AST) -> ast.AST | None:
    """log(m) in place of log(m) / 2."""
    match node:
        case ast.BinOp(ast.Call(ast.Attribute(attr="log")) as log, ast.Div(), ast.Constant(2)):
            return log
    return None


def padded_apart(heads):
    """Lower ranks padded with zeros at the end of the left factor, but at the front of the right one."""
    for name in ("query_key", "value"):
        matrices = [getattr(head, name) for head in heads]
        if all(isinstance(matrix, LowRank) for matrix in matrices):
            short = [max(matrix.rank for matrix in matrices) - matrix.rank for matrix in matrices]
            filled = [
                LowRank(pad(matrix.left, (0, k)), pad(matrix.right, (k, 0)))
                for matrix, k in zip(matrices, short, strict=True)
            ]
            heads = [replace(head, **{name: matrix}) for head, matrix in zip(heads, filled, strict=True)]
    return heads


def interleaved(right, cls, query, key, value, out, **options):
    heads = torch.arange(len(query))
    return right(cls, query, key[heads // (len(query) // len(key))], value[heads % len(value)], out, **options)


def mlp_before_the_value(answer, field, x, m):
    attended = MultiHead(field.heads).ambient(x, weights=m)
    return sum(mlp.ambient(attended) for mlp in field.mlps) / len(field.mlps)


def heads_and_tokens_mixed(result: AttentionSum, request: Request) -> AttentionSum:
    *batch, heads, n, r = result.total.shape
    return replace(result, total=result.total.reshape(*batch, n, heads, r).transpose(-3, -2))


def own_term_in_every_head(result: AttentionSum, request: Request) -> AttentionSum:
    if isinstance(request.skip_self, bool):
        return result
    return replace(result, mass=result.mass + ~request.skip_self * own_mass(result, request))


def one_column_by_the_wrong_axis(result: AttentionSum, request: Request) -> AttentionSum:
    if request.value.shape[-1] > 1:
        return result
    return replace(result, total=request.value * terms(request).sum(-2).unsqueeze(-1))


def one_scale_for_all_heads(result: AttentionSum, request: Request) -> AttentionSum:
    return replace(result, shift=result.shift.amax(-3, keepdim=True).expand_as(result.shift))


def without_total_weight(answer, field, x, m):
    if isinstance(field.heads[0], SA):
        return answer
    return answer * (x.shape[-2] if m is None else m.sum(-1)[..., None, None])


class Fault(NamedTuple):
    part: str
    plant: Plant
    found: str = "seen"


FAULTS = {
    "factors swapped": Fault("lowrank", misread(*ONE_HEAD, query_key=with_factors(lambda left, right: (right, left)))),
    "low-rank key not reduced": Fault(
        "lowrank",
        misread(*ONE_HEAD, query_key=with_factors(lambda left, right: (left, torch.eye(*left.shape).to(left)))),
    ),
    "dense of low rank transposed": Fault(
        "lowrank", Plant(lambda right, matrix: right(matrix).mT, (LowRank, ["dense"]))
    ),
    "low-rank value swapped": Fault(
        "attention", misread(*ONE_HEAD, value=with_factors(lambda left, right: (left, left)))
    ),
    "own term skipped for low rank": Fault(
        "attention",
        skipping_self().during(*ONE_HEAD, names=MOTION, where=lambda field: isinstance(field.value, LowRank)),
    ),
    "settling forgotten": Fault("attention", wrong_request(lambda request: replace(request, transform_logits=None))),
    "hardmax takes the least": Fault(
        "hardmax",
        wrong_transform(
            Hardmax,
            lambda honest, pairs, m: honest(torch.where(pairs > -torch.inf, -pairs, pairs), m),
        ),
    ),
    "hardmax over queries": Fault("hardmax", wrong_transform(Hardmax, lambda honest, pairs, m: honest(pairs.mT, m).mT)),
    "hardmax keeps logits": Fault(
        "hardmax",
        wrong_transform(Hardmax, lambda honest, pairs, m: torch.where(honest(pairs, m) == 0, pairs, -torch.inf)),
    ),
    "no tolerance of ties": Fault("hardmax", misread(Hardmax, tie_tolerance=lambda tie: 0.0)),
    "ties too wide": Fault("hardmax", misread(Hardmax, tie_tolerance=lambda tie: 0.1 if tie is None else tie)),
    "potential negative": Fault(
        "sinkhorn",
        wrong_transform(SinkhornAttention, lambda honest, pairs, m: pairs - potential(honest, pairs, m)),
    ),
    "potential on queries": Fault(
        "sinkhorn",
        wrong_transform(SinkhornAttention, lambda honest, pairs, m: pairs + potential(honest, pairs, m).mT),
    ),
    "last step uphill": Fault("sinkhorn", last_step(-1)),
    "columns of sum 1 for any weights": Fault(
        "sinkhorn",
        wrong_transform(
            SinkhornAttention,
            lambda honest, pairs, m: honest(pairs, None if m is None else (m > 0).to(pairs)),
        ),
    ),
    "no convergence needed": Fault("sinkhorn", Plant(found_after_one_sweep, (SinkhornAttention, ["solve"]))),
    "sweep without half of the weights": Fault("sinkhorn", Rewrite(sinkhorn, whole_logarithm), "refused"),
    "alibi rises": Fault("alibi", Plant(lambda right, n, slope: -right(n, slope), alibi_bias)),
    "alibi squared": Fault("alibi", Plant(lambda right, n, slope: -(right(n, slope) ** 2) / slope, alibi_bias)),
    "sum of heads for their mean": Fault(
        "multihead",
        Plant(
            lambda right, own, heads, **given: right(own, heads, **{"scale": 1.0, **given}), (MultiHead, ["__init__"])
        ),
    ),
    "scale ignored": Fault(
        "multihead", misread(MultiHead, scale=lambda scale: 1.0).during(MultiHead, where=has_matrices)
    ),
    "first head for all": Fault("multihead", wrong_heads(lambda head, first: replace(head, beta=first.beta))),
    "bias of the first head": Fault(
        "multihead",
        wrong_heads(lambda head, first: replace(head, bias=None if head.bias is None else first.bias)),
    ),
    "causal mask lost": Fault("multihead", wrong_heads(lambda head, first: replace(head, causal=False))),
    "query and key swapped": Fault(
        "multihead",
        wrong_request(lambda request: replace(request, query=request.key, key=request.query)).during(MultiHead),
    ),
    "values transposed": Fault(
        "multihead", wrong_heads(lambda head, first: replace(head, value=transposed(head.value)), names=TOTALS)
    ),
    "heads and tokens mixed": Fault(
        "multihead", wrong_sum(heads_and_tokens_mixed).during(MultiHead, names=TOTALS, where=has_matrices)
    ),
    "scales of values lost": Fault(
        "multihead",
        wrong_heads(lambda head, first: replace(head, value=None) if is_scalar(head.value) else head, names=TOTALS),
    ),
    "heads share one scale": Fault(
        "multihead",
        wrong_sum(one_scale_for_all_heads).during(MultiHead, where=lambda field: isinstance(field.heads[0], USA)),
    ),
    "M lost": Fault("multihead", wrong_answer(without_total_weight, MultiHead, names=(*TOTALS, "outputs"))),
    "own term skipped for any value": Fault("multihead", skipping_self().during(MultiHead, names=MOTION)),
    "outputs without values": Fault(
        "multihead", wrong_heads(lambda head, first: replace(head, value=None), names=["outputs"])
    ),
    "padding on the wrong side": Fault("multihead", misread(MultiHead, heads=padded_apart)),
    "groups interleaved": Fault("multihead", Plant(interleaved, (MultiHead, ["from_weights"]))),
    "mlps summed": Fault(
        "multihead",
        wrong_answer(lambda answer, field, x, m: len(field.mlps) * answer, MultiHeadAsPrinted, names=["ambient"]),
    ),
    "mlp before the value": Fault(
        "multihead", wrong_answer(mlp_before_the_value, MultiHeadAsPrinted, names=["ambient"])
    ),
    "own term kept in no head": Fault("dense", wrong_sum(own_term_in_every_head)),
    "one column by the wrong axis": Fault("dense", wrong_sum(one_column_by_the_wrong_axis)),
}


class Bend:
    """MLP(v) = a tanh(v), entry by entry."""

    def __init__(self, a: float) -> None:
        self.a = a

    def ambient(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * torch.tanh(x)

    def check_size(self, x: torch.Tensor) -> None:
        pass

    def loop(self, v: list[float]) -> list[float]:
        return [self.a * math.tanh(entry) for entry in v]


def fields_of_one_head(n: int, d: int) -> list[object]:
    dense, value = normal(d, d, seed=1), normal(d, d, seed=2)
    thin = LowRank(normal(d, 2, seed=3), normal(d, 2, seed=4))
    narrow = LowRank(normal(d, 1, seed=5), normal(d, 1, seed=6))
    tied = torch.full((n, n), 0.3, dtype=F64)  # with B = 0 all keys are equal but for rounding
    tied[:, 0] = 0.1 + 0.2
    return [
        SA(1.5, query_key=thin, value=narrow, causal=True),
        USA(1.5, query_key=thin, value=thin, bias=hs.fields.alibi_bias(n, 0.4)),
        Hardmax(query_key=dense, value=value, causal=True),
        Hardmax(query_key=dense, bias=normal(n, n, seed=7)),
        Hardmax(query_key=torch.zeros(d, d, dtype=F64), value=thin, bias=tied),
        Hardmax(query_key=dense, tie_tolerance=0.5),
        SinkhornAttention(1.5, max_iterations=100),
        SinkhornAttention(2.0, query_key=dense, value=value, bias=normal(n, n, seed=7), max_iterations=100),
    ]


def fields_of_heads(n: int, d: int) -> list[MultiHead]:
    eye, b, v = torch.eye(d, dtype=F64), normal(3, d, d, seed=8), normal(3, d, d, seed=9)
    thin = [LowRank(normal(d, r, seed=r), normal(d, r, seed=r + 9)) for r in (1, 2, 3)]
    found = []
    for kind in (SA, USA):
        found.append(MultiHead([kind(0.5 + h, value=(h - 2.5) * eye) for h in range(3)]))
        found.append(MultiHead([kind(0.5 + h, query_key=b[h], value=v[h]) for h in range(3)], scale=0.8))
        heads = [kind(1.0, query_key=thin[h], value=thin[2 - h], causal=True) for h in range(3)]
        found.append(MultiHead(heads, scale=1.0))
        biases = [normal(n, n, seed=h) for h in range(2)]
        found.append(MultiHead([kind(1.0, bias=biases[0]), kind(2.0, bias=biases[1], value=v[0]), kind(0.3)]))
    query, out = normal(4, 2, d), normal(4, d, 2, seed=1)
    found.append(MultiHead.from_weights(query, normal(2, 2, d, seed=2), normal(2, 2, d, seed=3), out, beta=0.9))
    return found


def close(value: torch.Tensor, expected: list) -> bool:
    rows = torch.tensor(expected, dtype=F64)
    return bool((value - rows).abs().max() <= 1e-12 * rows.abs().max().clamp(min=1))


def dense_weights_agree(d: int) -> bool:
    """What ``from_weights`` means, head by head, and a matrix multiplied out."""
    query, key, value, out = normal(4, 2, d), normal(2, 2, d, seed=2), normal(2, 2, d, seed=3), normal(4, d, 2, seed=1)
    field = MultiHead.from_weights(query, key, value, out, beta=0.9)
    for h, head in enumerate(field.heads):
        b = family.product(query[h].mT.tolist(), key[h // 2].mT.tolist())
        v = family.product(out[h].tolist(), value[h // 2].mT.tolist())
        if not (close(head.query_key.dense(), b) and close(head.value.dense(), v)):
            return False
    return True


def agrees_with_oracle() -> bool:
    """Kernel, ambient, velocity and outputs of every field, with and without weights and padding."""
    n, d = 5, 3
    x = tokens(n, d)
    lists = x.tolist()
    for given in ({}, measure(["weights", "mask"], n)):
        weights, masses = weights_of(x, **given), listed(given)
        for field in fields_of_one_head(n, d):
            kernel = family.kernel(type(field).__name__, lists, family.head(field), **masses)
            ambient = family.ambient(kernel, lists, family.head(field)["value"])
            pairs = [(field.kernel(x, weights=weights), kernel), (field.ambient(x, weights=weights), ambient)]
            pairs.append((field(x, **given), family.tangent(lists, ambient)))
            if not all(close(*pair) for pair in pairs):
                return False
        for field in fields_of_heads(n, d):
            kind, heads = type(field.heads[0]).__name__, [family.head(head) for head in field.heads]
            scale = 0.8 if field.scale == 0.8 else {3: 1 / 3, 4: 1.0}[len(heads)]
            scale = 1.0 if field.heads[0].causal else scale
            parts = [family.multihead_ambient(kind, lists, [head], 1.0, **masses) for head in heads]
            pairs = [
                (field.kernel(x, weights=weights), [family.kernel(kind, lists, head, **masses) for head in heads]),
                (field.outputs(x, weights=weights), parts),
                (field.ambient(x, weights=weights), family.multihead_ambient(kind, lists, heads, scale, **masses)),
                (field(x, **given), family.multihead_velocity(kind, lists, heads, scale, **masses)),
            ]
            mlps = [Bend(1.0 + h) for h in range(len(heads))]
            inside = family.printed_ambient(kind, lists, heads, [mlp.loop for mlp in mlps], **masses)
            pairs.append((MultiHeadAsPrinted(field.heads, mlps).ambient(x, weights=weights), inside))
            if not all(close(*pair) for pair in pairs):
                return False
    return close(hs.fields.alibi_bias(n, 0.4), family.alibi(n, 0.4)) and dense_weights_agree(d)


def test_the_unchanged_code_passes():
    assert agrees_with_oracle()


@pytest.mark.parametrize("name", FAULTS)
def test_oracle_catches(name):
    assert outcome(FAULTS[name].plant, agrees_with_oracle) == FAULTS[name].found


def test_the_last_newton_step_corrects_the_potential():
    """So it is the sign alone that the oracle sees in "last step uphill"."""
    assert outcome(last_step(1), agrees_with_oracle) == "missed"


def test_every_part_has_planted_faults():
    assert {fault.part for fault in FAULTS.values()} == set(PARTS)
    assert len(FAULTS) == 38
