"""Figures of densities: which values are drawn, where, and what the titles say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import gamma

from helmscope.fields.attention import SA
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import CircleGrid, Density, SphereGrid, ZonalGrid, evolve
from helmscope.plots.density import density_path_figure
from helmscope.plots.draw import plot
from helmscope.plots.globe import PIXELS, disc_points, values_on_disc
from helmscope.plots.projection import orthographic
from helmscope.types import HelmscopeError, Status


def spread(grid, kappa=2.0, nu=0.3, times=(0.0, 0.5, 1.0)):
    return evolve(None, Density.von_mises_fisher(grid, kappa=kappa), times=times, noise=IsotropicNoise(nu))


def line(panel, label):
    (found,) = (each for each in panel.lines if each.get_label() == label)
    return found.get_xdata(), found.get_ydata()


def test_a_density_on_the_circle_has_its_closed_form_over_the_angle():
    figure = Density.von_mises_fisher(CircleGrid(degree=32), kappa=2.0).plot()
    ring, panel = figure.axes
    degrees, values = line(panel, "density")
    expected = np.exp(2 * np.cos(np.deg2rad(degrees))) / float(torch.special.i0(torch.tensor(2.0, dtype=torch.float64)))
    assert np.allclose(values, expected, atol=1e-10)
    assert set(line(panel, "uniform")[1]) == {1.0}
    curve = np.stack(ring.lines[-2].get_data())
    assert np.argmax(np.linalg.norm(curve, axis=0)) == np.argmax(values)  # the curve around the circle peaks there too
    assert figure._suptitle.get_text().startswith("density on S^1\n|mean| 0.698, entropy ")


def test_a_zonal_density_is_the_distribution_of_the_angle():
    figure = plot(Density.von_mises_fisher(ZonalGrid(dim=8, degree=32), kappa=5.0), title="vMF")
    degrees, values = line(figure.axes[0], "density")
    angle = np.deg2rad(degrees)
    assert np.trapezoid(values, angle) == pytest.approx(1, abs=1e-4)
    shape = np.exp(5 * np.cos(angle)) * np.sin(angle) ** 6
    assert np.allclose(values, shape / np.trapezoid(shape, angle), atol=1e-4)
    uniform = gamma(4) / (gamma(3.5) * np.sqrt(np.pi)) * np.sin(angle) ** 6
    assert np.allclose(line(figure.axes[0], "uniform")[1], uniform, atol=1e-12)
    assert figure._suptitle.get_text().startswith("vMF\n")


def test_the_pixels_of_a_globe_are_its_visible_points():
    view = (30.0, -20.0)
    points = disc_points(view)
    assert np.allclose(np.linalg.norm(points, axis=-1), 1)
    places, front = orthographic(points, azimuth=view[0], elevation=view[1])
    ticks = (2 * np.arange(PIXELS) + 1) / PIXELS - 1
    pixels = np.stack(np.meshgrid(ticks, ticks), -1).reshape(-1, 2)
    inside = np.linalg.norm(pixels, axis=-1) <= 1
    assert front[inside].all()
    assert np.allclose(places[inside], pixels[inside])
    assert values_on_disc(lambda x: x[None, :, 0], view).shape == (1, PIXELS, PIXELS)


def test_a_density_on_the_sphere_is_drawn_from_two_sides_with_one_scale():
    center = torch.tensor([0.0, 1.0, 1.0])
    figure = Density.von_mises_fisher(SphereGrid(degree=24), kappa=6.0, center=center).plot()
    front, back = figure.axes[:2]
    assert [panel.get_title() for panel in (front, back)] == [
        "azimuth 90°, elevation 45°",
        "azimuth 270°, elevation -45°",
    ]
    near, far = (panel.images[0] for panel in (front, back))
    assert near.norm is far.norm
    peak = 6 * np.exp(6) / np.sinh(6)
    assert near.get_array().max() == pytest.approx(peak, rel=1e-3)
    assert far.get_array().min() == pytest.approx(peak * np.exp(-12), rel=0.1)
    middle = PIXELS // 2
    assert near.get_array()[middle, middle] == pytest.approx(peak, rel=1e-2)  # the mean is in front


def test_a_view_can_be_chosen_on_a_globe_only():
    density = Density.von_mises_fisher(SphereGrid(degree=16), kappa=2.0)
    assert density.plot(view=(10, 30)).axes[0].get_title() == "azimuth 10°, elevation 30°"
    with pytest.raises(HelmscopeError, match=r"view is 3, but it must be \(azimuth, elevation\) in degrees"):
        density.plot(view=3)
    with pytest.raises(HelmscopeError, match="only densities on a SphereGrid are drawn on a globe: omit it"):
        Density.uniform(CircleGrid(degree=4)).plot(view=(0, 0))
    with pytest.raises(HelmscopeError, match="unknown option of plot 'veiw': did you mean 'view'"):
        density.plot(veiw=(0, 0))


def test_a_path_on_the_circle_is_a_map_over_time_with_curves():
    path = spread(CircleGrid(degree=16))
    figure = path.plot()
    over_time, curves, order, entropy = (panel for panel in figure.axes if panel.get_label() != "<colorbar>")
    (mesh,) = over_time.collections
    values = np.asarray(mesh.get_array()).reshape(721, 3)
    assert np.allclose(values[360], path.grid.evaluate(path.modes, torch.tensor([[1.0, 0.0]]))[:, 0])  # at angle 0
    for k, label in enumerate(("t = 0", "t = 0.5", "t = 1")):
        assert np.allclose(line(curves, label)[1], values[:, k])
    assert order.get_title(loc="left") == "order parameter |mean x|"
    seen = next(each for each in order.lines if each.get_label() != "_mark").get_ydata()
    assert seen == pytest.approx([float(density.mean.norm()) for density in path])
    lost = next(each for each in entropy.lines if each.get_label() != "_mark").get_ydata()
    assert lost == pytest.approx([np.log(2 * np.pi) - density.entropy for density in path])
    heading = figure.subfigs[0]._suptitle.get_text()
    assert heading == "no drift, isotropic noise nu = 0.3\ndensity on S^1, degree 16"


def test_a_path_on_the_sphere_is_a_row_of_globes():
    path = spread(SphereGrid(degree=12), times=np.linspace(0, 1, 9))
    figure = plot(path, panels=3, title="spreading")
    globes = figure.axes[:3]
    assert [panel.get_title() for panel in globes] == ["t = 0", "t = 0.5", "t = 1"]
    peaks = [float(panel.images[0].get_array().max()) for panel in globes]
    expected = [float(path[k].values.max()) for k in (0, 4, 8)]
    assert peaks == pytest.approx(expected, rel=2e-2)
    assert figure.subfigs[0]._suptitle.get_text() == (
        "spreading\ndensity on S^2, degree 12; seen from azimuth 0°, elevation 20°"
    )


def test_negative_mass_is_in_the_title():
    modes = torch.zeros(9, dtype=torch.float64)
    modes[0], modes[1] = 1, 1.0  # 1 + sqrt 2 cos t, negative around 180 degrees
    density = Density(CircleGrid(degree=4), modes)
    assert f", negative mass {density.negative_mass:.1g}" in density.plot()._suptitle.get_text()


def test_a_run_that_ended_early_says_so():
    grid = ZonalGrid(dim=4, degree=16)
    start = Density.von_mises_fisher(grid, kappa=0.5)
    path = evolve(SA(beta=2.0), start, times=np.linspace(0, 30, 61))
    assert path.outcome.statuses == (Status.UNRESOLVED,)
    heading = path.plot().subfigs[0]._suptitle.get_text()
    assert heading == f"SA(beta=2), no noise\ndensity on S^3, degree 16; unresolved at t = {path.outcome.times[0]:.4g}"


def test_a_path_of_one_time_has_curves_only_and_one_of_none_is_refused():
    path = spread(CircleGrid(degree=16), times=[0.0])
    assert len(path.plot().axes) == 3
    start = Density.von_mises_fisher(CircleGrid(degree=16), kappa=2.0)
    unresolved = evolve(SA(beta=2.0), start, times=[50.0])
    assert len(unresolved) == 0
    with pytest.raises(HelmscopeError, match=r"path has no times to draw, because .* no longer resolves"):
        density_path_figure(unresolved)


def test_a_positive_density_is_drawn_by_its_logarithm():
    start = Density.von_mises_fisher(CircleGrid(degree=16), kappa=4.0)
    path = evolve(None, start, times=[0, 0.1], noise=IsotropicNoise(0.1), positive=True)
    degrees, values = line(path.plot().axes[1], "t = 0")
    i0 = float(torch.special.i0(torch.tensor(4.0, dtype=torch.float64)))
    assert np.allclose(values, np.exp(4 * np.cos(np.deg2rad(degrees))) / i0, rtol=1e-6)
    assert values.min() > 0


def test_colors_keep_the_uniform_density_apart_from_zero():
    figure = density_path_figure(spread(SphereGrid(degree=24), kappa=8.0, times=[0, 1]))
    (norm,) = {id(panel.images[0].norm): panel.images[0].norm for panel in figure.axes[:2]}.values()
    assert norm.vmin == 0
    assert float(norm(1.0)) == pytest.approx(0.3)
    ticks = figure.axes[2].get_yticks()
    assert {0, 1, 2} <= set(ticks)
    assert max(ticks) <= norm.vmax
