"""Looking at real transformers: watch attention, study heads and layers, monitor training."""

from exptilt.lens.studying.results import (
    HeadDetail,
    HeadMeasure,
    Histogram,
    LayerMeasure,
    Study,
    TokenMass,
    Training,
)
from exptilt.lens.studying.study import study
from exptilt.lens.training.clip import ClippedHead, clip_qk_
from exptilt.lens.training.monitor import TrainingMonitor
from exptilt.lens.training.readings import HeadReading
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.record import CallRecord, Record
from exptilt.lens.watching.watch import NothingSeenError, watch

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
