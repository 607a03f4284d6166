"""What the MLPs of a model compute during a forward pass: the preactivations of their neurons and their outputs, which
an instrument would otherwise have to compute again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.probe import tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from helmscope.models.anatomy import Layer
    from helmscope.models.experts import ForceAfterNorm


@dataclass(frozen=True)
class MlpModules:
    """The modules of a block that compute an MLP: for each of the ``input_rows`` of its force, the path of the module
    that applies them and the columns of its output; and the path of the last matrix.

    >>> MlpModules((("mlp.gate_up", slice(0, 4)), ("mlp.gate_up", slice(4, None))), "mlp.down").paths
    ('mlp.gate_up', 'mlp.gate_up', 'mlp.down')
    """

    inputs: tuple[tuple[str, slice], ...]
    output: str

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all of these modules."""
        return (*(path for path, _ in self.inputs), self.output)


@dataclass(frozen=True, eq=False)
class _Output:
    """An output of a module, with its version: a family may add to it in place afterwards."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, output: Any) -> _Output:
        tensor = tensors_in(output)[0]
        return cls(tensor, tensor._version)

    def unchanged(self, rows: int, tokens: int) -> Tensor | None:
        """The output as (rows, tokens, k); None if it has changed, or is not in single precision."""
        fits = self.tensor.dtype == torch.float32 and self.tensor._version == self.version
        return self.tensor.reshape(rows, tokens, -1) if fits else None


class MlpCapture:
    """Collects the outputs of the modules of MLPs, a layer at a time.

    Only those in float32 are used: of a model in half precision, forces are computed with more digits than its own, and
    in many families a float64 model computes its norms in float32.

    >>> MlpCapture([], []).take(0, None, 1, 4)
    (None, None)
    """

    def __init__(self, layers: Sequence[Layer], forces: Sequence[ForceAfterNorm | None]) -> None:
        self.layers, self.forces = layers, forces
        self._outputs: dict[int, list[_Output]] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context manager: within it, forward passes of the model leave the outputs of its MLPs here."""
        modules = {
            id(module): module
            for layer, force in zip(self.layers, self.forces, strict=True)
            if force is not None and force.modules is not None
            for module in map(layer.part, force.modules.paths)
        }

        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._outputs.setdefault(id(module), []).append(_Output.of(output))

        handles = [module.register_forward_hook(keep) for module in modules.values()]
        try:
            yield
        finally:
            self.begin()
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """Forget the outputs of the layer before."""
        self._outputs = {}

    def take(
        self, layer: int, force: ForceAfterNorm | None, rows: int, tokens: int
    ) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
        """The preactivations along each of the force's ``input_rows``, and the force; None where they are unknown, as
        those of a module that was called more than once.
        """
        if force is None or force.modules is None:
            return None, None
        part = self.layers[layer].part
        found = [self._outputs.get(id(part(path)), []) for path in force.modules.paths]
        *inputs, output = [each[0].unchanged(rows, tokens) if len(each) == 1 else None for each in found]
        columns = [columns for _, columns in force.modules.inputs]
        known = [each[..., part] for each, part in zip(inputs, columns, strict=True) if each is not None]
        scaled = output if output is None or force.scale == 1 else force.scale * output
        return tuple(known) if len(known) == len(inputs) else None, scaled
