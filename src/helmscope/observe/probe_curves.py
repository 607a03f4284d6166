"""How each probe of a bank varies with the angle from its axis: the vector by which it reads a point, or for a lens
logit the row of its token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import retract
from helmscope.observe.probes import LensLogits

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.observe.probes import ProbeKind


@full_precision
def along_axes(kind: ProbeKind, angles: Float[Tensor, " k"]) -> Float[Tensor, "p k"]:
    """Each probe of a kind at angles from its axis, between 0 and 1.

    >>> from helmscope.observe.probes import ProbeBank
    >>> kind = ProbeBank.around(torch.eye(3, dtype=torch.float64), seed=0).kinds[0]
    >>> curves = along_axes(kind, torch.tensor([0.0, 1.0, 3.0]))
    >>> curves.shape, curves[:, 0].unique()  # an exponential is largest at its axis
    (torch.Size([8, 3]), tensor([1.], dtype=torch.float64))
    """
    axes = retract((kind.rows[kind.chosen] if isinstance(kind, LensLogits) else kind.rows).double())
    away = axes.mean(0) + torch.eye(axes.shape[-1], dtype=axes.dtype, device=axes.device)[0]  # parallel to no axis
    side = retract(away - (axes @ away).unsqueeze(-1) * axes)
    angles = angles.to(axes).unsqueeze(-1)
    curves = torch.stack([kind(angles.cos() * axes[p] + angles.sin() * side[p])[..., p] for p in range(kind.count)])
    low, high = curves.amin(-1, keepdim=True), curves.amax(-1, keepdim=True)
    return (curves - low) / torch.where(high > low, high - low, 1.0)
