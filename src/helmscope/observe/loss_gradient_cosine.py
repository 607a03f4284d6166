"""The direction of what a half-step writes against the gradient of the loss.

    cosine of token i  =  cos(w_i, -dL/dy_i)    at    y = x + s w

w is what attention or the MLP of one layer writes, x the state to which it is added, and L the sum of the next-token
losses of the prompt. The write of that half-step alone is scaled, for all tokens together, by s; all later layers run
on. At s = 0 the gradient does not depend on the write, and a write that goes down the loss has a cosine above 0. At
s = 1, the model as it is, training makes the derivative of the loss in the scale of a write vanish on average, so that
cosines near 0 say nothing there. Source: [Additive transport], abstract and Section 2.

Null: the same gradients with the writes permuted over the tokens of a prompt. The mean over all n! permutations is
<mean of w_i / |w_i|, mean of -g_i / |g_i|>, since every write meets every gradient equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.intervene.edit import Edit
from helmscope.models.names import Layers, chosen_layers
from helmscope.models.put_state import PutInput
from helmscope.models.sites import Site
from helmscope.observe.scoring import LayerInputs, Scoring, token_losses
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_real, check_replicates, check_seed, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.sites import AbstractEdit, EditContext
    from helmscope.types.progress import ProgressOption

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0)
DRAWS = 2  # single permutations, to compare one with another
COSINE = {"long_name": "cosine of write and minus the loss gradient", "valid_min": -1.0, "valid_max": 1.0}
PERMUTED = {**COSINE, "long_name": "cosine of permuted writes and minus the loss gradient"}


@shows_progress("cosine with the loss gradient")
def loss_gradient_cosine(
    recording: Recording,
    *,
    scales: Sequence[float] = SCALES,
    layers: Layers | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The cosine of every half-step's write with minus the loss gradient, with the write scaled by each of ``scales``:
    ``cosine`` along (layer, half, scale, prompt), the mean over the tokens of a prompt.

    ``cosine_null`` is its mean over all permutations of the writes over the tokens, and ``cosine_permuted``, along a
    further axis ``draw``, its value for two random ones. Tokens that do not count, that write nothing, or on which no
    scored token depends, such as the last one, have no cosine; a prompt without any has NaN. Takes one forward pass and
    backward from the layer on for each half-step and scale, and for s = 1 a single one for all half-steps. Raises
    HelmscopeError where ``next_token_loss`` does, and for a layer out of range.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> dict(loss_gradient_cosine(recording, scales=[0, 1]).cosine.sizes)
    {'layer': 2, 'half': 2, 'scale': 2, 'prompt': 2}
    """
    report, seed = check_progress(progress), check_seed(seed)
    steps = _checked_scales(scales)
    scoring = Scoring(recording)
    chosen = chosen_layers(recording, layers)
    sites = _writes(recording)
    found = np.full((1 + 1 + DRAWS, len(chosen), len(sites), len(steps), len(recording.batch)), np.nan)
    counted, done = recording.batch.counted, 0
    for rows in scoring.chunks():
        inputs = _inputs(scoring, rows)
        weights = torch.ones(scoring.weights[rows].shape, device="cpu") if counted is None else counted[rows].cpu()
        # where no write is changed, one backward pass gives the gradients at all states
        places = [(layer, site) for layer in chosen for site in sites]
        unchanged = _writes_and_gradients(scoring, rows, places, 1.0) if 1.0 in steps else {}
        for index in np.ndindex(found.shape[1:4]):
            layer, site, scale = chosen[index[0]], sites[index[1]], steps[index[2]]
            if scale == 1.0:
                write, gradient = unchanged[layer, site]
            else:
                write, gradient = _write_and_gradient(scoring, rows, inputs[layer], layer, site, scale)
            found[(slice(None), *index, rows)] = _cosines(write, -gradient, weights, rows.start, seed)
            done += rows.stop - rows.start
            report(done / found[0].size)
    axes = ("layer", "half", "scale", "prompt")
    data = {
        "cosine": (axes, found[0], COSINE),
        "cosine_null": (axes, found[1], PERMUTED),
        "cosine_permuted": (("draw", *axes), found[2:], PERMUTED),
    }
    coords = {"layer": chosen, "half": [site.value for site in sites], "scale": steps, **scoring.coords}
    return check_replicates(xr.Dataset(data, coords, {**scoring.attributes, "title": "cosine with the loss gradient"}))


@shows_progress("loss gradient")
def loss_gradient(
    recording: Recording,
    *,
    layer: int | str,
    site: Site = Site.MLP,
    scale: float = 0.0,
    progress: ProgressOption = None,
) -> Float[Tensor, "batch n d"]:
    """Loss gradient dL/dy of every token at the state y = x + s w after the half-step ``site`` (Site.ATTENTION or
    Site.MLP) of a layer, with its write w scaled by s = ``scale``; L is the sum of the next-token losses of the prompt.
    ``progress`` is called with the share of the prompts done.

    >>> from helmscope import record
    >>> recording = record("A", ["Once upon a time"])
    >>> gradient = loss_gradient(recording, layer=11)
    >>> gradient.shape, float(gradient[0, -1].abs().max())  # nothing is predicted from the last token
    (torch.Size([1, 4, 192]), 0.0)
    """
    scoring, number = Scoring(recording), recording.layer(layer)
    if site not in _writes(recording):
        allowed = ", ".join(map(str, _writes(recording)))
        raise HelmscopeError(f"site is {short_repr(site)}, but it must be that of a write, one of {allowed}")
    scale = check_real("scale", scale)
    report, found = check_progress(progress), []
    for rows in scoring.chunks():
        state = _inputs(scoring, rows)[number]
        found.append(_write_and_gradient(scoring, rows, state, number, site, scale)[1])
        report(rows.stop / len(recording.batch))
    return torch.cat(found)


