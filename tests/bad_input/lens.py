"""Bad input to watches, monitors and studies."""

import math

from torch import nn

from exptilt.lens import (
    TrainingMonitor,
    cache,
    clip_qk_,
    compact_cache,
    compare,
    differentiable,
    edits,
    study,
    watch,
)

LAYER = nn.MultiheadAttention(8, 2)

ROWS = [
    (lambda: TrainingMonitor(LAYER, every=0), "every", "every is 0"),
    (lambda: TrainingMonitor(LAYER, every=2.5), "every", "every is 2.5"),
    (lambda: TrainingMonitor(LAYER, every=True), "every", "every is True"),
    (lambda: TrainingMonitor(LAYER, log="excel"), "log", "log is 'excel'"),
    (lambda: TrainingMonitor(LAYER, log=None), "log", "log is None"),
    (lambda: TrainingMonitor(LAYER, max_logit=0.0), "max_logit", "max_logit is 0.0"),
    (lambda: TrainingMonitor(LAYER, min_entropy=math.nan), "min_entropy", "min_entropy is nan"),
    (lambda: TrainingMonitor("gpt2"), "model", "model is a str"),
    (lambda: differentiable("gpt2"), "model", "model is a str"),
    (lambda: clip_qk_(LAYER, None, 1.0), "record", "record is a NoneType"),
    (lambda: watch("gpt2").__enter__(), "model", "str"),
    (lambda: cache(LAYER, "a text"), "text", "there is no tokenizer"),
    (lambda: compare(3, 4), "int", "got int and int. Pass two studies"),
    (lambda: compare(LAYER, LAYER), "texts", "list of texts"),
    (lambda: compact_cache(LAYER, 10), "model", "set_attn_implementation"),
    (lambda: edits.without([0], [3]), "heads", "pairs of layer and head"),
    (lambda: study("gpt2", None, ["a text"]), "model", "Pass a transformers model"),
]
