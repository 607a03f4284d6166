"""The figure of a bank of probes: how each varies with the angle from its axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.observe.probe_curves import along_axes
from helmscope.observe.probes import ProbeBank
from helmscope.plots.style import COLORS, new_figure, styled
from helmscope.plots.variable_panel import plain
from helmscope.types import HelmscopeError, pluralized, type_with_article

if TYPE_CHECKING:
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
