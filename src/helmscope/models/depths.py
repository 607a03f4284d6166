"""The correspondence between depths and the states of layers; the only place that knows the sub-steps of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from helmscope.models.sites import Site

STATES = (Site.INPUT, Site.MIDDLE)
STATES_WITH_CROSS = (Site.INPUT, Site.MIDDLE, Site.CROSS_MIDDLE)


@dataclass(frozen=True)
class Depths:
    """The depths of a model with ``layers`` layers. A layer has two sub-steps, attention and MLP; with ``cross`` it
    has cross-attention between them. Depth 0 is the input of the first layer, ``last`` the output of the last one.

    >>> Depths(2).last, Depths(2, cross=True).last
    (4, 6)
    >>> Depths(2, cross=True).at(1, Site.CROSS_MIDDLE)
    5
    >>> Depths(2).site(3), Depths(2).site(4)
    ((1, <Site.MIDDLE: 'middle'>), (1, <Site.OUTPUT: 'output'>))
    """

    layers: int
    cross: bool = False

    @property
    def states(self) -> tuple[Site, ...]:
        """The sites of a layer's states in order, without its output, which is the input of the next layer."""
        return STATES_WITH_CROSS if self.cross else STATES

    @property
    def steps(self) -> int:
        """The number of sub-steps of a layer."""
        return len(self.states)

    @property
    def last(self) -> int:
        """The depth of the last layer's output."""
        return self.steps * self.layers

    def at(self, layer: int, site: Site) -> int:
        """The depth of a state: INPUT, MIDDLE, CROSS_MIDDLE or OUTPUT of a layer."""
        return self.steps * layer + (self.steps if site is Site.OUTPUT else self.states.index(site))

    def layer(self, depth: int) -> int:
        """The layer that reads the state at a depth; for the last depth, the last layer."""
        return min(depth // self.steps, self.layers - 1)

    def site(self, depth: int) -> tuple[int, Site]:
        """The layer and the site of the state at a depth."""
        layer = self.layer(depth)
        return layer, Site.OUTPUT if depth == self.last else self.states[depth % self.steps]
