"""Broadcast shapes, against those of torch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from helmscope.geometry.arithmetic import broadcast_shapes

SHAPES = [shape for rank in range(4) for shape in product((0, 1, 2, 3), repeat=rank)]


def expected(*shapes: tuple[int, ...]) -> torch.Size | None:
    """The shape of the sum of tensors; None if they cannot be added."""
    try:
        return sum((torch.empty(shape) for shape in shapes), start=torch.empty(())).shape
    except RuntimeError:
        return None


def computed(*shapes: tuple[int, ...]) -> torch.Size | None:
    try:
        return broadcast_shapes(*shapes)
    except ValueError:
        return None


def test_pairs_of_shapes_broadcast_as_tensors_do():
    answers = [(computed(*pair), expected(*pair)) for pair in product(SHAPES[:40], SHAPES)]
    assert all(ours == torchs for ours, torchs in answers)
    assert {None, torch.Size([0, 2]), torch.Size([2, 1, 3])} <= {ours for ours, _ in answers}


def test_any_number_of_shapes():
    assert broadcast_shapes() == torch.Size([])
    assert broadcast_shapes((1, 3), (2, 1), (4, 1, 1)) == torch.Size([4, 2, 3])
    with pytest.raises(ValueError, match=r"shapes \[\(2,\), \(1,\), \(3,\)\] do not broadcast"):
        broadcast_shapes((2,), (1,), (3,))
