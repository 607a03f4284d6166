"""Probes: test functions on unit vectors that are not polynomials, in kinds whose members are computed together.

A generator is known by what it does to test functions. Linear and quadratic ones cannot distinguish a first-order step
from one with noise [Helmholtz Transformer, no. 8], so that none of these is a polynomial. Every probe is a function of
a few linear coordinates, phi_p(x) = F_p(W x + b):

    exponential   e^(kappa <a, x>), zonal, around random directions (kappa = sqrt d) and around tokens (kappa = 4)
    pole          1 / (c - <a, x>), c = 1.25, zonal, around tokens
    cosine        cos(<w, x> + b), w standard normal, b uniform
    tanh          tanh(<w, x> + b), w and b standard normal
    lens          log-softmax of the model's unembedding, through its final norm, among some tokens of its vocabulary

On unit vectors <w, x> is of order 1, as kappa <a, x> is, so that a step of 1 rad is not small for them. A probe is
extended to R^d without 0 as a function of the direction. Along the scaled step x(s) = (x + s D) / |x + s D|

    W x(s) = (u + s v) / rho(s),    u = W x,   v = W D,   rho(s)^2 = 1 + 2 s <x, D> + s^2 |D|^2,

so that two products with W give the probes at every s, and their derivatives at s = 0 in closed form:

    d phi / ds = <grad_S phi, P D>,    (1/2) d^2 phi / ds^2 = (1/2) Hess_S phi(P D, P D) - <x, D> <grad_S phi, P D>.

The second is (D D^T / 2):Hess of the extended probe. The cost is one product with W for each kind; the lens has as many
rows as tokens in its softmax.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import retract
from helmscope.kernels.dense import matrix_product
from helmscope.models.head import head_on_directions
from helmscope.models.recording import Recording
from helmscope.observe.pairs import sphere_and_ids
from helmscope.types import HelmscopeError, Trajectory, check_integer, check_seed
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.types import System

    # the quadratic form <w, Sigma w> of vectors (..., k, d), at every point
    Form = Callable[[Tensor], Tensor]

PER_KIND, VOCABULARY = 8, 256  # probes of a kind; tokens in the softmax of the lens
AROUND_TOKENS, POLE = 4.0, 1.25


@dataclass(frozen=True, eq=False)
class ProbeKind(ABC):
    """Probes phi_p(x) = F_p(W x + b) of one kind, with the derivatives of F.

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> Tanh(torch.eye(2), torch.zeros(2))(x)
    tensor([[0.7616, 0.0000]])
    """

    name: ClassVar[str]

    rows: Float[Tensor, "k d"] = field(repr=False)
    offset: Float[Tensor, " k"] = field(repr=False)

    @abstractmethod
    def outer(self, z: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch p"]:
        """F(z) of every probe."""

    @abstractmethod
    def slope(self, z: Float[Tensor, "*batch k"], dz: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch p"]:
        """DF(z)[dz]."""

    @abstractmethod
    def curvature(self, z: Float[Tensor, "*batch k"], dz: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch p"]:
        """D^2 F(z)[dz, dz]."""

    @abstractmethod
    def curvature_under(self, z: Float[Tensor, "*batch k"], form: Form) -> Float[Tensor, "*batch p"]:
        """Sigma:W^T D^2 F(z) W, with Sigma given by its quadratic form."""

    @property
    def count(self) -> int:
        """The number of probes."""
        return len(self.rows)

    def __call__(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch p"]:
        """The probes at points x, along a new last axis."""
        return self.outer(matrix_product(x, self.rows.mT) + self.offset)

    def along(self, x: Float[Tensor, "*batch d"], step: Float[Tensor, "*batch d"]) -> ScaledStep:
        """The probes along the scaled step from unit vectors x.

        >>> path = Cosine(torch.eye(2), torch.zeros(2)).along(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5]))
        >>> path.change(1.0)
        tensor([ 0.0857, -0.0983])
        """
        return ScaledStep(self, x, step)

    def under(
        self, x: Float[Tensor, "*batch d"], form: Form, trace: Float[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch p"]:
        """Sigma:Hess_S phi at unit vectors x for a tangent Sigma of the given quadratic form and trace:
        Sigma:Hess phi - <x, grad phi> tr Sigma.

        >>> x, flat = torch.tensor([1.0, 0.0]), lambda w: w[..., 1] ** 2  # Sigma = e2 e2^T
        >>> Exponential(torch.eye(2), torch.zeros(2)).under(x, flat, torch.tensor(1.0))
        tensor([-2.7183,  1.0000])
        """
        u = matrix_product(x, self.rows.mT)
        z = u + self.offset
        return self.curvature_under(z, form) - self.slope(z, u) * trace.unsqueeze(-1)


class ScaledStep:
    """The probes of a kind along x(s) = (x + s D) / |x + s D|."""

    def __init__(self, kind: ProbeKind, x: Tensor, step: Tensor) -> None:
        self.kind, self.u, self.v = kind, matrix_product(x, kind.rows.mT), matrix_product(step, kind.rows.mT)
        self.along, self.square = (x * step).sum(-1, keepdim=True), (step * step).sum(-1, keepdim=True)
        self.z = self.u + kind.offset
        self.before = kind.outer(self.z)

    def change(self, s: float | Tensor) -> Float[Tensor, "*batch p"]:
        """phi(x(s)) - phi(x); a tensor s broadcasts over the points, with a last axis of 1."""
        rho = (1 + 2 * s * self.along + s**2 * self.square).sqrt()
        return self.kind.outer((self.u + s * self.v) / rho + self.kind.offset) - self.before

    @property
    def _first(self) -> Tensor:
        return self.v - self.along * self.u

    @cached_property
    def drift(self) -> Float[Tensor, "*batch p"]:
        """<grad_S phi, P D>."""
        return self.kind.slope(self.z, self._first)

    @cached_property
    def second(self) -> Float[Tensor, "*batch p"]:
        """(D D^T / 2):Hess phi of the extended probe."""
        half = (3 * self.along**2 - self.square) / 2 * self.u - self.along * self.v  # (1/2) d^2 W x(s) / ds^2
        return self.kind.slope(self.z, half) + self.kind.curvature(self.z, self._first) / 2


class Ridge(ProbeKind):
    """Probes F(<w, x> + b) with one function F of one variable."""

    @abstractmethod
    def derivative(self, z: Tensor, order: int) -> Tensor:
        """F and its first two derivatives."""

    def outer(self, z: Tensor) -> Tensor:
        """F(z)."""
        return self.derivative(z, 0)

    def slope(self, z: Tensor, dz: Tensor) -> Tensor:
        """F'(z) dz."""
        return self.derivative(z, 1) * dz

    def curvature(self, z: Tensor, dz: Tensor) -> Tensor:
        """F''(z) dz^2."""
        return self.derivative(z, 2) * dz**2

    def curvature_under(self, z: Tensor, form: Form) -> Tensor:
        """F''(z) <w, Sigma w>."""
        return self.derivative(z, 2) * form(self.rows)


