"""Faults planted in the library while a test runs, to show that the test would notice them.

A fault is described by what the faulty library would compute, not by how its source reads, so that it survives
a rewrite of that source. To add one, name it in the ``FAULTS`` of a test file and plant it with the first that fits of

    misread(SA, value=transposed)     a field takes one of its parameters for something else
    wrong_answer(doubled, USA)        a field answers something else
    wrong_request(change)             the kernels are asked for something else
    wrong_sum(change)                 the kernels return something else
    Plant(wrong, function)            anything else with a name: wrong(right, ...) is called in place of right(...)
    Rewrite(module, change)           a place inside a function, found in the syntax tree by its meaning

``.during(USA, names=["ambient"])`` confines a plant to the calls of some methods. ``outcome(plant, check)`` says
whether the check notices the fault.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Self

import pytest
import torch

from helmscope.kernels.choose import token_sum
from helmscope.kernels.dense import transformed_logits
from helmscope.kernels.request import AttentionSum, Request
from helmscope.types import HelmscopeError

Target = FunctionType | tuple[type, Sequence[str]]
ANSWERS = ("__call__", "velocity", "ambient", "kernel", "outputs")  # what a field is request for
MOTION = ("__call__", "velocity")


class Plant:
    """Inside ``with plant:`` every call of a target is answered by ``wrong(right, *args, **kwargs)``.

    A target is a function, replaced wherever the library has imported it, or (class, names of methods), of which the
    class must have at least one. Only the outermost call goes wrong: if ``__call__`` and the ``velocity`` that it calls
    were both faulty, a matrix would be transposed twice. ``reached`` counts the calls that went wrong.
    """

    def __init__(self, wrong: Callable[..., Any], *targets: Target) -> None:
        self.wrong, self.targets = wrong, list(targets)
        self.gates: list[Target] = []
        self.where: Callable[[Any], bool] = lambda field: True
        self.reached = 0

    def during(self, *kinds: type, names: Sequence[str] = ANSWERS, where: Callable[[Any], bool] | None = None) -> Self:
        """This plant, confined to the calls of these methods, of objects for which ``where`` holds."""
        self.gates = [(kind, names) for kind in kinds]
        self.where = where or self.where
        return self

    def __enter__(self) -> Self:
        self.reached, self.open, self.busy = 0, not self.gates, False
        self.patch = pytest.MonkeyPatch()
        try:
            for wrap, targets in ((self._faulty, self.targets), (self._gate, self.gates)):
                for target in targets:
                    _replace(target, wrap, self.patch)
        except BaseException:
            self.patch.undo()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def _faulty(self, right: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(right)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.busy or not self.open:
                return right(*args, **kwargs)
            self.busy = True
            self.reached += 1
            try:
                return self.wrong(right, *args, **kwargs)
            finally:
                self.busy = False

        return call

    def _gate(self, right: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(right)
        def call(field: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.open
            self.open = before or self.where(field)
            try:
                return right(field, *args, **kwargs)
            finally:
                self.open = before

        return call


def _replace(target: Target, wrap: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    """Puts ``wrap(right)`` in the place of methods, or of a function wherever the library has imported it."""
    if isinstance(target, FunctionType):
        new = wrap(target)
        for module in [part for name, part in sys.modules.items() if name.split(".")[0] == "helmscope"]:
            for name in [name for name, part in vars(module).items() if part is target]:
                patch.setattr(module, name, new)
        return
    kind, names = target
    found = [name for name in names if any(name in vars(base) for base in kind.__mro__)]
    assert found, f"{kind.__name__} has none of {', '.join(names)}: point the fault at what took their place"
    for name in found:
        right = inspect.getattr_static(kind, name)
        if isinstance(right, property):
            patch.setattr(kind, name, property(wrap(right.fget)))
        elif isinstance(right, classmethod):
            patch.setattr(kind, name, classmethod(wrap(right.__func__)))
        else:
            patch.setattr(kind, name, wrap(right))


class Rewrite(Plant):
    """A fault in the syntax tree of a module: ``change(node)`` returns a wrong node, or None for all nodes but one.

    ``change`` recognizes its node by meaning, such as "a logarithm divided by 2", never by exact text.
    """

    def __init__(self, module: ModuleType, change: Callable[[ast.AST], ast.AST | None]) -> None:
        super().__init__(self._run)
        self.module, self.change = module, change

    def __enter__(self) -> Self:
        assert self.module.__file__ is not None
        changed = _Changed(self.change)
        tree = ast.fix_missing_locations(changed.visit(ast.parse(Path(self.module.__file__).read_text())))
        count, name = len(changed.places), self.change.__name__
        assert count == 1, (
            f"{name} matches {count} nodes of {self.module.__name__}: let it match the one that it is about"
        )
        self.code: CodeType = compile(tree, self.module.__file__, "exec")
        place: Any = self.module
        for part in changed.places[0]:  # down to the first function; those inside it are part of its code
            owner, place = place, inspect.getattr_static(place, part)
            self.code = next(c for c in self.code.co_consts if isinstance(c, CodeType) and c.co_name == part)
            if not isinstance(place, type):
                self.targets = [(owner, [part]) if isinstance(owner, type) else place]
                break
        return super().__enter__()

    def _run(self, right: FunctionType, *args: Any, **kwargs: Any) -> Any:
        faulty = FunctionType(self.code, right.__globals__, right.__name__, right.__defaults__, right.__closure__)
        faulty.__kwdefaults__ = right.__kwdefaults__
        return faulty(*args, **kwargs)


class _Changed(ast.NodeTransformer):
    """Replaces nodes and records where: the names of the classes and functions around each."""

    def __init__(self, change: Callable[[ast.AST], ast.AST | None]) -> None:
        self.change, self.around, self.places = change, [], []

    def visit(self, node: ast.AST) -> ast.AST:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        self.around += [node.name] if named else []
        new = self.change(self.generic_visit(node))
        if new is not None:
            self.places.append(list(self.around))
        if named:
            self.around.pop()
        return node if new is None else ast.copy_location(new, node)


def outcome(plant: Plant, check: Callable[[], bool]) -> str:
    """What a check that passes without the fault makes of it.

    "seen" if it fails, "missed" if it still passes, "refused" if the library raises its own error, and "unreached" if
    the faulty code never ran: then the library takes another way now, and the fault has to move there. Any other
    exception is a mistake in the plant, and is raised.
    """
    with plant:
        try:
            found = "missed" if check() else "seen"
        except HelmscopeError:
            found = "refused"
    return found if plant.reached else "unreached"


# Fields, and what passes between them and the kernels -----------------------------------------------------------------


def weights_of(
    x: torch.Tensor, weights: torch.Tensor | None = None, mask: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Weights and padding as one tensor, None if neither is given."""
    if weights is None and mask is None:
        return None
    return (torch.ones_like(x[..., 0]) if weights is None else weights) * (1 if mask is None else mask)


