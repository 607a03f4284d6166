"""Instruments: measurements that are taken while a system is replayed.

A replay shows every layer of a system once, one chunk of its replicates at a time: the attention half, then the
cross-attention of a decoder that reads an encoder, then the MLP half, as far as the layer has them. An ``Instrument``
declares what it needs, keeps a small result of each chunk, and returns a Measurement with replicates. A replay computes
only what some instrument needs.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any

from helmscope.types.arguments import counted, shown, type_with_article
from helmscope.types.errors import HelmscopeError
from helmscope.types.measurement import check_replicates, identity_coordinates

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from jaxtyping import Bool, Float
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.types.system import System


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
    (queries, keys and values) and ``FORCE`` (the MLP as a field on unit vectors) are required: replaying a system that
    cannot provide them raises ``HelmscopeError``. ``CROSS`` (the states that cross-attention reads, and those of the
    encoder that it attends to), ``CROSS_KERNEL``, ``CROSS_QKV`` and ``CROSS_WRITE`` are passed for every layer with
    cross-attention; most systems have none.

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

    @property
    def attention_half(self) -> bool:
        """Whether anything of the attention half is needed.

        >>> Needs.QKV.attention_half, Needs.FORCE.attention_half
        (True, False)
        """
        return bool(self & (Needs.ATTENTION | Needs.KERNEL | Needs.QKV | Needs.ATTENTION_WRITE))

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
class ReplayPlan:
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
class Moment:
    """The position of a chunk within a replay.

    ``layer`` and ``half`` identify the mechanism. ``time`` is the position of the state that this half reads: the time
    of a simulation, the depth of a recording. ``rows`` are the replicates of the chunk, ``weights`` the weights of
    their tokens in statistics (None: equal), ``visible`` the tokens that can be attended to (None: all). ``step`` is
    None in a flow, whose writes are velocities; in a layer, writes are increments and ``step`` is its size h: 1 in a
    model, and for ``Layer(h)`` the factor h that the increments contain. ``heads`` is the number of heads of this half,
    None if it has no axis of heads or their number is unknown.

    >>> Moment(0, Half.MLP, 0.0, slice(0, 2), step=1.0).is_increment
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

    @property
    def is_increment(self) -> bool:
        """Whether writes are increments of the state rather than velocities."""
        return self.step is not None

    def token_mean(self, values: Float[Tensor, "rows ... n"]) -> Float[Tensor, "rows ..."]:
        """The mean over tokens, the last axis, by their weights: padding does not count.

        >>> import torch
        >>> moment = Moment(0, Half.MLP, 0.0, slice(0, 1), weights=torch.tensor([[1.0, 1.0, 0.0]]))
        >>> moment.token_mean(torch.tensor([[1.0, 3.0, float("nan")]]))
        tensor([2.])
        """
        if self.weights is None:
            return values.mean(-1)
        weights = self.weights.to(values)
        weights = weights.reshape(len(weights), *(1,) * (values.ndim - 2), -1)
        return (weights * values.where(weights > 0, 0.0)).sum(-1) / weights.sum(-1)


@dataclass(frozen=True, eq=False)
class AttentionPass:
    """The tensors of the attention half of one layer; those that no instrument needs are None.

    ``state`` is the state that the half reads, before any norm, and ``direction`` its unit vectors as in the
    trajectory. ``kernel`` has rows of attention weights, and an axis of heads unless the system is a simulated field of
    a single head. In a model keys and values may have fewer heads than queries. ``write`` is what the half adds to the
    state, before any projection to the sphere. Tensors are valid only during the call.

    >>> import torch
    >>> x = torch.eye(2).expand(1, 2, 2)
    >>> AttentionPass(state=3 * x, direction=x).kernel is None
    True
    """

    state: Float[Tensor, "rows n d"]
    direction: Float[Tensor, "rows n d"]
    kernel: Float[Tensor, "rows *heads n n"] | None = None
    query: Float[Tensor, "rows *heads n r"] | None = None
    key: Float[Tensor, "rows *kv_heads n r"] | None = None
    value: Float[Tensor, "rows *kv_heads n s"] | None = None
    write: Float[Tensor, "rows n d"] | None = None


