"""The norms of the loss gradient along depth, with and without residual connections, and with norms
free or at fixed scales.

    g_k  =  sqrt(mean_t |dL/dx_t|^2)    at the input x of block k, and at the output of the last block,

with L the sum of the next-token losses of a prompt. Four versions of the same weights:

    whole model               the model as it is
    no residual connections   y' = A(y), y'' = M(y'): each half replaces the state by its write
    norms at fixed scales     N(y) becomes gain * (y - mean y) / s + bias, s that of the token in the whole model
    both of these

At fixed scales the forward pass of the whole model is unchanged, and its gradient lacks the projection by which a norm
removes the radial direction. Source: [Additive transport], Section 9.3: ill-conditioned mixing "forbids gradient
propagation", and the residual connection prevents it.

How to read it. ``log_loss_gradient_rms`` along depth; its fall or growth per block is the slope. With residual
connections each block's Jacobian is I + J, and the gradient changes little. How it fails. Without residual connections
a trained model computes something else: the gradients are those of another function, at other states. Cost: a forward
and a backward pass for each version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.fields.norms import LayerNorm
from helmscope.intervene.edit import Edit
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import Site
from helmscope.models.tap import locked
from helmscope.models.topology import Kind
from helmscope.observe.scoring import Scoring, token_losses
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_replicates, short_repr

if TYPE_CHECKING:
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm
    from helmscope.models.sites import AbstractEdit, EditContext
    from helmscope.types.progress import ProgressOption

LOG_NORM = {"long_name": "log of the root mean square gradient over tokens"}


class GradientVersion(Enum):
    """The versions of a model of ``loss_gradient_norms``; the values are the coordinates of its axis ``version``.

    >>> [version.value for version in GradientVersion][:2]
    ['whole model', 'no residual connections']
    """

    WHOLE = "whole model"
    NO_RESIDUAL = "no residual connections"
    FIXED_SCALES = "norms at fixed scales"
    BOTH = "no residual connections, norms at fixed scales"


@shows_progress("norms of the loss gradient")
def loss_gradient_norms(
    recording: Recording,
    *,
    versions: Sequence[GradientVersion] = tuple(GradientVersion),
    progress: ProgressOption = None,
) -> xr.Dataset:
    """``log_loss_gradient_rms`` along (depth, version, prompt): the natural logarithm of g at the input of each block
    and at the output of the last one.

    Tokens on which no scored token depends, such as the last one, have gradient 0 and count. Raises HelmscopeError
    where ``next_token_loss`` does, for blocks with scaled residual connections or cross-attention, and, with norms at
    fixed scales, for a model whose norms cannot be read.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> found = loss_gradient_norms(record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])))
    >>> dict(found.log_loss_gradient_rms.sizes)
    {'depth': 3, 'version': 4, 'prompt': 2}
    """
    report, scoring = check_progress(progress), Scoring(check_recording(recording))
    chosen = list(versions)
    for each in chosen:
        if not isinstance(each, GradientVersion):
            raise HelmscopeError(f"versions holds {short_repr(each)}, but each must be a GradientVersion")
    if not chosen:
        raise HelmscopeError("versions is empty, but it must hold at least one GradientVersion")
    _check_supported(recording, chosen)
    layers = len(recording.anatomy.layers)
    found = np.full((layers + 1, len(chosen), len(recording.batch)), np.nan)
    counted, done = recording.batch.counted, 0
    for rows in scoring.chunks():
        weights = torch.ones(scoring.weights[rows].shape, device="cpu") if counted is None else counted[rows].cpu()
        for k, version in enumerate(chosen):
            for block, gradient in enumerate(_gradients(recording, scoring, rows, version)):
                squares = gradient.double().cpu().square().sum(-1)
                mean = (torch.where(weights > 0, weights * squares, 0.0)).sum(-1) / weights.sum(-1)
                found[block, k, rows] = (mean.log() / 2).numpy()
            done += rows.stop - rows.start
            report(done / (len(chosen) * len(recording.batch)))
    depths = [recording.anatomy.depths.steps * block for block in range(layers + 1)]
    axis: dict[str, Any] = {"depth": ("depth", depths, {"units": recording.trajectory.unit})}
    coords = {**axis, "version": [each.value for each in chosen], **scoring.coords}
    data = {"log_loss_gradient_rms": (("depth", "version", "prompt"), found, LOG_NORM)}
    return check_replicates(xr.Dataset(data, coords, {**scoring.attributes, "title": "norms of the loss gradient"}))


def _gradients(recording: Recording, scoring: Scoring, rows: slice, version: GradientVersion) -> list[Tensor]:
    """dL/dx at the input of every block, and at the output of the last one."""
    layers = len(recording.anatomy.layers)
    terms: dict[int, Tensor] = {}

    def marked(value: Tensor, context: EditContext) -> Tensor:
        block = context.layer + (context.site is Site.OUTPUT)
        terms[block] = torch.zeros_like(value).requires_grad_()
        return value + terms[block]

    edits: list[AbstractEdit] = [Edit(Site.INPUT, None, marked), Edit(Site.OUTPUT, [layers - 1], marked)]
    if version in (GradientVersion.NO_RESIDUAL, GradientVersion.BOTH):
        edits += _without_residual(recording)
    fixed = version in (GradientVersion.FIXED_SCALES, GradientVersion.BOTH)
    with torch.enable_grad(), ExitStack() as stack:
        if fixed:
            stack.enter_context(_fixed_scales(recording, rows))
        logits = scoring.runner.under(*edits).outputs(rows=rows, gradients=True)
        scored = (scoring.weights[rows] > 0).nonzero()
        text, token = scored.to(logits.device).unbind(-1)
        targets = scoring.ids[rows][scored[:, 0], scored[:, 1]].to(logits.device)
        weights = scoring.weights[rows][scored[:, 0], scored[:, 1]].to(logits)
        loss = (weights * token_losses(logits[text, token - scoring.shift], targets)).sum()
        return list(torch.autograd.grad(loss, [terms[block] for block in range(layers + 1)]))


def _without_residual(recording: Recording) -> list[AbstractEdit]:
    """Edits by which each write replaces the state to which it is added: w becomes w - x."""
    states: dict[Site, Tensor] = {}

    def keep(value: Tensor, context: EditContext) -> None:
        states[context.site] = value

    edits: list[AbstractEdit] = [
        Edit(Site.INPUT, None, keep),
        Edit(Site.ATTENTION, None, lambda write: write - states[Site.INPUT]),
    ]
    if recording.anatomy.layers[0].wiring.kind is not Kind.PARALLEL:
        edits += [Edit(Site.MIDDLE, None, keep), Edit(Site.MLP, None, lambda write: write - states[Site.MIDDLE])]
    return edits


def _norm_modules(recording: Recording) -> dict[nn.Module, Norm]:
    """The norms inside the blocks, with what they compute."""
    found: dict[nn.Module, Norm] = {}
    for layer in recording.anatomy.layers:
        wiring = layer.wiring
        for path, norm in (
            (wiring.attention_norm, layer.attention_norm),
            (wiring.mlp_norm, layer.mlp_norm),
            (wiring.close, layer.close_norm),
        ):
            if path is not None and norm is not None:
                found[layer.part(path)] = norm
    return found


@contextmanager
def _fixed_scales(recording: Recording, rows: slice) -> Iterator[None]:
    """Within it, the norms of the blocks are affine maps, with the scales that each token has in the whole model."""
    norms = _norm_modules(recording)
    scales: dict[Any, list[Tensor]] = {}

    def record_scale(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        scales.setdefault(module, []).append(_scale(norms[module], args[0].detach()))

    calls: dict[Any, int] = {}

    def replaced(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        number = calls.get(module, 0)
        calls[module] = number + 1
        norm, y = norms[module], args[0]
        y = (y - y.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else y) / scales[module][number].to(y)
        y = y if norm.gain is None else norm.gain.to(y) * y
        return y if norm.bias is None else y + norm.bias.to(y)

    with locked(recording.anatomy.model):
        for hook in (record_scale, replaced):
            handles = [module.register_forward_hook(hook) for module in norms]
            try:
                if hook is record_scale:
                    recording.runner.forward(rows=rows)
                else:
                    yield
            finally:
                for handle in handles:
                    handle.remove()


def _scale(norm: Norm, y: Tensor) -> Tensor:
    """The s by which a norm divides y."""
    wide = y.double()
    wide = wide - wide.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else wide
    return (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def _check_supported(recording: Recording, versions: Sequence[GradientVersion]) -> None:
    anatomy = recording.anatomy
    if anatomy.has_cross:
        raise HelmscopeError("recording is of a model with cross-attention, whose residual connections cannot be cut")
    fixed = {GradientVersion.FIXED_SCALES, GradientVersion.BOTH} & set(versions)
    cut = {GradientVersion.NO_RESIDUAL, GradientVersion.BOTH} & set(versions)
    for number, layer in enumerate(anatomy.layers):
        wiring = layer.wiring
        if cut and any(wiring.scale(site) != 1 for site in (Site.ATTENTION, Site.MLP)):
            raise HelmscopeError(f"layer {number} scales its residual connections, which cannot be cut")
        if fixed and (wiring.sandwich or not _norm_modules(recording)):
            raise HelmscopeError(f"layer {number} has norms that cannot be read, so that their scales cannot be fixed")
