"""Looking at real transformers: watch attention, study heads and layers, monitor training."""

from exptilt.lens.call import AttentionCall
from exptilt.lens.clip import ClippedHead, clip_qk_
from exptilt.lens.monitor import TrainingMonitor
from exptilt.lens.readings import HeadReading
from exptilt.lens.record import CallRecord, Record
from exptilt.lens.results import HeadDetail, HeadMeasure, Histogram, LayerMeasure, Study, TokenMass, Training
from exptilt.lens.study import study
from exptilt.lens.watch import NothingSeenError, watch

__all__ = [
    "AttentionCall",
    "CallRecord",
    "ClippedHead",
    "HeadDetail",
    "HeadMeasure",
    "HeadReading",
    "Histogram",
    "LayerMeasure",
    "NothingSeenError",
    "Record",
    "Study",
    "TokenMass",
    "Training",
    "TrainingMonitor",
    "clip_qk_",
    "study",
    "watch",
]
