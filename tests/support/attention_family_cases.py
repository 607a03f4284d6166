"""Fields of the attention family of all kinds, and what to hold them against."""

from __future__ import annotations

import math

import torch

import support.attention_family_oracles as family
from helmscope.fields.activations import Tanh
from helmscope.fields.attention import SA, USA
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.lowrank import LowRank
from helmscope.fields.mlp import MLP
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.fields.weights import check_weights
from support.attention_cases import F64, listed, normal

KINDS = {
    "sa": SA,
    "usa": USA,
    "hardmax": lambda beta, **given: Hardmax(**given),
    "sinkhorn": SinkhornAttention,
}


def tensor(rows):
    return torch.tensor(rows, dtype=F64)


def thin(d, r, seed=0):
    return LowRank(normal(d, r, seed=seed), normal(d, r, seed=seed + 1) / math.sqrt(d))


def assert_oracle(field, x, given):
    """A field of one head and one system: 1e-12 of the greatest value before projection, or of 1."""
    lists, masses, kind = x.tolist(), listed(given), type(field).__name__
    kernel = family.kernel(kind, lists, family.head(field), **masses)
    ambient = family.ambient(kernel, lists, family.head(field)["value"])
    combined = check_weights(x, given.get("weights"), given.get("mask"))
    size = 1e-12 * tensor(ambient).abs().max().clamp(min=1)
    assert (field.kernel(x, combined) - tensor(kernel)).abs().max() <= 1e-12 * tensor(kernel).abs().max().clamp(min=1)
    assert (field.ambient(x, combined) - tensor(ambient)).abs().max() <= size
    assert (field(x, **given) - tensor(family.tangent(lists, ambient))).abs().max() <= size


def heads_of(kind, make, n, d, seed=0, count=3):
    """``count`` heads with betas 0.5, 1, ...; ``make`` names what they hold."""
    given = [{} for _ in range(count)]
    for h, parts in enumerate(given):
        s = seed + 20 * h
        if make == "scales":
            parts["value"] = (h - 1.5) * torch.eye(d, dtype=F64)
        if make in ("dense", "all"):
            parts.update(query_key=normal(d, d, seed=s + 1) / math.sqrt(d), value=normal(d, d, seed=s + 2))
        if make == "thin":  # ranks differ
            parts.update(query_key=thin(d, 1 + h, s + 1), value=thin(d, 3 - h % 3, s + 3))
        if make == "mixed" and h == 0:
            parts.update(query_key=thin(d, 2, s + 1))
        if make == "mixed" and h == 1:
            parts.update(query_key=normal(d, d, seed=s + 1), value=thin(d, 1, s + 3))
        if make in ("bias", "all") and h != 1:
            parts["bias"] = normal(n, n, seed=s + 4)
        if make == "all" and kind != "sinkhorn":
            parts["causal"] = True
    return [KINDS[kind](0.5 * (1 + h), **parts) for h, parts in enumerate(given)]


def assert_multihead_oracle(field, x, given):
    """A field of several heads and one system: 1e-12 of the greatest output of a head, or of 1."""
    lists, masses, kind = x.tolist(), listed(given), type(field.heads[0]).__name__
    heads = [family.head(head) for head in field.heads]
    combined = check_weights(x, given.get("weights"), given.get("mask"))
    kernel = tensor([family.kernel(kind, lists, head, **masses) for head in heads])
    ambient = tensor(family.multihead_ambient(kind, lists, heads, field.scale, **masses))
    velocity = tensor(family.multihead_velocity(kind, lists, heads, field.scale, **masses))
    alone = tensor([family.multihead_ambient(kind, lists, [head], 1.0, **masses) for head in heads])
    size = 1e-12 * alone.abs().max().clamp(min=1)
    assert (field.kernel(x, combined) - kernel).abs().max() <= 1e-12 * kernel.abs().max().clamp(min=1)
    assert (field.ambient(x, combined) - ambient).abs().max() <= size
    assert (field(x, **given) - velocity).abs().max() <= size
    assert (field.outputs(x, combined) - alone).abs().max() <= size


def force(d, hidden, seed):
    """An MLP, and the same by loops."""
    w_in, w_out, b_in = normal(hidden, d, seed=seed), normal(d, hidden, seed=seed + 1), normal(hidden, seed=seed + 2)

    def loop(v):
        bent = [
            math.tanh(math.fsum(a * b for a, b in zip(row, v, strict=True)) + c)
            for row, c in zip(w_in.tolist(), b_in.tolist(), strict=True)
        ]
        return [math.fsum(a * b for a, b in zip(row, bent, strict=True)) for row in w_out.tolist()]

    return MLP(w_in=w_in, w_out=w_out, b_in=b_in, activation=Tanh()), loop
