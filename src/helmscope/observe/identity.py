"""How well the id of a token can be decoded from its state, by depth: nearest class mean with held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.track import SHARE, with_bounds, with_replicates
from helmscope.types import HelmscopeError, System, Trajectory

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


@full_precision
def token_identity(
    reference: Trajectory | System,
    test: Trajectory | System,
    *,
    reference_ids: Int[Tensor, "batch n"] | None = None,
    test_ids: Int[Tensor, "batch n"] | None = None,
) -> xr.Dataset:
    """Share of the tokens of each test prompt whose id is that of the nearest class mean, over (depth, prompt).

    From every state on the sphere of the theory the mean of the cloud of its prompt is subtracted, and the result is
    scaled to length 1. The class mean of an id is the mean of these vectors over all reference tokens of this id at the
    same depth; the nearest one has the largest cosine. ``reference`` and ``test`` are recordings of the same model on
    different prompts, such as ``subject.recording_of(subject.selection)`` and ``subject.recording_of(subject.test)``,
    or trajectories with their ids.

    Only ids that occur in both halves are classes, and only their tokens are tested: ``classes`` of the attributes is
    their number. ``accuracy_null`` is the chance level, the accuracy on the same tokens of always answering the most
    frequent class of the reference. Tokens of weight 0 and the first token of each prompt are left out. A prompt
    without any token to test has NaN.

    >>> start = torch.eye(3, dtype=torch.float64)[None, None]
    >>> path, ids = Trajectory(torch.zeros(1), start), torch.tensor([[0, 1, 2]])
    >>> found = token_identity(path, path, reference_ids=ids, test_ids=ids)
    >>> found.accuracy.values.tolist(), found.accuracy_null.values.tolist(), found.attrs["classes"]
    ([[1.0]], [0.5], 2)
    """
    known, asked = _Half.of("reference", reference, reference_ids), _Half.of("test", test, test_ids)
    if len(known.path.times) != len(asked.path.times) or known.path.states.shape[-1] != asked.path.states.shape[-1]:
        raise HelmscopeError(
            f"test has {len(asked.path.times)} depths of dimension {asked.path.states.shape[-1]}, but reference has "
            f"{len(known.path.times)} of dimension {known.path.states.shape[-1]}"
        )
    classes = _common_ids(known, asked)
    if not len(classes):
        raise HelmscopeError("test has no token id in common with reference, but classes are ids that occur in both")
    labels, is_known = _class_labels(known.ids, classes, known.counted)
    wanted, is_asked = _class_labels(asked.ids, classes, asked.counted)
    sizes = torch.bincount(labels[is_known], minlength=len(classes))
    tested = is_asked.sum(-1)
    rows = []
    for depth in range(len(known.path.times)):
        sums = torch.zeros(len(classes), known.path.states.shape[-1], dtype=torch.float64, device=labels.device)
        sums.index_add_(0, labels[is_known], known.centred(depth)[is_known])
        means = torch.nn.functional.normalize(sums / sizes.unsqueeze(-1), dim=-1)
        nearest = (asked.centred(depth) @ means.T).argmax(-1)
        rows.append(((nearest == wanted) & is_asked).sum(-1).double() / tested)
    measurement = with_replicates({"accuracy": torch.stack(rows)}, asked.path)
    chance = ((wanted == sizes.argmax()) & is_asked).sum(-1).double() / tested
    measurement["accuracy_null"] = (asked.path.replicate, chance.cpu().numpy())
    measurement.accuracy.attrs["long_name"] = "share of tokens whose id is decoded from their state"
    return with_bounds(measurement, {"accuracy": SHARE}).assign_attrs(classes=len(classes))


@dataclass(frozen=True, eq=False)
class _Half:
    """The states, ids and counted tokens of one half of the prompts."""

    path: Trajectory
    ids: Int[Tensor, "batch n"]
    weights: Float[Tensor, "batch n"]

    @classmethod
    def of(cls, name: str, source: object, ids: Tensor | None) -> _Half:
        path, ids = sphere_and_ids(source, ids)
        if ids is None:
            raise HelmscopeError(f"{name}_ids is None, but without a recording the token ids must be given")
        path = without_first_token(path)
        assert path.weights is not None
        return cls(path, ids, path.weights[0].double())

    @property
    def counted(self) -> Bool[Tensor, "batch n"]:
        return self.weights > 0

    def centred(self, depth: int) -> Float[Tensor, "batch n d"]:
        """The states minus the mean of their cloud, scaled to length 1 (0 stays 0)."""
        x, m = self.path.states[depth].double(), self.weights.unsqueeze(-1)
        mean = (m * x).sum(1, keepdim=True) / m.sum(1, keepdim=True)
        centred: Tensor = torch.nn.functional.normalize(x - mean, dim=-1)
        return centred


def _common_ids(known: _Half, asked: _Half) -> Int[Tensor, " classes"]:
    ids: Tensor = torch.unique(known.ids[known.counted])
    return ids[torch.isin(ids, asked.ids[asked.counted])]


def _class_labels(
    ids: Int[Tensor, "batch n"], classes: Int[Tensor, " classes"], counted: Bool[Tensor, "batch n"]
) -> tuple[Int[Tensor, "batch n"], Bool[Tensor, "batch n"]]:
    """The index of each token's class, and whether the token counts and has one."""
    labels = torch.searchsorted(classes, ids).clamp(max=len(classes) - 1)
    return labels, counted & (classes[labels] == ids)
