"""Noise on the matrices W_Q, W_K and W_V of a model, the second interpretation of [Additive transport], table 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.input_matrices import PROJECTED, InputMatrix, input_matrices
from helmscope.models.mlp_reading import affine_of, as_stored
from helmscope.models.names import Layers, layer_indices
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import Site
from helmscope.types import HelmscopeError, check_real, check_seed, short_repr
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class WeightNoise(ConciseRepr):
    """Draws Gaussian noise on the query, key or value matrices of a model; biases stay.

    ``matrices`` are those of every layer (``models.input_matrices``). A matrix that several layers share is changed
    once, with the noise of the first of them.

    >>> from helmscope import record
    >>> from helmscope.intervene.change import with_parameters
    >>> recording = record("A", ["Once upon a time"])
    >>> noise = WeightNoise.of(recording)
    >>> before = recording.logits()
    >>> with with_parameters(recording.anatomy.model, noise.values(Site.KEY, relative_sigma=0.1)):
    ...     bool((recording.logits() - before).abs().max() > 0)
    True
    """

    model: Any
    matrices: tuple[Mapping[Site, InputMatrix], ...]

    @classmethod
    def of(cls, recording: Recording) -> WeightNoise:
        """The weight noise for a recorded model. Raises HelmscopeError where ``input_matrices`` does.

        >>> from helmscope import record
        >>> len(WeightNoise.of(record("A", ["Once upon a time"])).matrices)
        12
        """
        check_recording(recording)
        return cls(recording.anatomy.model, input_matrices(recording))

    @full_precision
    def values(
        self,
        site: Site,
        *,
        sigma: float | None = None,
        relative_sigma: float | None = None,
        mixing: float | None = None,
        layers: Layers | None = None,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """The parameters of the model with noise on the matrices of Site.QUERY, KEY or VALUE, for ``with_parameters``:
        exactly one of

        - ``sigma``: W + sigma N, the same for all entries, as [Additive transport] prints it;
        - ``relative_sigma``: W + relative rms(W) N, with the root mean square of the entries of all heads of the layer;
        - ``mixing``: W + mixing W E with E_ab ~ N(0, 1/d), noise on the state that the heads read. For queries it
          multiplies W_Q^T W_K from the left, for keys from the right. It depends on no basis inside the heads: any
          invertible G in W_Q -> G W_Q, W_K -> G^-T W_K, which leaves the model unchanged, leaves it unchanged too.

        N has independent standard normal entries, which depend on ``seed`` and the layer.

        >>> from helmscope import record
        >>> noise = WeightNoise.of(record("A", ["Once upon a time"]))
        >>> list(noise.values(Site.QUERY, sigma=0.01, layers=3))
        ['transformer.h.3.attn.c_attn.weight']
        """
        given = {
            name: check_real(name, size, at_least=0)
            for name, size in (("sigma", sigma), ("relative_sigma", relative_sigma), ("mixing", mixing))
            if size is not None
        }
        if len(given) != 1:
            raise HelmscopeError(
                f"sigma is {sigma!r}, relative_sigma is {relative_sigma!r} and mixing is {mixing!r}, but exactly one "
                "of them must be given"
            )
        ((kind, size),) = given.items()
        if site not in PROJECTED:
            raise HelmscopeError(f"site is {short_repr(site)}, but it must be Site.QUERY, Site.KEY or Site.VALUE")
        chosen = range(len(self.matrices)) if layers is None else layer_indices("layers", layers)
        if max(chosen) >= len(self.matrices):
            last = len(self.matrices) - 1
            raise HelmscopeError(f"layers holds {max(chosen)}, but the model has layers 0 to {last}")
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        modules, seed = [layer[site].module for layer in self.matrices], check_seed(seed)
        found: dict[str, Tensor] = {}
        for layer in chosen:
            module, rows = modules[layer], self.matrices[layer][site].rows.flatten()
            name = names[id(module.weight)]
            if name in found:
                continue
            matrix = affine_of(module)[0].clone()
            old = matrix[rows].double().cpu()
            draw = np.random.default_rng([seed, modules.index(module)])
            if kind == "mixing":
                change = old @ torch.from_numpy(draw.standard_normal((old.shape[1],) * 2)) / old.shape[1] ** 0.5
            else:
                change = torch.from_numpy(draw.standard_normal(tuple(old.shape)))
                change = change * old.square().mean().sqrt() if kind == "relative_sigma" else change
            matrix[rows] = (old + size * change).to(matrix)
            found[name] = as_stored(module, matrix)
        return found
