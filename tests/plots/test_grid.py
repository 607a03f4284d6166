"""Small multiples: titles that fit, ticks that do not overlap, and the probes of a generator test."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.claims.generator_shares import ANGLES, BlockShares
from helmscope.observe.probe_curves import along_axes
from helmscope.observe.probes import ProbeBank
from helmscope.plots.grid import draw_grid
from helmscope.plots.style import blank_figure, styled
from helmscope.plots.variable_panel import letters_across


def drawn(data: xr.Dataset, name: str, width: float) -> tuple[list[str], str, list[list[str]]]:
    """The titles of the first row, the label of the horizontal axis, and the texts of its ticks."""
    with styled():
        figure = blank_figure(width, 6.0)
        place = figure.subfigures(1, 1)
        draw_grid(place, data, name, letters=letters_across(width))
        figure.canvas.draw()
    columns = data[name].sizes[data[name].dims[-2]]
    titles = [panel.get_title() for panel in place.axes[:columns]]
    ticks = [[text.get_text() for text in panel.get_xticklabels()] for panel in place.axes[-columns:]]
    return titles, place._supxlabel.get_text(), ticks


@pytest.fixture(scope="module")
def bank() -> tuple[ProbeBank, xr.Dataset]:
    recording = hs.record("A", ["Once upon a time there was a cat.", "The dog ran home to eat."])
    chosen = ProbeBank.of(recording, per_kind=8)
    return chosen, BlockShares(hs.observe.generator_test(recording, bank=chosen)).bank(chosen)


def test_titles_of_narrow_columns_are_numbers_and_the_axis_says_of_what(bank: tuple[ProbeBank, xr.Dataset]) -> None:
    titles, label, ticks = drawn(bank[1], "probe_value", 8.0)
    assert titles == ["probe = 1", "probe = 3", "probe = 6", "probe = 8"]
    assert label == "angle"
    assert all(len(row) <= 4 for row in ticks)
    many = bank[1].isel(probe=[0, 1, 2, 3, 0, 1, 2, 3]).assign_coords(probe=range(1, 9))
    titles, label, _ = drawn(many, "probe_value", 3.9)
    assert titles == [str(number) for number in range(1, 9)]
    assert label == "angle; columns: probe"


def test_the_picture_has_the_probes_of_the_bank(bank: tuple[ProbeBank, xr.Dataset]) -> None:
    """The same for all prompts, the first and the last of each kind among them, between 0 and 1."""
    probes, data = bank
    assert data.kind.values.tolist() == list(probes.names)
    assert np.ptp(data.probe_value.values, 0).max() == 0
    angles = torch.linspace(0, torch.pi, ANGLES, dtype=torch.float64)
    for kind in probes.kinds:
        curves = along_axes(kind, angles).numpy()
        shown = data.probe_value.sel(kind=kind.name)
        for number in (1, 8):
            assert shown.sel(probe=number)[0].values == pytest.approx(curves[number - 1], abs=1e-12)
    assert float(data.probe_value.min()) == 0
    assert float(data.probe_value.max()) == 1
