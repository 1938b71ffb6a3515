"""Looking at real transformers: watch attention, study heads and layers, monitor training."""

import sys

from exptilt._support.former import former_names
from exptilt.lens import edits
from exptilt.lens.caches import compact_cache
from exptilt.lens.differentiable import differentiable
from exptilt.lens.heads.kinds import HeadKind
from exptilt.lens.inputs.media import Picture
from exptilt.lens.questions.decomposition import cache
from exptilt.lens.studying.compare import compare
from exptilt.lens.studying.results import Study
from exptilt.lens.studying.study import study
from exptilt.lens.training.clip import clip_qk_
from exptilt.lens.training.monitor import TrainingMonitor
from exptilt.lens.watching.record import Record
from exptilt.lens.watching.transformers_hook import register
from exptilt.lens.watching.watch import NothingSeenError, watch

__all__ = [
    "HeadKind",
    "NothingSeenError",
    "Picture",
    "Record",
    "Study",
    "TrainingMonitor",
    "cache",
    "clip_qk_",
    "compact_cache",
    "compare",
    "differentiable",
    "edits",
    "register",
    "study",
    "watch",
]

# Former module paths, so that objects pickled before the modules moved into subfolders still load.
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

__getattr__ = former_names(__name__)
