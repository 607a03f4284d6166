"""Units of work for the tests of ``runs``: small, and importable by other processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from helmscope.runs import Serial, Unit
from helmscope.store import Manifest
from helmscope.types import HelmscopeError


def manifest(**changes: object) -> Manifest:
    details = {"seed": 0, "dtype": "float64", "device": "cpu", "threads": 1, "command": ["helmscope", "toy"]}
    return Manifest.collect(**{**details, "inputs": {}, "parameters": {}, **changes})


def numbers(seed: int) -> dict[str, object]:
    """Plain data."""
    draws = np.random.default_rng(seed).normal(size=20)
    return {"seed": seed, "mean": float(draws.mean()), "draws": draws.tolist()}


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def dataset(seed: int) -> object:
    import xarray as xr

    draws = np.random.default_rng(seed).normal(size=(3, 50))
    return xr.Dataset({"x": (("a", "b"), draws)}, coords={"a": ["p", "q", "r"]}, attrs={"seed": seed})


def product(seed: int, size: int) -> bytes:
    """A matrix product, whose last bits depend on the number of threads."""
    matrix = np.random.default_rng(seed).normal(size=(size, size))
    return (matrix @ matrix).tobytes()


def received(values: np.ndarray) -> list[object]:
    """How an array is passed to a unit: its type, whether it is writable, and its sum."""
    return [type(values).__name__, values.flags.writeable, float(values.sum())]


def torch_product(seed: int, size: int) -> bytes:
    import torch

    matrix = torch.empty(size, size, dtype=torch.float64)
    matrix.copy_(torch.from_numpy(np.random.default_rng(seed).normal(size=(1, size))))
    return (matrix @ matrix.T).numpy().tobytes()


def mixture(count: int, size: int = 1000) -> list[Unit]:
    """Units of all three kinds, in turn."""
    kinds = [
        lambda i: Unit(f"numbers-{i}", numbers, {"seed": i}),
        lambda i: Unit(f"noise-{i}", noise, {"seed": i, "size": size}),
        lambda i: Unit(f"dataset-{i}", dataset, {"seed": i}),
    ]
    return [kinds[i % 3](i) for i in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file under a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def results(folder: Path) -> dict[str, bytes]:
    return contents(folder / "units")


def refuse(value: float) -> None:
    raise HelmscopeError(f"value is {value}, but it must be positive")


def divide(a: float, b: float) -> float:
    return a / b


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    sys.exit(3)


def hoard(size: int) -> int:
    """Allocate memory without touching it."""
    return np.empty(size, np.uint8).nbytes


def complain(text: str) -> None:
    raise ValueError(text)


def rest(seconds: float, started: str = "") -> float:
    """Sleep, after creating a file in ``started`` whose name is the process id."""
    if started:
        Path(started, str(os.getpid())).touch()
    time.sleep(seconds)
    return seconds


class Counting(Serial):
    """Records which units are run, in ``started``."""

    def attempts(self, units):
        self.started.extend(unit.name for unit in units)
        return super().attempts(units)

    started: list[str]


def counting(**options: int) -> Counting:
    engine = Counting(**options)
    object.__setattr__(engine, "started", [])
    return engine
