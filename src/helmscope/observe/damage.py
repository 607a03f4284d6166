"""What an edit does to a model's predictions: the KL divergence of the next-token distribution, and the loss.

    KL of a token  =  sum_v p(v) (log p(v) - log q(v))      p without edits, q under the edit, in nats

at the positions that ``next_token_loss`` scores. The divergence counts every change of the law, and the loss only
changes that matter for the text: an edit may lower the loss, never the divergence. Near no edit the divergence is
quadratic in the size of the edit, while the loss may change at first order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.observe.scoring import Scoring
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_replicates, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.sites import AbstractEdit
    from helmscope.types.progress import ProgressOption

NAMES = {
    "kl": "KL divergence of the next-token distribution from that without edits",
    "loss_increase": "increase of the next-token loss",
    "prediction_entropy_change": "change of the entropy of the next-token distribution",
}


@shows_progress("damage under edits")
def damage_under_edits(
    recording: Recording,
    edits: Mapping[str, AbstractEdit | Sequence[AbstractEdit]],
    *,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage of each of several named edits (or lists of edits), one value per prompt: along (edit, prompt)

    - ``kl``: KL(p || q) of the next-token distribution p without edits and q under the edit;
    - ``loss_increase``: the loss under the edit minus the loss without it;
    - ``prediction_entropy_change``: H(q) - H(p), above 0 where the edit makes the model less certain;
    - ``top_token_agreement``: the share of positions at which the most likely next token stays the same.

    The first three are in nats. Null values are those of an edit that changes nothing. Each edit takes one forward pass
    from the first layer that it changes. Raises HelmscopeError where ``loss_under_edits`` does.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.intervene.states import Ablate
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> damage = damage_under_edits(recording, {"no MLP": Ablate([1]), "none": []})
    >>> damage.kl.dims, damage.kl.sel(edit="none").values.tolist()
    (('edit', 'prompt'), [0.0, 0.0])
    """
    if not isinstance(edits, Mapping) or not edits:
        raise HelmscopeError(
            f"edits is {short_repr(edits)}, but it must be a mapping of names to edits, with at least one"
        )
    lists = {str(name): tuple(edit) if isinstance(edit, Sequence) else (edit,) for name, edit in edits.items()}
    scoring = Scoring(recording)
    means = scoring.means_under(list(lists.values()), check_progress(progress), token_damage)[1:]
    data = {
        name: (("edit", "prompt"), means[:, k], {"long_name": text, "units": "nats"})
        for k, (name, text) in enumerate(NAMES.items())
    }
    kept = {
        "long_name": "share of positions whose most likely next token is unchanged",
        "valid_min": 0.0,
        "valid_max": 1.0,
    }
    nulls = {f"{name}_null": 0.0 for name in NAMES} | {"top_token_agreement_null": 1.0}
    variables = data | {"top_token_agreement": (("edit", "prompt"), means[:, len(NAMES)], kept)} | nulls
    coords = {"edit": list(lists), **scoring.coords}
    return check_replicates(xr.Dataset(variables, coords, {**scoring.attributes, "title": "damage under edits"}))


def token_damage(
    edited: Float[Tensor, "tokens vocabulary"],
    targets: Int[Tensor, " tokens"],
    plain: Float[Tensor, "tokens vocabulary"],
) -> Float[Tensor, "4 tokens"]:
    """KL, increase of the loss, change of the entropy, and whether the top token stays, at each token."""
    log_p, log_q = (torch.log_softmax(logits, -1) for logits in (plain, edited))
    p, q = log_p.exp(), log_q.exp()
    change = log_q - log_p
    # q - p - p log(q / p) >= 0 term by term and sums to KL: small divergences keep their digits
    if bool(change.abs().amax() < 1):
        kl = (p * (torch.expm1(change) - change)).sum(-1)
    else:  # tokens that cannot occur, or whose quotient is far from 1, are slower
        change = torch.where(p > 0, change, 0.0)
        terms = torch.where(change.abs() < 1, p * (torch.expm1(change) - change), q - p - p * change)
        kl = torch.where(p > 0, terms, q).sum(-1)
    at = targets.unsqueeze(-1)
    increase = (log_p.gather(-1, at) - log_q.gather(-1, at)).squeeze(-1)
    prediction_entropy_change = (p * log_p).nansum(-1) - (q * log_q).nansum(-1)  # 0 log 0 = 0
    top_token_agreement = (edited.argmax(-1) == plain.argmax(-1)).double()
    return torch.stack([kl, increase, prediction_entropy_change, top_token_agreement])
