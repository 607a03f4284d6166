"""What the trials of attention as a diffusion share: the prompts of a subject, its recording, and the same recording
with blocks that write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.arm_statistics import SILENT
from helmscope.claims.evidence import Evidence, PremiseImpossible, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import ChosenPrompts
from helmscope.geometry.arithmetic import full_precision
from helmscope.models.bundled_models import is_bundled, validation_contexts
from helmscope.models.premise import CAUSAL, attention_of
from helmscope.observe.attention_diffusion import AttentionDiffusionSpectrum, spectrum_statistics
from helmscope.observe.attention_drift import mean_ratio
from helmscope.observe.head_moments import HEADS_NEED, HeadMoments, TangentSpaces, with_heads
from helmscope.observe.track import token_weights
from helmscope.types import HelmscopeError, Instrument, Needs

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.claims.registry import TrialCase
    from helmscope.models.identity import Prompt
    from helmscope.models.recording import Recording
    from helmscope.models.subject import Subject
    from helmscope.types import AttentionTensors, ReplayContext

TWIN_PROMPTS = 8


@dataclass(frozen=True, eq=False)
class AttentionTrial:
    """The prompts of a trial, with as many different first tokens as the texts have.

    >>> from helmscope.claims.registry import registered_case
    >>> from helmscope.models.subject import Subject
    >>> trial = AttentionTrial.of(registered_case("elliptic", subject=Subject("A"), quick=True))
    >>> len(trial.prompts), trial.without_ruling is None
    (32, True)
    """

    subject: Subject
    chosen: ChosenPrompts
    least_prompts: int

    @classmethod
    def of(cls, case: TrialCase) -> AttentionTrial:
        """The trial of a case, whose entry has the constant ``least_prompts``.

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.subject import Subject
        >>> AttentionTrial.of(registered_case("elliptic", subject=Subject("A"), quick=True)).least_prompts
        32
        """
        return cls(case.subject, ChosenPrompts.of(case, gap=1), case.constant("least_prompts"))

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, texts of the subject."""
        return self.chosen.texts

    @property
    def without_ruling(self) -> Finding | None:
        """The finding of a subject on which the claim cannot be tried, or has too few prompts; None if it can."""
        if self.chosen.too_few:
            return Finding.inconclusive(self.chosen.too_few)
        return None if self.unmet is None else Finding.impossible(self.unmet)

    @cached_property
    def unmet(self) -> str | None:
        """Why the claim cannot be tried: hidden heads, or halves that cannot be switched off."""
        missing = self.subject.unmet_premise("kernel", "replay")
        if missing is not None:
            return missing
        try:
            _ = self.silent
        except HelmscopeError as error:
            return f"attention and MLP of {self.subject.name} cannot be switched off: {error}"
        return self.recording.unsupported_reason(AttentionDiffusionSpectrum())

    @property
    def recording(self) -> Recording:
        """The recording of the whole model."""
        return self.subject.record(self.prompts)

    @cached_property
    def silent(self) -> Recording:
        """The recording of the first prompts with blocks that write nothing."""
        whole = self.few
        return whole.under(*SILENT.edits(whole))

    @property
    def few(self) -> Recording:
        """The recording of the first prompts, as many as the entry needs."""
        return self.subject.record(self.prompts[: self.least_prompts])

    @property
    def causal(self) -> bool:
        """Whether the attention of the model is causal."""
        return attention_of(self.recording.certificate) == CAUSAL

    @property
    def setting(self) -> str:
        """What was recorded, and in which coordinates."""
        anatomy = self.recording.anatomy
        dim = anatomy.dim - (2 if anatomy.centered else 1)
        coordinates = "state as read, gain and bias included" if anatomy.post_norm else "residual stream"
        return (
            f"model {self.subject.name}, {self.chosen.setting}; direction of the {coordinates}, writes divided by its "
            f"length, tangent dimension {dim}"
        )

    def silent_evidence(self, made: Callable[[Recording], Evidence], what: str) -> Evidence:
        """The evidence of blocks that write nothing: that the quantity does not exist, if they really write nothing.

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.subject import Subject
        >>> trial = AttentionTrial.of(registered_case("elliptic", subject=Subject("A"), quick=True))
        >>> trial.silent_evidence(lambda recording: None, "Sigma is 0").reason
        'blocks that write nothing: Sigma is 0'
        """
        if writes_nothing(self.silent):
            return PremiseImpossible(f"blocks that write nothing: {what}")
        return made(self.silent)


def writes_nothing(recording: Recording) -> bool:
    """Whether attention writes 0 in every layer of a recording.

    >>> from helmscope.models.record import record
    >>> writes_nothing(record("A", ["Once upon a time"]))
    False
    """
    writes = _Writes()
    return not float(recording.replay(writes)[writes.name].largest_write.max())


def contexts_of(subject: Subject) -> tuple[np.ndarray, str]:
    """Token ids of contexts of equal length in which words occur, and where they come from: the validation windows for
    a bundled model, whose few texts repeat hardly any word at the same position, else the texts of the subject, cut to
    the shortest.

    >>> from helmscope.models.subject import Subject
    >>> contexts_of(Subject("A"))[0].shape
    (768, 128)
    """
    if is_bundled(subject.model):
        contexts = validation_contexts()
        return contexts, f"{len(contexts)} validation windows of 128 tokens without held-out ones"
    length = min(len(row) for row in subject.token_ids)
    return np.array([row[:length] for row in subject.token_ids]), f"{len(subject.token_ids)} texts of {length} tokens"


