"""The diffusion of attention in mode C: how the increment of one token at a fixed state varies over contexts.

    Sigma_C(x) = (1/2) Cov(Delta | x_i = x),    Delta = T W_O m_i / |y|                  [Helmholtz Transformer, no. 2]

A state that is the same in many contexts exists before the first layer only, where it depends on word and position. So
the contexts are grouped by (word, position), and each group of at least ``min_contexts`` members is one replicate:
Delta is what attention of layer 0 adds to its token. Sigma_C is measured, not a model: context is what is random. It is
compared with the mean over the same contexts of Sigma_A, the covariance of sampling one key per head:

    slope    least squares through 0 of the entries of Sigma_C, from half of the contexts, on those of Sigma_A, from the
             other half
    R^2      of Sigma_C of held-out contexts predicted by the slope and the Sigma_A of the others, about the mean entry

With m held-out contexts Sigma_C has rank m - 1 and R^2 stays below 1 even where the two agree: ``r_squared_corrected``
corrects for that by the product of two independent halves of Sigma_C, and is noisy itself.

Shares of covariance that comes from several heads, or several keys, together: (tr Cov(sum) - sum tr Cov) / tr Cov(sum),
0 for independent ones. ``kolmogorov_distance`` is the Kolmogorov distance of standardized increments from N(0, 1) on
random tangent directions, whose mean for normal samples of the same size is ``kolmogorov_distance_null``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.bundled_models import is_bundled, validation_contexts
from helmscope.models.recording import Recording
from helmscope.models.replay import InstrumentFeed
from helmscope.models.sites import Site
from helmscope.models.targets import prepare_inputs
from helmscope.observe.attention_drift import described
from helmscope.observe.context_group import ContextGroup
from helmscope.observe.context_statistics import group_statistics
from helmscope.observe.head_moments import HEADS_NEED, TangentSpaces, centered_output, with_heads
from helmscope.observe.kernel import effective_keys
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    Instrument,
    ReplayPlan,
    check_integer,
    check_progress,
    check_replicates,
    sub_progress,
    type_with_article,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

NAMES = {
    "slope": "slope of the entries of Sigma_C on those of Sigma_A",
    "r_squared": "R^2 of Sigma_C of held-out contexts, predicted by Sigma_A",
    "r_squared_corrected": "R^2 of Sigma_C by Sigma_A, corrected for the number of contexts",
    "nu_context": "diffusivity nu of Sigma_C (squared radians per layer)",
    "total_nu_token_sampling": "mean diffusivity nu of Sigma_A, summed over heads (squared radians per layer)",
    "total_nu_random_values": "mean diffusivity nu of Sigma_B, summed over heads (squared radians per layer)",
    "cross_head_share": "share of tr Sigma_C from covariance between heads",
    "cross_key_share": "share of tr Sigma_C from covariance between keys",
    "kolmogorov_distance": "Kolmogorov distance of standardized increments from N(0, 1)",
    "kolmogorov_distance_null": "Kolmogorov distance of normal samples of the same size, standardized",
    "effective_keys": "effective number of keys, the mean over heads and contexts",
    "context_count": "number of contexts",
}
RUN_SHARE = 0.7  # of the time, which runs layer 0
FIRST_POSITION = 8  # of a word with contexts: before it there are few keys


@shows_progress("measuring contexts")
def context_groups(
    recording: Recording,
    contexts: NDArray[np.int64] | Tensor,
    *,
    groups: int = 256,
    min_contexts: int = 16,
    first_position: int = FIRST_POSITION,
    seed: int = 0,
    progress: ProgressOption = None,
) -> list[ContextGroup]:
    """Groups of contexts with the same word at the same position, at most ``groups`` of them, drawn by ``seed`` among
    those with at least ``min_contexts`` contexts and from ``first_position`` on, where there are several keys.

    ``contexts`` are token ids (contexts, n), such as ``validation_contexts()``. Only layer 0 is run. Raises
    HelmscopeError unless there is a group, for states that differ within one, and for heads that are hidden.

    >>> from helmscope import record
    >>> from helmscope.models.bundled_models import validation_contexts
    >>> found = context_groups(record("A", ["Once upon a time"]), validation_contexts()[:64], groups=2, min_contexts=4)
    >>> len(found), found[0].outputs.shape[1:]
    (2, torch.Size([6, 32]))
    """
    if not isinstance(recording, Recording):
        raise HelmscopeError(f"recording is {type_with_article(recording)}, but it must be a Recording of a model")
    for name, value in (("groups", groups), ("min_contexts", min_contexts)):
        check_integer(name, value, at_least=4 if name == "min_contexts" else 1)
    ids = _token_ids(contexts)
    runner = recording.runner
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch = prepare_inputs(runner.model, inputs, recording.tokenizer, truncate=False)
    chosen = _choose(ids.cpu().numpy(), batch.counted, groups, min_contexts, first_position, seed)
    if not chosen:
        raise HelmscopeError(
            f"contexts has no word at the same position in {min_contexts} of its {len(ids)} texts: pass more, or lower "
            "min_contexts"
        )
    collector = _Collector(chosen)
    other = replace(recording, runner=replace(runner, batch=batch))
    reason = other.unsupported_reason(collector)
    if reason is not None:
        raise HelmscopeError(reason)
    collector.start(ReplayPlan(range(1), "layer", [0], "prompt", len(batch), batch.identities))
    report = check_progress(progress)
    feed = _FirstLayer(other, [collector], HEADS_NEED)
    for begin in range(0, len(batch), runner.batch_size):
        rows = slice(begin, min(begin + runner.batch_size, len(batch)))
        with suppress(_LayerDone):
            other.runner.forward(feed, rows=rows)
        report(rows.stop / len(batch))
    return collector.made()


def _token_ids(contexts: object) -> Tensor:
    """Contexts as token ids; raises HelmscopeError for texts and for rows of different lengths."""
    try:
        ids = torch.as_tensor(contexts, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0, device="cpu")
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise HelmscopeError(
            f"contexts is {type_with_article(contexts)}, but it must be token ids of shape (contexts, n), such as "
            "validation_contexts() or tokenizer(texts)['input_ids'] of equal lengths"
        )
    return ids


def own_contexts(recording: Recording) -> NDArray[np.int64]:
    """The contexts of a recording, token ids (contexts, n): the validation windows for a bundled model, whose texts
    hardly ever have the same word at the same position, else its own texts without padding, cut to the shortest.

    >>> from helmscope import record
    >>> own_contexts(record("A", ["Once upon a time"])).shape
    (768, 128)
    """
    if is_bundled(recording.origin.name):
        return validation_contexts()
    rows = recording.batch.visible_ids
    length = min(len(row) for row in rows)
    return np.array([row[:length] for row in rows])


def context_unsupported(system: System, *, min_contexts: int = 16) -> str | None:
    """Why ``context_noise`` cannot be taken of a system with its own contexts, in one sentence; None if it can.

    >>> from helmscope import record
    >>> context_unsupported(record("A", ["Once upon a time"])) is None
    True
    """
    if not isinstance(system, Recording):
        return f"system is {type_with_article(system)}, but context_noise needs contexts, as a Recording has them"
    reason = system.unsupported_reason(_Collector({}))
    if reason is not None or is_bundled(system.origin.name):
        return reason
    ids = own_contexts(system)
    if not _choose(ids, None, 1, min_contexts, FIRST_POSITION, 0):
        return (
            f"the {len(ids)} texts have no word at the same position in {min_contexts} of them, which context_noise "
            "needs: pass more contexts to hs.observe.context_noise"
        )
    return None


@shows_progress("context noise")
def context_noise(
    recording: Recording,
    contexts: Any = None,
    *,
    seed: int = 0,
    progress: ProgressOption = None,
    **options: Any,
) -> xr.Dataset:
    """Mode C of every (word, position) group, the replicates: Sigma_C against Sigma_A, shares of covariance between
    heads and keys, and the distance of the increments from normal ones. Quantities are those of this file's docstring.

    ``recording`` is one of the model, with ``contexts`` (by default ``own_contexts``) and ``options`` as for
    ``context_groups``; of the model only layer 0 is run, once for all contexts. ``context_group_noise`` takes the
    groups themselves. ``progress`` is called with the share of the work done.

    >>> from helmscope import record
    >>> from helmscope.models.bundled_models import validation_contexts
    >>> recording, contexts = record("A", ["Once upon a time"]), validation_contexts()[:64]
    >>> measured = context_noise(recording, contexts, groups=2, min_contexts=4)
    >>> measured.slope.dims
    ('group',)
    """
    report = check_progress(progress)
    contexts = own_contexts(recording) if contexts is None else contexts
    groups = context_groups(recording, contexts, seed=seed, progress=sub_progress(report, 0.0, RUN_SHARE), **options)
    return context_group_noise(groups, seed=seed, progress=sub_progress(report, RUN_SHARE, 1.0))


@shows_progress("context noise")
def context_group_noise(
    groups: Sequence[ContextGroup], *, seed: int = 0, progress: ProgressOption = None
) -> xr.Dataset:
    """``context_noise`` of groups that ``context_groups`` returned.

    >>> from helmscope import record
    >>> from helmscope.models.bundled_models import validation_contexts
    >>> recording, contexts = record("A", ["Once upon a time"]), validation_contexts()[:64]
    >>> groups = context_groups(recording, contexts, groups=2, min_contexts=4)
    >>> context_group_noise(groups).sizes["group"]
    2
    """
    report, rows = check_progress(progress), []
    for number, group in enumerate(groups):
        rows.append(group_statistics(group, seed, number))
        report(len(rows) / len(groups))
    data = {name: ("group", np.array([row[name] for row in rows])) for name in NAMES}
    coords = {
        "group": np.arange(len(rows)),
        "token_id": ("group", np.array([group.token for group in groups])),
        "position": ("group", np.array([group.position for group in groups])),
    }
    measured = xr.Dataset(data, coords)
    measured.r_squared.attrs["averaged_as"] = "log(1 - x)"  # bad predictions have very negative values
    measured = measured.assign_attrs(extra_forward_passes="layer 0 once for all contexts")
    return check_replicates(described(measured, NAMES), "group")


def _choose(
    ids: np.ndarray, counted: Tensor | None, groups: int, min_contexts: int, first_position: int, seed: int
) -> dict[tuple[int, int], list[int]]:
    """The contexts of some groups, by (token, position)."""
    found: dict[tuple[int, int], list[int]] = {}
    counts = np.ones(ids.shape, dtype=bool) if counted is None else counted.cpu().numpy().astype(bool)
    for row, line in enumerate(ids):
        for position in range(first_position, len(line)):
            if counts[row, position]:
                found.setdefault((int(line[position]), position), []).append(row)
    usable = sorted(key for key, members in found.items() if len(members) >= min_contexts)
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(usable))[:groups]
    return {usable[k]: found[usable[k]] for k in sorted(order)}


class _LayerDone(Exception):
    """Ends a forward pass after layer 0."""


class _FirstLayer(InstrumentFeed):
    """Feeds layer 0 only, and ends the forward pass when the next layer begins."""

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Collect a state or a write of layer 0."""
        if layer > 0:
            raise _LayerDone
        super().state(site, layer, value)