@dataclass(frozen=True, eq=False)
class CrossPass:
    """The tensors of the cross-attention of one layer, by which a decoder reads its encoder; those that no instrument
    needs are None.

    ``state`` is the state that it reads, before any norm, and ``direction`` its unit vectors. ``memory`` holds the
    encoder's last states, which it attends to; ``memory_weights`` are the weights of the encoder's tokens in statistics
    (None: equal), ``memory_visible`` the ones that can be attended to (None: all). ``kernel`` has for each token of the
    decoder a row of weights of the encoder's m tokens; queries come from the decoder, keys and values from the encoder.
    ``write`` is what cross-attention adds to the state. Tensors are valid only during the call.

    >>> import torch
    >>> x = torch.eye(2).expand(1, 2, 2)
    >>> CrossPass(state=3 * x, direction=x, memory=torch.ones(1, 5, 4)).memory.shape
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
class MlpPass:
    """The tensors of the MLP half of one layer; those that no instrument needs are None.

    ``state`` is the state that the half reads, before any norm, and ``direction`` its unit vectors. ``force`` is the
    MLP as a field with its norm folded in, and ``point`` where it must be evaluated to reproduce the MLP's output: unit
    vectors up to the epsilon of the norm. ``write`` is what the half adds to the state, before any projection to the
    sphere. Tensors are valid only during the call.

    >>> import torch
    >>> x = torch.eye(2).expand(1, 2, 2)
    >>> MlpPass(state=3 * x, direction=x, write=torch.zeros_like(x)).write.shape
    torch.Size([1, 2, 2])
    """

    state: Float[Tensor, "rows n d"]
    direction: Float[Tensor, "rows n d"]
    force: Any = None
    point: Float[Tensor, "rows n d"] | None = None
    write: Float[Tensor, "rows n d"] | None = None


class Instrument(ABC):
    """Base class for what measures a system during a replay; ``system.replay(...)`` and ``hs.measure`` take
    instruments.

    A subclass defines its ``name`` and its ``needs``, and implements one or more of ``attention``, ``cross`` and
    ``mlp``, which call ``keep`` with one value or array per replicate of the chunk. The values are assembled by
    replicate, so that the result does not depend on the chunk size. Average over tokens with ``moment.token_mean``,
    which leaves out padding. An instrument can be reused: every replay resets it.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> class Peaks(Instrument):
    ...     name, needs = "peaks", Needs.KERNEL
    ...     def attention(self, moment, passed):
    ...         self.keep(moment, {"peak": moment.token_mean(passed.kernel.amax(-1))})
    >>> run = integrate(SA(beta=0.0), torch.eye(2).expand(3, 2, 2), times=[0.0, 1.0])
    >>> peak = run.replay(Peaks())["peaks"].peak
    >>> peak.dims, peak.values.tolist()
    (('time', 'system'), [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    """

    _plan: ReplayPlan | None = None
    _kept: dict[str, _Kept]

    @property
    @abstractmethod
    def name(self) -> str:
        """The key of its Measurement in the result of a replay."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What it needs from a replay."""

    @property
    def extra_forwards(self) -> int:
        """The number of forward passes of a model that it runs in addition to the replay; 0 by default."""
        return 0

    @property
    def plan(self) -> ReplayPlan:
        """The plan of its latest replay; raises ``HelmscopeError`` before the first one."""
        if self._plan is None:
            raise HelmscopeError(
                f"instrument {self.name} has no plan before its first replay: pass it to system.replay"
            )
        return self._plan

    def refusal(self, system: System) -> str | None:
        """Why this instrument cannot be used on the system beyond its ``needs``, in one sentence; None if it can."""
        return None

    def start(self, plan: ReplayPlan) -> None:
        """Start a new replay and discard the values of earlier ones."""
        self._plan, self._kept = plan, {}

    def attention(self, moment: Moment, passed: AttentionPass) -> None:  # noqa: B027 - some need one half only
        """Process one chunk of an attention half."""

    def cross(self, moment: Moment, passed: CrossPass) -> None:  # noqa: B027 - the same
        """Process one chunk of cross-attention."""

    def mlp(self, moment: Moment, passed: MlpPass) -> None:  # noqa: B027 - the same
        """Process one chunk of an MLP half."""

    def keep(self, moment: Moment, values: Mapping[str, Tensor], axes: Sequence[str] | None = None) -> None:
        """Keep, by name, tensors with one value per replicate of the chunk, or with one array per replicate.

        ``axes`` names the axes after that of the replicates, such as ("bin",) or ("head", "bin"). Without it, one
        further axis is that of the heads, and must have as many entries as this half has heads. It is ignored for
        plain values, so that the same call works for systems with heads and without. Raises ``HelmscopeError`` if the
        shape does not match.
        """
        if not isinstance(values, Mapping):
            raise HelmscopeError(
                f"values of instrument {self.name} is {type_with_article(values)}, but keep needs a mapping of names "
                "to tensors"
            )
        names = None if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for name, value in values.items():
            if not hasattr(value, "detach"):
                raise HelmscopeError(
                    f"{name} of instrument {self.name} is {type_with_article(value)}, but keep needs a tensor with one "
                    "entry per replicate"
                )
            array = value.detach().double().cpu().numpy()
            used = self._axes(name, array.shape, moment, names)
            kept = self._kept.setdefault(name, _Kept(used, []))
            kept.chunks.append((moment.layer, moment.rows, array))

    def _axes(self, name: str, shape: tuple[int, ...], moment: Moment, axes: tuple[str, ...] | None) -> tuple[str, ...]:
        """The names of a value's axes after that of the replicates; raises ``HelmscopeError`` if they do not fit."""
        count, replicate = moment.rows.stop - moment.rows.start, self.plan.replicate
        described = f"{name} of instrument {self.name} has shape {shape}"
        if axes is not None and {replicate, self.plan.axis} & set(axes):
            taken = f"'{replicate}' and '{self.plan.axis}'"
            raise HelmscopeError(f"axes is {axes}, but {taken} are axes of every value: choose another name")
        if len(shape) == 1 and shape[0] == count:
            return ()
        if axes is None and len(shape) == 2 and shape[0] == count:
            if shape[1] == moment.heads:
                return ("head",)
            heads = "no known heads" if moment.heads is None else counted(moment.heads, "head")
            raise HelmscopeError(
                f"{described}, but this {moment.half.value} half has {heads}: name the axis of {shape[1]} entries, "
                "such as keep(moment, values, axes=('bin',))"
            )
        wanted = ", ".join((replicate, *(("head",) if axes is None else axes)))
        if axes is None or len(shape) != 1 + len(axes) or shape[0] != count:
            raise HelmscopeError(
                f"{described}, but a chunk of {counted(count, 'replicate')} needs the axes ({replicate}) or "
                f"({wanted}), named by axes="
            )
        return axes

    def result(self) -> xr.Dataset:
        """The Measurement of all kept values, with axes (layer or time, prompt or system, further axes).

        Entries for which nothing was kept are NaN, such as those of layers without this half, or of heads that a layer
        does not have. Raises ``HelmscopeError`` if nothing was kept at all.
        """
        import numpy as np
        import xarray as xr

        plan, sizes = self.plan, dict[str, int]()
        if not self._kept:
            raise HelmscopeError(f"instrument {self.name} kept nothing: this system has no half that it measures")
        for kept in self._kept.values():
            for _, _, array in kept.chunks:
                for axis, size in zip(kept.axes, array.shape[1:], strict=True):
                    sizes[axis] = max(size, sizes.get(axis, 0))
        data = {}
        for name, kept in self._kept.items():
            shape = (len(plan.layers), plan.replicates, *(sizes[axis] for axis in kept.axes))
            values = np.full(shape, np.nan)
            for layer, rows, array in kept.chunks:
                values[plan.layers.index(layer), rows][tuple(slice(size) for size in array.shape)] = array
            data[name] = ((plan.axis, plan.replicate, *kept.axes), values)
        coords: dict[str, Any] = {plan.axis: np.asarray(plan.coordinates), plan.replicate: np.arange(plan.replicates)}
        coords |= {axis: np.arange(size) for axis, size in sizes.items()}
        return xr.Dataset(data, coords | identity_coordinates(plan.replicate, plan.identities))


@dataclass(frozen=True, eq=False)
class _Kept:
    """The kept values of one name: their axes after the replicate axis, and the chunks as (layer, rows, values)."""

    axes: tuple[str, ...]
    chunks: list[tuple[int, slice, NDArray[np.float64]]]


def start_instruments(system: System, instruments: Sequence[Instrument], plan: ReplayPlan) -> Needs:
    """Check the instruments, start them for a replay of the system, and return the union of their needs.

    Raises ``HelmscopeError`` if one is not an Instrument, if two have the same name, or if one cannot be used on the
    system.

    >>> start_instruments(None, [], ReplayPlan(range(1), "layer", [0], "prompt", 1))
    <Needs.NOTHING: 0>
    """
    needs = Needs.NOTHING
    for instrument in instruments:
        if not isinstance(instrument, Instrument):
            kind = instrument.__name__ if isinstance(instrument, type) else type(instrument).__name__
            raise HelmscopeError(
                f"instruments holds {kind}, but each must be an Instrument object such as KernelStatistics()"
            )
    names = [instrument.name for instrument in instruments]
    for name in names:
        if names.count(name) > 1:
            raise HelmscopeError(f"instruments holds {names.count(name)} named '{name}', but each needs its own name")
    for instrument in instruments:
        _check_needs(instrument)
        reason = system.refusal(instrument)
        if reason is not None:
            raise HelmscopeError(reason)
        needs |= instrument.needs
    for instrument in instruments:
        instrument.start(plan)
    return needs


def _check_needs(instrument: Instrument) -> None:
    """Raise HelmscopeError unless the needs of an instrument are a ``Needs``, with the member that was meant."""
    needs: object = instrument.needs
    if isinstance(needs, Needs):
        return
    members = [str(name) for name in Needs.__members__]
    near = difflib.get_close_matches(needs.upper().strip(), members, n=1, cutoff=0.4) if isinstance(needs, str) else []
    hint = f"did you mean Needs.{near[0]}?" if near else f"such as Needs.{Needs.KERNEL.name}"
    raise HelmscopeError(
        f"needs of instrument {instrument.name} is {shown(needs)}, but it must be a member of Needs: {hint}"
    )


def results(instruments: Sequence[Instrument]) -> dict[str, xr.Dataset]:
    """The Measurements of the instruments after a replay, by name.

    >>> results([])
    {}
    """
    return {instrument.name: check_replicates(instrument.result()) for instrument in instruments}
