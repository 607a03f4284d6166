"""Real transformers: load, record, find the residual topology, certify, continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.models.bundled_models import ablated_training_history as ablated_training_history
    from helmscope.models.bundled_models import bundled_folder as bundled_folder
    from helmscope.models.bundled_models import held_out_texts as held_out_texts
    from helmscope.models.bundled_models import is_bundled as is_bundled
    from helmscope.models.bundled_models import story_texts as story_texts
    from helmscope.models.bundled_models import training_history as training_history
    from helmscope.models.bundled_models import validation_contexts as validation_contexts
    from helmscope.models.certificate import Certificate as Certificate
    from helmscope.models.doctor import diagnose as diagnose
    from helmscope.models.experts import MixtureOfExperts as MixtureOfExperts
    from helmscope.models.keep import KeptTensors as KeptTensors
    from helmscope.models.load import LoadedModel as LoadedModel
    from helmscope.models.load import ModelOrigin as ModelOrigin
    from helmscope.models.load import load as load
    from helmscope.models.load import load_all as load_all
    from helmscope.models.names import parse_head as parse_head
    from helmscope.models.paragraphs import paragraph_texts as paragraph_texts
    from helmscope.models.record import record as record
    from helmscope.models.recording import Recording as Recording
    from helmscope.models.sites import EditContext as EditContext
    from helmscope.models.sites import Site as Site
    from helmscope.models.subject import Subject as Subject
    from helmscope.models.twin import untrained_twin as untrained_twin

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
