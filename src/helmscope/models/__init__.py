"""Real transformers: load, record, find the residual topology, certify, continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.models.boxed import box_folder as box_folder
    from helmscope.models.boxed import box_texts as box_texts
    from helmscope.models.boxed import held_back_texts as held_back_texts
    from helmscope.models.boxed import sibling_history as sibling_history
    from helmscope.models.boxed import training_history as training_history
    from helmscope.models.certificate import Certificate as Certificate
    from helmscope.models.doctor import diagnose as diagnose
    from helmscope.models.experts import MixtureOfExperts as MixtureOfExperts
    from helmscope.models.keep import Keep as Keep
    from helmscope.models.load import Loaded as Loaded
    from helmscope.models.load import Origin as Origin
    from helmscope.models.load import load_all as load_all
    from helmscope.models.names import parse_head as parse_head
    from helmscope.models.recording import Recording as Recording
    from helmscope.models.subject import Subject as Subject
    from helmscope.models.twin import untrained_twin as untrained_twin
    from helmscope.models.watch import Context as Context
    from helmscope.models.watch import Site as Site

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
