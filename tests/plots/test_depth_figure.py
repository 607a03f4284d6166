"""The picture of a recording: clustering, rank and radius over depth, as the measurement has them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.plots.depth import depth_figure
from support.refusal import refused


@cache
def recording():
    sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return hs.record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [1, 3, 5, 7]]))


def values(panel):
    return [line.get_ydata() for line in panel.lines]


def test_axes_say_depth_and_curves_are_the_means_over_texts():
    seen = recording()
    path = seen.trajectory
    figure = seen.plot()
    clustering, rank, radius = figure.axes
    for panel in figure.axes:
        assert panel.get_xlabel() == "depth (half-layers)"
        assert all(np.array_equal(line.get_xdata(), np.arange(5)) for line in panel.lines)
    inner, order = values(clustering)
    assert np.allclose(inner, hs.mean_inner_product(path.states).double().mean(1).numpy(), atol=1e-6)
    assert np.allclose(order, hs.order_parameter(path.states).double().mean(1).numpy(), atol=1e-6)
    assert np.allclose(values(rank)[0], hs.observe.effective_rank(path.states).double().mean(1).numpy(), rtol=1e-5)
    assert np.allclose(values(radius)[0], path.radius.double().mean((1, 2)).numpy(), rtol=1e-5)
    assert all(len(panel.collections) == len(panel.lines) for panel in figure.axes)  # a band for each curve


def test_the_title_names_the_model_and_the_texts():
    words = recording().plot().get_suptitle()
    assert "sequential pre-norm; 2 layers, width 8" in words
    assert "mean over 3 prompts, band: " in words
    assert recording().plot(title="mine $5").get_suptitle().startswith("mine \\$5\n")


def test_a_resumed_recording_begins_where_it_does():
    seen = recording()
    later = seen.resume(depth=2, states=seen.trajectory.states[2])
    assert later.plot().axes[0].lines[0].get_xdata().tolist() == [2.0, 3.0, 4.0]


def test_padding_counts_nowhere():
    path = recording().trajectory
    weights = torch.ones(1, 3, 4)
    weights[:, :, 3] = 0
    states, radius = path.states.clone(), path.radius.clone()
    states[:, :, 3], radius[:, :, 3] = path.states[:, :, 0], 1e6
    padded = hs.Trajectory(path.times, states, weights, radius, axis="depth", replicate="prompt")
    short = hs.Trajectory(
        path.times, path.states[:, :, :3], None, path.radius[:, :, :3], axis="depth", replicate="prompt"
    )
    for ours, theirs in zip(depth_figure(padded).axes, depth_figure(short).axes, strict=True):
        for one, other in zip(values(ours), values(theirs), strict=True):
            assert np.allclose(one, other, atol=1e-5)


def test_texts_that_are_not_finite_are_left_out():
    path = recording().trajectory
    states = path.states.clone()
    states[1, 0] = torch.nan
    figure = depth_figure(hs.Trajectory(path.times, states, axis="depth", replicate="prompt"))
    assert "mean over 2 prompts" in figure.get_suptitle()
    lost = hs.Trajectory(path.times, torch.full_like(states, torch.nan), axis="depth", replicate="prompt")
    refused(lambda: depth_figure(lost), "no prompt whose states are all finite")
    refused(lambda: depth_figure(3), "trajectory is an int")


def test_one_text_has_no_interval():
    path = recording().trajectory
    one = hs.Trajectory(path.times, path.states[:, :1], radius=path.radius[:, :1], axis="depth", replicate="prompt")
    assert depth_figure(one).get_suptitle() == "1 prompt: no interval"


def test_a_radius_that_grows_by_decades_has_a_log_axis():
    path = recording().trajectory
    radius = torch.logspace(0, 3, 5)[:, None, None].expand(5, 3, 4)
    *_, panel = depth_figure(
        hs.Trajectory(path.times, path.states, radius=radius, axis="depth", replicate="prompt")
    ).axes
    assert panel.get_yscale() == "log"
    assert values(panel)[0] == pytest.approx(radius[:, 0, 0].tolist(), rel=1e-5)
