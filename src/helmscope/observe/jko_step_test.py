"""Whether a layer maps the cloud of its tokens as one step of Jordan, Kinderlehrer and Otto does.

The tokens of several prompts before and after a layer are taken for the laws N(m, C) and N(m*, C*) of their directions
(``pooled``). From the first one, the minimizer of

    G(rho) = nu Ent(rho) + int V drho + W2^2(rho, N(m, C)) / (2 tau)

with the quadratic V and the nu of the layer (``quadratic_free_energy``) is N(m', C') in closed form
(``gaussian_jko_step``), and

    gap_closed_share = 1 - W2(output, minimizer) / W2(input, minimizer)

is the share of the gap that the layer closes, with W2 between Gaussian laws: the empirical W2 of clouds in 190
dimensions measures their sparseness. V, nu and tau come from one half of the prompts, tau as the value with the largest
share there; the share is that of the other half. Its replicates, one for each prompt of both halves, are the
pseudo-values of a jackknife of all of it, so that intervals contain the error of V, nu and tau (``step_replicates``).

    gap_closed_share            in all directions in which the tokens of the first half vary
    gap_closed_share_projected  in their leading principal axes (``principal_axes`` of them), with V restricted to these
    gap_closed_share_mlp        of the MLP half-step alone, from the cloud that the MLP reads, with nu = 0: attention is
                                the map T then, and counts in no nu (sequential blocks of a model only)
    objective_...               G at the input, the output and the minimizer, with V = 0 at the mean of the input

How to read it. 1: the output is the minimizer. 0: the layer comes no closer to it than its input; below 0 it moves
away. tau is a coordinate: the size of a step in layers, if it is the right V.
How it fails. A share above 0 in many dimensions can come from the means alone; tau is chosen in favor of the claim. A
law that is far from a normal one has moments that say little. V is that of the MLP at the tokens: beyond it the
quadratic form is an extrapolation. NaN where V and nu vanish, so that there is no gap. Fewer than four prompts are
refused; of tokens that span few directions, as few are used.
Cost. One replay, a d x d matrix for each prompt and layer, and for every layer about 60 eigendecompositions of d x d
matrices and 3 for each prompt of the tested half; three times as many without ``whole_layer_only``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.models.recording import Recording
from helmscope.models.sites import Site
from helmscope.models.topology import Kind
from helmscope.observe.depth_steps import check_finite, sphere_text
from helmscope.observe.entropy import entropy_unsupported
from helmscope.observe.gaussian_step import PARTS, CloudPair, FittedStep
from helmscope.observe.labels import label_attributes
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergies, QuadraticFreeEnergy
from helmscope.observe.step_replicates import step_replicates
from helmscope.observe.track import check_system
from helmscope.runs.bar import shows_progress
from helmscope.stats.replicates import random_halves
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_progress,
    check_replicates,
    identity_coordinates,
    short_repr,
)

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.types import System, Trajectory
    from helmscope.types.progress import ProgressOption

COMPONENTS = 4
NAMES = {
    "gap_closed_share": "share of the gap to the JKO minimizer that the layer closes (Gaussian laws)",
    "gap_closed_share_projected": "share of the gap to the JKO minimizer that the layer closes, in principal axes",
    "gap_closed_share_mlp": "share of the gap to the JKO minimizer that the MLP half-step closes, with nu = 0",
    "objective_input": "JKO objective at the input of the layer",
    "objective_output": "JKO objective at the output of the layer",
    "objective_minimizer": "JKO objective at its minimizer",
}


@shows_progress("comparing layers with JKO steps")
def jko_step_test(
    system: System,
    *,
    principal_axes: int = COMPONENTS,
    whole_layer_only: bool = False,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The share of the gap to the JKO minimizer that each layer closes, over (layer, prompt), with V, nu and tau fitted
    on one half of the prompts (attribute ``fitted_on``) and the share taken on the other; ``tau`` and ``nu`` are
    coordinates of the layers. The module's docstring defines the quantities; those of single prompts are pseudo-values,
    and only their mean is a share. With ``whole_layer_only`` the steps in leading axes and of the MLP alone are not
    fitted, as the attribute ``left_out`` says. ``seed`` draws the halves.

    A layer of a simulation is the step from one stored time to the next. Raises HelmscopeError for fewer than four
    prompts, for a system without attention or MLP, and for clouds that span too few directions.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.fields.block import Block
    >>> from helmscope.fields.mlp import MLP
    >>> from helmscope.solve.integrate import integrate
    >>> x = torch.nn.functional.normalize(torch.randn(6, 9, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    >>> block = Block(SA(beta=1.0), MLP(w_in=torch.eye(3), w_out=-torch.eye(3)))
    >>> jko_step_test(integrate(block, x.double(), times=[0.0, 0.1]), principal_axes=2).gap_closed_share.shape
    (1, 6)
    """
    steps = LayerSteps.of(system, seed=seed)
    principal_axes = check_integer("principal_axes", principal_axes, at_least=1)
    if not isinstance(whole_layer_only, bool):
        raise HelmscopeError(f"whole_layer_only is {short_repr(whole_layer_only)}, but it must be True or False")
    report, rows = check_progress(progress), []
    for done, layer in enumerate(steps.layers, 1):
        rows.append(steps.measured(layer, principal_axes=None if whole_layer_only else principal_axes))
        report(done / len(steps.layers))
    measured = steps.measurement(rows)
    if whole_layer_only:
        measured.attrs["left_out"] = (
            "gap_closed_share_projected and gap_closed_share_mlp: only the step of the whole layer was fitted"
        )
    return measured


