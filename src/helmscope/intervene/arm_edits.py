"""Edits used by the arms of the factorial experiment: ``NegateValues`` (-V in place of V) and ``FreezeRadius`` (the
state is rescaled to the radius that it has in another recording).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.intervene.edit import Edit, SiteEdit
from helmscope.models.recording import Recording
from helmscope.models.sites import AbstractEdit, Observer, Site
from helmscope.models.topology import Kind
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.sites import EditContext
    from helmscope.models.tap import Call

SPREAD = 1e-3  # relative difference of constants between tokens, above which values depend on more than the state


@dataclass(frozen=True, eq=False, repr=False)
class NegateValues(SiteEdit):
    """Replace the value matrix V by -V: values v = V c + u become -V c + u = 2 u - v.

    Here c is the state that attention reads on the unit sphere, before gain and bias of its norm, so that V
    contains the gain. The constants u (value bias, and the norm's bias times the value matrix) are unchanged, as is the
    bias of the output matrix: they add the same vector to every token, whatever the attention weights are.
    ``constants`` holds u for each layer, (kv_heads, 1, r); ``NegateValues.of`` computes them.

    >>> from helmscope.models.record import record
    >>> NegateValues.of(record("A", ["Once upon a time"])).constants[0].shape
    torch.Size([6, 1, 32])
    """

    allowed = (Site.VALUE,)
    layers: Sequence[int] | None = None
    constants: Sequence[Float[Tensor, "kv_heads 1 r"]] = ()
    site = Site.VALUE

    @classmethod
    def of(cls, recording: Recording) -> NegateValues:
        """The edit for the model of a recording, whose constants are found by one forward pass of its first text with
        all states set to c = 0. Raises HelmscopeError if the values of the model cannot be edited.

        >>> from helmscope import record
        >>> len(NegateValues.of(record("A", ["Once upon a time"])).constants)
        12
        """
        anatomy = recording.anatomy
        cls().check(anatomy)
        observer = _ValueConstants(len(anatomy.layers))
        zero = Edit(Site.INPUT, None, _ZeroCores(anatomy).state)
        replace(recording.runner, edits=(zero,)).forward(observer, rows=slice(0, 1))
        return cls(constants=tuple(observer.constants))

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """2 u - v."""
        return 2 * self.constants[context.layer].to(value) - value


@dataclass(frozen=True, eq=False)
class _ZeroCores:
    """The block inputs at which attention reads c = 0: 0, or in a post-norm block the bias of the norm before it."""

    anatomy: Anatomy

    def state(self, value: Tensor, context: EditContext) -> Tensor:
        """The input of a block, equal for all tokens."""
        layers, number = self.anatomy.layers, context.layer
        zero = torch.zeros_like(value)
        if layers[number].wiring.kind is not Kind.POST_NORM:
            return zero
        opening = self.anatomy.embedding_norm
        norm = layers[number - 1].close_norm if number else None if opening is None else opening[1]
        return zero if norm is None or norm.bias is None else zero + norm.bias.to(value)


class _ValueConstants(Observer):
    """Observer that keeps the value of the first token in every layer."""

    sees_attention = True

    def __init__(self, layers: int) -> None:
        self.constants = [torch.empty(0, device="cpu")] * layers

    def before(self, layer: int, call: Call) -> None:
        """Keep the value, and check that it is the same for all tokens."""
        first = call.value[0, :, :1]
        spread = float((call.value[0] - first).abs().max())
        if spread > SPREAD * float(first.abs().max()):
            raise HelmscopeError(
                f"values of layer {layer} differ by {spread:.2g} between tokens of equal states, but negating the "
                "value matrix needs values that depend on the state only"
            )
        self.constants[layer] = first.detach().clone()


@dataclass(frozen=True, eq=False, repr=False)
class FreezeRadius(AbstractEdit):
    """Rescale every state after the first to the radius that this token has at the same depth in ``source``, a
    recording of the same texts: the direction is that of the edited forward pass, the radius that of the source.

    The mean over coordinates, which is not part of the radius where norms remove it, is unchanged. Raises
    HelmscopeError for a post-norm model, where norms set the radius of every state.

    >>> from helmscope.intervene.states import Ablate
    >>> from helmscope.models.record import record
    >>> whole = record("A", ["Once upon a time"])
    >>> held = whole.under(Ablate(), FreezeRadius(whole))
    >>> bool((held.trajectory.radius / whole.trajectory.radius - 1).abs().max() < 1e-5)
    True
    """

    source: Recording

    @property
    def sites(self) -> frozenset[Site]:
        """The sites of states."""
        return frozenset({*self.source.anatomy.depths.states, Site.OUTPUT})

    def check(self, anatomy: Anatomy) -> None:
        """Raise HelmscopeError if the source is a recording of another kind of model, or begins at a later depth."""
        if not isinstance(self.source, Recording):
            raise HelmscopeError(f"source is {type_with_article(self.source)}, but it must be a Recording")
        if self.source.anatomy.depths != anatomy.depths or self.source.first != 0:
            raise HelmscopeError(
                f"source has the depths {self.source.first} to {self.source.anatomy.depths.last}, but the model has "
                f"the depths 0 to {anatomy.depths.last}"
            )
        if anatomy.post_norm:
            raise HelmscopeError(
                f"source is a recording of {type(anatomy.model).__name__}, a post-norm model, but the radius can be "
                "held only where norms do not set it"
            )

    def new(self, value: Tensor, context: EditContext) -> Tensor | None:
        """The state at the radius of the source."""
        anatomy = self.source.anatomy
        depth = anatomy.depths.at(context.layer, context.site)
        # the output of a block is rescaled as the input of the next one, and the first state is the source's own
        if depth == 0 or (context.site is Site.OUTPUT and depth < anatomy.depths.last):
            return None
        radius = self.source.residual.radius[depth]
        if len(radius) != context.texts or radius.shape[1] != value.shape[1]:
            raise HelmscopeError(
                f"source has {tuple(radius.shape)} texts and tokens, but the model reads "
                f"{(context.texts, value.shape[1])}"
            )
        target = radius[context.rows].unsqueeze(-1).to(value)
        mean = value.mean(-1, keepdim=True) if anatomy.centered else torch.zeros_like(value[..., :1])
        plain = value - mean
        own = torch.linalg.vector_norm(plain, dim=-1, keepdim=True)
        return mean + plain * (target / torch.where(own > 0, own, 1.0))
