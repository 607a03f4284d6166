"""Planted faults: every one of them must be caught by the loop oracle, or the oracle's agreement means little.

A fault is one textual change of the source that the attention fields are made of. The changed modules are compiled
afresh, beside the real ones. Invariants alone (tangency, rotation and permutation equivariance) are tried on the same
faults, to show what they miss.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import oracles

F64 = torch.float64
SPHERE, KERNEL = "helmscope.geometry.sphere", "helmscope.kernels.kernel"
DENSE, CHOOSE = "helmscope.kernels.dense", "helmscope.kernels.choose"
FIELD, LOWRANK = "helmscope.fields.field", "helmscope.fields.lowrank"
ATTENTION = "helmscope.fields.attention"
MODULES = (SPHERE, KERNEL, DENSE, CHOOSE, FIELD, LOWRANK, ATTENTION)  # each imports only from those before it


class Fault(NamedTuple):
    kind: str
    module: str
    old: str
    new: str


FAULTS = {
    "projection adds": Fault("sign", SPHERE, "return v - (x * v).sum", "return v + (x * v).sum"),
    "beta negative": Fault("sign", ATTENTION, "self.factor * query,", "-self.factor * query,"),
    "bias negative": Fault("sign", DENSE, "pairs = pairs + bias", "pairs = pairs - bias"),
    "value scale without sign": Fault(
        "sign", ATTENTION, "return self.value_scale * total", "return abs(self.value_scale) * total"
    ),
    "causal triangle flipped": Fault("sign", DENSE, ".triu(1)", ".tril(-1)"),
    "mask inverted": Fault("sign", FIELD, "combined * mask.to(x)", "combined * (~mask).to(x)"),
    "beta twice": Fault("factor", ATTENTION, "self.factor * query,", "2 * self.factor * query,"),
    "value scale lost": Fault("factor", ATTENTION, "return self.value_scale * total", "return total"),
    "no 1/n": Fault("factor", ATTENTION, "float(x.shape[-2]) if weights is None", "1.0 if weights is None"),
    "M counts tokens": Fault("factor", ATTENTION, "weights.sum(-1)[..., None, None]", "float(x.shape[-2])"),
    "mass without the own term": Fault(
        "factor", DENSE, "mass = mass * torch.exp(shift - mass_shift) + own_mass", "mass = mass"
    ),
    "mass not brought to its scale": Fault("factor", DENSE, "mass * torch.exp(shift - mass_shift)", "mass"),
    "mean not brought to its scale": Fault(
        "factor", KERNEL, "ratio * torch.exp(self.shift - self.mass_shift)", "ratio"
    ),
    "velocity without its scale": Fault(
        "factor", ATTENTION, "torch.exp(scaled.log_scale) * scaled.direction", "scaled.direction"
    ),
    "ambient without its scale": Fault("factor", ATTENTION, "torch.exp(sums.shift) * sums.total", "sums.total"),
    "projection forgotten": Fault(
        "factor",
        ATTENTION,
        "project(x, self._valued(self._sum(x, weights, tangent=True).mean))",
        "self._valued(self._sum(x, weights, tangent=True).mean)",
    ),
    "query_key transposed": Fault("transpose", LOWRANK, "x, matrix.to(x))", "x, matrix.to(x).mT)"),
    "value transposed": Fault("transpose", ATTENTION, "self.value.to(total).mT", "self.value.to(total)"),
    "bias transposed": Fault("transpose", DENSE, "pairs = pairs + bias", "pairs = pairs + bias.mT"),
    "logits transposed": Fault("transpose", DENSE, "pairs = query @ key.mT", "pairs = key @ query.mT"),
    "kernel transposed": Fault("transpose", ATTENTION, "return terms / total", "return terms.mT / total"),
    "sum transposed": Fault(
        "transpose", DENSE, "AttentionSum(_product(terms, value),", "AttentionSum(_product(terms.mT, value),"
    ),
    "softmax over queries": Fault(
        "axis", DENSE, "terms.sum(-1, keepdim=True), shift", "terms.sum(-2, keepdim=True).mT, shift"
    ),
    "1/d for 1/n": Fault("axis", ATTENTION, "float(x.shape[-2]) if weights", "float(x.shape[-1]) if weights"),
    "weights of the query": Fault(
        "axis", DENSE, "terms = terms * weights.unsqueeze(-2)", "terms = terms * weights.unsqueeze(-1)"
    ),
    "projection over tokens": Fault("axis", SPHERE, "v - (x * v).sum(-1,", "v - (x * v).sum(-2,"),
    "padding hides queries": Fault("axis", DENSE, "(weights == 0).unsqueeze(-2)", "(weights == 0).unsqueeze(-1)"),
    "mask ignored": Fault("mask", FIELD, "combined * mask.to(x)", "combined"),
    "causal diagonal hidden": Fault("mask", DENSE, ".triu(1)", ".triu(0)"),
    "causal mask ignored": Fault("mask", ATTENTION, "causal=self.causal", "causal=False"),
    "weights not applied": Fault("mask", DENSE, "terms = terms * weights.unsqueeze(-2)", "terms = terms"),
    "own term without weight": Fault(
        "mask", DENSE, "own_mass = own_mass * weights.unsqueeze(-1)", "own_mass = own_mass"
    ),
    "unseen key sets the scale": Fault(
        "mask", DENSE, "pairs = pairs.masked_fill((weights == 0).unsqueeze(-2), -torch.inf)", "pairs = pairs"
    ),
    "own term skipped for any V": Fault(
        "mask", ATTENTION, "skip_self=tangent and self.value_scale is not None", "skip_self=tangent"
    ),
    "own term skipped before projection": Fault(
        "mask", ATTENTION, "skip_self=tangent and self.value_scale", "skip_self=self.value_scale"
    ),
}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def tokens(n: int, d: int, seed: int) -> torch.Tensor:
    x = normal(n, d, seed=seed)
    return x / x.norm(dim=-1, keepdim=True)


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


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def load(fault: Fault | None, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A fresh attention module, with the fault in it or in what it imports."""
    with monkeypatch.context() as patch:
        for name in MODULES:
            text = source(name)
            if fault is not None and fault.module == name:
                assert text.count(fault.old) == 1, f"{name} holds {text.count(fault.old)} of {fault.old!r}"
                text = text.replace(fault.old, fault.new)
            module = types.ModuleType(name)
            patch.setitem(sys.modules, name, module)  # the next ones import it from here
            exec(compile(text, name, "exec"), module.__dict__)
    return module


