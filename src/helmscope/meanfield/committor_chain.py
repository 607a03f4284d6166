"""Committors of Markov chains: q_i is the probability that the chain started in i reaches B before A.

sum_j P_ij q_j = q_i outside of A and B,    q = 0 on A,    q = 1 on B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import breadth_first_order
from scipy.sparse.linalg import spsolve

from helmscope.types import HelmscopeError, check_integer, pluralized, short_repr, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

ROW_SUM_TOLERANCE = 1e-9


def chain_committor(
    transition: Float[Tensor, "n n"] | sparse.sparray, a: Bool[Tensor, " n"], b: Bool[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Committor q of a Markov chain with the given transition matrix, in float64: the solution of a linear system,
    dense or, for a SciPy sparse array, sparse.

    ``a`` and ``b`` mark the states of the two sets. Raises ``HelmscopeError`` unless rows are probabilities, the sets
    are disjoint and not empty, and every state can reach one of them: elsewhere q is not defined.

    >>> walk = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0], [0.0, 0.5, 0.0, 0.5], [0.0, 0.0, 0.0, 1.0]])
    >>> start, end = torch.tensor([True, False, False, False]), torch.tensor([False, False, False, True])
    >>> chain_committor(walk, start, end)
    tensor([0.0000, 0.3333, 0.6667, 1.0000], dtype=torch.float64)
    """
    matrix = _check_transition(transition)
    in_a, in_b = _check_mask("a", a, matrix.shape[0]), _check_mask("b", b, matrix.shape[0])
    if bool((in_a & in_b).any()):
        raise HelmscopeError(
            f"b shares {pluralized(int((in_a & in_b).sum()), 'state')} with a, but they must be disjoint"
        )
    _check_reachable(sparse.csr_array(matrix), in_a | in_b)
    q = in_b.astype(np.float64)
    free = ~(in_a | in_b)
    if free.any():
        rows = matrix[free]
        source = np.asarray(rows[:, in_b].sum(axis=1)).ravel()
        if isinstance(rows, np.ndarray):
            q[free] = np.linalg.solve(np.eye(int(free.sum())) - rows[:, free], source)
        else:
            q[free] = spsolve(sparse.csc_array(sparse.eye_array(int(free.sum())) - rows[:, free]), source)
    return torch.from_numpy(q)


def estimate_transition_matrix(
    states: Int[Tensor, "time ..."], *, size: int | None = None, lag: int = 1
) -> sparse.csr_array:
    """Transition matrix estimated from trajectories of a discretized process, as a sparse array.

    P_ij is the share of the visits to i at time t, t + lag still recorded, that are in j at t + lag. ``states`` are
    numbers of cells from 0 to size - 1, with time first; by default ``size`` is the largest one plus 1. A cell that is
    never left, or never visited, is kept: P_ii = 1. Raises ``HelmscopeError`` for other numbers, or a lag that is not
    shorter than the trajectory.

    >>> estimate_transition_matrix(torch.tensor([0, 1, 0, 0, 1])).toarray()
    array([[0.33333333, 0.66666667],
           [1.        , 0.        ]])
    """
    if not isinstance(states, torch.Tensor) or states.ndim < 1 or states.is_floating_point() or not states.numel():
        what = f"a tensor of {states.dtype}" if isinstance(states, torch.Tensor) else type_with_article(states)
        raise HelmscopeError(f"states is {what}, but it must be a tensor of whole numbers (time, ...), not empty")
    lag = check_integer("lag", lag, at_least=1)
    if lag >= len(states):
        raise HelmscopeError(f"lag is {lag}, but it must be less than the {len(states)} times of states")
    largest = int(states.max())
    size = largest + 1 if size is None else check_integer("size", size, at_least=1)
    if int(states.min()) < 0 or largest >= size:
        raise HelmscopeError(
            f"states holds numbers from {int(states.min())} to {largest}, but they must be from 0 to {size - 1}"
        )
    before, after = (part.reshape(-1).cpu().numpy() for part in (states[:-lag], states[lag:]))
    counts = sparse.coo_array((np.ones(len(before)), (before, after)), shape=(size, size)).tocsr()
    visits = np.asarray(counts.sum(axis=1)).ravel()
    kept = sparse.diags_array((visits == 0).astype(np.float64))
    return sparse.csr_array(sparse.diags_array(1 / np.where(visits > 0, visits, 1.0)) @ counts + kept)


def _check_transition(transition: object) -> np.ndarray | sparse.csr_array:
    """The matrix as float64, dense or sparse as it was passed."""
    if sparse.issparse(transition):
        matrix = sparse.csr_array(transition, dtype=np.float64)
        entries = matrix.data
    elif isinstance(transition, torch.Tensor | np.ndarray):
        matrix = entries = _as_array(transition).astype(np.float64)
    else:
        raise HelmscopeError(
            f"transition is {type_with_article(transition)}, but it must be a matrix: a tensor or a SciPy sparse array"
        )
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
        raise HelmscopeError(f"transition has shape {matrix.shape}, but it must be square and not empty")
    if not np.isfinite(entries).all() or (entries < 0).any():
        raise HelmscopeError("transition holds a negative entry or one that is not finite, but it holds probabilities")
    sums = np.asarray(matrix.sum(axis=1)).ravel()
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > ROW_SUM_TOLERANCE:
        raise HelmscopeError(f"transition has a row {worst} with sum {sums[worst]:.9g}, but every row must sum to 1")
    return matrix


def _check_mask(name: str, mask: object, size: int) -> np.ndarray:
    if not isinstance(mask, torch.Tensor | np.ndarray) or tuple(mask.shape) != (size,) or "bool" not in str(mask.dtype):
        raise HelmscopeError(f"{name} is {short_repr(mask)}, but it must be a boolean tensor with one entry per state")
    array = _as_array(mask)
    if not array.any():
        raise HelmscopeError(f"{name} contains no state, but a committor needs both sets")
    return array


def _as_array(values: Tensor | np.ndarray) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values


def _check_reachable(matrix: sparse.csr_array, absorbing: np.ndarray) -> None:
    """Raise ``HelmscopeError`` if some state can reach neither set: a search backwards from a node before both."""
    size = len(absorbing)
    backwards = (matrix > 0).astype(np.float64).T
    root = sparse.csr_array(absorbing[None].astype(np.float64))
    graph = sparse.block_array([[backwards, None], [root, sparse.csr_array((1, 1))]], format="csr")
    reached = breadth_first_order(graph, size, directed=True, return_predecessors=False)
    lost = np.setdiff1d(np.arange(size), reached)
    if len(lost):
        raise HelmscopeError(
            f"transition has {pluralized(len(lost), 'state')} that can reach neither a nor b, the first of which is "
            f"{lost[0]}, but the committor is defined only where the chain ends in one of them"
        )
