"""Planted faults are where they should be, go wrong once a call, and leave nothing behind."""

from __future__ import annotations

import ast
import importlib.util
import sys

import pytest
import torch

from helmscope.fields.attention import SA, USA
from helmscope.fields.multihead import MultiHead
from helmscope.geometry.sphere import project
from helmscope.kernels.request import AttentionSum
from helmscope.types import HelmscopeError
from support.planting import MOTION, Plant, Rewrite, misread, outcome, wrong_answer, wrong_request, wrong_sum

X = torch.eye(2, dtype=torch.float64)
TOY = """
def double(x):
    return x + x

class Base:
    def value(self, x):
        return x

class Child(Base):
    def value(self, x, *, scale=3):
        own = super().value(x)
        return [scale * own - 1 for _ in range(2)]
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    spec = importlib.util.spec_from_file_location("helmscope.toy", tmp_path / "toy.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "helmscope.toy", module)
    spec.loader.exec_module(module)
    return module


def doubled(answer, field, x, m):
    return 2 * answer


def library() -> dict[tuple[str, ...], object]:
    """Everything with a name in the loaded modules and in their classes."""
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "helmscope"}
    named = {(name, part): vars(module)[part] for name, module in modules.items() for part in vars(module)}
    kinds = {key: kind for key, kind in named.items() if isinstance(kind, type)}
    return named | {(*key, part): thing for key, kind in kinds.items() for part, thing in vars(kind).items()}


PLANTS = {
    "a function": Plant(lambda right, x, v: v, project),
    "a method": wrong_answer(doubled, USA),
    "a property": Plant(lambda right, own: own.total, (AttentionSum, ["mean"])),
    "a class method": Plant(lambda right, *given: None, (MultiHead, ["from_weights"])),
    "a request": wrong_request(lambda request: request),
    "a sum of some methods": wrong_sum(lambda result, request: result).during(SA, names=MOTION),
}


@pytest.mark.parametrize("name", PLANTS)
def test_nothing_is_left_behind(name):
    before = library()
    with PLANTS[name]:
        assert library() != before
    assert library() == before
    with pytest.raises(ZeroDivisionError), PLANTS[name]:
        _ = 1 / 0
    assert library() == before


def test_a_function_is_replaced_wherever_it_was_imported():
    with Plant(lambda right, x, v: right(x, v) + 7, project) as plant:
        assert sys.modules["helmscope.fields.attention"].project(X, X).equal(torch.full_like(X, 7))
        assert sys.modules["helmscope.geometry.sphere"].project is not project
    assert plant.reached == 1
    assert sys.modules["helmscope.fields.attention"].project is project


def test_only_the_outermost_call_goes_wrong():
    field = SA(0.0)
    right = field(X)
    with wrong_answer(doubled, SA, names=("__call__", "velocity")) as plant:
        assert field(X).equal(2 * right)
        assert field.velocity(X).equal(2 * right)
        assert USA(0.0)(X).equal(right)
    assert plant.reached == 2


def test_weights_and_padding_reach_a_change_of_the_answer():
    seen = []
    weights, mask = torch.tensor([2.0, 3.0], dtype=X.dtype), torch.tensor([True, False])
    with wrong_answer(lambda answer, field, x, m: seen.append(m), SA):
        SA(0.0)(X)
        SA(0.0)(X, weights=weights, mask=mask)
        SA(0.0).kernel(X, weights=weights)
    assert [m if m is None else m.tolist() for m in seen] == [None, [2.0, 0.0], [2.0, 3.0]]


def test_a_misread_parameter_stays_what_it_is():
    field = SA(0.0, value=3 * torch.eye(2))
    right = field(X)
    with misread(SA, value=lambda value: 2 * value):
        assert field(X).equal(2 * right)
        assert field.value.equal(3 * torch.eye(2))


def test_a_plant_can_be_confined_to_methods_and_objects():
    field, other, ambient = SA(0.0), SA(1.0), SA(0.0).ambient(X)
    plant = Plant(lambda right, x, v: 0 * v, project).during(SA, names=MOTION, where=lambda field: field.beta == 0)
    with plant:
        assert field(X).equal(0 * X)
        assert not other(X).equal(0 * X)
        assert field.ambient(X).equal(ambient)
        assert not USA(0.0)(X).equal(0 * X)
    assert plant.reached == 1


def test_outcomes():
    plant = wrong_answer(doubled, SA)

    def refused():
        SA(0.0)(X)
        raise HelmscopeError("no")

    assert outcome(plant, lambda: bool(SA(0.0)(X).sum() < 1.5)) == "seen"
    assert outcome(plant, lambda: bool(SA(0.0)(X).sum() > 0)) == "missed"
    assert outcome(plant, refused) == "refused"
    assert outcome(plant, lambda: bool(USA(0.0)(X).sum() > 0)) == "unreached"
    with pytest.raises(TypeError):
        outcome(Plant(lambda right: None, project), lambda: bool(SA(0.0)(X).sum() > 0))


def test_a_method_that_is_gone_is_named():
    plant = wrong_answer(doubled, SA, names=["speed"])
    with pytest.raises(AssertionError, match="SA has none of speed: point the fault at"), plant:
        pass


def without_sum(node):
    """a in place of a + b."""
    match node:
        case ast.BinOp(left, ast.Add(), _):
            return left
    return None


def without_difference(node):
    """a in place of a - b."""
    match node:
        case ast.BinOp(left, ast.Sub(), _):
            return left
    return None


def without_argument(node):
    """None in place of x."""
    return ast.Constant(None) if isinstance(node, ast.Name) and node.id == "x" else None


def test_syntax_is_changed_in_a_function(toy):
    with Rewrite(toy, without_sum) as plant:
        assert toy.double(2) == 2
    assert plant.reached == 1
    assert toy.double(2) == 4


def test_syntax_is_changed_in_a_method_that_calls_its_parent(toy):
    with Rewrite(toy, without_difference):
        assert toy.Child().value(2) == [6, 6]
        assert toy.Child().value(2, scale=1) == [2, 2]
    assert toy.Child().value(2) == [5, 5]


def test_a_change_of_syntax_must_find_one_node(toy):
    with pytest.raises(AssertionError, match=r"without_argument matches 4 nodes of helmscope\.toy"):
        Rewrite(toy, without_argument).__enter__()
    with pytest.raises(AssertionError, match=r"<lambda> matches 0 nodes of helmscope\.toy"):
        Rewrite(toy, lambda node: None).__enter__()
