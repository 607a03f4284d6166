"""The picture of the README: ``python docs/pictures.py`` draws docs/clustering.png."""

from pathlib import Path

import helmscope as hs

# system 8 has two clusters at t = 60, like 14 of the 16 systems
tokens = hs.Uniform(n=32, dim=3).sample(batch=16, seed=0)
sim = hs.integrate(hs.SA(beta=4.0), tokens, times=[0, 4, 60])
figure = sim.plot(system=8)
figure.draw_without_rendering()  # the layout is final after the first pass
globes = figure.subfigs[0].bbox.transformed(figure.dpi_scale_trans.inverted())  # without the curves below, in inches
figure.savefig(Path(__file__).parent / "clustering.png", bbox_inches=globes, metadata={"Software": None})