class _Sums:
    """Running sums of one group: members, outputs, covariances by half, and moments of what each key contributes."""

    def __init__(self, token: int, position: int) -> None:
        self.token, self.position = token, position
        self.outputs: list[Tensor] = []
        self.covariances: list[list[Tensor]] = [[], []]
        self.key_sum: Tensor | None = None
        self.key_squares = 0.0
        self.keys: list[float] = []
        self.random_traces: list[float] = []
        self.state: Tensor | None = None
        self.writes: Tensor | None = None
        self.first: tuple[Tensor, Tensor] | None = None
        self.dim = 0

    @full_precision
    def add(self, rows: Tensor, values: Tensor) -> None:
        """One context: its weights (heads, n) and values (heads, n, s)."""
        assert self.writes is not None
        mean = torch.einsum("hn,hns->hs", rows, values)
        deviation = values - mean.unsqueeze(1)
        half = self.covariances[len(self.outputs) % 2]
        covariance = (rows.unsqueeze(-1) * deviation).mT @ deviation
        half[:] = [covariance if not half else half[0] + covariance]
        self.outputs.append(mean)
        each = torch.einsum("hn,hns,hds->nd", rows, values, self.writes)
        self.key_sum = each if self.key_sum is None else self.key_sum + each
        self.key_squares += float(each.square().sum())
        spread = ((self.writes @ deviation.mT) ** 2).sum(1)  # |W_O (v_j - m)|^2, (heads, n)
        self.random_traces.append(float((rows**2 * spread).sum()) / 2)
        self.keys.append(float(effective_keys(rows.unsqueeze(-2).expand(-1, rows.shape[-1], -1))[:, 0].mean()))
        self.first = self.first or (rows, values)

    def made(self) -> ContextGroup:
        """The group of all contexts."""
        assert self.key_sum is not None
        assert self.writes is not None
        count = len(self.outputs)
        halves = [half[0] / len(self.outputs[k::2]) for k, half in enumerate(self.covariances)]
        key_traces = (self.key_squares - float(self.key_sum.square().sum()) / count) / (count - 1)
        outputs, covariances = torch.stack(self.outputs), torch.stack(halves)
        means = float(np.mean(self.random_traces)), float(np.mean(self.keys))
        place = self.token, self.position, self.dim
        return ContextGroup(*place, outputs, self.writes, covariances, key_traces, *means, self.first)


