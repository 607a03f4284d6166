"""Every object in a real notebook: what Jupyter shows of it, once, and without an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat

from support.children import run_python

FIRST = """
import torch, xarray as xr, helmscope as hs
sim = hs.integrate(hs.SA(beta=4.0), hs.Uniform(n=12, dim=3).sample(3, seed=0), times=[0, 4])
recording = hs.record("A", ["Once upon a time there was a cat.", "One day a dog ran <script>alert(1)</script>"])
diagram = hs.phase_diagram(hs.SA, betas=[1, 4], times=[0, 4, 9], start=hs.Uniform(4, 8), samples=3)
trial = hs.run_trial("kuramoto", quick=True)
job = hs.jobs.run(hs.jobs.TrialsSpec(claims=["kuramoto"], quick=True), folder=FOLDER)
density = hs.meanfield.Density.von_mises_fisher(hs.meanfield.CircleGrid(degree=16), kappa=1.0)
path = hs.meanfield.evolve(None, density, times=[0, 1], noise=hs.noise.IsotropicNoise(0.1))
"""
TABLE, PICTURE, TEXT = "text/html", "image/png", "text/plain"
CELLS = {
    "sim": TABLE,
    "recording": TABLE,
    "recording.certificate": TABLE,
    "trial": TABLE,
    "trial.verdict": TABLE,
    "job": TABLE,
    "diagram": TABLE,
    "hs.summary(hs.overview(sim, beta=4.0))": TABLE,
    "sim.plot()": PICTURE,
    "recording.plot()": PICTURE,
    "hs.plot(diagram)": PICTURE,
    "hs.plot(hs.overview(sim, beta=4.0))": PICTURE,
    "hs.plot(hs.overview(recording))": PICTURE,
    "hs.plot({'both': hs.overview(recording), 'one prompt': hs.overview(recording).isel(prompt=[0])})": PICTURE,
    "hs.plot(hs.measure(recording, only=['kernel_statistics', 'depth_steps']))": PICTURE,
    "trial.plot()": PICTURE,
    "import matplotlib.pyplot as plt\nsim.trajectory.plot(system=1)": PICTURE,  # pyplot shows its own figures itself
    "path.plot()": PICTURE,
    "hs.plot(density)": PICTURE,
    "path": TEXT,
    "density": TEXT,
    "sim.trajectory": TEXT,
    "sim.outcome": TEXT,
    "hs.Subject('A', ['one text'])": TEXT,
    "hs.Interval(0.5, 0.4, 0.6, n=3)": TEXT,
}
# as if every call were a long one; nested calls, of which two have bars of their own, report nothing
BAR = """
from helmscope.runs import bar
bar.PATIENCE_S = 0.0
_ = hs.measure(sim, only=["kernel_statistics", "depth_steps", "transport_ratio"])
bar.PATIENCE_S = 2.0
"""
# In a process of its own, with the kernel started by the same interpreter, whatever is registered on the machine.
RUN = """
import sys
import nbclient, nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

class ThisPython(KernelManager):
    @property
    def kernel_spec(self):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, language="python", display_name="this Python")

path = sys.argv[1]
notebook = nbformat.read(path, as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_manager_class=ThisPython).execute()
nbformat.write(notebook, path)
"""


def executed(folder: Path) -> dict[str, list[Any]]:
    """The outputs of each cell of one notebook that was run from top to bottom, without an error."""
    path = folder / "shown.ipynb"
    sources = (FIRST, *CELLS, BAR)
    cells = [nbformat.v4.new_code_cell(f"FOLDER = {str(folder / 'run')!r}")]
    cells += [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    homes = {name: str(folder) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    run_python(RUN, path, check=True, timeout=240.0, env={**os.environ, **homes})
    return {cell.source: cell.outputs for cell in nbformat.read(path, as_version=4).cells}


def test_every_object_is_shown_once(tmp_path):
    """One test for all, so that the notebook is run once, however many workers there are."""
    shown = executed(tmp_path)
    assert {output.output_type for output in shown[FIRST]} <= {"stream"}  # a bar, on a slow machine
    assert not any("Warning" in output.text for output in shown[FIRST])
    assert {output.name for output in shown[BAR]} == {"stderr"}
    drawn = "".join(output.text for output in shown[BAR])
    assert drawn.count("100%") == drawn.count("\n") == 1
    assert drawn.split("\r")[-1].startswith("measuring ━━━━━━━━━━")
    for source, kind in CELLS.items():
        (output,) = shown[source]
        assert output.output_type == "execute_result", source
        assert set(output.data) == {TEXT, kind}, source
        if kind == TABLE:
            assert "<script" not in output.data[TABLE], source
            assert "<table" in output.data[TABLE] or "xr-wrap" in output.data[TABLE], source
        if source != "diagram":
            assert "\n" not in output.data[TEXT], source
            assert len(output.data[TEXT]) <= 200, source
