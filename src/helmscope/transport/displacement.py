"""Displacement interpolation: the mass of a plan moves along geodesics at constant speed (McCann 1997)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.geometry import sphere
from helmscope.transport.cost import Euclidean, Geodesic
from helmscope.types import HelmscopeError, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.plan import Plan


def interpolate(plan: Plan, t: float) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]:
    """The points and masses of the interpolation between the clouds of a plan at time t: x at 0, y at 1.

    Every pair (i, j) of the plan is a point with mass pi_ij on the geodesic from x_i to y_j of its cost: a great circle
    for ``Geodesic()``, a straight line for ``Euclidean()``. If the plan is optimal for dist^p, p > 1, then W_p(mu_s,
    mu_t) = |t - s| W_p(mu_0, mu_1). Antipodal points are joined by every great half circle; the one towards the
    coordinate axis along which x_i has its smallest entry in absolute value is chosen (``sphere.log``), so that the
    result is deterministic. Raises ``HelmscopeError`` for a plan whose cost has no geodesics within the sphere, such as
    ``Chordal()``, and t outside [0, 1].

    >>> import torch
    >>> from helmscope.transport.exact import exact_plan
    >>> plan = exact_plan(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
    >>> interpolate(plan, 0.5)
    (tensor([[0.7071, 0.7071, 0.0000]]), tensor([1.]))
    """
    share = check_real("t", t, at_least=0.0)
    if share > 1:
        raise HelmscopeError(f"t is {share:g}, but it must be in [0, 1]")
    if plan.entries is None:
        matrix = plan.matrix
        i, j = matrix.nonzero(as_tuple=True)
        mass = matrix[i, j]
    else:
        i, j, mass = plan.entries
    x, y = plan.clouds.x[i], plan.clouds.y[j]
    if isinstance(plan.cost, Geodesic):
        return sphere.exp(x, share * sphere.log(x, y)), mass
    if isinstance(plan.cost, Euclidean):
        return (1 - share) * x + share * y, mass
    raise HelmscopeError(
        f"cost of the plan is {plan.cost!r}, but interpolation needs one with geodesics: Geodesic() or Euclidean()"
    )
