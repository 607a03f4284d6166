"""Next-token loss of a causal language model or an encoder-decoder model, unmodified and under edits.

    loss of token t  =  -log p(token t | tokens before t)        in nats, from the logits at position t - 1

A token is scored with its statistical weight, and only where token t - 1 is visible: padding and special tokens are not
scored. An end-of-text token that the tokenizer adds is therefore not scored, although the model was trained to predict
it, while the first word after a beginning-of-text token is. Without a tokenizer no token is known to be special, and
all tokens but the first are scored.

The tokens of an encoder-decoder model are the targets of its decoder, whose loss is conditional on the text that the
encoder reads. All of them are scored, the first one too: it is predicted from the start token. If
``decoder_input_ids`` were recorded instead of targets, these are the tokens, and the first one is not scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from helmscope.intervene.attention import AblateHead
from helmscope.models.names import Layers, chosen_layers, parse_head
from helmscope.models.recording import Recording
from helmscope.models.sites import AbstractEdit
from helmscope.observe.scoring import Scoring
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_progress,
    check_replicates,
    short_repr,
)

if TYPE_CHECKING:
    from helmscope.types.progress import ProgressOption

LOSS = {"long_name": "next-token loss", "units": "nats", "valid_min": 0.0}
LOSS_UNDER_EDIT = {**LOSS, "long_name": "next-token loss under the edit"}
BASELINE = {**LOSS, "long_name": "next-token loss without edits"}
INCREASE = {"long_name": "increase of the next-token loss", "units": "nats"}


@shows_progress("next-token loss")
def next_token_loss(recording: Recording, *, progress: ProgressOption = None) -> xr.Dataset:
    """Mean next-token loss of each prompt in nats: ``loss`` along ``prompt``, averaged by the weights of the tokens.

    ``loss_null`` is the loss log |V| of a uniform guess over the vocabulary. The coordinate ``predicted`` holds the
    total weight of the scored tokens of each prompt; the loss of a prompt without any is NaN, and a
    warning names it.

    The loss of an encoder-decoder model is that of the targets given the texts. Runs the model once more under the
    edits of the recording, a few texts at a time, so that the logits of all texts are never in memory together. Sums
    are float64, whereas transformers computes its loss in float32. Raises HelmscopeError for models that are not causal
    or have no head over a vocabulary. ``progress`` is called with the share of the texts done.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> measured = next_token_loss(recording)
    >>> measured.loss.dims, measured.predicted.values.tolist(), round(float(measured.loss_null), 3)
    (('prompt',), [3.0, 3.0], 2.197)
    >>> ablated = next_token_loss(recording.under(AblateHead(layer=0, head=1)))
    >>> bool((ablated.loss != measured.loss).all())
    True
    """
    scoring = Scoring(recording)
    losses = scoring.losses(check_progress(progress))
    data = {"loss": ("prompt", scoring.means(losses), LOSS), "loss_null": scoring.null}
    return _in_nats(xr.Dataset(data, scoring.coords, scoring.attributes))


@shows_progress("next-token loss")
def token_loss(recording: Recording, *, progress: ProgressOption = None) -> xr.DataArray:
    """Next-token loss of every token in nats, (prompt, token), NaN where a token is not scored.

    The first token of each text, special tokens and padding are not scored. The tokens of an encoder-decoder model are
    its targets, of which the first is scored too. The coordinate ``label``, (prompt, token), holds the text of each
    token. The mean of a prompt by the weights of its tokens equals ``next_token_loss``, whose
    arguments and errors also apply here.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> losses = token_loss(record(model, torch.tensor([[1, 2, 3, 4]])))
    >>> losses.label.values.tolist(), losses.notnull().values.tolist()
    ([['1', '2', '3', '4']], [[False, True, True, True]])
    """
    scoring = Scoring(recording)
    losses = scoring.losses(check_progress(progress)).numpy()
    coords: dict[str, Any] = {"prompt": np.arange(len(losses)), "token": np.arange(losses.shape[1])}
    if scoring.tokens.tokens is not None:
        coords["label"] = (("prompt", "token"), np.array(scoring.tokens.tokens))
    return xr.DataArray(losses, coords, ("prompt", "token"), name="loss", attrs=LOSS)


@shows_progress("loss under edits")
def loss_under_edits(
    recording: Recording,
    edits: Mapping[str, AbstractEdit | Sequence[AbstractEdit]],
    *,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Next-token loss of each prompt under each of several named edits (or lists of edits): ``loss`` (edit, prompt).

    ``baseline_loss`` is the loss of each prompt without the edits, ``loss_increase`` how much higher ``loss`` is, all
    in nats; ``loss_null`` and ``baseline_loss_null`` are the loss log |V| of a uniform guess over the vocabulary. Each
    edit takes one forward pass from the first layer that it changes; earlier layers are not run again. The result
    equals ``next_token_loss(recording.under(edit))`` bit for bit, and its requirements on the recording apply here too.
    ``edits`` maps names to edits and must not be empty.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.intervene.states import Ablate
    >>> from helmscope.models.record import record
    >>> from helmscope.models.sites import Site
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> edits = {"no MLP": Ablate([1]), "no layer": [Ablate([1]), Ablate([1], site=Site.ATTENTION)]}
    >>> measured = loss_under_edits(recording, edits)
    >>> measured.loss_increase.dims, measured.edit.values.tolist()
    (('edit', 'prompt'), ['no MLP', 'no layer'])
    """
    if not isinstance(edits, Mapping) or not edits:
        raise HelmscopeError(
            f"edits is {short_repr(edits)}, but it must be a mapping of names to edits, with at least one"
        )
    edit_lists = {str(name): tuple(edit) if isinstance(edit, Sequence) else (edit,) for name, edit in edits.items()}
    scoring = Scoring(recording)
    means = scoring.means_under(list(edit_lists.values()), check_progress(progress))
    return _loss_and_increase(means, scoring, {"edit": list(edit_lists)}, "loss under edits")