def listed(given):
    return {name: part.tolist() if isinstance(part, torch.Tensor) else part for name, part in given.items()}


def agrees_with_oracle(attention: types.ModuleType) -> bool:
    """Velocity, ambient and kernel of SA and USA at 1e-12 of the oracle's greatest value, in every case."""
    for x, beta, given, measure in CASES:
        for name in ("SA", "USA"):
            if name == "USA" and beta > 700:  # the oracle itself would overflow
                continue
            field = getattr(attention, name)(beta, **given)
            weights = attention.check_weights(x, measure.get("weights"), measure.get("mask"))
            values = {"velocity": field(x, **measure), "ambient": field.ambient(x, weights)}
            values["kernel"] = field.kernel(x, weights)
            for quantity, value in values.items():
                options = {key: part for key, part in given.items() if quantity != "kernel" or key != "value"}
                loop = getattr(oracles, f"{name.lower()}_{quantity}")
                expected = torch.tensor(loop(x.tolist(), beta, **listed(options), **listed(measure)), dtype=F64)
                if not (value - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1):
                    return False
    return True


TURNED = ("query_key", "value")


def scalar(matrix: torch.Tensor) -> bool:
    """A multiple of I stays what it is under rotation; multiplied out, it would only by rounding."""
    return torch.equal(matrix, matrix[0, 0] * torch.eye(len(matrix), dtype=F64))


def keeps_invariants(attention: types.ModuleType) -> bool:
    """Tangency, rotation of tokens and matrices together, permutation of tokens, bias and weights together."""
    order = torch.tensor([3, 0, 4, 1, 2])
    for x, beta, given, measure in CASES:
        n, d = x.shape
        turn, shuffle = torch.linalg.qr(normal(d, d, seed=20)).Q, order[order < n]
        turned = {
            key: turn @ part @ turn.mT if key in TURNED and not scalar(part) else part for key, part in given.items()
        }
        shuffled = {key: part[shuffle][:, shuffle] if key == "bias" else part for key, part in given.items()}
        for name in ("SA", "USA"):
            if name == "USA" and beta > 700:
                continue
            kind = getattr(attention, name)
            velocity = kind(beta, **given)(x, **measure)
            bound = 1e-9 * velocity.abs().max().clamp(min=1)
            gaps = [(velocity * x).sum(-1), kind(beta, **turned)(x @ turn.mT, **measure) - velocity @ turn.mT]
            if not given.get("causal"):
                moved = {key: part[shuffle] for key, part in measure.items()}
                gaps.append(kind(beta, **shuffled)(x[shuffle], **moved) - velocity[shuffle])
            if not all(gap.abs().max() <= bound for gap in gaps):
                return False
    return True


def survives(check, attention: types.ModuleType) -> bool:
    """Whether nothing was noticed; an error while computing is a notice."""
    try:
        return check(attention)
    except (ValueError, RuntimeError, IndexError):
        return False


def test_the_code_as_it_is_passes(monkeypatch):
    attention = load(None, monkeypatch)
    assert attention.SA is not importlib.import_module(ATTENTION).SA
    assert agrees_with_oracle(attention)
    assert keeps_invariants(attention)


@pytest.mark.parametrize("name", FAULTS)
def test_oracle_catches(name, monkeypatch):
    assert not survives(agrees_with_oracle, load(FAULTS[name], monkeypatch))


def test_every_kind_of_fault_is_planted():
    kinds = [fault.kind for fault in FAULTS.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "sign": 6,
        "factor": 10,
        "transpose": 6,
        "axis": 5,
        "mask": 8,
    }
    assert len({fault[1:] for fault in FAULTS.values()}) == len(FAULTS) == 35


def test_invariants_alone_catch_4_of_35(monkeypatch):
    """Why there are oracles: a wrong field is tangent and equivariant too, unless its projection is at fault, or it
    divides by nothing.
    """
    caught = {n for n, fault in FAULTS.items() if not survives(keeps_invariants, load(fault, monkeypatch))}
    assert caught == {"projection adds", "projection forgotten", "projection over tokens", "softmax over queries"}
    assert len(caught) < len(FAULTS)


def test_the_real_modules_are_untouched(monkeypatch):
    before = {name: sys.modules.get(name) for name in MODULES}
    load(FAULTS["beta negative"], monkeypatch)
    assert {name: sys.modules.get(name) for name in MODULES} == before
