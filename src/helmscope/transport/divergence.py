"""The Sinkhorn divergence: entropic transport without its bias [Genevay, Peyre & Cuturi 2018, arXiv:1706.00292; Feydy
et al. 2019, arXiv:1810.08278].

    S(mu, nu) = OT(mu, nu) - OT(mu, mu) / 2 - OT(nu, nu) / 2,        OT = min <pi, c> + epsilon KL(pi | a b^T).

OT(mu, mu) > 0, and the mu closest to nu in OT is a shrunken nu. For c = |x - y|^p, 1 <= p <= 2, S is >= 0, and 0 only
for mu = nu. It tends to W_p^p as epsilon -> 0 and to an energy distance as epsilon -> infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from helmscope.runs.bar import shows_progress
from helmscope.transport.clouds import Clouds, check_clouds
from helmscope.transport.cost import GEODESIC, Cost
from helmscope.transport.sinkhorn_plan import Rules, entropic_plan
from helmscope.types.progress import sub_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.plan import Plan
    from helmscope.types.progress import ProgressOption


@dataclass(frozen=True, eq=False)
class SinkhornDivergence:
    """A Sinkhorn divergence, differentiable with respect to points and weights, and its three plans: x to y, x to x, y
    to y.

    >>> import torch
    >>> from helmscope.transport.cost import Euclidean
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> divergence = sinkhorn_divergence(x, x, epsilon=0.5, cost=Euclidean())
    >>> divergence.ok, len(divergence.plans)
    (True, 3)
    """

    value: Float[Tensor, ""]
    plans: tuple[Plan, Plan, Plan]

    @property
    def ok(self) -> bool:
        """Whether all three plans met their tolerance."""
        return all(plan.ok for plan in self.plans)

    @property
    def outcome(self) -> str:
        """How the three solvers ended, in words."""
        names = ("x to y", "x to x", "y to y")
        return "; ".join(f"{name}: {plan.outcome}" for name, plan in zip(names, self.plans, strict=True))

    def __repr__(self) -> str:
        return f"<SinkhornDivergence {float(self.value.detach()):.6g}; {self.outcome}>"


@shows_progress("Sinkhorn divergence")
def sinkhorn_divergence(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    x_weights: Float[Tensor, " n"] | None = None,
    y_weights: Float[Tensor, " m"] | None = None,
    *,
    epsilon: float,
    cost: Cost = GEODESIC,
    p: float = 2.0,
    reach: float | None = None,
    tol: float | None = None,
    max_iterations: int = 1000,
    progress: ProgressOption = None,
) -> SinkhornDivergence:
    """Sinkhorn divergence S = OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2; the arguments are those of ``sinkhorn``.

    With ``reach`` it is the unbalanced divergence, which also contains epsilon (sum a - sum b)^2 / 2 [Sejourne et al.
    2019, arXiv:1910.12958]. ``value`` is the combination of the dual values, whose error is of second order in the
    marginal errors; it is differentiable once. Gradients are ambient: on the sphere, project them. Positivity is proven
    for ``Euclidean()`` and ``Chordal()`` with p <= 2, not for the default ``Geodesic()`` on a sphere.

    >>> import torch
    >>> from helmscope.transport.cost import Euclidean
    >>> x = torch.tensor([[0.0], [1.0]], requires_grad=True)
    >>> divergence = sinkhorn_divergence(x, torch.tensor([[0.5], [1.5]]), epsilon=0.01, cost=Euclidean())
    >>> round(float(divergence.value.detach()), 4), torch.autograd.grad(divergence.value, x)[0]
    (0.25, tensor([[-0.5000],
            [-0.5000]]))
    """
    rules = Rules.checked(epsilon, cost, p, reach, tol, max_iterations)
    clouds = check_clouds(x, y, x_weights, y_weights, cost=rules.cost, balanced=reach is None)
    parts = [None if progress is None else sub_progress(progress, k / 3, (k + 1) / 3) for k in range(3)]  # type: ignore[arg-type]
    across = entropic_plan(clouds, rules, progress=parts[0])
    within_x = entropic_plan(Clouds(clouds.x, clouds.x, clouds.a, clouds.a), rules, symmetric=True, progress=parts[1])
    within_y = entropic_plan(Clouds(clouds.y, clouds.y, clouds.b, clouds.b), rules, symmetric=True, progress=parts[2])
    value = across.dual - within_x.dual / 2 - within_y.dual / 2
    if reach is not None:
        value = value + rules.epsilon / 2 * (clouds.a.sum() - clouds.b.sum()) ** 2
    return SinkhornDivergence(value, (across, within_x, within_y))