class Exponential(Ridge):
    """e^(kappa <a, x> + b), with rows kappa a.

    >>> Exponential(torch.eye(2), torch.zeros(2))(torch.tensor([1.0, 0.0]))
    tensor([2.7183, 1.0000])
    """

    name = "exponential"

    def derivative(self, z: Tensor, order: int) -> Tensor:
        """e^z, for every order."""
        return z.exp()


class Pole(Ridge):
    """1 / (c - <a, x>), with rows a and c = 1.25 - b.

    >>> Pole(torch.eye(2), torch.zeros(2))(torch.tensor([1.0, 0.0]))
    tensor([4.0000, 0.8000])
    """

    name = "pole"

    def derivative(self, z: Tensor, order: int) -> Tensor:
        """order! / (1.25 - z)^(order + 1)."""
        inverse, product = 1 / (POLE - z), torch.ones_like(z)
        for _ in range(order + 1):
            product = product * inverse
        return math.factorial(order) * product


class Cosine(Ridge):
    """cos(<w, x> + b).

    >>> Cosine(torch.eye(2), torch.zeros(2))(torch.tensor([1.0, 0.0]))
    tensor([0.5403, 1.0000])
    """

    name = "cosine"

    def derivative(self, z: Tensor, order: int) -> Tensor:
        """cos z, -sin z, -cos z."""
        return (z.cos(), -z.sin(), -z.cos())[order]


