"""Jobs described by data: a spec -> units of work -> one result.

``Simulate``, ``EvolveDensity``, ``Phase``, ``MeasurementSpec``, ``Trials`` and ``Report`` are specs: they describe a
job completely, including seed, dtype and device. ``run`` executes a spec in a run folder, ``estimate`` predicts its
cost, and ``read_spec`` and ``write_spec`` convert it from and to TOML. Every verb of the command line builds a
spec from its options and runs it. ``hs.runs`` executes the units of a job, and ``hs.store`` writes its folder.
Importing this package does not import torch.

>>> import tempfile
>>> import helmscope as hs
>>> spec = hs.jobs.Simulate(beta=9.0, n=8, batch=2, times=[0, 1])
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
from helmscope.jobs.density import DensityResult, EvolveDensity
from helmscope.jobs.job import Result
from helmscope.jobs.measure import MeasurementResult, MeasurementSpec
from helmscope.jobs.phase import Phase, PhaseResult
from helmscope.jobs.report import Report, ReportResult
from helmscope.jobs.run import estimate, run
from helmscope.jobs.simulate import Simulate, SimulationResult
from helmscope.jobs.spec import Spec, read_spec, spec_from_dict, spec_to_toml, write_spec
from helmscope.jobs.trials import Trials, TrialsResult
from helmscope.types.lazy import listed_exports

__all__ = [
    "DensityResult",
    "Estimate",
    "EvolveDensity",
    "MeasurementResult",
    "MeasurementSpec",
    "Phase",
    "PhaseResult",
    "Report",
    "ReportResult",
    "Result",
    "Simulate",
    "SimulationResult",
    "Spec",
    "Trials",
    "TrialsResult",
    "estimate",
    "read_spec",
    "run",
    "spec_from_dict",
    "spec_to_toml",
    "write_spec",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)
