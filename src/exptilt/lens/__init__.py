"""Looking at real transformers: watch attention, study heads and layers, monitor training."""

import sys

from exptilt.lens.differentiable import differentiable
from exptilt.lens.heads.kinds import Kind
from exptilt.lens.inputs.media import Picture
from exptilt.lens.studying.compare import Difference, compare
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
    "Difference",
    "HeadDetail",
    "HeadMeasure",
    "HeadReading",
    "Histogram",
    "Kind",
    "LayerMeasure",
    "NothingSeenError",
    "Picture",
    "Record",
    "Study",
    "TokenMass",
    "Training",
    "TrainingMonitor",
    "clip_qk_",
    "compare",
    "differentiable",
    "study",
    "watch",
]

# Objects that were pickled when these modules lay directly in this folder name them so.
_MOVED = {
    "call": "watching.call",
    "clip": "training.clip",
    "monitor": "training.monitor",
    "readings": "training.readings",
    "record": "watching.record",
    "results": "studying.results",
    "watch": "watching.watch",
}
for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = sys.modules[f"{__name__}.{_new}"]
