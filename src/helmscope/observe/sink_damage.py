"""What attention sinks do for a model's predictions: the damage of changing what other queries retrieve from them.

Query t of a head with weights A_tj retrieves the sum lambda V_s + sum_{j != s} A_tj V_j, where s is the first visible
token and lambda = A_ts. For all queries but that of s itself, whose own output and thereby all of its states stay,

    mean     lambda V_s becomes lambda c, with c the mean of V_s over other prompts
    zero     lambda V_s becomes 0
    masked   lambda V_s becomes 0, and the other weights are divided by 1 - lambda

The value is not edited where it is computed, since the output of s would change too, and so would all queries of heads
that share the value and are no sinks. A query with lambda = 1 keeps its weights when the sink is masked. If the value
of a sink is a constant, the mean does no damage. Source: [Additive transport], 9.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.intervene.edit import Edit
from helmscope.models.recording import check_recording
from helmscope.models.sites import Site
from helmscope.observe.damage import damage_under_edits
from helmscope.observe.loss import heads_to_ablate
from helmscope.observe.sinks import SINK_THRESHOLD, AttentionSinks, TokenValues
from helmscope.runs.bar import shows_progress
from helmscope.stats.replicates import random_halves
from helmscope.types import HelmscopeError, check_progress, check_real, check_seed, pluralized

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.sites import AbstractEdit, EditContext
    from helmscope.types.progress import ProgressOption

Head = tuple[int, int]  # layer and number
MIN_PROMPTS = 4  # two in each half


@shows_progress("damage to sinks")
def sink_damage(
    recording: Recording,
    *,
    heads: str | Sequence[str] | None = None,
    threshold: float = SINK_THRESHOLD,
    first_position: int = 1,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage (``damage_under_edits``) of replacing what other queries retrieve from the sinks of a model by its
    mean and by 0, and of masking the sinks, all of them together: along (edit, prompt).

    ``heads`` names the sinks, such as ["L2H3"]; by default these are the heads whose mean weight on the first visible
    token, over the queries from ``first_position`` on, is at least ``threshold``. The mean of a prompt is that over the
    half of the prompts to which it does not belong. Takes three forward passes from the first sink's layer on, and one
    for weights and values. Raises HelmscopeError if no head is a sink, for fewer than four prompts, and where
    ``next_token_loss`` does.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [2, 4, 6, 8], [3, 1, 2, 7]]))
    >>> damage = sink_damage(recording, heads="L1H0")
    >>> damage.kl.dims, damage.edit.values.tolist()
    (('edit', 'prompt'), ['mean', 'zero', 'masked'])
    """
    report, seed, least = check_progress(progress), check_seed(seed), check_real("threshold", threshold, above=0)
    check_recording(recording)
    if len(recording.batch) < MIN_PROMPTS:
        raise HelmscopeError(
            f"recording has {pluralized(len(recording.batch), 'prompt')}, but the mean over other prompts needs at "
            f"least {MIN_PROMPTS}"
        )
    if heads is None:
        instrument = AttentionSinks(first_position=first_position)
        weights = recording.replay(instrument)[instrument.name].first_token_mass.mean("prompt")
        sinks = sinks_of(weights, least)
        if not sinks:
            raise HelmscopeError(
                f"threshold is {least:g}, but no head has a mean weight on the first token above "
                f"{float(weights.max()):.3g}"
            )
    else:
        sinks = heads_to_ablate(recording, None, heads)
    constants = _other_means(recording, seed)
    edits = {
        "mean": SinkEdits(sinks, constants=constants).edits,
        "zero": SinkEdits(sinks).edits,
        "masked": SinkEdits(sinks, renormalized=True).edits,
    }
    damage = damage_under_edits(recording, edits, progress=report)
    return damage.assign_attrs(title="damage to sinks", sinks=[f"L{layer}H{head}" for layer, head in sinks])


