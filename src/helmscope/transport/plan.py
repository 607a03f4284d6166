"""What a transport solver returns: a plan with its value, its potentials, and how far it can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from helmscope.transport.cost import power, root
from helmscope.types import HelmscopeError, Plottable, pluralized

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from jaxtyping import Float, Int
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.transport.clouds import Clouds
    from helmscope.transport.cost import Cost


class PlanStatus(Enum):
    """How a solver ended; the value is the message, with a remedy.

    >>> PlanStatus.OPTIMAL.ok, PlanStatus.ITERATION_LIMIT.ok
    (True, False)
    """

    OPTIMAL = "optimal: an exact plan with duality gap {gap:.2g}"
    CONVERGED = "converged in {iterations}: marginal error {error:.2g}"
    ITERATION_LIMIT = (
        "iteration limit reached after {iterations} with marginal error {error:.2g}: raise max_iterations, "
        "or take epsilon >= {epsilon:.2g}"
    )
    PIVOT_LIMIT = "iteration limit reached after {pivots} with duality gap {gap:.2g}: raise max_iterations"
    NOT_FINITE = "not finite after {iterations}: take epsilon >= {epsilon:.2g}, or float64"

    @property
    def ok(self) -> bool:
        """Whether the plan meets its tolerance."""
        return self in (PlanStatus.OPTIMAL, PlanStatus.CONVERGED)


@dataclass(frozen=True, eq=False)
class Plan(Plottable):
    """A transport plan pi between x with masses a and y with masses b.

    ``cost`` is the ground distance, ``p`` its power, and ``epsilon`` the weight of the entropy, None if the plan is
    exact. ``value`` is the transport cost sum_ij pi_ij c_ij, c = dist^p, and ``distance`` its root value^(1/p), W_p if
    the plan is exact; ``objective`` is what the solver minimized (the same for exact transport; with entropy and
    relaxed marginals otherwise), and ``dual`` its lower bound from the ``potentials`` f, g. ``apply(values)`` returns
    sum_j pi_ij values_j, (n, k), without forming pi where the plan is implicit. ``marginal_errors`` are the sums over i
    of |sum_j pi_ij - a_i|, and likewise for y. A sparse plan lists its ``entries``: indices i, indices j, and masses
    pi_ij > 0.

    >>> from helmscope.transport.line import line_plan
    >>> plan = line_plan(torch.tensor([[0.0]]), torch.tensor([[1.0], [3.0]]))
    >>> plan.value, plan.distance, plan.matrix, plan.barycentric_projection, plan.ok
    (tensor(5.), tensor(2.2361), tensor([[0.5000, 0.5000]]), tensor([[2.]]), True)
    """

    clouds: Clouds
    cost: Cost
    p: float
    value: Float[Tensor, ""]
    objective: Float[Tensor, ""]
    dual: Float[Tensor, ""]
    potentials: tuple[Float[Tensor, " n"], Float[Tensor, " m"]]
    marginal_errors: tuple[float, float]
    status: PlanStatus
    iterations: int
    apply: Callable[[Float[Tensor, "m k"]], Float[Tensor, "n k"]]
    epsilon: float | None = None
    remedy_epsilon: float = 0.0  # a regularization that would converge, named by the outcome
    entries: tuple[Int[Tensor, " k"], Int[Tensor, " k"], Float[Tensor, " k"]] | None = None

    @property
    def distance(self) -> Float[Tensor, ""]:
        """value^(1/p), differentiable where ``value`` is: W_p for an exact plan, more than W_p for an entropic one."""
        return root(self.value, self.p)

    @property
    def duality_gap(self) -> float:
        """Objective minus dual value: 0 up to rounding at the optimum. For a plan that meets its marginals it bounds
        the distance to the optimum; before convergence an entropic plan does not, and the gap may have either sign.
        """
        return float(self.objective.detach() - self.dual.detach())

    @property
    def ok(self) -> bool:
        """Whether the solver met its tolerance."""
        return self.status.ok

    @property
    def outcome(self) -> str:
        """How the solver ended, in words, with a remedy."""
        return self.status.value.format(
            gap=self.duality_gap,
            iterations=pluralized(self.iterations, "iteration"),
            pivots=pluralized(self.iterations, "pivot"),
            error=max(self.marginal_errors),
            epsilon=self.remedy_epsilon,
        )

    @property
    def matrix(self) -> Float[Tensor, "n m"]:
        """The plan as a matrix; raises ``HelmscopeError`` if it would not fit in memory."""
        n, m = self.clouds.a.shape[-1], self.clouds.b.shape[-1]
        if n * m > 2**28:
            raise HelmscopeError(f"the plan has {n} x {m} entries, but a matrix of at most 2^28 is formed: use apply")
        return self.apply(torch.eye(m, dtype=self.clouds.b.dtype, device=self.clouds.b.device))

    @property
    def barycentric_projection(self) -> Float[Tensor, "n d"]:
        """Where each x goes on average, the barycentric projection sum_j pi_ij y_j / sum_j pi_ij in R^d."""
        y = self.clouds.y
        sums = self.apply(torch.cat([y, torch.ones_like(y[:, :1])], -1))
        return sums[:, :-1] / sums[:, -1:]

    def __repr__(self) -> str:
        n, m = self.clouds.a.shape[-1], self.clouds.b.shape[-1]
        exact = f"W_{self.p:g} {float(self.distance.detach()):.6g}"
        found = exact if self.epsilon is None else f"cost {float(self.value.detach()):.6g}, epsilon {self.epsilon:g}"
        return f"<Plan of {n} x {m} points: {found}, {self.outcome}>"


def single_problem(clouds: Clouds) -> Clouds:
    """The clouds, if they have no batch axes; raises ``HelmscopeError`` otherwise."""
    if clouds.x.ndim != 2:
        raise HelmscopeError(
            f"x and y have batch axes {tuple(clouds.x.shape[:-2])}, but a plan is computed for one pair of clouds, "
            "(n, d) and (m, d)"
        )
    return clouds


def sparse_plan(
    clouds: Clouds,
    entries: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]],
    potentials: tuple[NDArray[np.float64], NDArray[np.float64]],
    *,
    cost: Cost,
    p: float,
    status: PlanStatus,
    iterations: int = 0,
) -> Plan:
    """The plan with these entries (i, j, mass) and dual potentials, all in float64; the tensors of the plan have the
    dtype and device of the clouds. ``value`` is differentiable with respect to positions and weights.
    """
    device, dtype = clouds.x.device, clouds.x.dtype
    i, j, mass = (torch.from_numpy(part).to(device) for part in entries)
    i, j, mass = (part[mass > 0] for part in (i, j, mass))
    f, g = (torch.from_numpy(part).to(device) for part in potentials)
    double = clouds.double()
    a, b = double.a.detach(), double.b.detach()
    transport = (mass * power(cost.distance(double.x[i], double.y[j]), p)).sum()
    if not torch.isfinite(transport):
        raise HelmscopeError(f"p is {p:g}, but dist^p must not overflow float64: take a smaller p or scale the points")
    value = with_gradient(transport.detach(), transport, double, potentials)
    dual = (f * a).sum() + (g * b).sum()
    n = len(a)
    errors = [
        float((torch.zeros_like(total).index_add_(0, index, mass) - total).abs().sum())
        for index, total in ((i, a), (j, b))
    ]

    def applied(values: Tensor) -> Tensor:
        sums = torch.zeros(n, values.shape[-1], dtype=torch.float64, device=device)
        return sums.index_add(0, i, mass.unsqueeze(-1) * values.double()[j]).to(values.dtype)

    # the gap is the difference of two float64 sums, so these remain float64 for float32 clouds
    return Plan(
        clouds,
        cost,
        p,
        value=value.to(dtype),
        objective=value,
        dual=dual,
        potentials=(f.to(dtype), g.to(dtype)),
        marginal_errors=(errors[0], errors[1]),
        status=status,
        iterations=iterations,
        apply=applied,
        entries=(i, j, mass.to(dtype)),
    )


def with_gradient(
    value: Float[Tensor, "*batch"],
    transport: Float[Tensor, "*batch"],
    clouds: Clouds,
    potentials: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
) -> Float[Tensor, "*batch"]:
    """``value`` with the gradient of an optimal value: that of ``transport``, its cost with the plan held fixed, by
    positions, and the dual potentials by weights (envelope theorem). All in float64.
    """
    surrogate = transport
    if potentials is not None:
        for weights, potential in zip((clouds.a, clouds.b), potentials, strict=True):
            fixed = torch.from_numpy(potential).to(weights.device).reshape(weights.shape)
            surrogate = surrogate + (fixed * weights).sum(-1)
    return value + (surrogate - surrogate.detach())
