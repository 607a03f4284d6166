"""The names of objects in specs and on the command line.

Inside the library, behavior is selected by objects such as ``RK4(0.1)``; names exist only for what is typed or written
in TOML. An object is imported when its name is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helmscope.types import HelmscopeError, check_memory, check_name, type_with_article

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Names:
    """The names of one kind of object, each with the location "module:object" it is imported from.

    >>> STEPPERS.check("rk5")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown stepper 'rk5': did you mean 'rk4'? Allowed: ...
    >>> FIELDS.load("sa").__name__
    'SA'
    """

    what: str
    places: Mapping[str, str]
    excluded: tuple[str, ...] = ()  # names that are not misspelt, so that the closest match would not help

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def check(self, name: object) -> str:
        """Return ``name``; an unknown one raises ``HelmscopeError`` with the closest match."""
        if not isinstance(name, str) or name in self.excluded:
            shown = f"'{name}'" if isinstance(name, str) else type_with_article(name)
            raise HelmscopeError(f"{self.what} is {shown}, but it must be one of {', '.join(self)}")
        return check_name(self.what, name, self.places)

    def load(self, name: str) -> Any:
        """Import and return the object of that name."""
        module, _, thing = self.places[self.check(name)].partition(":")
        return getattr(importlib.import_module(module), thing)


FIELDS = Names(
    "field",
    {
        "sa": "helmscope.fields.attention:SA",
        "usa": "helmscope.fields.attention:USA",
        "sinkhorn": "helmscope.fields.sinkhorn:SinkhornAttention",
    },
)
STARTS = Names(
    "start",
    {
        "uniform": "helmscope.theory.starts:Uniform",
        "vmf": "helmscope.theory.starts:VonMisesFisher",
        "orthonormal": "helmscope.theory.starts:Orthonormal",
    },
)
NONE = "none"
FORCE = "force"
DENSITY_FIELDS = Names(
    "field",
    {name: FIELDS.places[name] for name in ("sa", "usa")}
    | {FORCE: "helmscope.meanfield.axis_force:AxisForce", NONE: ""},
    excluded=("sinkhorn",),
)
PROCESSES = Names(
    "process",
    {
        "chain": "helmscope.fields.process:LayerNormChain",
        "stratonovich": "helmscope.fields.process:Stratonovich",
        "ito": "helmscope.fields.process:Ito",
        "divergence": "helmscope.fields.process:DivergenceForm",
    },
)
DENSITY_STARTS = Names(
    "start",
    {"uniform": "helmscope.jobs.density:perturbed_uniform", "vmf": "helmscope.jobs.density:von_mises_fisher"},
)
STEPPERS = Names(
    "stepper",
    {
        "adaptive": "helmscope.solve.dormand_prince:DormandPrince",
        "euler": "helmscope.solve.projected_euler:ProjectedEuler",
        "heun": "helmscope.solve.heun:Heun",
        "rk4": "helmscope.solve.rk4:RK4",
        "geodesic-euler": "helmscope.solve.geodesic_euler:GeodesicEuler",
        "geodesic-heun": "helmscope.solve.geodesic_heun:GeodesicHeun",
        "geodesic-rk4": "helmscope.solve.geodesic_rk4:GeodesicRK4",
        "layer": "helmscope.solve.layer:Layer",
        "unprojected-euler": "helmscope.solve.unprojected_euler:UnprojectedEuler",
        "euler-maruyama": "helmscope.solve.euler_maruyama:EulerMaruyama",
        "stochastic-heun": "helmscope.solve.stochastic_heun:StochasticHeun",
        "noisy-layer": "helmscope.solve.noisy_layer:NoisyLayer",
    },
)
NOISY_STEPPERS = ("euler-maruyama", "stochastic-heun", "noisy-layer")
AUTO = "auto"
SUMMATIONS = Names(
    "summation",
    {
        AUTO: "",
        "dense": "helmscope.kernels.dense:Dense",
        "blockwise": "helmscope.kernels.blockwise:Blockwise",
        "harmonic": "helmscope.kernels.harmonic:Harmonic",
        "flash": "helmscope.kernels.flash:Flash",
    },
)
DTYPES = Names("dtype", {"float64": "torch:float64", "float32": "torch:float32"}, excluded=("bfloat16", "float16"))
MODEL_DTYPES = Names("dtype", {**DTYPES.places, "bfloat16": "torch:bfloat16", "float16": "torch:float16"})


# all of observe.measure.measurement_names, which would import torch; a test compares them
MEASUREMENTS = (
    "kernel_statistics",
    "attention_drift",
    "attention_diffusion",
    "mlp_force",
    "arc_length",
    "depth_steps",
    "mlp_weights",
    "bistochasticity",
    "gate_sparsity",
    "effective_beta",
    "transport_ratio",
    "context_noise",
    "attention_diffusion_spectrum",
    "attention_surface_divergence",
    "mlp_jacobian",
    "free_energy_along_depth",
    "entropy_along_depth",
    "mlp_entropy_change",
    "generator_test",
    "layer_whitening",
    "perturbation_growth",
    "jko_step_test",
    "mobility_test",
    "mlp_swirl_bound",
)
# observe.intervention_names()
INTERVENTIONS = (
    "query_key_noise",
    "query_key_noise_by_layer",
    "query_key_edit_damage",
    "query_key_metric",
    "holonomy_defect",
    "attention_sinks",
    "sink_constancy",
    "sink_damage",
    "layer_ablation_damage",
    "head_ablation_damage",
    "fourier_band_damage",
    "attention_temperature_damage",
    "loss_gradient_cosine",
    "cloud_projection",
)


def usable_device(name: str) -> str:
    """Return ``name`` if torch can use that device, else raise ``HelmscopeError``.

    >>> usable_device("cpu")
    'cpu'
    """
    import torch

    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise HelmscopeError(f"device is '{name}', but torch cannot use it here: cpu always works") from None
    return name


def value_matrix(value: float, dim: int) -> torch.Tensor | None:
    """The matrix V = value I in ``dim`` dimensions, or None for V = I. Raises ``HelmscopeError`` if it would not fit in
    memory.

    >>> value_matrix(1.0, 3) is None, value_matrix(-1.0, 2).tolist()
    (True, [[-1.0, -0.0], [-0.0, -1.0]])
    """
    import torch

    if value == 1:
        return None
    check_memory(f"value is {value:g} and dim is {dim}", dim * dim)
    return value * torch.eye(dim, dtype=torch.float64, device="cpu")
