"""Jobs described by data: a spec -> units of work -> one result.

``SimulationSpec``, ``DensitySpec``, ``PhaseSpec``, ``MeasurementSpec``, ``TrialsSpec`` and ``ReportSpec`` describe a
job completely, with seed, dtype and device. ``run`` executes a spec in a run folder, ``estimate`` predicts its cost,
and ``read_spec`` and ``write_spec`` convert it from and to TOML. Every verb of the command line builds a spec from its
options and runs it. ``hs.runs`` executes the units of a job, and ``hs.store`` writes its folder. Importing this package
does not import torch.

>>> import tempfile
>>> import helmscope as hs
>>> spec = hs.jobs.SimulationSpec(beta=9.0, n=8, batch=2, times=[0, 1])
>>> with tempfile.TemporaryDirectory() as root:
...     hs.jobs.write_spec(spec, f"{root}/spec.toml")
...     result = hs.jobs.run(hs.jobs.read_spec(f"{root}/spec.toml"), folder=f"{root}/run")
...     hs.jobs.read_spec(f"{root}/run") == spec
True
>>> str(result.outcome)
'finished at t=1'
"""

from typing import TYPE_CHECKING

from helmscope.jobs.cost import Estimate
from helmscope.jobs.density import DensityResult, DensitySpec
from helmscope.jobs.job import Result
from helmscope.jobs.measure import MeasurementResult, MeasurementSpec
from helmscope.jobs.phase import PhaseResult, PhaseSpec
from helmscope.jobs.report import ReportResult, ReportSpec
from helmscope.jobs.run import estimate, run
from helmscope.jobs.simulate import SimulationResult, SimulationSpec
from helmscope.jobs.spec import Spec, read_spec, spec_from_dict, spec_to_toml, write_spec
from helmscope.jobs.trials import TrialsResult, TrialsSpec
from helmscope.types.lazy import listed_exports

__all__ = [
    "DensityResult",
    "DensitySpec",
    "Estimate",
    "MeasurementResult",
    "MeasurementSpec",
    "PhaseResult",
    "PhaseSpec",
    "ReportResult",
    "ReportSpec",
    "Result",
    "SimulationResult",
    "SimulationSpec",
    "Spec",
    "TrialsResult",
    "TrialsSpec",
    "estimate",
    "read_spec",
    "run",
    "spec_from_dict",
    "spec_to_toml",
    "write_spec",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)