class Tanh(Ridge):
    """tanh(<w, x> + b).

    >>> Tanh(torch.eye(2), torch.zeros(2))(torch.tensor([1.0, 0.0]))
    tensor([0.7616, 0.0000])
    """

    name = "tanh"

    def derivative(self, z: Tensor, order: int) -> Tensor:
        """t, 1 - t^2 and -2 t (1 - t^2) with t = tanh z."""
        t = z.tanh()
        return (t, 1 - t**2, -2 * t * (1 - t**2))[order]


@dataclass(frozen=True, eq=False)
class LensLogits(ProbeKind):
    """log softmax(W x + b) of the tokens number ``chosen`` among the rows of W: the logit lens at a direction.

    >>> LensLogits(torch.eye(2), torch.zeros(2), torch.tensor([0]))(torch.tensor([0.6, 0.8]))
    tensor([-0.7981])
    """

    name: ClassVar[str] = "lens"

    chosen: Int[Tensor, " p"]

    @property
    def count(self) -> int:
        """The number of chosen tokens."""
        return len(self.chosen)

    def outer(self, z: Tensor) -> Tensor:
        """log softmax z of the chosen tokens."""
        return z.log_softmax(-1)[..., self.chosen]

    def slope(self, z: Tensor, dz: Tensor) -> Tensor:
        """dz less its mean under the softmax."""
        return dz[..., self.chosen] - (z.softmax(-1) * dz).sum(-1, keepdim=True)

    def curvature(self, z: Tensor, dz: Tensor) -> Tensor:
        """Minus the variance of dz under the softmax, the same for all tokens."""
        p = z.softmax(-1)
        off = dz - (p * dz).sum(-1, keepdim=True)
        return self._for_all(-(p * off**2).sum(-1))

    def curvature_under(self, z: Tensor, form: Form) -> Tensor:
        """Minus the variance of the rows under the softmax, measured by the form."""
        p = z.softmax(-1)
        mean = matrix_product(p, self.rows).unsqueeze(-2)
        return self._for_all(form(mean).squeeze(-1) - (p * form(self.rows)).sum(-1))

    def _for_all(self, value: Tensor) -> Tensor:
        return value.unsqueeze(-1).expand(*value.shape, self.count)