class _Writes(Instrument):
    """The largest entry of what attention writes."""

    name = "writes"
    needs = Needs.ATTENTION_WRITE

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the largest entry of a layer."""
        assert tensors.write is not None
        self.keep(context, {"largest_write": tensors.write.abs().flatten(1).amax(-1)})


def every_layer(values: xr.DataArray) -> ReplicatesInEveryCase | PremiseImpossible:
    """Evidence at every attention half-step of values over (layer, prompt); layers without any value are left out.

    >>> import xarray as xr
    >>> every_layer(xr.DataArray([[1.0, 2.0]], dims=("layer", "prompt"))).names
    ['layer 0']
    """
    rows = values.transpose("layer", ...).values
    usable = [k for k, row in enumerate(rows) if np.isfinite(row).sum() > 1]
    if not usable:
        return PremiseImpossible("the quantity is defined in no layer")
    samples = [rows[k][np.isfinite(rows[k])] for k in usable]
    return ReplicatesInEveryCase(samples, "prompts", [f"layer {k}" for k in usable])


def layer_means(values: xr.DataArray) -> str:
    """The smallest and the largest mean over prompts of a quantity, over the layers.

    >>> import xarray as xr
    >>> layer_means(xr.DataArray([[1.0, 2.0], [0.0, 0.1]], dims=("layer", "prompt")))
    'from 0.05 (layer 1) to 1.5 (layer 0)'
    """
    means = values.mean("prompt").values
    low, high = int(np.nanargmin(means)), int(np.nanargmax(means))
    return f"from {means[low]:.3g} (layer {low}) to {means[high]:.3g} (layer {high})"


class OneHead(AttentionDiffusionSpectrum):
    """Instrument: ``AttentionDiffusionSpectrum`` of the first head of every layer alone.

    >>> from helmscope.models.record import record
    >>> measured = record("A", ["Once upon a time"]).replay(OneHead(sampled_tokens=1))["one_head"]
    >>> bool((measured.total_sigma_rank <= 32).all())
    True
    """

    name = "one_head"

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the spectrum of one head."""
        kernel, values, output = with_heads(tensors)
        assert tensors.query is not None
        query = tensors.query[:, :1] if tensors.query.ndim == 4 else tensors.query.unsqueeze(1)
        one = replace(tensors, kernel=kernel[:, :1], value=values[:, :1], query=query, output_matrix=output[:1])
        super().attention(replace(context, heads=1), one)


class RatioOfKernel(Instrument):
    """Instrument: the drift ratio with the attention weights replaced by ``kernel(weights, visible)``.

    >>> from helmscope.models.record import record
    >>> same = RatioOfKernel("same", lambda weights, visible: weights)
    >>> recording = record("A", ["Once upon a time"])
    >>> from helmscope.observe.attention_drift import attention_drift
    >>> import numpy as np
    >>> np.allclose(recording.replay(same)["same"].ratio, attention_drift(recording).total_drift_ratio, rtol=1e-4)
    True
    """

    needs = HEADS_NEED

    def __init__(self, name: str, kernel: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        self.kernel, self._name = kernel, name

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return self._name

    @full_precision
    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the ratio of a layer with the other kernel."""
        old, values, output = with_heads(tensors)
        assert tensors.kernel is not None
        assert tensors.write is not None
        visible = None if context.visible is None else context.visible.unsqueeze(1).expand(old.shape[:-1])
        new = self.kernel(old, visible).to(old)
        moved = torch.einsum("bhns,hds->bnd", (new - old) @ values, output)
        weights = token_weights(tensors.state, context.weights)
        if not bool(torch.isfinite(new).all()):
            self.keep(context, {"ratio": torch.full_like(weights[:, 0], torch.nan)})
            return
        changed = new if tensors.kernel.ndim == 4 else new.squeeze(1)
        moments = HeadMoments.of(context, replace(tensors, kernel=changed, write=tensors.write + moved))
        self.keep(context, {"ratio": mean_ratio(moments.total_drift, moments.sampling.sum(1) / 2, weights)})


class PlantedSigma(Instrument):
    """Instrument: the spectrum of planted diffusion matrices at the tokens of a recording: a multiple of the tangent
    projector, and a matrix of rank 1; through the same statistics as ``AttentionDiffusionSpectrum``.

    >>> from helmscope.models.record import record
    >>> planted = record("A", ["Once upon a time"]).replay(PlantedSigma())["planted_sigma"]
    >>> share = planted.effective_dimension_share
    >>> bool((abs(share - 1) < 1e-6).all()), round(float(planted.one_direction[0, 0]) * 190, 6)
    (True, 1.0)
    """

    name = "planted_sigma"
    needs = Needs.ATTENTION

    @full_precision
    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the statistics at the last token that counts."""
        spaces = TangentSpaces.of(context, tensors)
        x = spaces.x[:, -1].double()
        d = x.shape[-1]
        eye = torch.eye(d, dtype=x.dtype, device=x.device)
        projector = eye - x.unsqueeze(-1) * x.unsqueeze(-2)
        if context.centered:
            projector = projector - 1 / d
        single = projector[:, :, :1] * projector[:, :1, :]
        found = [spectrum_statistics(torch.linalg.eigvalsh(each), spaces.dim, 1e-6) for each in (projector, single)]
        values = {name: found[0][name] for name in ("smallest_eigenvalue", "effective_dimension_share")}
        self.keep(context, values | {"one_direction": found[1]["effective_dimension_share"]})


def by_prompt(values: xr.DataArray) -> np.ndarray:
    """Values over (layer, prompt) as (prompt, layer), for ``claims.curves.curve``.

    >>> import xarray as xr
    >>> by_prompt(xr.DataArray([[1.0, 2.0]], dims=("layer", "prompt"))).shape
    (2, 1)
    """
    return np.asarray(values.transpose("prompt", "layer").values)
