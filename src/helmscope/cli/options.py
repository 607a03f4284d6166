"""From words on the command line to the objects they name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from helmscope.types import HelmscopeError, fits_memory, increasing_times, known_name, real_number, whole_number

if TYPE_CHECKING:
    import torch

    from helmscope.fields.attention import Attention
    from helmscope.fields.noise import Noise
    from helmscope.kernels.kernel import Kernel
    from helmscope.runs.attempt import Engine
    from helmscope.solve.stepper import Stepper
    from helmscope.theory.starts import Start

MOST_TIMES = 1_000_000
NOISY = ("euler-maruyama", "stochastic-heun", "noisy-layer")


def field_named(name: str, *, beta: float, value: float, causal: bool, dim: int) -> Attention:
    """sa, usa or sinkhorn, with V = value I."""
    import torch

    from helmscope.fields.attention import SA, USA
    from helmscope.fields.sinkhorn import SinkhornAttention

    scale, dim, scaled = real_number("value", value), whole_number("dim", dim, at_least=2), None
    if scale != 1:
        fits_memory(f"value is {scale:g} and dim is {dim}", dim * dim)
        scaled = scale * torch.eye(dim, dtype=torch.float64)
    makers: dict[str, Callable[[], Attention]] = {
        "sa": lambda: SA(beta, value=scaled, causal=causal),
        "usa": lambda: USA(beta, value=scaled, causal=causal),
        "sinkhorn": lambda: SinkhornAttention(beta, value=scaled, causal=causal),
    }
    return makers[known_name("field", name, makers)]()


def noise_of(nu: float) -> Noise | None:
    """Isotropic noise, or none where nu = 0."""
    from helmscope.fields.noise import IsotropicNoise

    return IsotropicNoise(nu) if real_number("nu", nu, at_least=0) > 0 else None


def usual_kappa(start: str, kappa: float | None) -> float | None:
    """The concentration of a vmf start, 1 where it goes unsaid; other starts have none."""
    if start == "vmf":
        return 1.0 if kappa is None else kappa
    if kappa is not None:
        raise HelmscopeError(f"kappa is {kappa}, but the start '{start}' has no concentration: add --start vmf")
    return None


def usual_step(stepper: str | None, step: float | None, nu: float) -> float | None:
    """The step size, 0.05 where it goes unsaid; the adaptive stepper chooses its own."""
    if stepper == "adaptive" or (stepper is None and nu == 0):
        if step is not None:
            raise HelmscopeError(
                f"step is {step}, but the adaptive stepper chooses its own: add --stepper, such as rk4"
            )
        return None
    return 0.05 if step is None else step


def start_named(name: str, *, n: int, dim: int, kappa: float | None) -> Start:
    """uniform, vmf or orthonormal."""
    from helmscope.theory.starts import Orthonormal, Uniform, VonMisesFisher

    makers: dict[str, Callable[[], Start]] = {
        "uniform": lambda: Uniform(n, dim),
        "vmf": lambda: VonMisesFisher(n, dim, real_number("kappa", kappa, at_least=0)),
        "orthonormal": lambda: Orthonormal(n, dim),
    }
    return makers[known_name("start", name, makers)]()


def stepper_named(name: str | None, *, step: float | None, tol: float | None, nu: float) -> Stepper:
    """The stepper of that name; where None, the usual one for a flow with or without noise."""
    from helmscope.solve.dormand_prince import DormandPrince
    from helmscope.solve.euler import ProjectedEuler
    from helmscope.solve.euler_maruyama import EulerMaruyama
    from helmscope.solve.geodesic_euler import GeodesicEuler
    from helmscope.solve.geodesic_heun import GeodesicHeun
    from helmscope.solve.geodesic_rk4 import GeodesicRK4
    from helmscope.solve.heun import Heun
    from helmscope.solve.layer import Layer
    from helmscope.solve.noisy_layer import NoisyLayer
    from helmscope.solve.published import PublishedEuler
    from helmscope.solve.rk4 import RK4
    from helmscope.solve.stochastic_heun import StochasticHeun

    h = math.nan if step is None else real_number("step", step, above=0)
    makers: dict[str, Callable[[], Stepper]] = {
        "adaptive": lambda: DormandPrince(tol=tol),
        "euler": lambda: ProjectedEuler(h),
        "heun": lambda: Heun(h),
        "rk4": lambda: RK4(h),
        "geodesic-euler": lambda: GeodesicEuler(h),
        "geodesic-heun": lambda: GeodesicHeun(h),
        "geodesic-rk4": lambda: GeodesicRK4(h),
        "layer": lambda: Layer(h),
        "published": lambda: PublishedEuler(h),
        "euler-maruyama": lambda: EulerMaruyama(h),
        "stochastic-heun": lambda: StochasticHeun(h),
        "noisy-layer": lambda: NoisyLayer(h),
    }
    if name is None:
        name = "euler-maruyama" if nu > 0 else "adaptive"
    known_name("stepper", name, makers)
    if name in NOISY and nu == 0:
        raise HelmscopeError(f"stepper is '{name}', but it is for noise: add --nu, such as --nu 0.1")
    if name not in NOISY and nu > 0:
        raise HelmscopeError(
            f"stepper is '{name}' and nu is {nu:g}, but noise needs {', '.join(NOISY[:2])} or {NOISY[2]}"
        )
    if name != "adaptive" and tol is not None:
        raise HelmscopeError(f"tol is {tol}, but the stepper '{name}' takes steps of fixed size: give --step instead")
    return makers[name]()


def kernel_named(name: str) -> Kernel | None:
    """The kernel of that name; None for auto."""
    from helmscope.kernels.dense import Dense
    from helmscope.kernels.flash import Flash
    from helmscope.kernels.harmonic import Harmonic
    from helmscope.kernels.streaming import Streaming

    makers: dict[str, Callable[[], Kernel | None]] = {
        "auto": lambda: None,
        "dense": Dense,
        "streaming": Streaming,
        "harmonic": Harmonic,
        "flash": Flash,
    }
    return makers[known_name("kernel", name, makers)]()


def times_of(text: str) -> list[float]:
    """0,1,5 or FROM:TO:COUNT."""
    if ":" not in text:
        return increasing_times([_number(part) for part in text.split(",")])
    parts = text.split(":")
    if len(parts) != 3 or not parts[2].isdigit() or not 2 <= int(parts[2]) <= MOST_TIMES:
        raise HelmscopeError(
            f"times is '{text}', but it must be numbers such as 0,1,5 or a range FROM:TO:COUNT such as 0:10:101, with "
            f"COUNT from 2 to {MOST_TIMES}"
        )
    first, last = (real_number("times", _number(part)) for part in parts[:2])
    count = int(parts[2])
    return increasing_times([first + (last - first) * k / (count - 1) for k in range(count)])


def _number(text: str) -> float | str:
    """The number, or the text itself for whoever refuses it by name."""
    try:
        return float(text)
    except ValueError:
        return text


def dtype_named(name: str) -> torch.dtype:
    """float64 or float32."""
    import torch

    return {"float64": torch.float64, "float32": torch.float32}[known_name("dtype", name, ("float64", "float32"))]


def model_dtype_named(name: str) -> torch.dtype:
    """One that the weights of a model may have."""
    import torch

    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return known[known_name("dtype", name, known)]


def device_named(name: str) -> str:
    """A device that torch can use here."""
    import torch

    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise HelmscopeError(f"device is '{name}', but torch cannot use it here: cpu always works") from None
    return name


def engine_of(jobs: int, max_memory: str | None, threads: int, ray: str | None) -> Engine:
    """One process, several where jobs > 1, or Ray."""
    from helmscope.runs.limits import parse_size
    from helmscope.runs.on_ray import Ray
    from helmscope.runs.processes import Processes
    from helmscope.runs.serial import Serial

    limit = None if max_memory is None else parse_size("max_memory", max_memory)
    if ray is not None:
        if limit is not None:
            raise HelmscopeError(f"max_memory is {max_memory}, but with --ray memory is for Ray to watch: leave it out")
        return Ray(jobs, None if ray == "local" else ray, threads=threads)
    if whole_number("jobs", jobs, at_least=1) == 1:
        return Serial(max_memory=limit, threads=threads)
    return Processes(jobs, max_memory=limit, threads=threads)
