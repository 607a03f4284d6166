"""How much worse does model B predict the next token without each of its heads? python ablated_heads.py [FOLDER]"""

import sys
from pathlib import Path

import helmscope as hs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
recording = hs.record("B", [text[:120] for text in hs.models.story_texts()[:8]])
losses = hs.observe.head_ablation_loss(recording)
mean = hs.reduce_replicates(losses)  # over prompts, with intervals
print(f"loss {float(mean.baseline_loss):.3f} nats, a uniform guess has {float(mean.loss_null):.3f}")
for layer in mean.layer.values:
    print(f"layer {layer:2d}:", *(f"{value:+.3f}" for value in mean.loss_increase.sel(layer=layer).values))
one = mean.sel(**hs.models.parse_head("L0H4"))
low, high = float(one.loss_increase_low), float(one.loss_increase_high)
print(f"without L0H4 the loss is higher by {float(one.loss_increase):.3f}, 95 % interval {low:.3f} .. {high:.3f}")

mean.to_netcdf(folder / "ablated_heads.nc", engine="h5netcdf")
hs.plot(losses, variables="loss_increase").save(folder / "ablated_heads.png")
print("saved to", folder / "ablated_heads.png")
