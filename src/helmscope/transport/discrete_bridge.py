"""The Schroedinger bridge of a Markov chain with finitely many states: Sinkhorn on a path measure.

The reference is a chain with transition matrices P_1, ..., P_K. Of all path measures with the laws mu_0 at step 0 and
mu_K at step K, the bridge has the least relative entropy with respect to the reference started from mu_0. It is a
Markov chain again, with potentials phi_k and transitions

    phi_(k-1)(x) = sum_y P_k(x, y) phi_k(y),     P^phi_k(x, y) = P_k(x, y) phi_k(y) / phi_(k-1)(x),

where phi_K is found by scaling R = P_1 ... P_K to the marginals mu_0 and mu_K. The cost is the relative entropy,
sum_y mu_K log phi_K - sum_x mu_0 log phi_0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.geometry.arithmetic import check_dense_values, every
from helmscope.runs.bar import shows_progress
from helmscope.transport.scaling import Scaling, scale_to_marginals
from helmscope.types import (
    ConciseRepr,
    HelmscopeError,
    Interval,
    Plottable,
    check_integer,
    check_real,
    pluralized,
    short_repr,
    type_with_article,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}  # allowed deviation of a sum of probabilities from 1


@dataclass(frozen=True, eq=False)
class DiscreteBridge(ConciseRepr, Plottable):
    """The bridge of a Markov chain, returned by ``bridge_chain``.

    ``log_potentials`` holds log phi_k, (K + 1, states), -inf where the bridge never is; ``marginals`` the laws at all
    steps, (K + 1, states); ``transitions`` the matrices P^phi_k, (K, states, states). Rows of ``transitions`` for
    states that the bridge never visits are those of the reference.

    >>> step = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    >>> bridge = bridge_chain([step], torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1]))
    >>> bridge.marginals[-1]
    tensor([0.9000, 0.1000], dtype=torch.float64)
    """

    log_potentials: Float[Tensor, "steps_plus_1 states"]
    marginals: Float[Tensor, "steps_plus_1 states"]
    transitions: Float[Tensor, "steps states states"]
    iterations: int
    marginal_error: float
    ok: bool

    @property
    def outcome(self) -> str:
        """How the solver ended, in words, with a remedy."""
        if self.ok:
            return f"converged in {pluralized(self.iterations, 'iteration')}: marginal error {self.marginal_error:.2g}"
        return (
            f"iteration limit reached after {pluralized(self.iterations, 'iteration')} with marginal error "
            f"{self.marginal_error:.2g}: raise max_iterations, or use a reference that connects all states of start "
            "and end"
        )

    def cost(self) -> Interval:
        """The relative entropy of the bridge with respect to the reference started from mu_0; exact, so that its
        interval has the width 0.

        >>> step = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
        >>> bridge = bridge_chain([step], torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
        >>> round(bridge.cost().estimate, 6)  # log 2
        0.693147
        """
        ends = [
            float((law[law > 0] * log_phi[law > 0]).sum())
            for law, log_phi in zip(self.marginals[[0, -1]], self.log_potentials[[0, -1]], strict=True)
        ]
        cost = ends[1] - ends[0]
        return Interval(cost, cost, cost, n=1)

    def sample(self, n: int, *, seed: int = 0) -> Int[Tensor, "n steps_plus_1"]:
        """n paths of the bridge, as numbers of states.

        >>> step = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
        >>> bridge = bridge_chain([step], torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        >>> bridge.sample(2)
        tensor([[0, 1],
                [0, 1]])
        """
        n = check_integer("n", n, at_least=1)
        uniform = np.random.default_rng(check_integer("seed", seed, at_least=0, below=2**128))
        device = self.marginals.device
        rows, path = self.marginals[0].expand(n, -1), list[torch.Tensor]()
        for step in range(len(self.marginals)):
            if step:
                rows = self.transitions[step - 1][path[-1]]
            at = torch.from_numpy(uniform.random(n)).to(device)
            cumulative = rows.cumsum(1)
            path.append((cumulative <= (at * cumulative[:, -1])[:, None]).sum(1))
        return torch.stack(path, 1)


@shows_progress("scaling the chain")
def bridge_chain(
    transitions: Sequence[Float[Tensor, "states states"]],
    start: Float[Tensor, " states"],
    end: Float[Tensor, " states"],
    *,
    tol: float = 1e-12,
    max_iterations: int = 100_000,
    progress: ProgressOption = None,
) -> DiscreteBridge:
    """The Schroedinger bridge of the chain with the matrices ``transitions`` from the law ``start`` to the law ``end``.

    ``transitions`` is a sequence of stochastic matrices, one per step, or a tensor (steps, states, states). The
    computation is in float64 and in the log domain, so that transition probabilities may be as small as 1e-300. The
    solver ends when the marginal error is at most ``tol``. If it does not within ``max_iterations``, the result
    is not ``ok``; that happens if every state of ``end`` can be reached, but not with the masses required. It costs
    O(steps states^3) once and O(states^2) per iteration. Raises ``HelmscopeError`` for matrices that are not
    stochastic, laws that are not, and states of ``start`` and ``end`` that no path connects to the other law.

    >>> lazy = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    >>> bridge = bridge_chain([lazy, lazy], torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    >>> bridge.marginals[1], bridge.outcome
    (tensor([0.7439, 0.2561], dtype=torch.float64), 'converged in 1 iteration: marginal error 0')
    """
    steps = _check_transitions(transitions)
    first, last = _check_law(start, "start", steps), _check_law(end, "end", steps)
    log_steps = torch.log(steps)
    log_path = log_steps[0]
    for log_step in log_steps[1:]:
        log_path = _log_product(log_path, log_step)
    rows, columns = first > 0, last > 0
    log_path = log_path[rows][:, columns]
    _check_reachable(log_path, rows, columns)
    scaling = scale_to_marginals(
        log_path,
        first[rows],
        last[columns],
        tol=check_real("tol", tol, above=0),
        max_iterations=check_integer("max_iterations", max_iterations, at_least=1),
        progress=progress or None,
    )
    return _assemble(steps, log_steps, first, columns, scaling)


def _log_product(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a e^b) of two square matrices, in blocks of rows that fit in memory."""
    rows = max(1, 2**22 // b.numel())
    return torch.cat([torch.logsumexp(part[:, :, None] + b, 1) for part in torch.split(a, rows)])


def _assemble(steps: Tensor, log_steps: Tensor, first: Tensor, columns: Tensor, scaling: Scaling) -> DiscreteBridge:
    """Potentials, transitions and marginals from the potential at the last step."""
    log_phi = torch.full_like(first, -torch.inf)
    log_phi[columns] = scaling.g
    log_potentials = [log_phi]
    for log_step in log_steps.flip(0):
        log_potentials.append(torch.logsumexp(log_step + log_potentials[-1], 1))
    log_potentials.reverse()
    controlled, marginals = [], [first]
    for k, log_step in enumerate(log_steps):
        before, after = log_potentials[k][:, None], log_potentials[k + 1]
        possible = torch.isfinite(before)
        tilted = torch.exp(log_step + after - torch.where(possible, before, torch.zeros_like(before)))
        controlled.append(torch.where(possible, tilted, steps[k]))
        marginals.append((marginals[-1][:, None] * controlled[-1]).sum(0))
    return DiscreteBridge(
        torch.stack(log_potentials),
        torch.stack(marginals),
        torch.stack(controlled),
        scaling.iterations,
        scaling.error,
        scaling.converged,
    )


def _check_transitions(transitions: object) -> Float[Tensor, "steps states states"]:
    """The matrices in float64."""
    if isinstance(transitions, torch.Tensor):
        transitions = list(transitions) if transitions.ndim == 3 else []
    if not isinstance(transitions, Sequence) or not transitions:
        raise HelmscopeError(
            f"transitions is {type_with_article(transitions)}, but it must be a sequence of at least one matrix, or a "
            "tensor (steps, states, states)"
        )
    checked: list[Tensor] = []
    for k, matrix in enumerate(transitions):
        name = f"transitions[{k}]"
        if not isinstance(matrix, torch.Tensor) or matrix.ndim != 2 or matrix.dtype not in _ROUNDING:
            raise HelmscopeError(f"{name} is {type_with_article(matrix)}, but it must be a float matrix")
        check_dense_values(name, matrix)
        shape = tuple(matrix.shape)
        if shape[0] != shape[1] or (checked and matrix.shape != checked[0].shape):
            wanted = tuple(checked[0].shape) if checked else "square"
            raise HelmscopeError(f"{name} has shape {shape}, but it must be {wanted}")
        sums = matrix.sum(1)
        if not every(matrix >= 0) or not every((sums - 1).abs() <= _ROUNDING[matrix.dtype]):
            raise HelmscopeError(f"{name} is not stochastic, but its entries must be >= 0 and its rows must sum to 1")
        exact = matrix.to(torch.float64)
        checked.append(exact / exact.sum(1, keepdim=True))
    return torch.stack(checked)


def _check_law(law: object, name: str, steps: Tensor) -> Float[Tensor, " states"]:
    """A law on the states, in float64."""
    states = steps.shape[-1]
    if not isinstance(law, torch.Tensor) or tuple(law.shape) != (states,) or law.dtype not in _ROUNDING:
        text = tuple(law.shape) if isinstance(law, torch.Tensor) else short_repr(law)
        raise HelmscopeError(
            f"{name} is {text}, but it must be a float tensor with one probability per state ({states})"
        )
    check_dense_values(name, law)
    total = float(law.sum())
    if not every(law >= 0) or abs(total - 1) > _ROUNDING[law.dtype]:
        raise HelmscopeError(f"{name} has the sum {total:.9g}, but it must have entries >= 0 and the sum 1")
    exact = law.to(steps)
    return exact / exact.sum()


def _check_reachable(log_path: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Raise ``HelmscopeError`` if a state with mass has no path to or from any state with mass of the other law."""
    for name, other, support, possible in (
        ("start", "end", rows, torch.isfinite(log_path).any(1)),
        ("end", "start", columns, torch.isfinite(log_path).any(0)),
    ):
        if not every(possible):
            state = int(support.nonzero()[~possible][0])
            raise HelmscopeError(
                f"{name} has mass at state {state}, but no path of the chain connects it with a state of {other}"
            )