@dataclass(frozen=True, eq=False)
class ProbeBank(ConciseRepr):
    """Probes of several kinds. Calling it gives all of them at points (..., d), along a new last axis; iterating over
    it gives single probes, each a callable (..., d) -> (...), for ``sphere_generator`` and ``ambient_generator``.

    >>> bank = ProbeBank.around(torch.eye(3, dtype=torch.float64), seed=0)
    >>> len(bank), bank.names, bank(torch.eye(3, dtype=torch.float64)).shape
    (32, ('exponential', 'pole', 'cosine', 'tanh'), torch.Size([3, 32]))
    """

    kinds: tuple[ProbeKind, ...]

    @classmethod
    def around(cls, points: Float[Tensor, "k d"], *, seed: int = 0, per_kind: int = PER_KIND) -> ProbeBank:
        """``per_kind`` probes of each kind but the lens, around random directions and around some of the unit vectors
        ``points``, in float64. Raises HelmscopeError for points of another shape, and for fewer than 2 probes.

        >>> len(ProbeBank.around(torch.eye(3), seed=0, per_kind=10))
        40
        """
        if not isinstance(points, torch.Tensor) or points.ndim != 2 or not len(points):
            shown = tuple(points.shape) if isinstance(points, torch.Tensor) else type(points).__name__
            raise HelmscopeError(f"points is {shown}, but it must be a tensor of unit vectors, (k, d)")
        per_kind, dim = check_integer("per_kind", per_kind, at_least=2), points.shape[-1]
        draw = torch.Generator("cpu").manual_seed(check_seed(seed))
        options: dict[str, Any] = {"generator": draw, "dtype": torch.float64, "device": "cpu"}

        def tokens(count: int) -> Tensor:
            order = torch.randint(len(points), (count,), generator=draw, device="cpu")
            return retract(points.detach().cpu().double()[order])

        normal = torch.randn(2, per_kind, dim, **options)
        directions = retract(torch.randn(per_kind - per_kind // 2, dim, **options))
        zonal = torch.cat([math.sqrt(dim) * directions, AROUND_TOKENS * tokens(per_kind // 2)])
        none = torch.zeros(per_kind, dtype=torch.float64, device="cpu")
        kinds = (
            Exponential(zonal, none),
            Pole(tokens(per_kind), none),
            Cosine(normal[0], 2 * math.pi * torch.rand(per_kind, **options)),
            Tanh(normal[1], torch.randn(per_kind, **options)),
        )
        return cls(tuple(_on_device(kind, points.device) for kind in kinds))

    @classmethod
    def of(cls, system: System | Trajectory, *, seed: int = 0, per_kind: int = PER_KIND) -> ProbeBank:
        """The probes of a system: around its own tokens, and with the lens if it is the recording of a model whose head
        reads the direction of the state through a norm. The tokens of the lens occur in the texts, and its softmax is
        taken over them and others, 256 in all.

        >>> from helmscope import record
        >>> ProbeBank.of(record("A", ["Once upon a time"])).names
        ('exponential', 'pole', 'cosine', 'tanh', 'lens')
        """
        path = sphere_and_ids(system, None)[0]
        states = path.states[:-1] if len(path.states) > 1 else path.states
        weights = torch.ones_like(states[:1, ..., 0]) if path.weights is None else path.weights
        counted = (weights[: len(states)] > 0).expand(states.shape[:-1]) & torch.isfinite(states).all(-1)
        bank = cls.around(states[counted], seed=seed, per_kind=per_kind)
        lens = lens_probes(system, seed=seed, count=per_kind) if isinstance(system, Recording) else None
        return bank if lens is None else cls((*bank.kinds, lens))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kinds."""
        return tuple(kind.name for kind in self.kinds)

    @property
    def kind_of(self) -> tuple[str, ...]:
        """The name of the kind of every probe."""
        return tuple(kind.name for kind in self.kinds for _ in range(kind.count))

    def __len__(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def __call__(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch p"]:
        """All probes at points x."""
        return torch.cat([kind(x) for kind in self.kinds], -1)

    def __iter__(self) -> Iterator[Callable[[Tensor], Tensor]]:
        for kind in self.kinds:
            for p in range(kind.count):
                yield lambda x, kind=kind, p=p: kind(x)[..., p]  # type: ignore[misc]


def _on_device(kind: ProbeKind, device: torch.device) -> ProbeKind:
    return type(kind)(kind.rows.to(device), kind.offset.to(device))


@full_precision
def lens_probes(
    recording: Recording, *, seed: int = 0, count: int = PER_KIND, vocabulary: int = VOCABULARY
) -> LensLogits | None:
    """The lens at ``count`` tokens that occur in the texts of a recording, drawn by ``seed``, with the softmax over
    ``vocabulary`` tokens that contain them; None for a model without a head that reads the direction of its state.

    >>> from helmscope import record
    >>> lens_probes(record("A", ["Once upon a time"])).rows.shape
    torch.Size([256, 192])
    """
    head = head_on_directions(recording)
    if head is None:
        return None
    weight, bias = head
    draw = torch.Generator("cpu").manual_seed(check_seed(seed))
    source = recording.batch
    own = sorted({token for row in source.visible_ids for token in row if token < len(weight)})
    probed = [own[k] for k in torch.randperm(len(own), generator=draw, device="cpu")[:count].tolist()]
    others = torch.randperm(len(weight), generator=draw, device="cpu").tolist()
    rest = [token for token in others if token not in set(probed)][: max(0, vocabulary - len(probed))]
    ids = torch.tensor([*probed, *rest], device=weight.device)
    chosen = torch.arange(len(probed), device=weight.device)
    return LensLogits(weight[ids].double(), bias[ids].double(), chosen)
