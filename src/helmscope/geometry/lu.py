"""Linear systems, inverses and determinants by LU decomposition, correct for any number of threads.

``torch.linalg`` divides a batch of LU decompositions among its threads, each of which calls MKL. With several threads
MKL fails for matrices with more than about 150 rows: it prints "Parameter 6 was incorrect on entry to DLASWP", and the
result is wrong, or "Pivots given to lu_solve must all be greater or equal to 1" is raised (issues 141358 and 142815 of
pytorch). So a batch on a CPU is decomposed by one thread here. A test requires that the whole package decomposes
matrices by these functions, each of which has the arguments of the function of the same name in ``torch.linalg``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

from helmscope.geometry.arithmetic import one_thread

if TYPE_CHECKING:
    from torch import Tensor

Params = ParamSpec("Params")
Result = TypeVar("Result")


def _batch_on_one_thread(
    function: Callable[Concatenate[Tensor, Params], Result],
) -> Callable[Concatenate[Tensor, Params], Result]:
    @functools.wraps(function)
    def run(matrix: Tensor, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        if matrix.dim() == 2 or matrix.device.type != "cpu":
            return function(matrix, *args, **kwargs)
        with one_thread():
            return function(matrix, *args, **kwargs)

    return run


det = _batch_on_one_thread(torch.linalg.det)
inv = _batch_on_one_thread(torch.linalg.inv)
inv_ex = _batch_on_one_thread(torch.linalg.inv_ex)
lu_factor_ex = _batch_on_one_thread(torch.linalg.lu_factor_ex)
slogdet = _batch_on_one_thread(torch.linalg.slogdet)
solve = _batch_on_one_thread(torch.linalg.solve)
solve_ex = _batch_on_one_thread(torch.linalg.solve_ex)
