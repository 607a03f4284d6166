"""Figures of bifurcation diagrams and of free energies."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from helmscope.fields.attention import SA, USA
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import CircleGrid, Density, bifurcation_diagram, evolve
from helmscope.observe.density_overview import density_overview
from helmscope.plots.bifurcation import bifurcation_figure, stable_branch
from helmscope.plots.draw import plot
from helmscope.plots.free_energy import free_energy_figure
from helmscope.types import HelmscopeError

NUS = [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]


def made_up(critical, fold):
    """A diagram of one beta per critical nu, with the order parameter that has the given fold in closed form."""
    nu = np.array(NUS)
    continuous = np.array([f == c for c, f in zip(critical, fold, strict=True)])
    jumps = 0.5 * ~continuous
    order = [np.where(nu < f, j + np.sqrt(np.clip(f - nu, 0, None)), 0) for f, j in zip(fold, jumps, strict=True)]
    return xr.Dataset(
        {
            "order_parameter": (("beta", "nu"), order),
            "critical_nu": ("beta", critical),
            "fold_nu": ("beta", fold),
            "fold_order_parameter": ("beta", jumps),
            "continuous": ("beta", continuous),
        },
        {"nu": nu, "beta": np.arange(1.0, 1 + len(critical))},
        {"dim": 3},
    )


def lines(panel, label):
    return [each.get_xydata() for each in panel.lines if each.get_label() == label]


def test_a_diagram_has_a_curve_for_each_beta_that_ends_at_its_critical_nu():
    diagram = bifurcation_diagram(SA, betas=[0.0, 4.0], nus=NUS, dim=3)
    orders, plane = plot(diagram).axes
    (dots,) = {len(dot) for dot in lines(orders, "_critical")}
    assert dots == 1
    assert [dot[0, 0] for dot in lines(orders, "_critical")] == pytest.approx([1 / 3, 0.18766778760042])
    for k, label in enumerate(("beta = 0", "beta = 4")):
        (curve,) = lines(orders, label)
        assert curve[-1] == pytest.approx([float(diagram.critical_nu[k]), 0], abs=1e-12)
        known = diagram.isel(beta=k).where(diagram.order_parameter.isel(beta=k) > 0, drop=True)
        # 200 points of a curve
        assert np.interp(known.nu, *curve.T) == pytest.approx(known.order_parameter.values, abs=2e-3)
    (boundary,) = lines(plane, "nu_c")
    assert boundary[:, 0].tolist() == [0.0, 4.0]
    assert lines(plane, "fold") == []


def test_a_discontinuous_transition_is_a_dashed_jump_at_the_fold_with_its_hysteresis_shaded():
    figure = bifurcation_figure(made_up([0.2, 0.2], [0.2, 0.28]), title="two kinds")
    orders, plane = figure.axes
    (jump,) = lines(orders, "_jump")
    assert jump == pytest.approx(np.array([[0.28, 0.5], [0.28, 0.0]]), abs=1e-9)
    (shaded,) = (patch for patch in orders.patches if patch.get_label() == "_both")
    assert shaded.get_extents().transformed(orders.transData.inverted()).intervalx == pytest.approx([0.2, 0.28])
    assert "both stable" in [text.get_text() for text in plane.get_legend().get_texts()]
    assert lines(plane, "fold")[0][1] == pytest.approx([2.0, 0.28])
    assert figure._suptitle.get_text() == "two kinds"


def test_a_single_beta_has_one_panel_and_many_are_thinned():
    assert len(bifurcation_figure(made_up([0.2], [0.2])).axes) == 1
    many = bifurcation_figure(made_up([0.2] * 12, [0.2] * 12)).axes[0]
    assert len(many.get_legend().get_texts()) == 8


def test_a_branch_is_exact_for_a_square_root():
    nu = np.linspace(0.1, 0.5, 9)
    for fold, jump in ((0.333, 0.0), (0.41, 0.6)):
        order = np.where(nu < fold, jump + 2 * np.sqrt(np.clip(fold - nu, 0, None)), 0)
        x, y = stable_branch(nu, order, fold, jump)
        assert y == pytest.approx(jump + 2 * np.sqrt(fold - x), abs=1e-9)
        assert x[-1] == fold
    assert [len(part) for part in stable_branch(nu, 0 * nu, 0.05, 0.0)] == [0, 0]
    assert stable_branch(nu, np.where(nu < 0.12, 0.7, 0), 0.12, 0.5)[1][[0, -1]].tolist() == [0.7, 0.5]


def test_both_states_are_visible_between_nu_c_and_the_fold_at_every_beta():
    """Of two betas the second has a fold: the region is a wedge of visible width, inside the frame."""
    plane = bifurcation_figure(made_up([0.2, 0.2], [0.2, 0.28])).axes[1]
    (region,) = (each for each in plane.collections if each.get_label() == "both stable")
    (path,) = region.get_paths()
    assert path.get_extents().intervalx.tolist() == [1.0, 2.0]
    assert path.get_extents().intervaly == pytest.approx([0.2, 0.28])
    assert lines(plane, "fold")[0] == pytest.approx(np.array([[1.0, 0.2], [2.0, 0.28]]))
    left, right = plane.get_xlim()
    assert left < 0.95
    assert right > 2.05


def test_the_unstable_branch_leads_from_nu_c_to_the_fold():
    diagram = bifurcation_diagram(USA, betas=[1.0, 3.0], nus=[0.6, 0.8], dim=3)
    (branch,) = lines(plot(diagram).axes[0], "_unstable")
    branch = branch[np.isfinite(branch[:, 0])]
    assert branch[0] == pytest.approx([float(diagram.critical_nu[1]), 0])
    assert branch[-1] == pytest.approx([float(diagram.fold_nu[1]), float(diagram.fold_order_parameter[1])])
    assert (np.diff(branch, axis=0) > 0).all()


def test_other_datasets_are_refused():
    with pytest.raises(
        HelmscopeError, match=r"diagram lacks order_parameter, but it must be a result of bifurcation_diagram"
    ):
        bifurcation_figure(xr.Dataset())


@pytest.fixture(scope="module")
def usa():
    start = Density.von_mises_fisher(CircleGrid(degree=24), kappa=0.5)
    return evolve(USA(beta=1.0), start, times=np.linspace(0, 2, 21), noise=IsotropicNoise(0.1))


def test_the_free_energy_is_drawn_with_its_rate(usa):
    measured = density_overview(usa)
    energy, rate = plot(measured, title="USA").axes
    assert np.array_equal(energy.lines[0].get_ydata(), measured.free_energy.values[:, 0])
    (formula,), (differences,) = lines(rate, "by its formula"), lines(rate, "differences of F")
    assert np.array_equal(formula[:, 1], -measured.free_energy_rate.values[:, 0])
    # a difference over 0.1 is the rate at its middle up to h^2 / 24 times its second derivative
    assert differences[:, 1] == pytest.approx(np.interp(differences[:, 0], *formula.T), rel=2e-3)


def test_single_variables_of_an_overview_are_curves(usa):
    figure = plot(density_overview(usa), variables="order_parameter")
    assert len(figure.axes) == 1


def test_sa_has_no_free_energy():
    start = Density.von_mises_fisher(CircleGrid(degree=16), kappa=0.5)
    measured = density_overview(evolve(SA(beta=1.0), start, times=[0, 1]))
    assert "free_energy" not in measured
    with pytest.raises(HelmscopeError, match=r"measurement lacks free_energy, but .*: SA has no free energy"):
        free_energy_figure(measured)
