"""Brenier's potential: closed forms, linear programs, and maps that are not optimal."""

import itertools

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linprog

import helmscope as hs
from helmscope.transport.brenier import brenier_potential


def points(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_bracket_is_that_of_a_linear_program() -> None:
    """The greatest and least phi_j with phi_0 = 0 under all n (n - 1) inequalities, by an independent solver."""
    x = points(7, 3)
    root = points(3, 3, seed=1)
    y = x @ (root @ root.T)
    found = brenier_potential(x, y)
    rows, bounds = [], []
    for i, j in itertools.permutations(range(7), 2):
        row = np.zeros(7)
        row[i], row[j] = 1.0, -1.0
        rows.append(row)
        bounds.append(-float(y[i] @ (x[j] - x[i])))
    for j in range(1, 7):
        for sign, seen in ((1.0, found.lower[j]), (-1.0, found.upper[j])):
            c = np.zeros(7)
            c[j] = sign
            solved = linprog(c, rows, bounds, np.eye(7)[:1], [0.0], bounds=(None, None))
            assert sign * solved.fun == pytest.approx(float(seen), abs=1e-9)


def test_the_potential_of_a_positive_definite_matrix_is_in_the_bracket() -> None:
    x, root = points(4, 40, 3), points(3, 3, seed=1)
    matrix = root @ root.T
    found = brenier_potential(x, x @ matrix)
    phi = 0.5 * torch.einsum("...i,ij,...j->...", x, matrix, x)
    phi = phi - phi[..., :1]
    assert (found.excess_cost == 0).all()
    assert (found.lower <= phi + 1e-12).all()
    assert (phi <= found.upper + 1e-12).all()
    slope = found.middle[..., None, :] - found.middle[..., :, None]
    weights = (x @ matrix) @ x.mT
    weights = weights - weights.diagonal(dim1=-2, dim2=-1)[..., None]
    assert (slope >= weights - 1e-10).all()


def test_more_points_determine_the_potential() -> None:
    """On a line of spacing h the bracket of phi = x^2 / 2 grows by h^2 per point: 2 h of the range, on average."""
    for n in (11, 101):
        x = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]
        assert float(brenier_potential(x, x).indeterminacy) == pytest.approx(2 * 2 / (n - 1), rel=1e-9)


def test_a_rotation_is_not_optimal_and_its_excess_is_that_of_pot() -> None:
    x = points(24, 2)
    turn = torch.tensor([[-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    y = x @ turn
    found = brenier_potential(torch.stack([x, x]), torch.stack([x, y]))
    assert found.excess_cost[0] == 0
    assert found.lower[0].isfinite().all()
    least = ot.emd2([], [], ot.dist(x.numpy(), y.numpy()))
    assert float(found.excess_cost[1]) == pytest.approx(float((x - y).square().sum(-1).mean()) - least, rel=1e-10)
    assert found.lower[1].isnan().all()
    assert found.middle[1].isnan().all()


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (torch.eye(3), torch.eye(2), r"y has the shape \(2, 2\)"),
        (torch.eye(3)[:1], torch.eye(3)[:1], "n >= 2"),
        (torch.eye(3), torch.full((3, 3), torch.nan), "y has coordinates that are not finite"),
    ],
)
def test_bad_input(x: torch.Tensor, y: torch.Tensor, text: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=text):
        brenier_potential(x, y)
