"""How well the id of a token can be decoded from its state, by depth: nearest class mean with held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.labels import label_attributes
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.track import SHARE, with_bounds, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, System, Trajectory, check_progress

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.types.progress import ProgressOption


@shows_progress("token decoding accuracy")
@full_precision
def token_decoding_accuracy(
    reference: Trajectory | System,
    test: Trajectory | System,
    *,
    reference_ids: Int[Tensor, "batch n"] | None = None,
    test_ids: Int[Tensor, "batch n"] | None = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Share of the tokens of each test prompt whose id is that of the nearest class mean, over (depth, prompt).

    From every state on the unit sphere the mean of the cloud of its prompt is subtracted, and the result is
    scaled to length 1. The class mean of an id is the mean of these vectors over all reference tokens of this id at the
    same depth; the nearest one has the largest cosine. ``reference`` and ``test`` are recordings of the same model on
    different prompts, such as ``subject.record(subject.selection)`` and ``subject.record(subject.test)``,
    or trajectories with their ids.

    Only ids that occur in both halves are classes, and only their tokens are tested: ``classes`` of the attributes is
    their number. ``accuracy_null`` is the chance level, the accuracy on the same tokens of always answering the most
    frequent class of the reference. Tokens of weight 0 and the first token of each prompt are left out. A prompt
    without any token to test has NaN. ``progress`` is called with the share of the depths done.

    >>> start = torch.eye(3, dtype=torch.float64)[None, None]
    >>> path, ids = Trajectory(torch.zeros(1), start), torch.tensor([[0, 1, 2]])
    >>> found = token_decoding_accuracy(path, path, reference_ids=ids, test_ids=ids)
    >>> found.accuracy.values.tolist(), found.accuracy_null.values.tolist(), found.attrs["classes"]
    ([[1.0]], [0.5], 2)
    """
    reference_half, test_half = _Half.of("reference", reference, reference_ids), _Half.of("test", test, test_ids)
    depths, dim = reference_half.path.states.shape[0], reference_half.path.states.shape[-1]
    test_depths, test_dim = test_half.path.states.shape[0], test_half.path.states.shape[-1]
    if (test_depths, test_dim) != (depths, dim):
        raise HelmscopeError(
            f"test has {test_depths} depths of dimension {test_dim}, but reference has {depths} of dimension {dim}"
        )
    classes = _common_ids(reference_half, test_half)
    if not len(classes):
        raise HelmscopeError("test has no token id in common with reference, but classes are ids that occur in both")
    labels, in_reference = _class_labels(reference_half.ids, classes, reference_half.counted)
    true_labels, is_tested = _class_labels(test_half.ids, classes, test_half.counted)
    sizes = torch.bincount(labels[in_reference], minlength=len(classes))
    tested = is_tested.sum(-1)
    report, rows = check_progress(progress), []
    for depth in range(depths):
        sums = torch.zeros(len(classes), dim, dtype=torch.float64, device=labels.device)
        sums.index_add_(0, labels[in_reference], reference_half.centered(depth)[in_reference])
        means = torch.nn.functional.normalize(sums / sizes.unsqueeze(-1), dim=-1)
        nearest = (test_half.centered(depth) @ means.T).argmax(-1)
        rows.append(((nearest == true_labels) & is_tested).sum(-1).double() / tested)
        report(len(rows) / depths)
    measurement = with_replicates({"accuracy": torch.stack(rows)}, test_half.path)
    chance = ((true_labels == sizes.argmax()) & is_tested).sum(-1).double() / tested
    measurement["accuracy_null"] = (test_half.path.replicate, chance.cpu().numpy())
    measurement.accuracy.attrs |= label_attributes("share of tokens whose id is decoded from their state")
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

    def centered(self, depth: int) -> Float[Tensor, "batch n d"]:
        """The states minus the mean of their cloud, scaled to length 1 (0 stays 0)."""
        x, m = self.path.states[depth].double(), self.weights.unsqueeze(-1)
        mean = (m * x).sum(1, keepdim=True) / m.sum(1, keepdim=True)
        centered: Tensor = torch.nn.functional.normalize(x - mean, dim=-1)
        return centered


def _common_ids(reference_half: _Half, test_half: _Half) -> Int[Tensor, " classes"]:
    ids: Tensor = torch.unique(reference_half.ids[reference_half.counted])
    return ids[torch.isin(ids, test_half.ids[test_half.counted])]


def _class_labels(
    ids: Int[Tensor, "batch n"], classes: Int[Tensor, " classes"], counted: Bool[Tensor, "batch n"]
) -> tuple[Int[Tensor, "batch n"], Bool[Tensor, "batch n"]]:
    """The index of each token's class, and whether the token counts and has one."""
    labels = torch.searchsorted(classes, ids.contiguous()).clamp(max=len(classes) - 1)
    return labels, counted & (classes[labels] == ids)
