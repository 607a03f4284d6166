"""What passes through a system while it is replayed, and the instruments that measure it.

A replay shows every layer of a system once, a chunk of its replicates at a time: first the attention half, then the
cross-attention of a decoder that reads an encoder, then the MLP half, where there are such. An ``Instrument`` says what
it needs to be shown, keeps a small result of each chunk, and gives a Measurement that keeps its replicates. A replay
computes nothing that no instrument needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any

from helmscope.types.arguments import counted
from helmscope.types.errors import HelmscopeError
from helmscope.types.measurement import check_replicates

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from jaxtyping import Bool, Float
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.types.system import System


class Half(Enum):
    """The two halves of a block, and between them the cross-attention of a decoder that reads an encoder.

    >>> [half.value for half in Half]
    ['attention', 'cross', 'mlp']
    """

    ATTENTION = "attention"
    CROSS = "cross"
    MLP = "mlp"


class Needs(Flag):
    """What an instrument needs to be shown.

    ``ATTENTION`` and ``MLP`` are the states that a half reads, ``ATTENTION_WRITE`` and ``MLP_WRITE`` what it writes:
    shown wherever the system has that half. ``KERNEL`` (the attention weights), ``QKV`` (query, key and value) and
    ``FORCE`` (the MLP as a field on unit vectors) are required: a system that cannot show them refuses the instrument.
    ``CROSS`` (the states that cross-attention reads, and those of the encoder that it attends to), ``CROSS_KERNEL``,
    ``CROSS_QKV`` and ``CROSS_WRITE`` are shown wherever a layer has cross-attention; most systems have none.

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
        """Whether anything of the attention half is asked for."""
        return bool(self & (Needs.ATTENTION | Needs.KERNEL | Needs.QKV | Needs.ATTENTION_WRITE))

    @property
    def cross_half(self) -> bool:
        """Whether anything of cross-attention is asked for."""
        return bool(self & (Needs.CROSS | Needs.CROSS_KERNEL | Needs.CROSS_QKV | Needs.CROSS_WRITE))

    @property
    def mlp_half(self) -> bool:
        """Whether anything of the MLP half is asked for."""
        return bool(self & (Needs.MLP | Needs.FORCE | Needs.MLP_WRITE))


@dataclass(frozen=True, eq=False)
class ReplayPlan:
    """What a replay is about to show: ``layers``, whose mechanisms lie along the axis named ``axis`` at
    ``coordinates``, for a number of ``replicates`` along the axis ``replicate``.

    >>> ReplayPlan(range(1), axis="layer", coordinates=[0], replicate="prompt", replicates=3).replicates
    3
    """

    layers: range
    axis: str
    coordinates: Sequence[float] | NDArray[np.generic]
    replicate: str
    replicates: int


