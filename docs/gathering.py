"""Plot how tokens gather in the arms of several models, one panel per subject, as gathering.png in this folder.

helmscope claims test mlp-prevents --model A --model B --model tied --model FOLDER --out RUN
python docs/gathering.py RUN
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import xarray as xr

from helmscope.plots.style import COLORS, new_figure, styled
from helmscope.stats.reduce import band, reduced

LINES = {"whole model": "-", "attention alone": "-", "MLP alone": "--"}  # dashed, to be seen over the whole model
UNTRAINED = "attention alone, untrained"
OUT = Path(__file__).parent / "gathering.png"


def read_shares(run: Path) -> dict[str, xr.Dataset]:
    """The share of inner products above the level by depth and arm, reduced over the prompts, for each subject."""
    shares = {}
    for file in sorted((run / "units").glob("mlp-prevents--*.nc")):
        with xr.open_dataset(file, engine="h5netcdf") as stored:
            data = stored[["share"]].load()
        (verdict,) = json.loads(stored.attrs["verdict"])
        shares[verdict["subject"]] = reduced(data)
    return shares


def main() -> None:
    """Plot the subjects of a run folder."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of helmscope claims test mlp-prevents")
    parser.add_argument("--subjects", nargs="*", help="the subjects to show, in this order [default: all]")
    parser.add_argument("--title", default="Pairs of tokens that gather, in the whole model and in its parts alone")
    options = parser.parse_args()
    shares = read_shares(options.run)
    shares = {subject: shares[subject] for subject in options.subjects or shares}
    with styled():
        figure, panels = new_figure(1, len(shares), width=3.1 * len(shares), height=3.4)
        for panel, (subject, data) in zip(panels, shares.items(), strict=True):
            low, high = band(data, "share")
            for color, (arm, style) in zip(COLORS, {**LINES, UNTRAINED: ":"}.items(), strict=False):
                chosen = {"arm": arm}
                if arm not in data.arm.values:
                    continue
                depth = data.depth.values
                panel.plot(depth, data.share.sel(chosen), style, color=color, linewidth=2, label=arm)
                panel.fill_between(depth, low.sel(chosen), high.sel(chosen), color=color, alpha=0.2, linewidth=0)
            panel.set(title=subject, xlabel="depth (half-layers)", ylim=(-0.02, 1.02))
        panels[0].set_ylabel("share of pairs with cosine above 0.9")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(options.title, fontweight="bold")
        figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
