"""How well a causal language model predicts the next token, by itself and under edits.

    loss of token t  =  -log p(token t | tokens before t)        in nats, read off the logits at position t - 1

It counts by the weight that statistics give token t, and only where token t - 1 is visible: neither padding nor special
tokens count as predictions. So an end-of-text token that the tokenizer adds is not scored, though the model was trained
to predict it, while the first word behind a beginning-of-text token is. Without a tokenizer no token is known to be
special, and all are scored but the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.intervene.attention import AblateHead
from helmscope.models.place import PutInput
from helmscope.models.premise import Premise
from helmscope.models.probe import vocabulary_size
from helmscope.models.recording import Recording
from helmscope.models.watch import AbstractEdit, Observer, Site
from helmscope.types import HelmscopeError, check_progress, check_replicates, shown

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.runner import Runner
    from helmscope.types import Progress

PASSING = 1 << 24  # logits that the model gives at a time
WORKED = 1 << 16  # those that are summed at a time: what a cache holds


def next_token_loss(recording: Recording, *, progress: Progress | None = None) -> xr.Dataset:
    """The mean loss of each prompt in nats, over the tokens that are predicted and by their weights: ``loss`` along
    ``prompt``, with ``loss_null``, the loss log |V| of a guess that is uniform over the vocabulary. The coordinate
    ``predicted`` holds the weight behind each mean.

    The model is run once more under the edits of the recording, a few texts at a time, so that the logits of all texts
    are never in memory together; sums are float64, while transformers reports its own loss in float32. The loss is NaN
    for a prompt of which no token is predicted. Models that are not causal or have no head over a vocabulary are
    refused. ``progress`` is called with the share of the texts done.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> seen = next_token_loss(recording)
    >>> seen.loss.dims, seen.predicted.values.tolist(), round(float(seen.loss_null), 3)
    (('prompt',), [3.0, 3.0], 2.197)
    >>> cut = next_token_loss(recording.under(AblateHead(layer=0, head=1)))
    >>> bool((cut.loss != seen.loss).all())
    True
    """
    scoring = _Scoring(recording)
    losses = scoring.losses(check_progress(progress))
    data = {"loss": ("prompt", scoring.means(losses)), "loss_null": scoring.null}
    return check_replicates(xr.Dataset(data, scoring.coords))


def token_loss(recording: Recording, *, progress: Progress | None = None) -> xr.DataArray:
    """The loss of every token in nats, (prompt, token), NaN where a token is not predicted: the first one of each text,
    special tokens, padding. The coordinate ``label``, (prompt, token), holds the tokens as they are written.

    The mean of a prompt by the weights of its tokens is what ``next_token_loss`` gives; arguments as there.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> seen = token_loss(record(model, torch.tensor([[1, 2, 3, 4]])))
    >>> seen.label.values.tolist(), seen.notnull().values.tolist()
    ([['1', '2', '3', '4']], [[False, True, True, True]])
    """
    scoring = _Scoring(recording)
    losses = scoring.losses(check_progress(progress)).numpy()
    coords: dict[str, Any] = {"prompt": np.arange(len(losses)), "token": np.arange(losses.shape[1])}
    if recording.batch.tokens is not None:
        coords["label"] = (("prompt", "token"), np.array(recording.batch.tokens))
    return xr.DataArray(losses, coords, ("prompt", "token"), name="loss")


def loss_under(
    recording: Recording,
    edits: Mapping[str, AbstractEdit | Sequence[AbstractEdit]],
    *,
    progress: Progress | None = None,
) -> xr.Dataset:
    """The loss of each prompt under each edit, or list of edits, by its name: ``loss`` along (edit, prompt), and
    ``increase``, how much higher it is than without them, prompt by prompt.

    Each takes one forward, which starts at the first layer that is changed: the layers before it are not run again, and
    the result is to the bit that of ``next_token_loss(recording.under(edit))``. Arguments and refusals as there.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.intervene.states import Ablate
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> edits = {"no MLP": Ablate([1]), "no layer": [Ablate([1]), Ablate([1], site=Site.ATTENTION)]}
    >>> seen = loss_under(recording, edits)
    >>> seen.increase.dims, seen.edit.values.tolist()
    (('edit', 'prompt'), ['no MLP', 'no layer'])
    """
    if not isinstance(edits, Mapping) or not edits:
        raise HelmscopeError(f"edits is {shown(edits)}, but it must be a mapping of names to edits, with at least one")
    several = {str(name): tuple(each) if isinstance(each, Sequence) else (each,) for name, each in edits.items()}
    scoring = _Scoring(recording)
    means = scoring.means_under(list(several.values()), check_progress(progress))
    return _differences(means, scoring, {"edit": list(several)})


def ablation_loss(
    recording: Recording, *, layers: Sequence[int] | None = None, progress: Progress | None = None
) -> xr.Dataset:
    """The loss of each prompt with one head ablated, for every head: ``loss`` along (layer, head, prompt), and
    ``increase``, how much higher it is than with all heads, prompt by prompt. ``layers`` None takes all layers.

    An ablated head reads 0, as under ``AblateHead``. Each head takes one forward, from its layer on; where a layer has
    fewer heads than another the rest is NaN. ``reduce_replicates(seen)`` gives means over prompts with their intervals,
    ``seen.sel(**head("L1H0"))`` one head. Arguments and refusals as those of ``next_token_loss``.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> seen = ablation_loss(record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])))
    >>> dict(seen.increase.sizes)
    {'layer': 2, 'head': 2, 'prompt': 2}
    """
    scoring = _Scoring(recording)
    numbers = recording.layers if layers is None else [recording.layer(layer) for layer in layers]
    if not numbers:
        raise HelmscopeError("layers is empty, but it must hold at least one layer")
    heads = {layer: recording.anatomy.layers[layer].heads for layer in numbers}
    for layer, count in heads.items():
        if count is None:
            raise HelmscopeError(f"layer {layer} hides its heads, but only heads that can be seen can be ablated")
    places = [(row, head) for row, layer in enumerate(numbers) for head in range(heads[layer] or 0)]
    edits = [(AblateHead(layer=numbers[row], head=head),) for row, head in places]
    found = scoring.means_under(edits, check_progress(progress))
    means = np.full((len(numbers), max(filter(None, heads.values())), found.shape[-1]), np.nan)
    for (row, head), values in zip(places, found[1:], strict=True):
        means[row, head] = values
    axes = {"layer": list(numbers), "head": list(range(means.shape[1]))}
    return _differences(np.concatenate([found[:1], means.reshape(-1, found.shape[-1])]), scoring, axes)


def _differences(means: np.ndarray, scoring: _Scoring, axes: Mapping[str, list[Any]]) -> xr.Dataset:
    """The Measurement of means of each prompt, without edits and then under each of those along ``axes``."""
    dims, shape = (*axes, "prompt"), (*map(len, axes.values()), means.shape[-1])
    data = {
        "loss": (dims, means[1:].reshape(shape)),
        "loss_null": scoring.null,
        "increase": (dims, (means[1:] - means[0]).reshape(shape)),
        "increase_null": 0.0,
    }
    return check_replicates(xr.Dataset(data, {**axes, **scoring.coords}))


class _Scoring:
    """The texts of a recording as predictions: ``weights`` (batch, n), by how much each token counts as one, and their
    losses by the logits of the model.
    """

    def __init__(self, recording: Recording) -> None:
        if not isinstance(recording, Recording):
            raise HelmscopeError(f"recording is a {type(recording).__name__}, but the loss is that of a Recording")
        self.runner, batch = recording.runner, recording.batch
        self.weights = _weights(recording)
        self.ids = batch.inputs["input_ids"].cpu()
        self.coords = {"prompt": np.arange(len(batch)), "predicted": ("prompt", self.weights.sum(-1).numpy())}
        self._words = vocabulary_size(self.runner.model)

    @property
    def null(self) -> float:
        """The loss of a uniform guess."""
        return math.log(self._words)

    def chunks(self) -> Iterator[slice]:
        """As many texts at a time as the runner takes, and fewer where their logits would be many."""
        texts, n = self.weights.shape
        size = max(1, min(self.runner.batch_size, PASSING // (n * self._words)))
        for begin in range(0, texts, size):
            yield slice(begin, min(begin + size, texts))

    def losses(self, tell: Progress) -> Float[Tensor, "batch n"]:
        """The loss of every token, NaN where it does not count."""
        found = []
        for rows in self.chunks():
            found.append(self._of_tokens(self.runner, rows))
            tell(rows.stop / len(self.weights))
        return torch.cat(found)

    def means(self, losses: Float[Tensor, "rows n"], rows: slice = slice(None)) -> np.ndarray:
        """The mean of each text by the weights of its tokens, NaN where none counts."""
        weights = self.weights[rows]
        total = torch.where(weights > 0, weights * losses, 0.0).sum(-1)
        return (total / weights.sum(-1)).numpy()

    def means_under(self, several: Sequence[tuple[AbstractEdit, ...]], tell: Progress) -> np.ndarray:
        """The mean of each text without and then under each of several edits: (1 + edits, batch)."""
        layers = len(self.runner.anatomy.layers)
        for edits in several:
            self.runner.under(*edits)  # which refuses what does not fit, before anything runs
        begins = [next((k for k in range(layers) if _acts(edits, k)), layers - 1) for edits in several]
        found = np.empty((1 + len(several), len(self.weights)))
        for rows in self.chunks():
            inputs = _Inputs(begins)
            found[0, rows] = self.means(self._of_tokens(self.runner, rows, inputs), rows)
            for k, (layer, edits) in enumerate(zip(begins, several, strict=True), start=1):
                put = PutInput(layer, inputs.states[layer], rows)
                found[k, rows] = self.means(self._of_tokens(self.runner.under(put, *edits), rows), rows)
                share = (k + 1) / len(found)
                tell((rows.start + share * (rows.stop - rows.start)) / len(self.weights))
        return found

    def _of_tokens(self, runner: Runner, rows: slice, *observers: Observer) -> Float[Tensor, "rows n"]:
        """The losses of the tokens of some texts, a few at a time in float64."""
        logits, ids = runner.outputs(*observers, rows=rows), self.ids[rows]
        self._words = logits.shape[-1]
        if int(ids.max()) >= self._words:
            raise HelmscopeError(
                f"texts give the token id {int(ids.max())}, but the model predicts tokens 0 to {self._words - 1} alone"
            )
        found = torch.full(ids.shape, torch.nan, dtype=torch.float64, device="cpu")
        for part in torch.split((self.weights[rows] > 0).nonzero(), max(1, WORKED // self._words)):
            text, token = part.unbind(-1)
            scores = logits[text.to(logits.device), token.to(logits.device) - 1].double()
            target = scores.gather(-1, ids[text, token].to(scores.device).unsqueeze(-1)).squeeze(-1)
            found[text, token] = (torch.logsumexp(scores, -1) - target).cpu()
        return found


def _weights(recording: Recording) -> Float[Tensor, "batch n"]:
    """By how much each token counts as a prediction. A model that does not predict the next token is refused."""
    asker, model, batch = "the loss of the next token", recording.origin.name, recording.batch
    if "input_ids" not in batch.inputs or getattr(recording.anatomy.model.config, "is_encoder_decoder", False):
        raise HelmscopeError(f"{asker} needs a language model of one stream of tokens, but {model} is none")
    counted, visible = batch.counted, batch.visible
    weights = torch.ones(batch.inputs["input_ids"].shape, dtype=torch.float64, device="cpu")
    weights = weights if counted is None else counted.cpu().double()
    weights = weights * (torch.arange(weights.shape[1], device="cpu") > 0)
    if visible is not None:
        weights[:, 1:] *= visible[:, :-1].cpu()
    if not bool(weights.any()):
        raise HelmscopeError(f"{asker} needs a text of two tokens or more that count, but texts holds none")
    recording.certificate.require("lens")
    why = Premise(causal=True, head=True).unmet(recording.certificate, model, asker)
    if why is not None:
        raise HelmscopeError(why)
    return weights


def _acts(edits: Sequence[AbstractEdit], layer: int) -> bool:
    return any(edit.acts(layer) for edit in edits)


class _Inputs(Observer):
    """Keeps what some layers read, as it is."""

    sites = frozenset({Site.INPUT})

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = frozenset(layers)
        self.states: dict[int, Tensor] = {}

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """A copy, since some families add to a state in place later."""
        if layer in self.layers:
            self.states[layer] = value.clone()
