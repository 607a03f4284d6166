"""Which of three models predicts what a head writes: mixing, retrieval, or affine transport.

With weights A_tj of query t and values V_j, the head writes W_O sum_j A_tj V_j. On held-out prompts it is predicted by

    mixing     sum_j K_tj V_j                              K the mean of the kernels of the other prompts
    retrieval  V_j*,  j* the key with the largest weight   nothing is fitted
    transport  (1 - l_t) sum_{j > 1} M_tj V_j + l_t b      l_t = A_t1, the weight on the first token, M the mean over
                                                           other prompts of A_tj / (1 - l_t), b by least squares

    R^2  =  1 - sum |write - prediction|^2 / sum |write - mean write|^2,

sums over tokens and held-out prompts, the mean over tokens and the prompts of the fit, lengths in the residual stream.
The three interpretations are those of [Additive transport], Sections 2 and 9; the last is its "affine" equation of
Section 9.2, where the gate depends on the token: a head gates its constant kernel and a bias vector.

How to read it. R^2 = 1 is a head of that kind; all three can be low, since none of them reads the content of the tokens
but by the top key and the gate, or all high, as for a head that attends to the token before. Transport with a gate that
does not vary is mixing with the first value replaced by a constant, and loses what that value varies. How it fails. The
constant kernels are by position: a head that looks at the last comma is no constant kernel. The first query, which sees
one key under a causal mask, is left out. Prompts must have equal lengths, without padding.
Cost. Three replays with attention weights.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.recording import Recording, check_recording
from helmscope.observe.kernel import check_kernel
from helmscope.runs.bar import shows_progress
from helmscope.stats.replicates import random_halves
from helmscope.types import (
    HelmscopeError,
    Instrument,
    Needs,
    check_progress,
    check_replicates,
    check_seed,
    sub_progress,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext
    from helmscope.types.progress import ProgressOption

FEWEST = 4  # prompts, two for each half
OPEN = 1e-6  # of 1 - l: a query below attends to the first token only, and says nothing of the other keys
R_SQUARED = "r_squared"


class WriteModel(Enum):
    """The models of ``head_write_models``; the values are the coordinates of its axis ``write_model``.

    >>> [each.value for each in WriteModel]
    ['mixing', 'retrieval', 'transport']
    """

    MIXING = "mixing"
    RETRIEVAL = "retrieval"
    TRANSPORT = "transport"


class HeadFit(NamedTuple):
    """What is fitted for the heads of a layer: the mean kernel, the mean kernel of the keys after the first, the bias
    vector, and the mean write.
    """

    kernel: Float[Tensor, "heads n n"]
    rest: Float[Tensor, "heads n n"]
    bias: Float[Tensor, "heads s"]
    mean: Float[Tensor, "heads s"]


@full_precision
def head_write_r_squared(
    kernel: Float[Tensor, "prompts heads n n"],
    values: Float[Tensor, "prompts heads n s"],
    *,
    fitted: Sequence[int],
    tested: Sequence[int],
) -> Float[Tensor, "tested heads models"]:
    """R^2 of mixing, retrieval and transport (the order of ``WriteModel``) for the prompts ``tested``, fitted on the
    prompts ``fitted``: one value per prompt, relative to the mean over tested prompts of sum |write - mean write|^2, so
    that the mean over prompts is the R^2 of all of them.

    Lengths are those of the values: multiply them by W_O first for those of writes. NaN for a head whose writes do not
    vary. Raises HelmscopeError for tensors that do not fit, and for a prompt in both lists.

    >>> kernel = torch.eye(3).expand(4, 1, 3, 3)  # every token retrieves itself, which is a constant kernel too
    >>> values = torch.randn(4, 1, 3, 2, generator=torch.Generator().manual_seed(0))
    >>> head_write_r_squared(kernel, values, fitted=[0, 1], tested=[2, 3]).mean(0)[0, :2]
    tensor([1., 1.], dtype=torch.float64)
    """
    kernel = check_kernel(kernel).double()
    if kernel.ndim != 4 or values.shape[:-1] != kernel.shape[:-1] or kernel.shape[-1] < 2:
        raise HelmscopeError(
            f"kernel is {tuple(kernel.shape)} and values {tuple(values.shape)}, but they must be (prompts, heads, n, "
            "n) and (prompts, heads, n, s) with n >= 2"
        )
    if not len(fitted) or not len(tested) or set(fitted) & set(tested):
        raise HelmscopeError("fitted and tested must each hold a prompt, and share none")
    rows, others = kernel[list(fitted)], values[list(fitted)].double()
    sums = _kernel_sums(rows, others)
    fit = _without_bias(sums)
    fit = fit._replace(bias=_bias(_bias_sums(rows, others, fit)))
    return _shares(_errors(kernel[list(tested)], values[list(tested)].double(), fit))


@shows_progress("models of head writes")
def head_write_models(recording: Recording, *, seed: int = 0, progress: ProgressOption = None) -> xr.Dataset:
    """``r_squared`` along (layer, prompt, head, write_model), for the half of the prompts on which nothing was
    fitted; the halves are drawn with ``seed``. Its mean over prompts is the R^2 of the head, and its null is 0.

    Raises HelmscopeError for fewer than 4 prompts, prompts of different lengths, and models whose attention weights,
    values or output matrices cannot be read.

    >>> from helmscope import record
    >>> texts = ["Once upon a time", "The cat sat down", "Tom was very sad", "It was a day"]
    >>> head_write_models(record("A", texts)).r_squared.shape
    (12, 2, 6, 3)
    """
    report, seed = check_progress(progress), check_seed(seed)
    _check_lengths(check_recording(recording))
    fitted, tested = random_halves(len(recording.batch), seed=seed)
    fits = _Fits()
    tasks = ((fits.add_kernels, fitted), (fits.add_biases, fitted), (fits.errors, tested))
    for number, (use, prompts) in enumerate(tasks):
        replayed = _Pass(prompts, use)
        recording.replay(replayed, progress=sub_progress(report, number / 3, (number + 1) / 3))
    measured = replayed.result().isel(prompt=tested)
    errors = torch.from_numpy(measured.errors.transpose("prompt", "layer", "head", "error").values)
    shares = _shares(errors.flatten(1, 2)).reshape(*errors.shape[:-1], len(WriteModel))
    axes = ("layer", "prompt", "head", "write_model")
    data = {
        R_SQUARED: (axes, shares.transpose(0, 1).numpy(), {"long_name": "held-out R^2 of a model of the head's write"}),
        f"{R_SQUARED}_null": 0.0,
    }
    coords = {name: each for name, each in measured.coords.items() if set(each.dims) <= {"layer", "prompt", "head"}}
    found = xr.Dataset(data, {**coords, "write_model": [each.value for each in WriteModel]})
    attributes = {"title": "models of what heads write", "fitted": len(fitted), "seed": seed}
    return check_replicates(found.assign_attrs({**attributes, "model": recording.origin.title}))


def _check_lengths(recording: Recording) -> None:
    if len(recording.batch) < FEWEST:
        raise HelmscopeError(
            f"recording has {len(recording.batch)} prompts, but fitting on one half and testing on the other needs at "
            f"least {FEWEST}"
        )
    if recording.visible is not None and not bool(recording.visible.all()):
        raise HelmscopeError("recording has texts of different lengths, but constant kernels need equal ones: cut them")
    if recording.residual.radius.shape[-1] < 2:
        raise HelmscopeError("recording has texts of 1 token, but the first query is left out: take longer texts")


class _Pass(Instrument):
    """One replay: keeps what ``use`` returns for the layer and the kernels and values of the chosen ``prompts``; values
    are in coordinates in which they have the lengths of writes.
    """

    name = "head_write_models"
    needs = Needs.KERNEL | Needs.QKV | Needs.OUTPUT_MATRIX

    def __init__(self, prompts: np.ndarray, use: Callable[[int, Tensor, Tensor], Tensor | None]) -> None:
        self.prompts, self.use = set(prompts.tolist()), use

    @full_precision
    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Uses the chosen prompts of a layer."""
        kernel, value = check_kernel(tensors.kernel), tensors.head_values
        assert value is not None
        assert tensors.output_matrix is not None
        chosen = [row for row in range(len(kernel)) if context.rows.start + row in self.prompts]
        factor = torch.linalg.qr(tensors.output_matrix.double()).R  # |W_O u| = |R u|
        values = torch.einsum("hrs,bhns->bhnr", factor, value[chosen].double())
        found = self.use(context.layer, kernel[chosen].double(), values)
        errors = kernel.new_full((len(kernel), kernel.shape[1], 1 + len(WriteModel)), torch.nan, dtype=torch.float64)
        if found is not None:
            errors[chosen] = found
        self.keep(context, {"errors": errors}, axes=("head", "error"))