def sinks_of(weights: xr.DataArray, least: float) -> list[Head]:
    """The heads whose weight on the first token, (layer, head), is at least ``least``.

    >>> sinks_of(xr.DataArray([[0.1, 0.5]], dims=("layer", "head")), 0.3)
    [(0, 1)]
    """
    found = weights.transpose("layer", "head").values >= least
    return [(int(layer), int(head)) for layer, head in zip(*found.nonzero(), strict=True)]


def _other_means(recording: Recording, seed: int) -> Mapping[int, Float[Tensor, "batch heads s"]]:
    """For every layer and prompt, the mean of the sinks' values over the half of the prompts without it."""
    value = recording.replay(TokenValues())[TokenValues.name].value.isel(position=0)
    parts = random_halves(len(recording.batch), seed=seed)
    means = {}
    for layer, of_layer in zip(recording.layers, value.transpose("layer", "prompt", "head", "component"), strict=True):
        values = torch.from_numpy(of_layer.values)
        means[layer] = torch.empty_like(values)
        for part, other in (parts, parts[::-1]):
            means[layer][part] = values[other].mean(0)
    return means


class SinkEdits:
    """The ``edits`` that change what other queries retrieve from the first visible token in some heads, ``sinks``: to
    lambda c with ``constants`` c, or to 0; with ``renormalized`` the other weights are divided by 1 - lambda.

    >>> weights = torch.tensor([[[[1.0, 0.0], [0.75, 0.25]]]])
    >>> from helmscope.models.sites import Chunk
    >>> (masked,) = SinkEdits([(0, 0)], renormalized=True).edits
    >>> masked.new(weights, Chunk.whole(1).at(Site.KERNEL, layer=0)).tolist()
    [[[[1.0, 0.0], [0.0, 1.0]]]]
    """

    def __init__(
        self,
        sinks: Sequence[Head],
        *,
        constants: Mapping[int, Float[Tensor, "batch heads s"]] | None = None,
        renormalized: bool = False,
    ) -> None:
        self.heads: dict[int, list[int]] = {}
        for layer, head in sinks:
            self.heads.setdefault(layer, []).append(head)
        self.constants, self.renormalized = constants, renormalized
        self.retrieved: dict[int, Tensor] = {}  # lambda of the present forward, by layer

    @property
    def edits(self) -> tuple[AbstractEdit, ...]:
        """One edit of the weights, and one of the heads' outputs if there are constants."""
        layers = list(self.heads)
        without = Edit(Site.KERNEL, layers, self._without)
        return (without,) if self.constants is None else (without, Edit(Site.HEADS, layers, self._with_constants))

    def _without(self, weights: Tensor, context: EditContext) -> Tensor:
        heads, rows = self.heads[context.layer], torch.arange(len(weights), device=weights.device)
        visible = context.visible
        first = torch.zeros_like(rows) if visible is None else visible.to(torch.int8).argmax(-1)
        changed = weights.clone()
        own = torch.arange(weights.shape[-2], device=weights.device) == first[:, None]  # the query of the sink itself
        sink = weights[rows, :, :, first][:, heads]
        retrieved = torch.where(own[:, None], 0.0, sink)
        if self.renormalized:
            retrieved = torch.where(sink < 1, retrieved, 0.0)
            others = weights[:, heads] / torch.where(retrieved > 0, 1 - retrieved, 1.0).unsqueeze(-1)
            changed[:, heads] = others
        columns = changed[rows, :, :, first]
        columns[:, heads] = torch.where(retrieved > 0, 0.0, columns[:, heads])
        changed[rows, :, :, first] = columns
        self.retrieved[context.layer] = retrieved
        return changed

    def _with_constants(self, outputs: Tensor, context: EditContext) -> Tensor:
        assert self.constants is not None
        heads = self.heads[context.layer]
        constant = self.constants[context.layer][context.rows][:, heads].to(outputs)
        changed = outputs.clone()
        changed[:, :, heads] += self.retrieved.pop(context.layer).transpose(1, 2).unsqueeze(-1) * constant.unsqueeze(1)
        return changed
