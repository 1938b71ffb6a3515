"""The monitor as a callback of Lightning: a stand-in that calls what its trainer calls, and the real one."""

import numpy as np
import pytest
import torch

import exptilt as xt
from oracles import tiny_models as models

# What Lightning's trainer calls on a callback around training, besides the events of a batch.
AROUND = ("setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start")


class Trainer:
    """Two batches for every update, as `accumulate_grad_batches=2` has it."""

    def __init__(self, callback):
        self.callback, self.global_step = callback, 0

    def fit(self, module, batches):
        call = lambda name, *more: getattr(self.callback, name)(self, module, *more)  # noqa: E731
        optimizer = torch.optim.SGD(module.parameters(), 1e-3)
        for name in AROUND:
            call(name)
        assert self.callback.state_key == "TrainingMonitor"
        assert not self.callback.state_dict()
        for index, batch in enumerate(batches):
            call("on_train_batch_start", batch, index)
            loss = module(batch, labels=batch, use_cache=False).loss
            call("on_before_backward", loss)
            loss.backward()
            if index % 2:
                optimizer.step()
                self.global_step += 1
            call("on_train_batch_end", {"loss": loss}, batch, index)
        call("on_train_end")
        call("teardown")


def batches(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 61, (2, 9), generator=generator) for _ in range(count)]


def test_a_trainer_that_calls_as_lightning_does():
    model, found = models.make("gpt2", attention="sdpa"), []
    monitor = xt.lens.TrainingMonitor(model, every=2, log=lambda *reading: found.append(reading))
    Trainer(monitor).fit(model, batches(10))
    assert [step for step, _ in found] == [0, 2, 4]  # once a step, though a step has two batches
    again = models.make("gpt2", attention="sdpa")
    with torch.no_grad(), xt.lens.watch(again) as seen:
        again(batches(1)[0])
    first = [[r.entropy for r in found[0][1] if r.layer == layer] for layer in range(2)]
    np.testing.assert_allclose(first, seen.record.by_head("entropy"), rtol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_training_that_breaks_off_leaves_the_model_as_it_was():
    model = models.make("gpt2", attention="sdpa")
    monitor = xt.lens.TrainingMonitor(model, log=lambda *_: None)
    trainer = Trainer(monitor)
    monitor.on_train_batch_start(trainer, model, None, 0)
    assert model.config._attn_implementation != "sdpa"
    monitor.on_exception(trainer, model, RuntimeError())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_lightning_itself(tmp_path):
    lightning = pytest.importorskip("lightning")
    found = []

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = models.make("gpt2", attention="sdpa")

        def training_step(self, batch, _):
            return self.model(batch, labels=batch, use_cache=False).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    module = Lit()
    log = lambda step, heads: found.append((step, len(heads)))  # noqa: E731
    monitor = xt.lens.TrainingMonitor(module, every=2, log=log)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        max_steps=5, callbacks=[monitor], accelerator="cpu", default_root_dir=tmp_path, **quiet
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.stack(batches(6)), batch_size=None))
    assert found == [(0, 8), (2, 8), (4, 8)]
