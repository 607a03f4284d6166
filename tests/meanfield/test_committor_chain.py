"""Committors of Markov chains: gambler's ruin, deeptime on the same chain, sparse against dense, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deeptime.markov import TransitionCountEstimator
from deeptime.markov.tools.analysis import committor
from scipy import sparse

import helmscope as hs
from helmscope.meanfield.committor_chain import chain_committor, estimate_transition_matrix


def random_chain(n, seed=0):
    """A dense chain that is not reversible, with strongly unequal rows."""
    weights = torch.rand(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 8
    return weights / weights.sum(1, keepdim=True)


def marks(n, *numbers):
    mask = torch.zeros(n, dtype=torch.bool)
    mask[list(numbers)] = True
    return mask


def gambler(n, p):
    """Steps up with probability p and down with 1 - p, on 0 .. n - 1."""
    walk = torch.zeros(n, n, dtype=torch.float64)
    walk[0, 0] = walk[-1, -1] = 1.0
    for k in range(1, n - 1):
        walk[k, k + 1], walk[k, k - 1] = p, 1 - p
    return walk


@pytest.mark.parametrize("p", [0.5, 0.45, 0.7])
def test_gamblers_ruin(p: float) -> None:
    n = 30
    ratio = (1 - p) / p
    k = torch.arange(n, dtype=torch.float64)
    expected = k / (n - 1) if p == 0.5 else (1 - ratio**k) / (1 - ratio ** (n - 1))
    q = chain_committor(gambler(n, p), marks(n, 0), marks(n, n - 1))
    assert float((q - expected).abs().max()) < 1e-13
    transposed = gambler(n, 1 - p)  # the fault of reading P_ij as the probability of a step from j to i
    assert p == 0.5 or float((chain_committor(transposed, marks(n, 0), marks(n, n - 1)) - expected).abs().max()) > 0.1


def test_deeptime_agrees_on_random_chains() -> None:
    for seed in range(5):
        chain, a, b = random_chain(40, seed), [0, 3], [5, 6, 30]
        q = chain_committor(chain, marks(40, *a), marks(40, *b))
        expected = committor(chain.numpy(), a, b)
        assert float((q - torch.from_numpy(expected)).abs().max()) < 1e-12
        wrong = committor(chain.T.numpy() / chain.T.numpy().sum(1, keepdims=True), a, b)
        assert float((q - torch.from_numpy(wrong)).abs().max()) > 1e-2  # the other axis would be noticed


def test_sparse_and_dense_agree() -> None:
    chain = random_chain(60)
    chain = torch.where(chain > 0.005, chain, 0.0)
    chain = chain / chain.sum(1, keepdim=True)
    a, b = marks(60, 1), marks(60, 2)
    dense = chain_committor(chain, a, b)
    for kind in (sparse.csr_array, sparse.csc_array, sparse.coo_array):
        assert torch.allclose(chain_committor(kind(chain.numpy()), a, b), dense, atol=1e-13)
    assert torch.allclose(chain_committor(chain.numpy(), a.numpy(), b.numpy()), dense, atol=1e-15)


def test_exchanging_the_sets_gives_the_complement() -> None:
    chain, a, b = random_chain(20), marks(20, 0), marks(20, 7)
    assert torch.allclose(chain_committor(chain, a, b) + chain_committor(chain, b, a), torch.ones(20).double())


def test_sets_that_cover_everything() -> None:
    assert chain_committor(random_chain(2), marks(2, 0), marks(2, 1)).tolist() == [0.0, 1.0]


def test_states_that_reach_neither_set_are_refused() -> None:
    chain = torch.eye(4, dtype=torch.float64)
    chain[1] = torch.tensor([0.5, 0.0, 0.5, 0.0])
    with pytest.raises(hs.HelmscopeError, match="1 state that can reach neither a nor b, the first of which is 3"):
        chain_committor(chain, marks(4, 0), marks(4, 2))
    with pytest.raises(hs.HelmscopeError, match="1 state that can reach neither a nor b"):
        chain_committor(sparse.csr_array(chain.numpy()), marks(4, 0), marks(4, 2))
    one_way = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # state 1 never reaches b
    assert chain_committor(one_way, marks(3, 0), marks(3, 2)).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.eye(3), marks(3, 0), marks(3, 0)), "b shares 1 state with a"),
        ((torch.eye(3), marks(3), marks(3, 0)), "a contains no state"),
        ((torch.eye(3), marks(2, 0), marks(3, 0)), "a is tensor.*, but it must be a boolean tensor with one entry per"),
        ((torch.eye(3), torch.ones(3), marks(3, 0)), "a is tensor.*, but it must be a boolean tensor"),
        ((2 * torch.eye(3), marks(3, 0), marks(3, 1)), "a row 0 with sum 2, but every row must sum to 1"),
        ((torch.eye(3)[:2], marks(3, 0), marks(3, 1)), r"shape \(2, 3\), but it must be square"),
        ((torch.tensor([[2.0, -1.0], [0.0, 1.0]]), marks(2, 0), marks(2, 1)), "a negative entry"),
        (([[1.0]], marks(1, 0), marks(1, 0)), "transition is a list, but it must be a matrix"),
    ],
)
def test_bad_input_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        chain_committor(*arguments)


# Counting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 3])
def test_counts_are_those_of_a_loop_and_of_deeptime(lag: int) -> None:
    states = torch.randint(5, (200, 4), generator=torch.Generator().manual_seed(0))
    counts = np.zeros((5, 5))
    for path in states.T.tolist():
        for before, after in zip(path, path[lag:], strict=False):
            counts[before, after] += 1
    expected = counts / counts.sum(1, keepdims=True)
    assert np.abs(estimate_transition_matrix(states, lag=lag).toarray() - expected).max() < 1e-15
    theirs = TransitionCountEstimator(lag, "sliding").fit_fetch([path.numpy() for path in states.T]).count_matrix
    assert np.abs(theirs - counts).max() == 0


def test_a_chain_is_recovered_from_its_paths() -> None:
    chain, generator = random_chain(4, seed=2), torch.Generator().manual_seed(3)
    states = [torch.zeros(500, dtype=torch.int64)]
    for _ in range(400):
        states.append(torch.multinomial(chain[states[-1]], 1, generator=generator)[:, 0])
    estimate = torch.from_numpy(estimate_transition_matrix(torch.stack(states)).toarray())
    assert float((estimate - chain).abs().max()) < 0.01
    a, b = marks(4, 0), marks(4, 3)
    assert float((chain_committor(estimate, a, b) - chain_committor(chain, a, b)).abs().max()) < 0.01


def test_cells_never_left_are_kept() -> None:
    chain = estimate_transition_matrix(torch.tensor([0, 1, 2]), size=4).toarray()
    assert chain.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate_transition_matrix(torch.tensor([0.0, 1.0])), "states is a tensor of torch.float32"),
        (lambda: estimate_transition_matrix([0, 1]), "states is a list"),
        (
            lambda: estimate_transition_matrix(torch.tensor([0, 1]), lag=2),
            "lag is 2, but it must be less than the 2 times",
        ),
        (lambda: estimate_transition_matrix(torch.tensor([0, -1, 1])), "from -1 to 1, but they must be from 0 to 1"),
        (lambda: estimate_transition_matrix(torch.tensor([0, 5]), size=3), "from 0 to 5, but they must be from 0 to 2"),
    ],
)
def test_bad_counts_are_refused(call, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        call()
