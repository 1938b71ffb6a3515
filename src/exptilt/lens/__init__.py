"""Looking at real transformers: watch attention, study heads and layers, monitor training."""

from exptilt.lens.call import AttentionCall
from exptilt.lens.record import CallRecord, Record
from exptilt.lens.results import HeadDetail, HeadMeasure, Histogram, LayerMeasure, Study, TokenMass, Training
from exptilt.lens.study import study
from exptilt.lens.watch import NothingSeenError, watch

__all__ = [
    "AttentionCall",
    "CallRecord",
    "HeadDetail",
    "HeadMeasure",
    "Histogram",
    "LayerMeasure",
    "NothingSeenError",
    "Record",
    "Study",
    "TokenMass",
    "Training",
    "study",
    "watch",
]
