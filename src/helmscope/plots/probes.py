"""The figure of a bank of probes: how each varies with the angle from its axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.sphere import retract
from helmscope.observe.probes import LensLogits, ProbeBank
from helmscope.plots.style import COLORS, new_figure, styled
from helmscope.plots.variable_panel import plain
from helmscope.types import HelmscopeError, pluralized, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.observe.probes import ProbeKind
    from helmscope.plots.figure import Figure

ANGLES, WIDTH, HEIGHT = 121, 2.3, 2.4  # points along a half circle; inches of a panel


def probe_bank_figure(bank: ProbeBank, *, title: str = "") -> Figure:
    """Figure of the probes of a bank by kind: each along the half circle from its axis to the opposite point, from its
    least value there (0) to its largest (1). A probe whose curve is nearly a cosine is nearly linear.

    The axis of a probe is the vector by which it reads a point, that of a lens logit the row of its token, and the half
    circle goes in a direction that is the same for all of its kind. Raises HelmscopeError for
    anything but a ProbeBank.

    >>> bank = ProbeBank.around(torch.eye(3, dtype=torch.float64), seed=0)
    >>> [panel.get_title(loc="left") for panel in probe_bank_figure(bank).axes]
    ['exponential', 'pole', 'cosine', 'tanh']
    """
    if not isinstance(bank, ProbeBank):
        raise HelmscopeError(f"bank is {type_with_article(bank)}, but it must be a ProbeBank")
    angles = torch.linspace(0, math.pi, ANGLES, dtype=torch.float64)
    with styled():
        figure, panels = new_figure(1, len(bank.kinds), width=WIDTH * len(bank.kinds), height=HEIGHT)
        for panel, kind, color in zip(panels, bank.kinds, [*COLORS] * len(bank.kinds), strict=False):
            for curve in along_axes(kind, angles):
                panel.plot(angles.numpy(), curve.cpu().numpy(), color=color, linewidth=0.9, alpha=0.8)
            panel.set_xticks([0, math.pi / 2, math.pi], ["0", "\u03c0/2", "\u03c0"])
            panel.set_xlabel("angle from its axis", fontsize=8)
            panel.set_title(plain(kind.name), loc="left", fontsize=9)
        panels[0].set_ylabel("value, least to largest", fontsize=8)
        count = f"{pluralized(len(bank), 'probe')}, each along a half circle from its axis"
        figure.suptitle(plain(f"{title}\n{count}" if title else count), fontsize=9)
    return figure


def along_axes(kind: ProbeKind, angles: Float[Tensor, " k"]) -> Float[Tensor, "p k"]:
    """Each probe of a kind at angles from its axis, between 0 and 1.

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