def _checked_scales(scales: Sequence[float]) -> list[float]:
    if isinstance(scales, str) or not isinstance(scales, Sequence) or not scales:
        raise HelmscopeError(f"scales is {short_repr(scales)}, but it must be a list of numbers such as [0, 0.5, 1]")
    return [check_real("scales", scale) for scale in scales]


def _writes(recording: Recording) -> tuple[Site, ...]:
    """The sites of the writes of a layer, in the order of its half-steps."""
    written = recording.anatomy.layers[0].wiring.writes
    return tuple(site for site in (Site.ATTENTION, Site.CROSS, Site.MLP) if site in written)


def _inputs(scoring: Scoring, rows: slice) -> dict[int, Tensor]:
    """The inputs of all layers, from a forward pass whose logits are checked to contain the tokens."""
    inputs = LayerInputs()
    scoring.logits(scoring.runner, rows, inputs)
    return inputs.states


def _write_and_gradient(
    scoring: Scoring, rows: slice, state: Tensor, layer: int, site: Site, scale: float
) -> tuple[Tensor, Tensor]:
    """What one half-step writes, and the gradient of the summed loss at the state after it, with the write scaled."""
    put = PutInput(layer, state, rows)
    return _writes_and_gradients(scoring, rows, [(layer, site)], scale, put)[layer, site]


def _writes_and_gradients(
    scoring: Scoring, rows: slice, half_steps: Sequence[tuple[int, Site]], scale: float, *edits: AbstractEdit
) -> dict[tuple[int, Site], tuple[Tensor, Tensor]]:
    """What half-steps write, and the gradients of the summed loss at the states after them, with all of these writes
    scaled.

    The gradient is that by a term of value 0 that is added to the write: also where a norm follows the sum, as in
    post-norm blocks, it is the gradient at the sum.
    """
    writes: dict[tuple[int, Site], Tensor] = {}
    terms: dict[tuple[int, Site], Tensor] = {}

    def scaled(write: Tensor, context: EditContext) -> Tensor:
        place = context.layer, context.site
        writes[place] = write.detach().clone()
        terms[place] = torch.zeros_like(writes[place]).requires_grad_()
        return scale * write + terms[place]

    scalings = [Edit(site, [layer], scaled) for layer, site in half_steps]
    with torch.enable_grad():
        logits = scoring.runner.under(*edits, *scalings).outputs(rows=rows, gradients=True)
        scored = (scoring.weights[rows] > 0).nonzero()
        text, token = scored.to(logits.device).unbind(-1)
        targets = scoring.ids[rows][scored[:, 0], scored[:, 1]].to(logits.device)
        weights = scoring.weights[rows][scored[:, 0], scored[:, 1]].to(logits)
        loss = (weights * token_losses(logits[text, token - scoring.shift], targets)).sum()
        gradients = torch.autograd.grad(loss, list(terms.values()))
    return {place: (writes[place], gradient) for place, gradient in zip(terms, gradients, strict=True)}


def _cosines(
    write: Float[Tensor, "rows n d"],
    downward: Float[Tensor, "rows n d"],
    weights: Float[Tensor, "rows n"],
    first: int,
    seed: int,
) -> np.ndarray:
    """Mean cosines of each prompt, over (kind, rows): as they are, over all permutations, and for single ones."""
    write, downward = write.double().cpu(), downward.double().cpu()
    lengths = [torch.linalg.vector_norm(each, dim=-1) for each in (write, downward)]
    used = (weights > 0) & (lengths[0] > 0) & (lengths[1] > 0)
    columns = []
    for row in range(len(write)):
        tokens = used[row].nonzero().squeeze(-1)
        units = [
            each[row, tokens] / size[row, tokens, None] for each, size in zip((write, downward), lengths, strict=True)
        ]
        if not len(tokens):
            columns.append([np.nan] * (2 + DRAWS))
            continue
        share = weights[row, tokens].double() / weights[row, tokens].double().sum()
        null = (units[0].mean(0) * (share[:, None] * units[1]).sum(0)).sum()
        draw = np.random.default_rng([seed, first + row])
        orders = [
            torch.arange(len(tokens), device="cpu"),
            *(torch.from_numpy(draw.permutation(len(tokens))) for _ in range(DRAWS)),
        ]
        own, *others = (float((share * (units[0][order] * units[1]).sum(-1)).sum()) for order in orders)
        columns.append([own, float(null), *others])
    return np.array(columns).T
