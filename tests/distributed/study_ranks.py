"""Run by torchrun: a study shared out among processes, one of which is killed at the first attempt."""

import os
import pickle
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import exptilt as xt
from exptilt.lens.studying import study as studying

TEXTS = [f"to be or not to be, that is the question no {i}; and so on for a while" for i in range(7)]


class Letters:
    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


def model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def study(**options):
    return xt.lens.study(model(), Letters(), TEXTS, progress=False, **options)


def written(store):
    """The units of a store, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in store.glob("*.npz")}


def main(folder):
    """The attempt's number, when each unit that was there was written, and how many were measured."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    store = folder / "store"
    there = written(store)
    dist.barrier()
    measured, measure = [], studying.measure_unit

    def counted(*arguments):
        measured.append(1)
        if attempt == 0 and rank == 1 and len(measured) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(*arguments)

    studying.measure_unit = counted
    found = study(store=store, group=dist.group.WORLD)
    result = {"attempt": attempt, "there": there, "measured": len(measured), "study": found}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    os._exit(0)