class _Fits:
    """What is fitted for each layer, from sums over the chunks of a replay."""

    def __init__(self) -> None:
        self.kernels: dict[int, dict[str, Tensor]] = {}
        self.biases: dict[int, tuple[Tensor, Tensor]] = {}

    def add_kernels(self, layer: int, kernel: Tensor, values: Tensor) -> None:
        """Add the kernels of some prompts."""
        sums, before = _kernel_sums(kernel, values), self.kernels.get(layer)
        self.kernels[layer] = sums if before is None else {name: before[name] + each for name, each in sums.items()}

    def add_biases(self, layer: int, kernel: Tensor, values: Tensor) -> None:
        """Add what the bias vectors are fitted to, given the mean kernels."""
        sums, before = _bias_sums(kernel, values, _without_bias(self.kernels[layer])), self.biases.get(layer)
        self.biases[layer] = sums if before is None else (before[0] + sums[0], before[1] + sums[1])

    def errors(self, layer: int, kernel: Tensor, values: Tensor) -> Tensor:
        """The errors of some prompts, given all fits."""
        return _errors(kernel, values, _without_bias(self.kernels[layer])._replace(bias=_bias(self.biases[layer])))


@full_precision
def _kernel_sums(kernel: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Sums over prompts: of kernels, of those of the keys after the first, and of writes after the first query."""
    left = 1 - kernel[..., 0]
    defined = (left > OPEN).to(kernel)
    rest = kernel.clone()
    rest[..., 0] = 0
    rest = rest * (defined / torch.where(left > OPEN, left, 1.0)).unsqueeze(-1)
    writes = (kernel @ values)[..., 1:, :]
    return {
        "kernel": kernel.sum(0),
        "rest": rest.sum(0),
        "defined": defined.sum(0),
        "write": writes.sum((0, -2)),
        "prompts": kernel.new_tensor(float(len(kernel))),
    }


def _without_bias(sums: dict[str, Tensor]) -> HeadFit:
    count, defined = sums["prompts"].clamp(min=1), sums["defined"].clamp(min=1).unsqueeze(-1)
    mean = sums["write"] / (count * (sums["kernel"].shape[-1] - 1))
    return HeadFit(sums["kernel"] / count, sums["rest"] / defined, torch.zeros_like(mean), mean)


@full_precision
def _bias_sums(kernel: Tensor, values: Tensor, fit: HeadFit) -> tuple[Tensor, Tensor]:
    """sum l (write - (1 - l) M V) and sum l^2 over prompts and queries after the first, whose ratio is b."""
    gate = kernel[..., 1:, :1]
    rest = (kernel @ values)[..., 1:, :] - (1 - gate) * (fit.rest @ values)[..., 1:, :]
    return (gate * rest).sum((0, -2)), gate.square().sum((0, -2))


def _bias(sums: tuple[Tensor, Tensor]) -> Tensor:
    product, square = sums
    return product / torch.where(square > 0, square, 1.0)


@full_precision
def _errors(kernel: Tensor, values: Tensor, fit: HeadFit) -> Float[Tensor, "prompts heads errors"]:
    """The squared errors of the three models and of the mean write, summed over queries after the first."""
    write = (kernel @ values)[..., 1:, :]
    gate = kernel[..., 1:, :1]
    top = kernel[..., 1:, :].argmax(-1, keepdim=True).expand(*write.shape)
    predicted = (
        (fit.kernel @ values)[..., 1:, :],
        values.gather(-2, top),
        (1 - gate) * (fit.rest @ values)[..., 1:, :] + gate * fit.bias.unsqueeze(-2),
        fit.mean.unsqueeze(-2),
    )
    return torch.stack([(write - each).square().sum((-1, -2)) for each in predicted], -1)


def _shares(errors: Float[Tensor, "prompts heads errors"]) -> Float[Tensor, "prompts heads models"]:
    total = errors[..., -1].mean(0, keepdim=True).unsqueeze(-1)
    return 1 - errors[..., :-1] / torch.where(total > 0, total, torch.nan)
