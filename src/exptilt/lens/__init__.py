"""Looking at real transformers: watch attention, study heads and layers, monitor training."""

from exptilt.lens.call import AttentionCall
from exptilt.lens.results import HeadDetail, HeadMeasure, Histogram, LayerMeasure, Study, TokenMass, Training

__all__ = ["AttentionCall", "HeadDetail", "HeadMeasure", "Histogram", "LayerMeasure", "Study", "TokenMass", "Training"]
