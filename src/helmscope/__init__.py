"""helmscope: a laboratory for the dynamics of transformers.

Simulate tokens as interacting particles on the sphere, measure real transformers with the same instruments, and judge
claims with tests that can fail. Names are imported on first use. Most users need only these:

    simulate   integrate, Uniform, SA, USA, MLP, Block, phase_diagram, equiangular, hitting_time
    record     load, record, next_token_loss, token_logits, Edit, Site
    measure    measure, overview, track, two_nn, mlp_force, logit_lens_kl, kernel_statistics
    judge      Subject, run_trial, Verdict
    show       plot, summary, reduce_replicates, paired_difference

``activations``, ``kernel``, ``noise``, ``rank`` and ``sphere`` are modules of functions, such as ``hs.sphere.angle``.
Everything else is exported by a subpackage: ``hs.fields``, ``hs.solve``, ``hs.observe``, ``hs.intervene``,
``hs.transport``, ``hs.meanfield``, ``hs.claims``, ``hs.jobs``, ``hs.plots``, and the others in ``dir(hs)``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from helmscope import claims as claims
    from helmscope import fields as fields
    from helmscope import geometry as geometry
    from helmscope import intervene as intervene
    from helmscope import jobs as jobs
    from helmscope import kernels as kernels
    from helmscope import meanfield as meanfield
    from helmscope import models as models
    from helmscope import observe as observe
    from helmscope import plots as plots
    from helmscope import runs as runs
    from helmscope import solve as solve
    from helmscope import stats as stats
    from helmscope import store as store
    from helmscope import theory as theory
    from helmscope import transport as transport
    from helmscope import types as types
    from helmscope.claims.trial import run_trial as run_trial
    from helmscope.fields import activations as activations
    from helmscope.fields import noise as noise
    from helmscope.fields.attention import SA as SA
    from helmscope.fields.attention import USA as USA
    from helmscope.fields.block import Block as Block
    from helmscope.fields.cross import CrossAttention as CrossAttention
    from helmscope.fields.field import Field as Field
    from helmscope.fields.hardmax import Hardmax as Hardmax
    from helmscope.fields.helmholtz import helmholtz as helmholtz
    from helmscope.fields.mlp import MLP as MLP
    from helmscope.fields.mlp import GatedMLP as GatedMLP
    from helmscope.fields.multihead import MultiHead as MultiHead
    from helmscope.fields.sinkhorn import SinkhornAttention as SinkhornAttention
    from helmscope.geometry import sphere as sphere
    from helmscope.intervene.edit import Edit as Edit
    from helmscope.models.load import load as load
    from helmscope.models.record import record as record
    from helmscope.models.recording import Recording as Recording
    from helmscope.models.sites import Site as Site
    from helmscope.models.subject import Subject as Subject
    from helmscope.observe import kernel as kernel
    from helmscope.observe import rank as rank
    from helmscope.observe.clusters import cluster_count as cluster_count
    from helmscope.observe.dimension import two_nn as two_nn
    from helmscope.observe.energy import interaction_energy as interaction_energy
    from helmscope.observe.inner_products import close_pair_shares as close_pair_shares
    from helmscope.observe.inner_products import mean_inner_product as mean_inner_product
    from helmscope.observe.kernel import kernel_statistics as kernel_statistics
    from helmscope.observe.lens import logit_lens_kl as logit_lens_kl
    from helmscope.observe.loss import next_token_loss as next_token_loss
    from helmscope.observe.measure import measure as measure
    from helmscope.observe.mlp_force import mlp_force as mlp_force
    from helmscope.observe.order import order_parameter as order_parameter
    from helmscope.observe.overview import overview as overview
    from helmscope.observe.phase import phase_diagram as phase_diagram
    from helmscope.observe.token_logits import token_logits as token_logits
    from helmscope.observe.track import track as track
    from helmscope.plots.draw import plot as plot
    from helmscope.solve.dormand_prince import DormandPrince as DormandPrince
    from helmscope.solve.euler_maruyama import EulerMaruyama as EulerMaruyama
    from helmscope.solve.integrate import integrate as integrate
    from helmscope.solve.layer import Layer as Layer
    from helmscope.solve.rk4 import RK4 as RK4
    from helmscope.solve.simulation import Simulation as Simulation
    from helmscope.stats.paired import paired_difference as paired_difference
    from helmscope.stats.reduce import reduce_replicates as reduce_replicates
    from helmscope.stats.summary import summary as summary
    from helmscope.theory.equiangular import equiangular as equiangular
    from helmscope.theory.equiangular import hitting_time as hitting_time
    from helmscope.theory.starts import Orthonormal as Orthonormal
    from helmscope.theory.starts import Uniform as Uniform
    from helmscope.theory.starts import VonMisesFisher as VonMisesFisher
    from helmscope.transport.cost import Geodesic as Geodesic
    from helmscope.transport.distance import w2 as w2
    from helmscope.types import HelmscopeError as HelmscopeError
    from helmscope.types import Instrument as Instrument
    from helmscope.types import Interval as Interval
    from helmscope.types import Trajectory as Trajectory
    from helmscope.types import Verdict as Verdict

__getattr__, __dir__, _names = lazy_exports(__name__, __file__)
__all__ = ["__version__", *_names]

logging.getLogger(__name__).addHandler(logging.NullHandler())
