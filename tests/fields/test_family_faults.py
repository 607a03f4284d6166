"""Planted faults in the attention family: the loop oracles must catch every one.

As in ``test_faults``: a fault is one textual change of a source file; the changed modules are compiled afresh,
beside the real ones.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import attention_family_oracles as family
from attention_cases import F64, listed, measure, normal, tokens

NAMES = ("lowrank", "attention", "hardmax", "sinkhorn", "alibi", "multihead")
MODULES = (
    *(f"helmscope.kernels.{name}" for name in ("kernel", "dense", "choose")),
    *(f"helmscope.fields.{name}" for name in NAMES),
)


class Fault(NamedTuple):
    module: str
    old: str
    new: str


FAULTS = {
    "factors swapped": Fault(
        "lowrank",
        "matrix_product(x, matrix.left.to(x)), matrix_product(x, matrix.right.to(x))",
        "matrix_product(x, matrix.right.to(x)), matrix_product(x, matrix.left.to(x))",
    ),
    "low-rank key not reduced": Fault("lowrank", "matrix_product(x, matrix.right.to(x))\n", "x[..., : matrix.rank]\n"),
    "dense of low rank transposed": Fault(
        "lowrank", "self.left @ self.right.to(self.left).mT", "self.right @ self.left.mT"
    ),
    "low-rank value swapped": Fault(
        "attention", "matrix_product(x, self.value.right.to(x))", "matrix_product(x, self.value.left.to(x))"
    ),
    "own term skipped for low rank": Fault(
        "attention",
        "if isinstance(matrix, LowRank):\n        return None",
        "if isinstance(matrix, LowRank):\n        return 1.0",
    ),
    "settling forgotten": Fault("attention", "None if type(self).settle is Attention.settle else self.settle", "None"),
    "hardmax takes the least": Fault(
        "hardmax", "best >= best.amax(-1, keepdim=True) - tie", "best <= best.amin(-1, keepdim=True) + tie"
    ),
    "hardmax over queries": Fault("hardmax", "best.amax(-1, keepdim=True)", "best.amax(-2, keepdim=True)"),
    "hardmax keeps logits": Fault(
        "hardmax", "torch.where(chosen, 0.0, -torch.inf).to(pairs.dtype)", "torch.where(chosen, pairs, -torch.inf)"
    ),
    "no tolerance of ties": Fault("hardmax", "TIE[pairs.dtype] if self.tie is None else self.tie", "0.0"),
    "ties too wide": Fault("hardmax", "torch.float64: 1e-12", "torch.float64: 0.1"),
    "potential negative": Fault("sinkhorn", "(pairs + potential.unsqueeze(-2))", "(pairs - potential.unsqueeze(-2))"),
    "potential on queries": Fault("sinkhorn", "(pairs + potential.unsqueeze(-2))", "(pairs + potential.unsqueeze(-1))"),
    "last step uphill": Fault("sinkhorn", "dual.potential - (dual.response", "1.001 * dual.potential + (dual.response"),
    "columns of sum 1 for any weights": Fault(
        "sinkhorn",
        "m = torch.ones_like(pairs[..., 0]) if weights is None else weights.expand(pairs.shape[:-1])",
        "m = torch.ones_like(pairs[..., 0])",
    ),
    "no convergence needed": Fault(
        "sinkhorn", "for _ in range(max_sweeps):", "for _ in range(1):\n        found = torch.ones_like(found)"
    ),
    "sweep without half of the weights": Fault(
        "sinkhorn", "torch.where(self.real, m, 1.0).log() / 2", "torch.where(self.real, m, 1.0).log()"
    ),
    "alibi rises": Fault("alibi", "return -real_number", "return real_number"),
    "alibi squared": Fault("alibi", "(places[:, None] - places).abs()", "(places[:, None] - places) ** 2"),
    "sum of heads for their mean": Fault(
        "multihead", "1 / len(self.heads) if self.scale is None", "1.0 if self.scale is None"
    ),
    "scale ignored": Fault("multihead", "return self.scale * matrix_product(rows", "return matrix_product(rows"),
    "first head for all": Fault(
        "multihead", "[head.factor for head in self.heads]", "[self.heads[0].factor for head in self.heads]"
    ),
    "bias of the first head": Fault(
        "multihead",
        "none if head.bias is None else head.bias.to(x)",
        "none if head.bias is None else self.heads[0].bias.to(x)",
    ),
    "causal mask lost": Fault("multihead", "causal=first.causal", "causal=False"),
    "query and key swapped": Fault(
        "multihead",
        "self._through(x, left), self._through(x, right)",
        "self._through(x, right), self._through(x, left)",
    ),
    "values transposed": Fault("multihead", "left.mT.reshape(heads * r, -1)", "left.reshape(heads * r, -1)"),
    "heads and tokens mixed": Fault(
        "multihead",
        "parts.transpose(-3, -2).reshape(*parts.shape[:-3], n, heads * r)",
        "parts.reshape(*parts.shape[:-3], n, heads * r)",
    ),
    "scales of values lost": Fault("multihead", "torch.tensor([self._value_scales],", "torch.tensor([[1.0] * heads],"),
    "heads share one scale": Fault("multihead", "torch.exp(shift - top.unsqueeze(-3)) * sums.total", "sums.total"),
    "M lost": Fault("multihead", "* sums.total / total_weight(request.value, request.weights)", "* sums.total"),
    "own term skipped for any value": Fault("multihead", "head.value_scale is not None for head", "True for head"),
    "outputs without values": Fault(
        "multihead", "return parts if left is None else matrix_product(parts, left.mT.contiguous())", "return parts"
    ),
    "padding on the wrong side": Fault(
        "multihead",
        "pad(matrix.right.to(x), (0, rank - matrix.rank))",
        "pad(matrix.right.to(x), (rank - matrix.rank, 0))",
    ),
    "groups interleaved": Fault(
        "multihead", "value=LowRank(out[h], value[h // shared].mT)", "value=LowRank(out[h], value[h % len(value)].mT)"
    ),
    "mlps summed": Fault("multihead", "return total / len(self.mlps)", "return total"),
    "mlp before the value": Fault(
        "multihead",
        "self.attention.outputs(x, weights).unbind(-3)",
        "[self.attention.ambient(x, weights)] * len(self.mlps)",
    ),
    "own term kept in no head": Fault(
        "dense", "torch.exp(own - mass_shift) * skip_self", "torch.exp(own - mass_shift)"
    ),
    "one column by the wrong axis": Fault(
        "dense", "(a * b.mT).sum(-1, keepdim=True)", "(a * b.mT).sum(-2, keepdim=True).mT"
    ),
}


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def load(fault: Fault | None, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """All names of freshly compiled modules, with the fault in one of them."""
    names: dict[str, object] = {}
    with monkeypatch.context() as patch:
        for name in MODULES:
            text = source(name)
            if fault is not None and name.endswith(f".{fault.module}"):
                assert text.count(fault.old) == 1, f"{name} holds {text.count(fault.old)} of {fault.old!r}"
                text = text.replace(fault.old, fault.new)
            module = types.ModuleType(name)
            patch.setitem(sys.modules, name, module)  # the next ones import it from here
            exec(compile(text, name, "exec"), module.__dict__)
            names.update(vars(module))
    return types.SimpleNamespace(**names)


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


def fields_of_one_head(m: types.SimpleNamespace, n: int, d: int) -> list[object]:
    dense, value = normal(d, d, seed=1), normal(d, d, seed=2)
    thin = m.LowRank(normal(d, 2, seed=3), normal(d, 2, seed=4))
    narrow = m.LowRank(normal(d, 1, seed=5), normal(d, 1, seed=6))
    tied = torch.full((n, n), 0.3, dtype=F64)  # with B = 0 all keys are equal but for rounding
    tied[:, 0] = 0.1 + 0.2
    return [
        m.SA(1.5, query_key=thin, value=narrow, causal=True),
        m.USA(1.5, query_key=thin, value=thin, bias=m.alibi(n, 0.4)),
        m.Hardmax(query_key=dense, value=value, causal=True),
        m.Hardmax(query_key=dense, bias=normal(n, n, seed=7)),
        m.Hardmax(query_key=torch.zeros(d, d, dtype=F64), value=thin, bias=tied),
        m.Hardmax(query_key=dense, tie=0.5),
        m.SinkhornAttention(1.5),
        m.SinkhornAttention(2.0, query_key=dense, value=value, bias=normal(n, n, seed=7)),
    ]


def fields_of_heads(m: types.SimpleNamespace, n: int, d: int) -> list[object]:
    eye, b, v = torch.eye(d, dtype=F64), normal(3, d, d, seed=8), normal(3, d, d, seed=9)
    thin = [m.LowRank(normal(d, r, seed=r), normal(d, r, seed=r + 9)) for r in (1, 2, 3)]
    found = []
    for kind in (m.SA, m.USA):
        found.append(m.MultiHead([kind(0.5 + h, value=(h - 2.5) * eye) for h in range(3)]))
        found.append(m.MultiHead([kind(0.5 + h, query_key=b[h], value=v[h]) for h in range(3)], scale=0.8))
        heads = [kind(1.0, query_key=thin[h], value=thin[2 - h], causal=True) for h in range(3)]
        found.append(m.MultiHead(heads, scale=1.0))
        biases = [normal(n, n, seed=h) for h in range(2)]
        found.append(m.MultiHead([kind(1.0, bias=biases[0]), kind(2.0, bias=biases[1], value=v[0]), kind(0.3)]))
    query, out = normal(4, 2, d), normal(4, d, 2, seed=1)
    found.append(m.MultiHead.from_weights(query, normal(2, 2, d, seed=2), normal(2, 2, d, seed=3), out, beta=0.9))
    return found


def close(value: torch.Tensor, expected: list) -> bool:
    rows = torch.tensor(expected, dtype=F64)
    return bool((value - rows).abs().max() <= 1e-12 * rows.abs().max().clamp(min=1))


def dense_weights_agree(m: types.SimpleNamespace, d: int) -> bool:
    """What ``from_weights`` means, head by head, and a matrix multiplied out."""
    query, key, value, out = normal(4, 2, d), normal(2, 2, d, seed=2), normal(2, 2, d, seed=3), normal(4, d, 2, seed=1)
    field = m.MultiHead.from_weights(query, key, value, out, beta=0.9)
    for h, head in enumerate(field.heads):
        b = family.product(query[h].mT.tolist(), key[h // 2].mT.tolist())
        v = family.product(out[h].tolist(), value[h // 2].mT.tolist())
        if not (close(head.query_key.dense(), b) and close(head.value.dense(), v)):
            return False
    return True


def agrees_with_oracle(m: types.SimpleNamespace) -> bool:
    """Kernel, ambient, velocity and outputs of every field, with and without weights and padding."""
    n, d = 5, 3
    x = tokens(n, d)
    lists = x.tolist()
    for given in ({}, measure(["weights", "mask"], n)):
        weights, masses = m.check_weights(x, given.get("weights"), given.get("mask")), listed(given)
        for field in fields_of_one_head(m, n, d):
            kernel = family.kernel(type(field).__name__, lists, family.head(field), **masses)
            ambient = family.ambient(kernel, lists, family.head(field)["value"])
            pairs = [(field.kernel(x, weights), kernel), (field.ambient(x, weights), ambient)]
            pairs.append((field(x, **given), family.tangent(lists, ambient)))
            if not all(close(*pair) for pair in pairs):
                return False
        for field in fields_of_heads(m, n, d):
            kind, heads = type(field.heads[0]).__name__, [family.head(head) for head in field.heads]
            scale = 0.8 if field.scale == 0.8 else {3: 1 / 3, 4: 1.0}[len(heads)]
            scale = 1.0 if field.heads[0].causal else scale
            parts = [family.multihead_ambient(kind, lists, [head], 1.0, **masses) for head in heads]
            pairs = [
                (field.kernel(x, weights), [family.kernel(kind, lists, head, **masses) for head in heads]),
                (field.outputs(x, weights), parts),
                (field.ambient(x, weights), family.multihead_ambient(kind, lists, heads, scale, **masses)),
                (field(x, **given), family.multihead_velocity(kind, lists, heads, scale, **masses)),
            ]
            mlps = [Bend(1.0 + h) for h in range(len(heads))]
            inside = family.printed_ambient(kind, lists, heads, [mlp.loop for mlp in mlps], **masses)
            pairs.append((m.MultiHeadAsPrinted(field.heads, mlps).ambient(x, weights), inside))
            if not all(close(*pair) for pair in pairs):
                return False
    return close(m.alibi(n, 0.4), family.alibi(n, 0.4)) and dense_weights_agree(m, d)


def survives(m: types.SimpleNamespace) -> bool:
    """Whether nothing was noticed; an error while computing is a notice."""
    try:
        return agrees_with_oracle(m)
    except (ValueError, RuntimeError, IndexError):
        return False


def test_the_code_as_it_is_passes(monkeypatch):
    fresh = load(None, monkeypatch)
    real = importlib.import_module("helmscope.fields.multihead")
    assert fresh.MultiHead is not real.MultiHead
    assert agrees_with_oracle(fresh)


@pytest.mark.parametrize("name", FAULTS)
def test_oracle_catches(name, monkeypatch):
    assert not survives(load(FAULTS[name], monkeypatch))


def test_faults_are_different_and_in_every_file():
    assert len(set(FAULTS.values())) == len(FAULTS) == 38
    assert {fault.module for fault in FAULTS.values()} == {"dense", *NAMES}
    assert all(fault.old != fault.new for fault in FAULTS.values())


def test_the_real_modules_are_untouched(monkeypatch):
    before = {name: sys.modules.get(name) for name in MODULES}
    load(FAULTS["alibi rises"], monkeypatch)
    assert {name: sys.modules.get(name) for name in MODULES} == before