@dataclass(frozen=True, eq=False)
class Moment:
    """Where in a replay a chunk passes.

    ``layer`` and ``half`` say which mechanism it is. ``time`` is the time of the state that this half reads: the time
    of a simulation, the depth of a recording. ``rows`` are the replicates of the chunk, ``weights`` what
    statistics count of their tokens (None: all alike), ``visible`` what attention sees of them (None: all). ``step``
    is None in a flow, whose writes are velocities; in a layer writes are increments, and ``step`` is its size h: 1 in
    a model, and for ``Layer(h)`` the factor h that the increments contain.

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

    @property
    def is_increment(self) -> bool:
        """Whether a write is what the state is increased by, and not a velocity."""
        return self.step is not None


@dataclass(frozen=True, eq=False)
class AttentionPass:
    """What passes through the attention half of a layer; None where no instrument needs it.

    ``state`` is the state that the half reads, before any norm, and ``direction`` its unit vectors as in the
    trajectory. ``kernel`` has rows of attention weights, with an axis of heads where the system has one: a simulated
    field of a single head has none. ``query``, ``key`` and ``value`` are None where the mechanism does not show them;
    in a model keys and values may have fewer heads than queries. ``write`` is what the half adds to the state, before
    any projection to the sphere. Tensors are valid during the call alone.
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
    """What passes through the cross-attention of a layer, by which a decoder reads its encoder; None where no
    instrument needs it.

    ``state`` is the state that it reads, before any norm, and ``direction`` its unit vectors. ``memory`` holds the
    encoder's last states, which it attends to; ``memory_weights`` is what statistics count of the encoder's tokens
    (None: all alike), ``memory_visible`` which of them can be seen (None: all). ``kernel`` has for each token of the
    decoder a row of weights of the encoder's m tokens; ``query`` is the decoder's, ``key`` and ``value`` are the
    encoder's. ``write`` is what cross-attention adds to the state. Tensors are valid during the call alone.
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
    """What passes through the MLP half of a layer; None where no instrument needs it.

    ``state`` is the state that the half reads, before any norm, and ``direction`` its unit vectors. ``force`` is the
    MLP as a field with its norm folded in, and ``point`` where it gives what the MLP gave: unit vectors up to the
    epsilon of the norm. ``write`` is what the half adds to the state, before any projection to the sphere. Tensors are
    valid during the call alone.
    """

    state: Float[Tensor, "rows n d"]
    direction: Float[Tensor, "rows n d"]
    force: Any = None
    point: Float[Tensor, "rows n d"] | None = None
    write: Float[Tensor, "rows n d"] | None = None


class Instrument(ABC):
    """Measures what passes while a system is replayed; ``system.replay(...)`` and ``hs.measure`` take instruments.

    A subclass has a ``name`` and says what it ``needs``. It implements ``attention``, ``cross`` and ``mlp``, or some
    of them, and there calls ``keep`` with numbers of each replicate of the chunk. Kept numbers are put together by
    their replicate, so that the size of the chunks changes nothing. An instrument can be used again: every replay
    starts it afresh.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> class Peaks(Instrument):
    ...     name, needs = "peaks", Needs.KERNEL
    ...     def attention(self, moment, passed):
    ...         self.keep(moment, {"peak": passed.kernel.amax((-1, -2))})
    >>> seen = integrate(SA(beta=0.0), torch.eye(2).expand(3, 2, 2), times=[0.0, 1.0]).replay(Peaks())["peaks"]
    >>> seen.peak.dims, seen.peak.values.tolist()
    (('time', 'system'), [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    """

    _plan: ReplayPlan | None = None
    _kept: dict[str, _Kept]

    @property
    @abstractmethod
    def name(self) -> str:
        """What its Measurement is called among those of a replay."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What it needs to be shown."""

    @property
    def forwards(self) -> int:
        """How many forwards of a model it takes beside the replay: none where it only looks at what passes."""
        return 0

    @property
    def plan(self) -> ReplayPlan:
        """What the replay that it was last used in shows."""
        if self._plan is None:
            raise HelmscopeError(f"instrument {self.name} has seen no replay: give it to system.replay first")
        return self._plan

    def refusal(self, system: System) -> str | None:
        """Why the system is not one for this instrument, in one sentence; None where it is, ``needs`` provided."""
        return None

    def start(self, plan: ReplayPlan) -> None:
        """Forget earlier replays: another one begins."""
        self._plan, self._kept = plan, {}

    def attention(self, moment: Moment, passed: AttentionPass) -> None:  # noqa: B027 - it may need one half alone
        """Take in what passes through an attention half."""

    def cross(self, moment: Moment, passed: CrossPass) -> None:  # noqa: B027 - the same
        """Take in what passes through cross-attention."""

    def mlp(self, moment: Moment, passed: MlpPass) -> None:  # noqa: B027 - the same
        """Take in what passes through an MLP half."""

    def keep(self, moment: Moment, values: Mapping[str, Tensor], axes: Sequence[str] = ("head",)) -> None:
        """Keep, by their names, one value per replicate of the chunk, or an array per replicate with the axes ``axes``.

        A value without further axes needs no names, so that one call serves systems with heads and without.
        """
        count = moment.rows.stop - moment.rows.start
        for name, value in values.items():
            array = value.detach().double().cpu().numpy()
            if array.ndim not in (1, 1 + len(axes)) or len(array) != count:
                wanted = ", ".join((self.plan.replicate, *axes))
                raise HelmscopeError(
                    f"{name} of instrument {self.name} has shape {array.shape}, but a chunk of "
                    f"{counted(count, 'replicate')} needs the axes ({self.plan.replicate}) or ({wanted})"
                )
            kept = self._kept.setdefault(name, _Kept(tuple(axes)[: array.ndim - 1], []))
            kept.chunks.append((moment.layer, moment.rows, array))

    def result(self) -> xr.Dataset:
        """The Measurement of all that was kept, with its replicates: (layer or time, prompt or system, further axes).
        It is NaN where nothing was kept, as in a layer that lacks the half, or a head that its layer lacks.
        """
        import numpy as np
        import xarray as xr

        plan, sizes = self.plan, dict[str, int]()
        if not self._kept:
            raise HelmscopeError(f"instrument {self.name} kept nothing: this system has no half that it looks at")
        for kept in self._kept.values():
            for _, _, array in kept.chunks:
                for axis, size in zip(kept.axes, array.shape[1:], strict=True):
                    sizes[axis] = max(size, sizes.get(axis, 0))
        data = {}
        for name, kept in self._kept.items():
            shape = (len(plan.layers), plan.replicates, *(sizes[axis] for axis in kept.axes))
            whole = np.full(shape, np.nan)
            for layer, rows, array in kept.chunks:
                whole[plan.layers.index(layer), rows][tuple(slice(size) for size in array.shape)] = array
            data[name] = ((plan.axis, plan.replicate, *kept.axes), whole)
        coords = {plan.axis: np.asarray(plan.coordinates), plan.replicate: np.arange(plan.replicates)}
        return xr.Dataset(data, coords | {axis: np.arange(size) for axis, size in sizes.items()})


@dataclass(frozen=True, eq=False)
class _Kept:
    """The numbers of one name: the names of their axes behind that of the replicates, and the chunks."""

    axes: tuple[str, ...]
    chunks: list[tuple[int, slice, NDArray[np.float64]]]


def start_instruments(system: System, instruments: Sequence[Instrument], plan: ReplayPlan) -> Needs:
    """Check instruments, start them for a replay of the system, and give what they need together.

    >>> start_instruments(None, [], ReplayPlan(range(1), "layer", [0], "prompt", 1))
    <Needs.NOTHING: 0>
    """
    needs = Needs.NOTHING
    for instrument in instruments:
        if not isinstance(instrument, Instrument):
            shown = instrument.__name__ if isinstance(instrument, type) else type(instrument).__name__
            raise HelmscopeError(
                f"instruments holds {shown}, but each must be an Instrument object such as KernelStatistics()"
            )
    names = [instrument.name for instrument in instruments]
    for name in names:
        if names.count(name) > 1:
            raise HelmscopeError(f"instruments holds {names.count(name)} named '{name}', but each needs its own name")
    for instrument in instruments:
        reason = system.refusal(instrument)
        if reason is not None:
            raise HelmscopeError(reason)
        needs |= instrument.needs
    for instrument in instruments:
        instrument.start(plan)
    return needs


def results(instruments: Sequence[Instrument]) -> dict[str, xr.Dataset]:
    """The Measurements of instruments at the end of a replay, by their names.

    >>> results([])
    {}
    """
    return {instrument.name: check_replicates(instrument.result()) for instrument in instruments}
