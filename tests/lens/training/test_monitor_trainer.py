"""TrainingMonitor as a callback of transformers' Trainer."""

import logging

import pytest
import torch
import transformers as hf

import exptilt as xt


def gpt2():
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, **none)
    )


class Texts(torch.utils.data.Dataset):
    def __init__(self, fails_at=None):
        self.fails_at, self.given = fails_at, 0
        self.tokens = torch.randint(40, (32, 10), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 32

    def __getitem__(self, place):
        self.given += 1
        if self.given == self.fails_at:
            return {
                "input_ids": self.tokens[place] + 1000,
                "labels": self.tokens[place],
            }  # beyond the vocabulary: forward raises
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


def train(folder, model, monitor, texts=None, **other):
    options = {
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    arguments = hf.TrainingArguments(output_dir=str(folder), use_cpu=True, **(options | other))
    callbacks = [] if monitor is None else [monitor]
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=texts or Texts(), callbacks=callbacks)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return trainer.train()


@pytest.mark.parametrize(
    "other",
    [
        {},
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 3},
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "accumulation", "checkpointing", "both", "compiled"],
)
def test_a_trainer_with_a_monitor_learns_the_same(tmp_path, other):
    ends, losses = [], []
    for watched in (True, False):
        model = gpt2()
        got = []
        monitor = xt.lens.TrainingMonitor(
            model, every=2, log=lambda step, readings, got=got: got.append((step, list(readings)))
        )
        losses.append(train(tmp_path, model, monitor if watched else None, **other).training_loss)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        if watched:
            assert [step for step, _ in got] == [0, 2, 4]
            assert all(len(readings) == 4 for _, readings in got)
            assert {r.queries for _, readings in got for r in readings} == {20}  # the first batch of a step
            assert model.config._attn_implementation == "sdpa"
            assert not model._forward_hooks
            assert not model._forward_pre_hooks
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


def test_readings_are_of_the_weights_before_the_step(tmp_path):
    model = gpt2()
    got = []
    monitor = xt.lens.TrainingMonitor(model, every=50, log=lambda step, readings: got.append(readings))
    train(tmp_path, model, monitor, texts=(texts := Texts()))
    before = gpt2()
    with torch.no_grad(), xt.lens.watch(before) as seen:
        before(texts.tokens)
    assert len(got) == 1
    assert max(r.score_max for r in got[0]) <= seen.record.by_head("score_max").max() + 1e-6
    assert monitor.record is not None
    assert len(monitor.record.calls) == 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trainer_that_fails_leaves_nothing_behind(tmp_path, checkpointing):
    model = gpt2()
    monitor = xt.lens.TrainingMonitor(model, every=1, log=lambda *_: None)
    with pytest.raises(IndexError):
        train(tmp_path, model, monitor, texts=Texts(fails_at=5), gradient_checkpointing=checkpointing)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert len(monitor.record.calls) == 2


def test_csv_from_a_trainer(tmp_path):
    model = gpt2()
    train(tmp_path, model, xt.lens.TrainingMonitor(model, every=2, log="csv", folder=tmp_path / "log"))
    lines = (tmp_path / "log" / "attention.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * 4
    assert lines[-1].startswith("4,1,transformer.h.1.attn,1,20,")


def test_all_events_are_answered():
    monitor = xt.lens.TrainingMonitor(gpt2(), log=lambda *_: None)
    events = [name for name in dir(hf.TrainerCallback) if name.startswith("on_")]
    assert len(events) > 10
    for name in events:
        if name not in ("on_step_begin", "on_step_end"):
            assert getattr(monitor, name)(None, None, None, model=None) is None


def test_a_rotary_model_in_bfloat16(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))
    got = []
    monitor = xt.lens.TrainingMonitor(model, every=2, log=lambda step, readings: got.append((step, readings)))
    train(tmp_path, model, monitor, bf16=True)
    assert [step for step, _ in got] == [0, 2, 4]
    assert all(reading.finite for _, readings in got for reading in readings)