@shows_progress("ablating heads")
def head_ablation_loss(
    recording: Recording,
    *,
    layers: Layers | None = None,
    heads: str | Sequence[str] | None = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Next-token loss of each prompt with a single head ablated, for every head: ``loss`` along (layer, head, prompt).

    ``baseline_loss`` is the loss of each prompt with all heads, ``loss_increase`` how much higher ``loss`` is, all in
    nats; ``loss_null`` and ``baseline_loss_null`` are the loss log |V| of a uniform guess over the vocabulary, not that
    of the model, and ``loss_increase_null`` is 0: the head makes no difference. ``layers`` is a layer or a list of
    layers, by number or by name as for ``recording.layer``; by default all layers. ``heads`` selects single heads
    instead, by names such as "L3H5" or ["L3H5", "L4H0"]. In a decoder with cross-attention, the heads are those of
    self-attention; ``loss_under_edits`` takes ``AblateHead`` at Site.CROSS_HEADS. The output of an ablated head is 0,
    as under ``AblateHead``. Each head takes one forward pass, from its layer on. Entries of heads that a layer does not
    have, or that ``heads`` does not name, are NaN. ``reduce_replicates(measured)`` returns means over prompts with
    their intervals, ``measured.sel(**parse_head("L1H0"))`` one head. Raises HelmscopeError where ``next_token_loss``
    does, and for a layer whose heads cannot be separated.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> dict(head_ablation_loss(recording).loss_increase.sizes)
    {'layer': 2, 'head': 2, 'prompt': 2}
    >>> dict(head_ablation_loss(recording, heads="L1H0").loss_increase.sizes)
    {'layer': 1, 'head': 1, 'prompt': 2}
    """
    scoring = Scoring(recording)
    places = heads_to_ablate(recording, layers, heads)
    edits = [(AblateHead(layer=layer, head=head),) for layer, head in places]
    baseline, *ablated = scoring.means_under(edits, check_progress(progress))
    # layers in the order given, heads in their own
    axes = {"layer": list(dict.fromkeys(layer for layer, _ in places)), "head": sorted({head for _, head in places})}
    means = np.full((len(axes["layer"]), len(axes["head"]), len(baseline)), np.nan)
    for (layer, head), values in zip(places, ablated, strict=True):
        means[axes["layer"].index(layer), axes["head"].index(head)] = values
    means = np.concatenate([baseline[None], means.reshape(-1, len(baseline))])
    return _loss_and_increase(means, scoring, axes, "loss with one head ablated at a time")


def heads_to_ablate(recording: Recording, layers: object, heads: object) -> list[tuple[int, int]]:
    """Layer and head of each head that is ablated: all heads of the layers, or those that are named."""
    if heads is None:
        numbers = chosen_layers(recording, layers)
        return [(layer, head) for layer in numbers for head in range(_head_count(recording, layer))]
    if layers is not None:
        raise HelmscopeError(
            f"layers is {short_repr(layers)} and heads is {short_repr(heads)}, but only one of them may be given"
        )
    names = [heads] if isinstance(heads, str) else heads
    if not isinstance(names, Sequence) or not names:
        raise HelmscopeError(f"heads is {short_repr(heads)}, but it must be the name of a head, or a list of names")
    places = []
    for name in names:
        place = parse_head(name)
        layer, head = recording.layer(place["layer"]), place["head"]
        if head >= (count := _head_count(recording, layer)):
            raise HelmscopeError(f"heads holds {short_repr(name)}, but layer {layer} has heads 0 to {count - 1}")
        if (layer, head) in places:
            raise HelmscopeError(f"heads holds L{layer}H{head} twice, but all heads must be different")
        places.append((layer, head))
    return sorted(places)


def _head_count(recording: Recording, layer: int) -> int:
    count = recording.anatomy.layers[layer].heads
    if count is None:
        raise HelmscopeError(f"layer {layer} hides its heads, but only heads that can be separated can be ablated")
    return count


def _loss_and_increase(means: np.ndarray, scoring: Scoring, axes: Mapping[str, list[Any]], title: str) -> xr.Dataset:
    """The Measurement of mean losses: ``means[0]`` without edits, ``means[1:]`` under the edits along ``axes``."""
    dims, shape = (*axes, "prompt"), (*map(len, axes.values()), means.shape[-1])
    data = {
        "loss": (dims, means[1:].reshape(shape), LOSS_UNDER_EDIT),
        "loss_null": scoring.null,
        "loss_increase": (dims, (means[1:] - means[0]).reshape(shape), INCREASE),
        "loss_increase_null": 0.0,
        "baseline_loss": ("prompt", means[0], BASELINE),
        "baseline_loss_null": scoring.null,
    }
    return _in_nats(xr.Dataset(data, {**axes, **scoring.coords}, {**scoring.attributes, "title": title}))


def _in_nats(losses: xr.Dataset) -> xr.Dataset:
    """The checked Measurement, with the unit of all its variables."""
    for variable in losses.data_vars.values():
        variable.attrs["units"] = "nats"
    return check_replicates(losses)
