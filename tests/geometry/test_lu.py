"""LU decompositions are right for any number of threads; those of ``torch.linalg`` are not (``geometry/lu.py``)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import helmscope as hs
from helmscope.geometry import lu
from helmscope.geometry.arithmetic import one_thread
from helmscope.observe.mlp_entropy_change import sphere_map

SIZE = 160  # the smallest batched matrices at which MKL fails have about 150 rows
MATRICES = torch.randn(8, SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EYE = torch.eye(SIZE, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_batches_are_solved_and_inverted():
    right = MATRICES.flip(0)
    for solution in (lu.solve(MATRICES, right), lu.solve_ex(MATRICES, right).result):
        assert (MATRICES @ solution - right).abs().max() < 1e-11
    for inverse in (lu.inv(MATRICES), lu.inv_ex(MATRICES).inverse):
        assert (MATRICES @ inverse - EYE).abs().max() < 1e-11
    assert torch.get_num_threads() == 2


def test_determinants_are_those_of_the_singular_values():
    logs = torch.linalg.svdvals(MATRICES).log().sum(-1)
    pivots = lu.lu_factor_ex(MATRICES)[0].diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    for found in (lu.slogdet(MATRICES).logabsdet, pivots, lu.det(MATRICES).abs().log()):
        assert (found - logs).abs().max() < 1e-11


def test_the_number_of_threads_does_not_change_the_entropy_of_a_map():
    generator = torch.Generator().manual_seed(1)
    w_in, w_out, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2 * SIZE, SIZE), (SIZE, 2 * SIZE), (8, SIZE))
    )
    force = hs.MLP(w_in=w_in, w_out=w_out / SIZE)
    x, radius = x / x.norm(dim=-1, keepdim=True), torch.ones(8, dtype=torch.float64)
    many = sphere_map(force, x, radius).log_det
    with one_thread():
        one = sphere_map(force, x, radius).log_det
    assert (many - one).abs().max() < 1e-11


def test_gradients_pass_through():
    matrix = (MATRICES[:2, :3, :3] + 3 * EYE[:3, :3]).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: lu.solve(m, m.mT) + lu.inv(m), matrix)
    assert torch.autograd.gradcheck(lambda m: lu.slogdet(m).logabsdet + lu.det(m), matrix)


GUARDED = {"det", "inv", "inv_ex", "lu", "lu_factor", "lu_factor_ex", "slogdet", "solve", "solve_ex", "tensorinv"}
GUARDED |= {"inverse", "logdet", "tensorsolve"}


def unguarded(source: str) -> set[str]:
    """The functions of torch that decompose matrices and are used in a source."""
    names = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return names & {f"{package}.{name}" for package in ("torch", "torch.linalg") for name in GUARDED}


def test_only_one_module_decomposes_matrices_by_torch():
    assert unguarded("torch.linalg.solve(a, b), torch.logdet(a), lu.inv(a)") == {"torch.linalg.solve", "torch.logdet"}
    package = Path(hs.__file__).parent
    found = {path.name for path in package.rglob("*.py") if unguarded(path.read_text())}
    assert found == {"lu.py"}, "use helmscope.geometry.lu"
