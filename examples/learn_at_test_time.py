"""A model that learns at test time by two steps of descent on the past; training goes through them.

Each series is a sum of two waves of unknown frequencies. A small causal transformer reads it and predicts the
next value. Before it is asked about the second half of a series, its weights take two steps of descent on
its errors over the first half; the weights they start from, and the length of the steps of each weight, are
trained so that the model is good *after* these steps (MAML; test-time training). The gradient of that is a
second derivative through attention, under vmap: each series has weights of its own.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import exptilt as xt
from exptilt._support.plotting import COLOURS, caption, new_figure
from exptilt._support.progress import track

Weights = dict[str, Tensor]


class Forecast(nn.Module):
    """The next value after every place of a series ``(batch, time)``."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.read, self.write = heads, nn.Linear(4, width), nn.Linear(width, 1)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, series: Tensor) -> Tensor:
        """Predictions ``(batch, time)`` of what follows each place, from it and what came before."""
        past = F.pad(series, (3, 0)).unfold(-1, 4, 1)
        h = self.read(past)
        y = self.qkv(F.layer_norm(h, h.shape[-1:]))
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in y.chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.mix(o.transpose(1, 2).flatten(2))
        return self.write(h + self.mlp(F.layer_norm(h, h.shape[-1:])))[..., 0]


def waves(count: int, length: int) -> Tensor:
    """Sums of two waves with random frequencies, phases and sizes, ``(count, length)``."""
    rate, phase, size = (2 * torch.rand(3, count, 2, 1)).unbind()
    return ((0.3 + size) * torch.sin((0.2 + 0.6 * rate) * torch.arange(length) + 4 * phase)).sum(1)


def error(model: nn.Module, weights: Weights, series: Tensor) -> Tensor:
    """Mean squared error of the predictions of one series ``(time,)``."""
    return (functional_call(model, weights, (series[None, :-1],))[0] - series[1:]).square().mean()


def adapted(model: nn.Module, weights: Weights, rates: Weights, past: Tensor, steps: int = 2) -> Weights:
    """The weights after a few steps of descent on the past of one series."""
    for _ in range(steps):
        slope = grad(partial(error, model))(weights, past)
        weights = {name: w - rates[name].exp() * slope[name] for name, w in weights.items()}
    return weights


def loss(model: nn.Module, weights: Weights, rates: Weights, series: Tensor, steps: int = 2) -> Tensor:
    """Errors ``(batch,)`` on the second halves, each after steps on its own first half."""

    def one(whole: Tensor) -> Tensor:
        past, future = whole.chunk(2)
        return error(model, adapted(model, weights, rates, past, steps), future)

    return vmap(one)(series)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--picture", type=Path, help="where to draw a forecast, such as forecast.png")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    model = Forecast()
    weights: Weights = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    rates = {name: torch.full((), -4.0).requires_grad_() for name in weights}
    optimizer = torch.optim.Adam([*weights.values(), *rates.values()], lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=arguments.steps + 1)
    fresh = waves(200, 64)
    with xt.differentiable(model):
        first = loss(model, weights, rates, fresh).mean().item()
        for _ in track(range(arguments.steps), "training"):
            value = loss(model, weights, rates, waves(16, 64)).mean()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
        by_steps = [loss(model, weights, rates, fresh, steps).mean().item() for steps in range(4)]
        print(
            f"held-out error after two steps of descent: {first:.4f} before training, {by_steps[2]:.4f} after"
        )
        print("by steps at test time: " + ", ".join(f"{k}: {x:.4f}" for k, x in enumerate(by_steps)))
        if arguments.picture:
            past, future = fresh[0].chunk(2)
            with new_figure(7.6, 2.8) as figure, torch.no_grad():
                axes = figure.add_subplot()
                axes.plot(range(1, 32), future[1:], color="0.6", label="series")
                for colour, steps in zip(COLOURS, (0, 2), strict=False):
                    with torch.enable_grad():
                        moved = adapted(model, weights, rates, past, steps)
                    guess = functional_call(model, moved, (future[None, :-1],))[0]
                    axes.plot(range(1, 32), guess, ".--", color=colour, label=f"after {steps} steps")
                caption(axes, "The next value, before and after learning from the first half", "place", "")
                axes.legend(frameon=False)
                figure.savefig(arguments.picture, dpi=110)
    return first - by_steps[2]


if __name__ == "__main__":
    main()
