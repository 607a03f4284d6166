"""The MLP of a layer as an object of ``fields``, identified from the probe, with the norm before it folded in.

With R the input of the MLP and h the input of its last matrix,

    ungated   h = s(W R + c)                    gated   h = s(G R + c) * (U R + e)

where the matrices are separate modules or two parts of one. The activation and the gate are those for which the
equation holds on the recorded tensors. Gain, bias and the factor sqrt(d) of the norm N are folded in, so that the field
acts on x = normalized(z) / sqrt(d), which is the unit vector of z up to the norm's epsilon.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields import activations
from helmscope.fields.activations import Activation
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.models.experts import MixtureOfExperts, read_experts
from helmscope.models.mlp_capture import MlpModules
from helmscope.models.probe import equal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor, nn

    from helmscope.fields.mlp import Force
    from helmscope.models.probe import LayerTrace, ModuleCall
    from helmscope.models.topology import Wiring

Affine = tuple["Tensor", "Tensor | None"]


@dataclass(frozen=True, eq=False)
class ReadMLP:
    """The force of an MLP before its norm is folded in, its input, the output of its last matrix, and the modules that
    compute it.
    """

    force: Force | MixtureOfExperts
    read: Float[Tensor, "batch n d"]
    written: Float[Tensor, "batch n d"]
    modules: MlpModules | None = None


def read_mlp(layer: LayerTrace, wiring: Wiring) -> ReadMLP | None:
    """The MLP whose write is the output of ``wiring.mlp``; None if it is of an unknown kind."""
    calls = [call for call in layer.calls if call.path]
    written = _before_norm(calls, wiring)
    known = _known_activations(calls)
    experts = read_experts(calls, written, known)
    shape = layer.pre.shape
    if experts is not None:
        mixture, read, out = experts
        return ReadMLP(mixture, read.reshape(shape), out.reshape(shape))
    last = _last_matrix(calls, written, layer.pre)
    if last is None or last.input is None or last.output is None:
        return None
    attention = [pair[0].module for pair in (layer.attention, layer.cross) if pair is not None]
    in_attention = {id(part) for module in attention for part in module.modules()}
    firsts = _first_matrices([call for call in calls if id(call.module) not in in_attention], last, layer.pre.shape[-1])
    if not firsts or firsts[0].input is None:
        return None
    fitted = _fit_force(firsts, last, known)
    if fitted is None:
        return None
    force, modules = fitted
    return ReadMLP(force, firsts[0].input.reshape(shape), last.output.reshape(shape), modules)


def _before_norm(calls: list[ModuleCall], wiring: Wiring) -> ModuleCall:
    """The call whose output is that of the MLP, before the norm that follows it in a sandwich block."""
    write = next(call for call in calls if call.path == wiring.mlp)
    if not wiring.sandwich:
        return write
    return next(call for call in calls if call is not write and equal(call.output, write.input))


def _last_matrix(calls: list[ModuleCall], written: ModuleCall, pre: Tensor) -> ModuleCall | None:
    """The call of the matrix whose output is the write; None if there is none."""
    matrices = [call for call in calls if matrix_of(call.module) is not None and equal(call.output, written.output)]
    return matrices[-1] if matrices else None


def _first_matrices(calls: list[ModuleCall], last: ModuleCall, dim: int) -> list[ModuleCall]:
    """The calls of the matrices on R^d that come before the last one and read the same state."""
    assert last.input is not None
    width = last.input.shape[-1]
    before = [call for call in calls[: calls.index(last)] if matrix_of(call.module) is not None]
    fits = [call for call in before if call.output is not None and call.output.shape[-1] in (width, 2 * width)]
    fits = [call for call in fits if call.input is not None and call.input.shape[-1] == dim]
    same = [call for call in fits if fits and equal(call.input, fits[-1].input)]
    return same[-2:]


def _fit_force(firsts: list[ModuleCall], last: ModuleCall, known: list[Activation]) -> tuple[Force, MlpModules] | None:
    """The field whose hidden activations equal the input of the last matrix, and its modules; None if there is none."""
    w_out, b_out = affine_of(last.module)
    assert last.input is not None
    assert firsts[0].input is not None
    neurons, x = last.input, firsts[0].input
    parts = [affine_of(call.module) for call in firsts]
    places = [(call.path, slice(None)) for call in firsts]
    width = w_out.shape[1]
    if len(parts) == 1 and parts[0][0].shape[0] == 2 * width:
        weight, bias = parts[0]
        halves = slice(width), slice(width, None)
        parts = [(weight[half], None if bias is None else bias[half]) for half in halves]
        places = [(firsts[0].path, half) for half in halves]
    forces: list[tuple[Force, MlpModules]] = []
    for activation in known:
        if len(parts) == 1:
            mlp = MLP(w_in=parts[0][0], b_in=parts[0][1], w_out=w_out, b_out=b_out, activation=activation)
            forces.append((mlp, MlpModules(tuple(places), last.path)))
        else:
            forces += [
                (
                    GatedMLP(
                        w_gate=parts[gate][0],
                        b_gate=parts[gate][1],
                        w_up=parts[up][0],
                        b_up=parts[up][1],
                        w_out=w_out,
                        b_out=b_out,
                        activation=activation,
                    ),
                    MlpModules((places[gate], places[up]), last.path),
                )
                for gate, up in ((0, 1), (1, 0))
            ]
    wide = x.double()
    errors = [float((force.neurons(wide) - neurons.double()).norm()) for force, _ in forces]
    best = min(range(len(forces)), key=errors.__getitem__)
    return forces[best] if errors[best] <= _fit_tolerance(x) * float(neurons.double().norm()) else None


def _fit_tolerance(x: Tensor) -> float:
    return 1e-5 if x.dtype in (torch.float32, torch.float64) else 3e-2


def _known_activations(calls: list[ModuleCall]) -> list[Activation]:
    """The activations of ``fields`` that equal some module without parameters on a grid; all of them if none does."""
    candidates = all_activations()
    grid = torch.linspace(-6, 6, 241, device="cpu")
    matching = []
    for module in {id(call.module): call.module for call in calls}.values():
        if next(module.parameters(), None) is None and not list(module.children()):
            matching += _equal_on_grid(module, grid, candidates)
    return matching or candidates


def _equal_on_grid(module: nn.Module, grid: Tensor, candidates: list[Activation]) -> list[Activation]:
    """The candidates that equal a module on the grid."""
    try:
        with torch.no_grad():
            image = module(grid)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return []
    if not isinstance(image, torch.Tensor) or image.shape != grid.shape or torch.equal(image, grid):
        return []
    return [candidate for candidate in candidates if float((candidate(grid) - image).abs().max()) <= 1e-5]


def all_activations() -> list[Activation]:
    """One instance of every activation of ``fields``."""
    kinds = [kind for kind in vars(activations).values() if isinstance(kind, type) and issubclass(kind, Activation)]
    return [kind() for kind in kinds if not inspect.isabstract(kind) and not kind.__name__.startswith("_")]


def matrix_of(module: nn.Module) -> Float[Tensor, "out in"] | None:
    """The matrix (out, in) of a linear module; None if the module is not linear."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or isinstance(module, torch.nn.Embedding):
        return None
    return as_stored(module, weight.detach())


def as_stored(module: nn.Module, matrix: Float[Tensor, "out in"]) -> Tensor:
    """A matrix (out, in) in the layout in which a linear module stores its weight, and the reverse."""
    return matrix.mT if hasattr(module, "nf") else matrix  # Conv1D of GPT-2 stores the transpose


def affine_of(module: nn.Module) -> Affine:
    """Matrix and bias of a linear module, detached from autograd."""
    weight, bias = matrix_of(module), getattr(module, "bias", None)
    assert weight is not None
    return weight.float() if weight.dtype not in _EXACT else weight, None if bias is None else bias.detach()


_EXACT = (torch.float32, torch.float64)