def misread(*kinds: type, names: Sequence[str] = ANSWERS, **changes: Callable[[Any], Any]) -> Plant:
    """Fields that answer as if ``change(parameter)`` were given for each of these parameters."""

    def wrong(right: Callable[..., Any], field: Any, *args: Any, **kwargs: Any) -> Any:
        taken = {name: change(getattr(field, name)) for name, change in changes.items()}
        return right(replace(field, **taken), *args, **kwargs)

    return Plant(wrong, *((kind, names) for kind in kinds))


def wrong_answer(change: Callable[..., torch.Tensor], *kinds: type, names: Sequence[str] = ANSWERS) -> Plant:
    """Fields that answer ``change(answer, field, x, m)``, where m are the weights (0 at padding) or None."""

    def wrong(right: Callable[..., Any], field: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = inspect.signature(right).bind(field, x, *args, **kwargs).arguments
        m = weights_of(x, given.get("weights"), given.get("mask"))
        return change(right(field, x, *args, **kwargs), field, x, m)

    return Plant(wrong, *((kind, names) for kind in kinds))


def wrong_request(change: Callable[[Request], Request]) -> Plant:
    """Kernels that are request for ``change(request)``."""
    return Plant(lambda right, request: right(change(request)), token_sum, transformed_logits)


def wrong_sum(change: Callable[[AttentionSum, Request], AttentionSum]) -> Plant:
    """Kernels that return ``change(sum, request)``."""
    return Plant(lambda right, request: change(right(request), request), token_sum)


def hiding(request: Request, hidden: torch.Tensor) -> Request:
    """The request with these pairs (i, j) hidden as well."""
    bias = torch.where(hidden, -torch.inf, torch.zeros_like(request.query[..., :1, :1]))
    return replace(request, bias=bias if request.bias is None else bias + request.bias)


def terms(request: Request) -> torch.Tensor:
    """m_j e^{l_ij - shift_i}, an n x n matrix: the sum with one-hot values."""
    n = request.key.shape[-2]
    return token_sum(replace(request, value=torch.eye(n).to(request.key).expand(*request.key.shape[:-2], n, n))).total


def own_mass(result: AttentionSum, request: Request, *, weighted: bool = True) -> torch.Tensor:
    """m_i e^{l_ii - mass_shift_i}: what token i adds to its own mass."""
    own = torch.exp(transformed_logits(request).diagonal(dim1=-2, dim2=-1).unsqueeze(-1) - result.mass_shift)
    return own * request.weights.unsqueeze(-1) if weighted and request.weights is not None else own


def is_scalar(matrix: torch.Tensor | None) -> bool:
    """Whether a matrix is a multiple of I; None stands for I."""
    return matrix is None or (
        isinstance(matrix, torch.Tensor) and torch.equal(matrix, matrix[0, 0] * torch.eye(len(matrix)).to(matrix))
    )
