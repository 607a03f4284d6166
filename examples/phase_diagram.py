"""When do tokens in high dimension meet? A small phase diagram as a PDF. python phase_diagram.py [FOLDER]"""

import sys
from pathlib import Path

import helmscope as hs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
seen = hs.phase_diagram(
    hs.SA,
    betas=[0.5, 1, 2, 3, 4, 5],
    times=[k / 4 for k in range(49)],
    start=hs.Uniform(n=32, dim=128),
    samples=8,
    seed=0,
    progress=hs.runs.ProgressBar("phase diagram"),
)
half = hs.observe.half_time(seen)
for beta in (1, 4):
    theory, found = float(seen.curve.sel(beta=beta)), float(half.half_time.sel(beta=beta))
    print(f"beta = {beta}: half of all pairs have met at t = {found:.2f}, tokens at right angles at {theory:.2f}")

hs.plots.phase_figure(seen, title="SA").savefig(folder / "phase.pdf")
print("drawn in", folder / "phase.pdf")
