"""The arms of a factorial experiment on a transformer: attention x MLP, each on, off or changed in all layers.

    whole model          y' = y + A(y),  y'' = y' + M(y')
    attention alone      y' = y + A(y),  y'' = y'
    MLP alone            y' = y,         y'' = y' + M(y')
    no writes            y' = y,         y'' = y'
    no mixing            A with attention weights P = I: every token attends to itself only
    values negated       A with -V in place of V

The residual connection is part of every arm. In a post-norm block y' = N(y + A(y)), a half that is off writes 0, and
its norm still acts. Cross-attention of a decoder is not changed by any arm.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from helmscope.intervene.arm_edits import FreezeRadius, NegateValues
from helmscope.intervene.attention import ReplaceKernel
from helmscope.intervene.states import Ablate
from helmscope.models.names import Layers, layer_indices
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import Site
from helmscope.types import HelmscopeError, pluralized
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.sites import AbstractEdit


class AttentionMode(Enum):
    """What attention does in an arm: ``ON``, unchanged; ``OFF``, it writes 0; ``NO_MIXING``, its weights are P = I;
    ``NEGATED``, its value matrix is -V, with all biases unchanged (``NegateValues``).

    >>> [mode.value for mode in AttentionMode]
    ['on', 'off', 'no mixing (P = I)', 'values negated']
    """

    ON = "on"
    OFF = "off"
    NO_MIXING = "no mixing (P = I)"
    NEGATED = "values negated"


@dataclass(frozen=True)
class Arm(ConciseRepr):
    """One arm: what ``attention`` does in all layers, and whether the MLPs write. ``mlp`` is True (all on), False (all
    off), or the layers whose MLP stays on, such as 3 or ["L0", "L3"]. With ``radius_of_whole_model`` every state is
    rescaled to the radius that the token has at this depth in the whole model, so that the angle moved by a write is
    not changed by a smaller radius.

    >>> Arm(mlp=False).label
    'attention alone'
    >>> Arm(mlp={3, 1}).label
    'attention with the MLPs of layers 1, 3'
    >>> Arm(mlp=False, radius_of_whole_model=True).label
    "attention alone, at the whole model's radius"
    >>> from helmscope.models.record import record
    >>> Arm(mlp=False).edits(record("A", ["Once upon a time"]))
    (Ablate(),)
    """

    attention: AttentionMode = AttentionMode.ON
    mlp: bool | int | str | Collection[int | str] = True
    radius_of_whole_model: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.attention, AttentionMode):
            allowed = ", ".join(str(mode) for mode in AttentionMode)
            raise HelmscopeError(f"attention is {self.attention!r:.60}, but it must be one of {allowed}")
        if not isinstance(self.radius_of_whole_model, bool):
            raise HelmscopeError(
                f"radius_of_whole_model is {self.radius_of_whole_model!r:.60}, but it must be True or False"
            )
        if not isinstance(self.mlp, bool | int | str | Collection):
            raise HelmscopeError(
                f"mlp is {self.mlp!r:.60}, but it must be True, False or the layers whose MLP stays on, such as [0, 3]"
            )
        if not isinstance(self.mlp, bool):
            none = isinstance(self.mlp, Collection) and not len(self.mlp)
            object.__setattr__(self, "mlp", False if none else tuple(sorted(set(layer_indices("mlp", self.mlp)))))

    @property
    def label(self) -> str:
        """The arm in words, as in the coordinate ``arm`` of a Measurement."""
        mode = self.attention
        if isinstance(self.mlp, bool):
            label = _LABELS.get((mode, self.mlp), mode.value if self.mlp else f"{mode.value}, MLP off")
        else:
            layers = layer_indices("mlp", self.mlp)
            numbers, plural = ", ".join(map(str, layers)), "s" if len(layers) > 1 else ""
            mlps = f"the MLP{plural} of layer{plural} {numbers}"
            heads = {AttentionMode.ON: f"attention with {mlps}", AttentionMode.OFF: f"{mlps} alone"}
            label = heads.get(mode, f"{mode.value}, with {mlps}")
        return f"{label}, at the whole model's radius" if self.radius_of_whole_model else label

    def edits(self, recording: Recording) -> tuple[AbstractEdit, ...]:
        """The edits that turn the model of a recording into this arm, for ``recording.under``.

        ``recording`` is that of the whole model, whose radii ``radius_of_whole_model`` uses. The whole model needs
        none. Raises HelmscopeError if ``mlp`` names a layer that the model does not have, or if its attention cannot be
        edited.

        >>> from helmscope import record
        >>> len(Arm(mlp=False).edits(record("A", ["Once upon a time"])))
        1
        """
        check_recording(recording)
        edits: list[AbstractEdit] = []
        if self.attention is AttentionMode.OFF:
            edits.append(Ablate(site=Site.ATTENTION))
        elif self.attention is AttentionMode.NO_MIXING:
            edits.append(ReplaceKernel(function=_identity_weights))
        elif self.attention is AttentionMode.NEGATED:
            edits.append(NegateValues.of(recording))
        silent = self._silent_layers(len(recording.anatomy.layers))
        if silent is None or silent:
            edits.append(Ablate(silent, site=Site.MLP))
        return (*edits, FreezeRadius(recording)) if self.radius_of_whole_model else tuple(edits)

    def _silent_layers(self, count: int) -> list[int] | None:
        """The layers whose MLP is off; None for all of them."""
        if isinstance(self.mlp, bool):
            return [] if self.mlp else None
        kept = set(layer_indices("mlp", self.mlp))
        if max(kept) >= count:
            raise HelmscopeError(f"mlp holds {max(kept)}, but the model has layers 0 to {count - 1}")
        return [layer for layer in range(count) if layer not in kept]


_LABELS = {
    (AttentionMode.ON, True): "whole model",
    (AttentionMode.ON, False): "attention alone",
    (AttentionMode.OFF, True): "MLP alone",
    (AttentionMode.OFF, False): "no writes",
}
ARMS = tuple(Arm(mode, mlp) for mode in AttentionMode for mlp in (True, False))


def only_one_mlp(layers: Layers, *, attention: AttentionMode = AttentionMode.ON) -> tuple[Arm, ...]:
    """One arm per layer, in which only the MLP of this layer writes.

    >>> [arm.label for arm in only_one_mlp(range(2))]
    ['attention with the MLP of layer 0', 'attention with the MLP of layer 1']
    """
    return tuple(Arm(attention, (layer,)) for layer in layer_indices("layers", layers))


def without_one_mlp(layers: Layers, *, attention: AttentionMode = AttentionMode.ON) -> tuple[Arm, ...]:
    """One arm per layer, in which all MLPs write but that of this layer. ``layers`` are all layers of the model, such
    as ``recording.layers``; raises HelmscopeError if there are fewer than two.

    >>> [arm.mlp for arm in without_one_mlp(range(3))]
    [(1, 2), (0, 2), (0, 1)]
    """
    numbers = layer_indices("layers", layers)
    if len(set(numbers)) < 2:
        raise HelmscopeError(f"layers holds {pluralized(len(set(numbers)), 'layer')}, but leaving one out needs two")
    return tuple(Arm(attention, set(numbers) - {layer}) for layer in numbers)


def _identity_weights(weights: Tensor) -> Tensor:
    return torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device).expand_as(weights)
