"""What a replay passes to an instrument: where it is (``ReplayContext``) and the tensors of one half of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any

from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float
    from numpy.typing import NDArray
    from torch import Tensor


class Half(Enum):
    """The halves of a block: attention, the cross-attention of a decoder that reads an encoder, and the MLP.

    >>> [half.value for half in Half]
    ['attention', 'cross', 'mlp']
    """

    ATTENTION = "attention"
    CROSS = "cross"
    MLP = "mlp"


class Needs(Flag):
    """What an instrument needs from a replay.

    ``ATTENTION`` and ``MLP`` are the states that a half reads, ``ATTENTION_WRITE`` and ``MLP_WRITE`` what it writes;
    they are optional, and passed for every layer that has this half. ``KERNEL`` (the attention weights), ``QKV``
    (queries, keys and values), ``OUTPUT_MATRIX`` (the matrices by which the heads write) and ``FORCE`` (the MLP as a
    field on unit vectors) are required: replaying a system that cannot provide them raises ``HelmscopeError``.
    ``CROSS`` (the states that cross-attention reads, and those of the encoder that it attends to), ``CROSS_KERNEL``,
    ``CROSS_QKV`` and ``CROSS_WRITE`` are passed for every layer with cross-attention; most systems have none.

    >>> Needs.KERNEL in Needs.KERNEL | Needs.MLP_WRITE
    True
    """

    NOTHING = 0
    ATTENTION = auto()
    KERNEL = auto()
    QKV = auto()
    ATTENTION_WRITE = auto()
    MLP = auto()
    FORCE = auto()
    MLP_WRITE = auto()
    CROSS = auto()
    CROSS_KERNEL = auto()
    CROSS_QKV = auto()
    CROSS_WRITE = auto()
    OUTPUT_MATRIX = auto()

    @property
    def attention_half(self) -> bool:
        """Whether anything of the attention half is needed.

        >>> Needs.QKV.attention_half, Needs.FORCE.attention_half
        (True, False)
        """
        needs = Needs.ATTENTION | Needs.KERNEL | Needs.QKV | Needs.OUTPUT_MATRIX | Needs.ATTENTION_WRITE
        return bool(self & needs)

    @property
    def cross_half(self) -> bool:
        """Whether anything of cross-attention is needed.

        >>> Needs.CROSS_KERNEL.cross_half
        True
        """
        return bool(self & (Needs.CROSS | Needs.CROSS_KERNEL | Needs.CROSS_QKV | Needs.CROSS_WRITE))

    @property
    def mlp_half(self) -> bool:
        """Whether anything of the MLP half is needed.

        >>> Needs.FORCE.mlp_half
        True
        """
        return bool(self & (Needs.MLP | Needs.FORCE | Needs.MLP_WRITE))


@dataclass(frozen=True, eq=False)
class ReplayPlan(ConciseRepr):
    """The extent of a replay: its ``layers``, the name ``axis`` of their axis and their ``coordinates`` on it, and the
    name ``replicate`` of the replicate axis with the number of ``replicates``. ``identities`` are those of the
    ``Trajectory``, None if unknown.

    >>> ReplayPlan(range(1), axis="layer", coordinates=[0], replicate="prompt", replicates=3).replicates
    3
    """

    layers: range
    axis: str
    coordinates: Sequence[float] | NDArray[np.generic]
    replicate: str
    replicates: int
    identities: Sequence[str] | None = None


@dataclass(frozen=True, eq=False)
class ReplayContext(ConciseRepr):
    """The position of a chunk within a replay.

    ``layer`` and ``half`` identify the mechanism. ``time`` is the position of the state that this half reads: the time
    of a simulation, the depth of a recording. ``rows`` are the replicates of the chunk, ``weights`` the weights of
    their tokens in statistics (None: equal), ``visible`` the tokens that can be attended to (None: all). ``step`` is
    None in a flow, whose writes are velocities; in a layer, writes are increments and ``step`` is its size h: 1 in a
    model, and for ``Layer(h)`` the factor h that the increments contain. ``heads`` is the number of heads of this half,
    None if it has no axis of heads or their number is unknown. ``centered``: norms remove the mean over coordinates, so
    that directions are on S^(d-2), whose tangent space has d - 2 dimensions.

    >>> ReplayContext(0, Half.MLP, 0.0, slice(0, 2), step=1.0).is_increment
    True
    """

    layer: int
    half: Half
    time: float
    rows: slice
    weights: Float[Tensor, "rows n"] | None = None
    visible: Bool[Tensor, "rows n"] | None = None
    step: float | None = None
    heads: int | None = None
    centered: bool = False

    @property
    def is_increment(self) -> bool:
        """Whether writes are increments of the state rather than velocities."""
        return self.step is not None

    def token_mean(self, values: Float[Tensor, "rows ... n"]) -> Float[Tensor, "rows ..."]:
        """The mean over tokens, the last axis, by their weights: padding does not count.

        >>> import torch
        >>> context = ReplayContext(0, Half.MLP, 0.0, slice(0, 1), weights=torch.tensor([[1.0, 1.0, 0.0]]))
        >>> context.token_mean(torch.tensor([[1.0, 3.0, float("nan")]]))
        tensor([2.])
        """
        if self.weights is None:
            return values.mean(-1)
        weights = self.weights.to(values)
        weights = weights.reshape(len(weights), *(1,) * (values.ndim - 2), -1)
        return (weights * values.where(weights > 0, 0.0)).sum(-1) / weights.sum(-1)


@dataclass(frozen=True, eq=False)
class AttentionTensors(ConciseRepr):
    """The tensors of the attention half of one layer; those that no instrument needs are None.

    ``state`` is the state that the half reads, before any norm, and ``direction`` its unit vectors as in the
    trajectory. ``kernel`` has rows of attention weights, and an axis of heads unless the system is a simulated field of
    a single head. In a model keys and values may have fewer heads than queries. ``write`` is what the half adds to the
    state, before any projection to the sphere. ``output_matrix`` holds the matrices W_O^h by which the heads write,
    residual multiplier and step size included: ``write`` is sum_h W_O^h sum_j P^h_ij v^h_j plus a bias that is the same
    for all tokens. Tensors are valid only during the call.

    >>> import torch
    >>> x = torch.eye(2).expand(1, 2, 2)
    >>> AttentionTensors(state=3 * x, direction=x).kernel is None
    True
    """

    state: Float[Tensor, "rows n d"]
    direction: Float[Tensor, "rows n d"]
    kernel: Float[Tensor, "rows *heads n n"] | None = None
    query: Float[Tensor, "rows *heads n r"] | None = None
    key: Float[Tensor, "rows *kv_heads n r"] | None = None
    value: Float[Tensor, "rows *kv_heads n s"] | None = None
    write: Float[Tensor, "rows n d"] | None = None
    output_matrix: Float[Tensor, "*heads d s"] | None = None

    @property
    def radius(self) -> Float[Tensor, "rows n"]:
        """The length |y| of each state, without its mean where norms remove it; 1 on the unit sphere."""
        return (self.state * self.direction).sum(-1)

    @property
    def head_values(self) -> Float[Tensor, "rows *heads n s"] | None:
        """The values, repeated where several query heads share them."""
        if self.value is None or self.query is None or self.query.ndim == 3:
            return self.value
        return self.value.repeat_interleave(self.query.shape[1] // self.value.shape[1], 1)


@dataclass(frozen=True, eq=False)
class CrossAttentionTensors(ConciseRepr):
    """The tensors of the cross-attention of one layer, by which a decoder reads its encoder; those that no instrument
    needs are None.

    ``state`` is the state that it reads, before any norm, and ``direction`` its unit vectors. ``memory`` holds the
    encoder's last states, which it attends to; ``memory_weights`` are the weights of the encoder's tokens in statistics
    (None: equal), ``memory_visible`` the ones that can be attended to (None: all). ``kernel`` has for each token of the
    decoder a row of weights of the encoder's m tokens; queries come from the decoder, keys and values from the encoder.
    ``write`` is what cross-attention adds to the state. Tensors are valid only during the call.

    >>> import torch
    >>> x = torch.eye(2).expand(1, 2, 2)
    >>> CrossAttentionTensors(state=3 * x, direction=x, memory=torch.ones(1, 5, 4)).memory.shape
    torch.Size([1, 5, 4])
    """

    state: Float[Tensor, "rows n d"]
    direction: Float[Tensor, "rows n d"]
    memory: Float[Tensor, "rows m e"]
    memory_weights: Float[Tensor, "rows m"] | None = None
    memory_visible: Bool[Tensor, "rows m"] | None = None
    kernel: Float[Tensor, "rows heads n m"] | None = None
    query: Float[Tensor, "rows heads n r"] | None = None
    key: Float[Tensor, "rows kv_heads m r"] | None = None
    value: Float[Tensor, "rows kv_heads m s"] | None = None
    write: Float[Tensor, "rows n d"] | None = None


@dataclass(frozen=True, eq=False)
class MlpTensors(ConciseRepr):
    """The tensors of the MLP half of one layer; those that no instrument needs are None.

    ``state`` is the state that the half reads, before any norm, and ``direction`` its unit vectors. ``force`` is the
    MLP as a field with its norm folded in, and ``point`` where it must be evaluated to reproduce the MLP's output: unit
    vectors up to the epsilon of the norm. ``unfolded`` is the same MLP as a function of the output of that ``norm``,
    with the weights that the model has (times its residual multiplier); ``norm`` is None where there is none. ``write``
    is what the half adds to the state, before any projection to the sphere. ``preactivations`` and ``force_value`` are
    what the model itself has computed of the force at these points: W x + b for each of the force's ``input_rows``, and
    the force; None where an instrument has to compute them. Tensors are valid only during the call.

    >>> import torch
    >>> x = torch.eye(2).expand(1, 2, 2)
    >>> MlpTensors(state=3 * x, direction=x, write=torch.zeros_like(x)).write.shape
    torch.Size([1, 2, 2])
    """

    state: Float[Tensor, "rows n d"]
    direction: Float[Tensor, "rows n d"]
    force: Any = None
    point: Float[Tensor, "rows n d"] | None = None
    write: Float[Tensor, "rows n d"] | None = None
    unfolded: Any = None
    norm: Any = None
    preactivations: tuple[Float[Tensor, "rows n h"], ...] | None = None
    force_value: Float[Tensor, "rows n d"] | None = None
