"""Simulate 32 tokens that cluster under self-attention, and plot an overview. python clustering.py [FOLDER]"""

import sys
from pathlib import Path

import helmscope as hs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
start = hs.Uniform(n=32, dim=3).sample(batch=16, seed=0)
times = [k / 2 for k in range(21)]
sim = hs.integrate(hs.SA(beta=4.0), start, times=times)
print(sim.outcome)

order = hs.order_parameter(sim.states).mean(-1)
clusters = hs.cluster_count(sim.states, max_angle=0.1).double().mean(-1)
for k in (0, 10, 20):
    print(f"t = {times[k]:4.1f}: order {order[k]:.3f}, {clusters[k]:.1f} clusters")

figure = hs.plots.overview_figure(hs.overview(sim), title="SA, beta = 4, 32 tokens on the sphere")
figure.savefig(folder / "clustering.png")
print("saved to", folder / "clustering.png")