class _Collector(Instrument):
    """Collects the groups from layer 0."""

    name = "context_noise"
    needs = HEADS_NEED

    def __init__(self, chosen: dict[tuple[int, int], list[int]]) -> None:
        self.groups = {key: _Sums(*key) for key in chosen}
        self.wanted: dict[int, list[tuple[int, int]]] = {}
        for key, members in chosen.items():
            for row in members:
                self.wanted.setdefault(row, []).append(key)

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Adds the contexts of a chunk to their groups."""
        spaces = TangentSpaces.of(context, tensors)
        kernel, values, output = (part.cpu() for part in with_heads(tensors))
        output = centered_output(output.double(), centered=context.centered)
        for local, row in enumerate(range(context.rows.start, context.rows.stop)):
            wide = values[local].double()
            for key in self.wanted.get(row, []):
                sums, position = self.groups[key], key[1]
                state = tensors.state[local, position].cpu()
                if sums.state is None:
                    self._begin(sums, spaces, local, position, output)
                    sums.state = state
                elif float((state - sums.state).abs().max()) > 1e-4 * float(sums.state.abs().max()):
                    raise HelmscopeError(
                        f"state of token {key[0]} at position {position} differs between contexts before layer 0, but "
                        "it must depend on word and position only"
                    )
                sums.add(kernel[local, :, position].double(), wide)
        self.keep(context, {"rows": torch.ones(context.rows.stop - context.rows.start, device="cpu")})

    @full_precision
    def _begin(self, sums: _Sums, spaces: TangentSpaces, local: int, position: int, output: Tensor) -> None:
        """The tangential output matrices at the state of a group, over its length."""
        x = spaces.x[local, position].cpu().double()
        radius = float(spaces.radius[local, position])
        along = torch.einsum("d,hds->hs", x, output)
        sums.writes = (output - x[:, None] * along.unsqueeze(1)) / radius
        sums.dim = spaces.dim

    def made(self) -> list[ContextGroup]:
        """The groups in order."""
        return [sums.made() for sums in self.groups.values()]