def jko_unsupported(system: System) -> str | None:
    """One sentence that says why a system does not support ``jko_step_test``; None if it does.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> jko_unsupported(integrate(SA(beta=1.0), torch.eye(2), times=[0.0, 1.0]))
    'system has 1 system, but jko_step_test fits on one half of them and needs at least 4'
    """
    prompts, states = system.trajectory.states.shape[1], len(system.trajectory.times)
    if prompts < 4:
        some = f"{prompts} {system.replicate}{'' if prompts == 1 else 's'}"
        return f"system has {some}, but jko_step_test fits on one half of them and needs at least 4"
    if states < 2:
        return "system has 1 stored time, but jko_step_test compares two"
    refused = entropy_unsupported(system)
    if refused is not None:
        return refused.replace("entropy_along_depth", "jko_step_test")
    if isinstance(system, Recording) and system.anatomy.has_cross:
        return "system is a decoder that reads an encoder, but jko_step_test needs blocks of attention and MLP"
    return system.unsupported_reason(QuadraticFreeEnergies([]))


@dataclass(frozen=True, eq=False)
class LayerSteps:
    """The clouds of a system on the unit sphere, without the first token, the energies of its layers, fitted on the
    prompts ``selection``, and the prompts ``test`` of the shares. ``depths`` has the indices of the states before and
    after each layer, and between its halves where a model has one.
    """

    path: Trajectory
    depths: Mapping[int, tuple[int, int, int | None]]
    energies: Mapping[int, QuadraticFreeEnergy]
    selection: np.ndarray
    test: np.ndarray
    source: System

    @classmethod
    def of(cls, system: System, *, seed: int = 0) -> LayerSteps:
        """The steps of a system; one replay."""
        reason = jko_unsupported(check_system(system))
        if reason is not None:
            raise HelmscopeError(reason)
        path = check_finite(without_first_token(sphere_and_ids(system, None)[0]))
        selection, test = random_halves(path.states.shape[1], seed=seed)
        instrument = QuadraticFreeEnergies(selection)
        system.replay(instrument, progress=False)
        energies = instrument.energies
        depths = {k: value for k, value in _depths(system).items() if k in energies}
        return cls(path, depths, energies, selection, test, system)

    @property
    def layers(self) -> list[int]:
        """The layers with a state before and after them."""
        return list(self.depths)

    @cached_property
    def _weights(self) -> Tensor:
        weights = self.path.weights
        assert weights is not None
        if not bool((weights == weights[0]).all()):
            raise HelmscopeError("weights of the trajectory change over time, but jko_step_test needs fixed ones")
        return weights[0].double().cpu()

    def clouds(self, layer: int, *, mlp: bool = False) -> CloudPair:
        """The tokens before and after a layer, or its MLP half-step."""
        first, last, between = self.depths[layer]
        first = first if not mlp or between is None else between
        before, after = (self.path.states[k].double().cpu() for k in (first, last))
        return CloudPair(before, after, self._weights)

    def fitted(self, layer: int, *, most: int | None = None, energy: QuadraticFreeEnergy | None = None) -> FittedStep:
        """The step of a layer, for its own energy or another one."""
        pair = self.clouds(layer)
        axes = pair.axes(self.path.states.shape[-1] if most is None else most, self.selection, self.test)
        return pair.fit(self.energies[layer] if energy is None else energy, axes, self.selection)

    def replicates(
        self, layer: int, step: FittedStep, energy: QuadraticFreeEnergy | None = None
    ) -> dict[str, np.ndarray]:
        """The ``PARTS`` of a step of a layer, one replicate for each prompt, for its own energy or another one."""
        energy = self.energies[layer] if energy is None else energy
        found = step_replicates(self.clouds(layer), step, energy, self.selection, self.test).numpy()
        return {name: found[:, k] for k, name in enumerate(PARTS)}

    def shares(
        self, layer: int, step: FittedStep, energy: QuadraticFreeEnergy | None = None, *, mlp: bool = False
    ) -> np.ndarray:
        """The share of the gap closed alone, one replicate for each prompt."""
        pair, energy = self.clouds(layer, mlp=mlp), self.energies[layer] if energy is None else energy
        found: np.ndarray = step_replicates(pair, step, energy, self.selection, self.test, parts=1).numpy()[:, 0]
        return found

    def share(self, layer: int, step: FittedStep) -> float:
        """The share of the gap closed over all test prompts, without its jackknife."""
        return step.closed(*self.clouds(layer).moments(step.axes, self.test).laws())

    def measured(self, layer: int, *, principal_axes: int | None) -> dict[str, np.ndarray]:
        """All quantities of a layer for all prompts, and its tau; those of the whole layer alone if ``principal_axes``
        is None.
        """
        step = self.fitted(layer)
        values = self.replicates(layer, step) | {"tau": np.array(step.tau)}
        if principal_axes is None:
            return values
        values["gap_closed_share_projected"] = self.shares(layer, self.fitted(layer, most=principal_axes))
        if self.depths[layer][2] is not None:
            pair = self.clouds(layer, mlp=True)
            axes = pair.axes(self.path.states.shape[-1], self.selection, self.test)
            silent = self.energies[layer].with_noise_of(None)
            alone = pair.fit(silent, axes, self.selection)
            values["gap_closed_share_mlp"] = self.shares(layer, alone, silent, mlp=True)
        return values

    def measurement(self, rows: list[dict[str, np.ndarray]]) -> xr.Dataset:
        """The Measurement of the values of all layers."""
        axis, over, layers = self.source.layer_axis, self.path.replicate, self.layers
        times = layers if isinstance(self.source, Recording) else self.path.times.cpu().numpy()[layers]
        data = {
            name: ((axis, over), np.stack([row[name] for row in rows]), label_attributes(long_name))
            for name, long_name in NAMES.items()
            if name in rows[0]
        }
        names = self.path.identities
        coords = {
            axis: np.asarray(times),
            over: np.arange(self.path.states.shape[1]),
            "tau": (axis, np.array([float(row["tau"]) for row in rows])),
            "nu": (axis, np.array([self.energies[layer].nu for layer in layers])),
            **identity_coordinates(over, names),
        }
        return check_replicates(xr.Dataset(data, coords)).assign_attrs(
            sphere=sphere_text(self.source),
            radius="recorded radius of each token",
            potential="quadratic: mean force and symmetric part of the mean Jacobian of the MLP over the tokens",
            replicates="pseudo-values of a jackknife over the prompts of both halves",
            fitted_on=[int(k) for k in self.selection],
        )


def _depths(system: System) -> dict[int, tuple[int, int, int | None]]:
    """The indices of the states before and after each layer, and between its halves if the MLP reads that state."""
    if not isinstance(system, Recording):
        return {k: (k, k + 1, None) for k in range(len(system.trajectory.times) - 1)}
    anatomy, found = system.anatomy, {}
    for layer in system.layers:
        first, last = (anatomy.depths.at(layer, site) - system.first for site in (Site.INPUT, Site.OUTPUT))
        parallel = anatomy.layers[layer].wiring.kind is Kind.PARALLEL
        if first >= 0:
            found[layer] = (first, last, None if parallel else first + 1)
    return found
