"""A small MeanFlow model: digits drawn in one step, by a transformer whose loss needs a forward derivative.

Noise e becomes an image x along z_t = (1 − t) x + t e, with velocity v = e − x. A MeanFlow model (Geng et
al. 2025) learns the mean velocity u over [r, t], which obeys

    u(z, r, t) = v − (t − r) du/dt,      du/dt = ∂_z u · v + ∂_t u,

so that z_0 = z_1 − u(z_1, 0, 1) is one step from noise to an image. The right-hand side is a forward
derivative of the model along (v, 0, 1): through attention, which fused kernels refuse, and
`xt.differentiable` gives. The data are scikit-learn's digits, the model a small DiT that is told which digit
to draw; a classifier that has seen real digits only says how many of the drawn ones it reads as that digit.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.func import jvp

import exptilt as xt
from exptilt._support.plotting import new_figure
from exptilt._support.progress import track


class Block(nn.Module):
    """Attention and a perceptron, both shifted and scaled by what the model is told (DiT's adaLN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.mix = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.told = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.told.weight), nn.init.zeros_(self.told.bias)

    def forward(self, h: Tensor, told: Tensor) -> Tensor:
        """Tokens ``(batch, token, width)``, told ``(batch, 1, width)``."""
        a, b, c, d, e, f = self.told(told).chunk(6, -1)
        x = F.layer_norm(h, h.shape[-1:]) * (1 + a) + b
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        h = h + (1 + c) * self.mix(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return h + (1 + f) * self.mlp(F.layer_norm(h, h.shape[-1:]) * (1 + d) + e)


class Velocity(nn.Module):
    """u(z, r, t) of images as patches ``(batch, token, 4)``, times ``(batch,)`` and digits ``(batch,)``."""

    def __init__(self, tokens: int = 16, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(4, width), nn.Linear(width, 4)
        self.clock = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.digit, self.place = nn.Embedding(10, width), nn.Parameter(0.5 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, z: Tensor, r: Tensor, t: Tensor, digit: Tensor) -> Tensor:
        """The mean velocity, of the shape of z."""
        told = (self.clock(torch.stack([t, t - r], -1)) + self.digit(digit))[:, None]
        h = self.read(z) + self.place
        for block in self.blocks:
            h = block(h, told)
        return self.write(F.layer_norm(h, h.shape[-1:]))


def patches(images: Tensor) -> Tensor:
    """Images ``(batch, 8, 8)`` as 16 patches of 4 pixels."""
    return images.unflatten(2, (4, 2)).unflatten(1, (4, 2)).transpose(2, 3).flatten(3).flatten(1, 2)


def images(tokens: Tensor) -> Tensor:
    """The inverse of `patches`."""
    return tokens.reshape(-1, 4, 4, 2, 2).transpose(2, 3).reshape(-1, 8, 8)


def loss(model: nn.Module, x: Tensor, digit: Tensor) -> Tensor:
    """Squared distance from the mean velocity's own equation."""
    e, times = torch.randn_like(x), torch.sigmoid(torch.randn(2, len(x)) - 0.4)
    r, t = times.amin(0), times.amax(0)
    r = torch.where(torch.rand(len(x)) < 0.5, t, r)  # there u is v itself
    z, v = (1 - t)[:, None, None] * x + t[:, None, None] * e, e - x
    along = (v, torch.zeros_like(r), torch.ones_like(t))
    with torch.no_grad():  # the target is held still, so nothing of its derivative is kept
        slope = jvp(lambda z, r, t: model(z, r, t, digit), (z, r, t), along)[1]
    apart = (model(z, r, t, digit) - (v - (t - r)[:, None, None] * slope)).square().mean((1, 2))
    return (apart / (apart.detach() + 0.05)).mean()  # all samples count alike, however hard


@torch.no_grad()
def draw(model: nn.Module, digit: Tensor) -> Tensor:
    """Images in one step from noise."""
    start = torch.randn(len(digit), 16, 4)
    return images(start - model(start, torch.zeros(len(digit)), torch.ones(len(digit)), digit))


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--autocast", action="store_true", help="products in bfloat16")
    parser.add_argument("--picture", type=Path, help="where to draw samples, such as samples.png")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    data = load_digits()
    pixels, labels = torch.tensor(data.images).float() / 8 - 1, torch.tensor(data.target)
    judge = SVC(C=10).fit(data.data[1200:] / 8 - 1, data.target[1200:])  # has seen none of the model's digits
    model = Velocity()
    smooth = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=arguments.steps + 1)
    bits = torch.autocast("cpu", torch.bfloat16) if arguments.autocast else nullcontext()
    losses, asked = [], torch.arange(10).repeat(50)
    reads = lambda x: (judge.predict(x.reshape(len(x), 64)) == asked.numpy()).mean()  # noqa: E731
    before = reads(draw(model, asked))
    with xt.differentiable(model):
        for _ in track(range(arguments.steps), "training"):
            at = torch.randint(1200, (128,))
            with bits:
                value = loss(model, patches(pixels[at]), labels[at])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            smooth.update_parameters(model)
            losses.append(value.item())
    few = max(1, len(losses) // 20)
    drawn = draw(smooth, asked)
    print(f"loss {sum(losses[:few]) / few:.3f} -> {sum(losses[-few:]) / few:.3f}")
    real = judge.score(data.data[:1200] / 8 - 1, data.target[:1200])
    print(f"read as the digit asked for: {before:.1%} -> {reads(drawn):.1%} (of real digits: {real:.1%})")
    if arguments.picture:
        rows = [pixels[[int((labels == d).nonzero()[k]) for d in range(10)]] for k in range(2)]
        with new_figure(7.6, 3.2) as figure:
            for place, image in enumerate(torch.cat([*rows, drawn[:30]])):
                axes = figure.add_subplot(5, 10, place + 1)
                axes.imshow(image, cmap="gray_r", vmin=-1, vmax=1)
                axes.set(xticks=[], yticks=[])
                if place % 10 == 0:
                    axes.set_ylabel("data" if place < 20 else "drawn", fontsize=8)
            figure.savefig(arguments.picture, dpi=110)
    return sum(losses[:few]) / few - sum(losses[-few:]) / few


if __name__ == "__main__":
    main()
