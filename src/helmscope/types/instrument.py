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
from typing import TYPE_CHECKING, Any

from helmscope.types.arguments import pluralized, short_repr, type_with_article
from helmscope.types.errors import HelmscopeError
from helmscope.types.measurement import as_measurement, check_replicates, identity_coordinates
from helmscope.types.replay_context import (
    AttentionTensors,
    CrossAttentionTensors,
    MlpTensors,
    Needs,
    ReplayContext,
    ReplayPlan,
)

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.types.dataset import Measurements
    from helmscope.types.system import System


class Instrument(ABC):
    """Base class for what measures a system during a replay; ``system.replay(...)`` and ``hs.measure`` take
    instruments.

    A subclass defines its ``name`` and its ``needs``, and implements one or more of ``attention``, ``cross`` and
    ``mlp``, which call ``keep`` with one value or array per replicate of the chunk. The values are assembled by
    replicate, so that the result does not depend on the chunk size. Average over tokens with ``context.token_mean``,
    which leaves out padding. An instrument can be reused: every replay resets it.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> class Peaks(Instrument):
    ...     name, needs = "peaks", Needs.KERNEL
    ...     def attention(self, context, tensors):
    ...         self.keep(context, {"peak": context.token_mean(tensors.kernel.amax(-1))})
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
    def extra_forward_passes(self) -> int:
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

    def unsupported_reason(self, system: System) -> str | None:
        """Why this instrument cannot be used on the system beyond its ``needs``, in one sentence; None if it can.

        >>> from helmscope.observe.kernel import KernelStatistics
        >>> KernelStatistics().unsupported_reason(None)
        """
        return None

    def start(self, plan: ReplayPlan) -> None:
        """Start a new replay and discard the values of earlier ones.

        >>> from helmscope.observe.kernel import KernelStatistics
        >>> instrument = KernelStatistics()
        >>> instrument.start(ReplayPlan(range(1), "layer", [0], "prompt", 1))
        >>> instrument.plan.replicates
        1
        """
        self._plan, self._kept = plan, {}

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:  # noqa: B027 - some need one half only
        """Process one chunk of an attention half.

        >>> class Queries(Instrument):
        ...     name, needs = "queries", Needs.QKV
        ...     def attention(self, context, tensors):
        ...         self.keep(context, {"length": tensors.query.norm(dim=-1).mean((1, 2))})
        """

    def cross(self, context: ReplayContext, tensors: CrossAttentionTensors) -> None:  # noqa: B027 - the same
        """Process one chunk of cross-attention.

        >>> class Reads(Instrument):
        ...     name, needs = "reads", Needs.CROSS_KERNEL
        ...     def cross(self, context, tensors):
        ...         self.keep(context, {"largest": context.token_mean(tensors.kernel.amax(-1))})
        """

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:  # noqa: B027 - the same
        """Process one chunk of an MLP half.

        >>> class Writes(Instrument):
        ...     name, needs = "writes", Needs.MLP_WRITE
        ...     def mlp(self, context, tensors):
        ...         self.keep(context, {"length": context.token_mean(tensors.write.norm(dim=-1))})
        """

    def keep(self, context: ReplayContext, values: Mapping[str, Tensor], axes: Sequence[str] | None = None) -> None:
        """Keep, by name, tensors with one value per replicate of the chunk, or with one array per replicate.

        ``axes`` names the axes after that of the replicates, such as ("bin",) or ("head", "bin"). Without it, one
        further axis is that of the heads, and must have as many entries as this half has heads. It is ignored for
        plain values, so that the same call works for systems with heads and without. Raises ``HelmscopeError`` if the
        shape does not match.

        >>> import torch
        >>> from helmscope.observe.kernel import KernelStatistics
        >>> instrument = KernelStatistics()
        >>> instrument.start(ReplayPlan(range(1), "layer", [0], "prompt", 1))
        >>> from helmscope.types import Half
        >>> instrument.keep(ReplayContext(0, Half.MLP, 0.0, slice(0, 1)), {"size": torch.ones(1)})
        >>> instrument.keep(ReplayContext(0, Half.MLP, 0.0, slice(0, 1)), {"bins": torch.ones(1, 3)}, axes=("bin",))
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
            used = self._axes(name, array.shape, context, names)
            kept = self._kept.setdefault(name, _Kept(used, []))
            kept.chunks.append((context.layer, context.rows, array))

    def _axes(
        self, name: str, shape: tuple[int, ...], context: ReplayContext, axes: tuple[str, ...] | None
    ) -> tuple[str, ...]:
        """The names of a value's axes after that of the replicates; raises ``HelmscopeError`` if they do not fit."""
        count, replicate = context.rows.stop - context.rows.start, self.plan.replicate
        described = f"{name} of instrument {self.name} has shape {shape}"
        if axes is not None and {replicate, self.plan.axis} & set(axes):
            taken = f"'{replicate}' and '{self.plan.axis}'"
            raise HelmscopeError(f"axes is {axes}, but {taken} are axes of every value: choose another name")
        if len(shape) == 1 and shape[0] == count:
            return ()
        if axes is None and len(shape) == 2 and shape[0] == count:
            if shape[1] == context.heads:
                return ("head",)
            heads = "no known heads" if context.heads is None else pluralized(context.heads, "head")
            raise HelmscopeError(
                f"{described}, but this {context.half.value} half has {heads}: name the axis of {shape[1]} entries, "
                "such as keep(context, values, axes=('bin',))"
            )
        wanted = ", ".join((replicate, *(("head",) if axes is None else axes)))
        if axes is None or len(shape) != 1 + len(axes) or shape[0] != count:
            raise HelmscopeError(
                f"{described}, but a chunk of {pluralized(count, 'replicate')} needs the axes ({replicate}) or "
                f"({wanted}), named by axes="
            )
        return axes

    def result(self) -> xr.Dataset:
        """The Measurement of all kept values, with axes (layer or time, prompt or system, further axes).

        Entries for which nothing was kept are NaN, such as those of layers without this half, or of heads that a layer
        does not have. Raises ``HelmscopeError`` if nothing was kept at all.

        >>> import torch
        >>> from helmscope.observe.kernel import KernelStatistics
        >>> instrument = KernelStatistics()
        >>> instrument.start(ReplayPlan(range(1), "layer", [0], "prompt", 1))
        >>> from helmscope.types import Half
        >>> instrument.keep(ReplayContext(0, Half.MLP, 0.0, slice(0, 1)), {"size": torch.ones(1)})
        >>> Instrument.result(instrument)["size"].dims
        ('layer', 'prompt')
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
        return as_measurement(xr.Dataset(data, coords | identity_coordinates(plan.replicate, plan.identities)))


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
    for k, instrument in enumerate(instruments):
        if not isinstance(instrument, Instrument):
            is_class = isinstance(instrument, type)
            kind = f"the class {instrument.__name__}" if is_class else type_with_article(instrument)
            raise HelmscopeError(
                f"instruments[{k}] is {kind}, but it must be an Instrument, such as KernelStatistics()"
            )
    names = [instrument.name for instrument in instruments]
    for name in names:
        if names.count(name) > 1:
            raise HelmscopeError(f"instruments holds {names.count(name)} named '{name}', but each needs its own name")
    for instrument in instruments:
        _check_needs(instrument)
        reason = system.unsupported_reason(instrument)
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
        f"needs of instrument {instrument.name} is {short_repr(needs)}, but it must be a member of Needs: {hint}"
    )


def results(instruments: Sequence[Instrument]) -> Measurements:
    """The Measurements of the instruments after a replay, by name.

    >>> results([])
    <Measurements: 0: none>
    """
    from helmscope.types.dataset import Measurements  # it imports xarray, which takes long

    return Measurements({instrument.name: check_replicates(instrument.result()) for instrument in instruments})
