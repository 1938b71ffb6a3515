"""Draw the pictures of the first pages and the recipes into docs/images.

A picture of a recipe shows what the code on its page gave: the page is run as a reader would type it, and
the variables that it leaves are drawn. Run: python book/pictures.py [NAME ...]
"""

import contextlib
import io
import json
import sys
import warnings
from doctest import DocTestParser
from pathlib import Path

import numpy as np
import torch

import exptilt as xt
from exptilt._support.plotting import COLOURS, caption, new_figure, whole_log
from exptilt.claims.experiments.capacity import storage_capacity
from exptilt.claims.experiments.cliff import classical_cliff
from exptilt.claims.experiments.sweep import equilibrium_sweep

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
KEYS = torch.tensor([[2.0, 0.5], [1.0, 1.6], [-1.2, 1.3], [-1.5, -0.6], [0.6, -1.7]])
BLUE, ORANGE, GREEN = COLOURS[:3]


def typed(page):
    """The variables that the examples of a page leave behind."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for example in DocTestParser().get_examples((DOCS / page).read_text("utf-8")):
            exec(compile(example.source, page, "single"), names)
    return names


def save(figure, name):
    """Write one picture."""
    figure.savefig(DOCS / "images" / f"{name}.png", dpi=140)
    sys.stdout.write(f"docs/images/{name}.png\n")


def hessian():
    """Memory of a Hessian-vector product, as benchmarks/hessian_product.py saved it last."""
    saved = max(
        DOCS.glob("benchmarks/*/hessian_product.json"),
        key=lambda path: json.loads(path.read_text())["written"],
    )
    rows = [x for x in json.loads(saved.read_text("utf-8"))["results"]["rows"] if x["kind"] == "hessian"]
    tokens = [row["n"] for row in rows]
    with new_figure(7.6, 3.0) as figure:
        axes = figure.subplots()
        for way, colour in (("math attention", ORANGE), ("exptilt", BLUE)):
            memory = [row[way] / 1e9 for row in rows]
            axes.loglog(tokens, memory, "o-", color=colour, base=2)
            size = f"{memory[-1]:.1f} GB" if memory[-1] >= 1 else f"{1e3 * memory[-1]:.0f} MB"
            axes.text(tokens[-1] * 1.06, memory[-1], f"{way}\n{size}", color=colour, va="center")
        axes.set_xlim(tokens[0] * 0.9, tokens[-1] * 1.7)
        axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
        axes.set_yticks([1 / 16, 1 / 4, 1, 4], ["62 MB", "250 MB", "1 GB", "4 GB"])
        axes.minorticks_off()
        caption(axes, "Hessian–vector product of a two-layer transformer: peak memory", "tokens", "")
        save(figure, "front-hessian")


def die():
    """A die tilted by three numbers."""
    faces = torch.arange(1.0, 7.0)
    with new_figure(7.6, 2.4) as figure:
        panels = figure.subplots(1, 3, sharey=True)
        for axes, eta in zip(panels, (-0.5, 0.0, 0.5), strict=True):
            p = torch.softmax(eta * faces, 0)
            mean = (p * faces).sum().item()
            axes.bar(faces, p, color=BLUE, width=0.75)
            axes.axvline(mean, color=ORANGE, linestyle="--")
            axes.text(mean, 0.44, f" mean {mean:.2f}", color="#a3540f", ha="right" if eta > 0 else "left")
            axes.set_ylim(0, 0.48)
            caption(axes, f"η = {eta:g}".replace("-", "−"), "face", "probability" if eta < 0 else "")
        save(figure, "start-die")


def log_normalizer():
    """G of a die with tangents, and its slope."""
    faces = torch.arange(1.0, 7.0, dtype=torch.float64)
    eta = torch.linspace(-2, 2, 201, dtype=torch.float64)
    G = torch.logsumexp(eta[:, None] * faces, 1)
    mean = torch.softmax(eta[:, None] * faces, 1) @ faces
    with new_figure(7.6, 2.9) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(eta, G, color=BLUE)
        right.plot(eta, mean, color=BLUE)
        for at in (-1.0, 0.0, 1.0):
            i = int((eta - at).abs().argmin())
            left.plot(
                eta[i] + torch.tensor([-0.6, 0.6]), G[i] + mean[i] * torch.tensor([-0.6, 0.6]), color=ORANGE
            )
            left.plot(eta[i], G[i], "o", color=ORANGE)
            left.annotate(f"slope {mean[i]:.2f}", (eta[i], G[i]), (8, -14), textcoords="offset points")
            right.plot(eta[i], mean[i], "o", color=ORANGE)
            right.annotate(f"{mean[i]:.2f}", (eta[i], mean[i]), (7, -11), textcoords="offset points")
        caption(left, "the log-normalizer G", "η: how hard the die is leaned on")
        caption(right, "its slope is the mean of the tilted die", "η")
        right.set_ylim(0.8, 6.2)
        save(figure, "start-log-normalizer")


def query():
    """Keys weighed by three queries."""
    with new_figure(7.6, 2.9) as figure:
        for axes, (x, y) in zip(
            figure.subplots(1, 3, sharey=True), ((0.25, 0.1), (1.0, 0.4), (-0.7, 1.2)), strict=True
        ):
            p = torch.softmax(KEYS @ torch.tensor([x, y]), 0)
            mean = p @ KEYS
            axes.scatter(*KEYS.T, s=20 + 900 * p, color=BLUE, alpha=0.75, linewidth=0)
            axes.scatter(*mean, marker="X", s=90, color=ORANGE, zorder=3, edgecolor="white")
            axes.annotate(
                "", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": "#333", "linewidth": 1.6}
            )
            for place, weight in zip(KEYS, p, strict=True):
                axes.annotate(
                    f"{weight:.0%}",
                    place.tolist(),
                    (0, 13),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
            axes.set(xlim=(-2.4, 2.9), ylim=(-2.3, 2.5), aspect="equal")
            count = torch.exp(-(p * p.log()).sum())
            caption(axes, f"query ({x:g}, {y:g}): {count:.1f} of 5 keys".replace("-", "−"), "")
        figure.axes[0].text(-2.3, -2.15, "arrow: query   cross: output", fontsize=8, color="#444")
        save(figure, "start-query")


def landscape():
    """G over the plane of queries, with attention as its slope."""
    size = 2.6
    line = torch.linspace(-size, size, 181)
    plane = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
    G = xt.log_normalizer(plane.reshape(1, -1, 2), KEYS[None], scale=1.0).reshape(181, 181)
    coarse = torch.linspace(-size * 0.92, size * 0.92, 13)
    places = torch.stack(torch.meshgrid(coarse, coarse, indexing="xy"), -1).reshape(1, -1, 2)
    out = xt.attend(places, KEYS[None], KEYS[None], scale=1.0)
    with new_figure(6.4, 4.9) as figure:
        axes = figure.subplots()
        filled = axes.contourf(line, line, G, levels=24, cmap="viridis")
        axes.contour(line, line, G, levels=24, colors="white", linewidths=0.35, alpha=0.5)
        axes.quiver(*places[0].T, *out.output[0].T, color="white", width=0.004, scale=30, alpha=0.9)
        axes.scatter(*KEYS.T, s=70, color=ORANGE, edgecolor="white", linewidth=1.2, zorder=3)
        figure.colorbar(filled, label="G(q), the log-normalizer", format="%g")
        axes.set(aspect="equal")
        axes.grid(visible=False)
        caption(
            axes,
            "dots: keys    colour: G(q)    arrows: attention = ∇G(q)",
            "query, first coordinate",
            "second",
        )
        save(figure, "landscape")


def heads():
    """What the heads of the packaged model look at."""
    seen = typed("recipes/heads.md")
    keys, study = seen["keys"], seen["study"]
    before = study.heads["previous_mass"].value
    strips = {(d.layer, d.head): d.strip for d in study.details}
    with new_figure(8.2, 2.9) as figure:
        one, two, three = figure.subplots(1, 3, width_ratios=[1, 1, 1.15])
        for axes, table, title in ((one, keys, "effective keys"), (two, before, "weight on the key before")):
            axes.imshow(table, cmap="YlGnBu")
            for (i, j), x in np.ndenumerate(table):
                dark = x > 0.6 * table.max()
                axes.text(
                    j,
                    i,
                    f"{x:.3g}" if x >= 1 else f"{x:.2f}",
                    ha="center",
                    va="center",
                    color="white" if dark else "#222",
                    fontsize=8,
                )
            axes.set(xticks=range(4), yticks=range(4))
            axes.grid(visible=False)
            caption(axes, title, "head", "layer")
        i, j = np.unravel_index(before.argmax(), before.shape)
        strip = strips[(int(i), int(j))][:24, :24]
        three.imshow(strip, cmap="YlGnBu")
        words = ["␣" if t == " " else "⏎" if t == "\n" else t for t in study.strip_tokens[:24]]
        three.set_xticks(range(24), words, fontsize=6, family="DejaVu Sans Mono")
        three.set_yticks(range(24), words, fontsize=6, family="DejaVu Sans Mono")
        three.grid(visible=False)
        caption(three, f"layer {i}, head {j} on a line of text", "looks at", "character")
        save(figure, "recipe-heads")


def training():
    """Two runs of training, seen by their heads."""
    seen = typed("recipes/training.md")
    with new_figure(7.6, 2.7) as figure:
        left, right = figure.subplots(1, 2)
        for name, run, colour in (("rate 0.003", seen["good"], BLUE), ("rate 0.1", seen["bad"], ORANGE)):
            left.plot(
                list(run),
                [max(h.score_max for h in heads) for heads in run.values()],
                color=colour,
                label=name,
            )
            right.plot(
                list(run), [min(h.entropy for h in heads) for heads in run.values()], color=colour, label=name
            )
        left.axhline(50, color="#666", linestyle=":")
        left.text(78, 58, "max_logit", ha="right", fontsize=8, color="#444")
        left.set_yscale("log")
        left.legend()
        caption(left, "largest score of any head", "step")
        caption(right, "least entropy of any head, nats", "step")
        save(figure, "recipe-training")


def derivatives():
    """The loss along the direction of largest curvature, and its parabola."""
    seen = typed("recipes/derivatives.md")
    value, slope, bend = (float(seen[name]) for name in ("value", "slope", "bend"))
    t = np.linspace(-1.2, 1.2, 61)
    with torch.no_grad():
        loss = [
            float(seen["loss"]({n: w + float(x) * seen["direction"][n] for n, w in seen["weights"].items()}))
            for x in t
        ]
    with new_figure(5.6, 2.9) as figure:
        axes = figure.subplots()
        axes.plot(t, loss, color=BLUE, label="the loss itself")
        axes.plot(
            t,
            value + slope * t + 0.5 * bend * t**2,
            "--",
            color=ORANGE,
            label="value + slope t + ½ curvature t²",
        )
        axes.set_ylim(min(loss) - 0.03, max(loss) + 0.1)
        axes.legend()
        caption(axes, "the loss along the direction of largest curvature", "t, distance from the weights")
        save(figure, "recipe-derivatives")


def losses():
    """Memory of three ways to the same loss, as the benchmark measured it."""
    file = sorted((DOCS / "benchmarks").glob("*/losses.json"))[0]
    saved = json.loads(file.read_text("utf-8"))
    names = {
        "plain logits": "matrix of logits",
        "torch, chunked": "torch's chunked loss",
        "linear_cross_entropy": "xt.losses.linear_cross_entropy",
    }
    sizes = [saved["results"]["head"]["memory"][name]["beyond"] / 1e6 for name in names]
    with new_figure(7.6, 2.0) as figure:
        axes = figure.subplots()
        bars = axes.barh(list(names.values()), sizes, color=("#8a8f98", "#8a8f98", BLUE))
        axes.bar_label(bars, [f"{size:,.0f} MB" for size in sizes], padding=3)
        axes.set_xlim(0, 1.15 * max(sizes))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        caption(axes, "memory beyond inputs and gradients (2,048 tokens, 49,152 words)", "MB")
        save(figure, "recipe-losses")


def regimes():
    """A series and what the fit says of it."""
    seen = typed("recipes/regimes.md")
    wild = seen["calm"] == 0
    with new_figure(7.6, 3.2) as figure:
        top, low = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
        top.plot(seen["y"], color="#555", linewidth=0.9)
        low.plot(seen["probability"][:, 0], color=ORANGE)
        for axes in (top, low):
            axes.fill_between(
                np.arange(400),
                0,
                1,
                where=wild,
                transform=axes.get_xaxis_transform(),
                color=BLUE,
                alpha=0.15,
                linewidth=0,
            )
        caption(top, "the series; shaded where it really was wild", "")
        caption(low, "probability of the wild regime, given the whole series", "step")
        low.set_ylim(-0.03, 1.03)
        save(figure, "recipe-regimes")


def spectrum():
    """Nodes of the spectrum of each layer of the packaged model, by how many eigenvalues they stand for."""
    spectra = typed("recipes/spectrum.md")["spectra"]
    with new_figure(7.6, 2.8) as figure:
        axes = figure.subplots()
        for place, found in enumerate(spectra.values()):
            at, mass = found.nodes.flatten(), found.weights.flatten().clamp_min(1e-5)
            colours = [ORANGE if x < 0 else BLUE for x in at]
            axes.scatter(at, [place] * len(at), 12 + 300 * mass.sqrt(), color=colours, alpha=0.5)
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.set_yticks(range(len(spectra)), [name.rpartition(".")[2] for name in spectra])
        axes.set_ylim(len(spectra) - 0.5, -0.5)
        words = "area: root of the share of eigenvalues that a node stands for; orange: negative"
        caption(axes, words, "eigenvalue of the Hessian's block", "layer")
        save(figure, "recipe-spectrum")


def influence():
    """Training points of the recipe, coloured by their influence; wrong labels are ringed."""
    seen = typed("recipes/influence.md")
    x, y, scores = seen["x"], seen["y"], 1e3 * seen["found"].scores
    edge = float(scores.abs().max())
    with new_figure(6.4, 3.4) as figure:
        axes = figure.subplots()
        for label, marker in ((0, "s"), (1, "o")):
            here = y == label
            shown = axes.scatter(
                *x[here].T,
                45,
                c=scores[here],
                marker=marker,
                cmap="PuOr",
                vmin=-edge,
                vmax=edge,
                edgecolors="#888",
            )
        axes.scatter(*x[:3].T, 190, facecolors="none", edgecolors="black", linewidths=1.2)
        figure.colorbar(shown, label="change of the new loss without it, × 1000")
        caption(axes, "circles are labelled 1, squares 0; ringed: the three wrong labels", "")
        save(figure, "recipe-influence")


def collapse_order():
    """The error of GPB_k's likelihood over k, for the series of the page and for twenty like it."""
    seen = typed("switching.md")
    model, orders = seen["swings"], np.arange(1, 9)
    with new_figure(7.6, 2.8) as figure:
        axes = figure.subplots()
        for seed in range(20):
            y = model.sample(12, generator=torch.Generator().manual_seed(100 + seed)).y
            exact = model.filter(y, method="exact").log_likelihood
            errors = [abs(model.filter(y, method=f"gpb{k}").log_likelihood - exact) for k in orders]
            axes.semilogy(orders, errors, color="#bbb", linewidth=0.8)
        axes.semilogy(orders, seen["errors"], color=ORANGE, marker="o")
        axes.set_ylim(1e-7, 3)
        axes.set_xticks(orders, [f"{k}\n{2 ** (k - 1)}" for k in orders])
        caption(axes, "error of the log-likelihood in nats; orange: the series above", "k, and laws kept")
        save(figure, "switching-collapse-order")


def two_measures():
    """Divergences between the heads of the packaged model, and the characters it would miss."""
    seen = typed("two_measures.md")
    apart, names = seen["apart"], [f"{i}.{j}" for i in range(4) for j in range(4)]
    with new_figure(6.0, 4.6) as figure:
        axes = figure.subplots()
        shown = axes.imshow(apart, cmap="YlGnBu")
        axes.set_xticks(range(16), names, fontsize=7, rotation=90)
        axes.set_yticks(range(16), names, fontsize=7)
        axes.grid(visible=False)
        figure.colorbar(shown, label="KL(p‖q), nats, mean over characters")
        caption(axes, "how far the attention of two heads is apart", "q: layer.head", "p: layer.head")
        save(figure, "two-measures-heads")
    count = 72
    missed = seen["missed"][:count]
    words = ["␣" if t == " " else "⏎" if t == "\n" else t for t in seen["passage"][:count]]
    heaviest = missed.argsort(descending=True)[:8].tolist()
    with new_figure(8.2, 2.4) as figure:
        axes = figure.subplots()
        axes.bar(range(count), missed, color=[ORANGE if j in heaviest else BLUE for j in range(count)])
        axes.set_xticks(range(count), words, fontsize=8, family="DejaVu Sans Mono")
        axes.set_xlim(-0.7, count - 0.3)
        caption(axes, "change of the last layer without each character; orange: the eight largest", "")
        save(figure, "two-measures-missed")


def phases():
    """Clusters and distance from a Gaussian by step, for each renormaliser and start."""
    kinds, starts = ("sphere", "layer", "batch", "whiten"), ("gaussian", "laplace", "uniform")
    found = equilibrium_sweep(counts=(200,), seeds=4, steps=200, renormalizers=kinds, starts=starts)
    with new_figure(12.0, 5.2) as figure:
        panels = figure.subplots(2, len(kinds), sharex=True, sharey="row")
        for setting in found:
            column, path = panels[:, kinds.index(setting.renormalizer)], setting.path
            for axes, values in zip(column, (path.clusters.effective, path.gaussianity.sliced), strict=True):
                middle = values.double().log().mean(-1).exp()  # a line ends where a cloud is one point
                colour = COLOURS[starts.index(setting.start)]
                axes.plot(path.steps, middle, color=colour, label=setting.start)
        for (upper, lower), kind in zip(panels.T, kinds, strict=True):
            whole_log(upper)
            caption(upper, kind, "")
            lower.set(yscale="log", xlabel="step")
            lower.axhline(0.385, color="0.3", linewidth=0.9, linestyle="--")
            lower.set_xscale("symlog", linthresh=10)  # most happens early: the first steps get room
            lower.set_xlim(left=0)
        panels[0, 0].set_ylabel("effective clusters")
        panels[1, 0].set_ylabel("sliced A² (dashed: Gaussian)")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        save(figure, "flow-phases")


def capacity():
    """Random patterns that are all recalled, by dimension."""
    found = storage_capacity([6, 8, 10, 12, 14, 16])
    rate, *_ = found.exponent
    with new_figure(5.6, 3.8) as figure:
        axes = figure.subplots()
        d, mean = torch.tensor(found.dimensions).double(), found.mean
        low, high = (mean - found.interval[:, 0]), (found.interval[:, 1] - mean)
        axes.errorbar(
            d, mean, yerr=torch.stack((low, high)), fmt="o", color=BLUE, label="recalled, 95 % interval"
        )
        fitted = (mean.log().mean() + rate * (d - d.mean())).exp()
        axes.plot(d, fitted, color="0.4", lw=1.0, ls="--", label=f"$e^{{{rate:.2f}\\,d}}$")
        promised = [bound.count for bound in found.bounds]
        axes.plot(
            d,
            promised,
            "s-",
            color=ORANGE,
            markerfacecolor="white",
            label=r"theorem: $\sqrt{p}\,c^{(d-1)/4}$",
        )
        whole_log(axes)
        caption(axes, "Random patterns that are all recalled", "dimension d", "patterns")
        axes.legend(loc="upper left")
        save(figure, "memory-capacity")


def cliff():
    """Recall of a classical network by its load."""
    found = classical_cliff([0.10, 0.12, 0.13, 0.14, 0.15, 0.16, 0.17, 0.18], seeds=5)
    with new_figure(5.6, 3.4) as figure:
        axes = figure.subplots()
        axes.plot(found.loads, found.mean, "o-", color=BLUE, label="share recalled (overlap > 0.9)")
        axes.plot(found.loads, found.overlap.mean(-1), "^:", color=GREEN, label="mean overlap")
        axes.axvline(0.138, color=ORANGE, ls="--", label="an infinite network forgets")
        axes.set_ylim(-0.03, 1.03)
        caption(axes, "Recall of random patterns, 1,000 units, 5 networks", "load P/N", "share")
        axes.legend(loc="lower left")
        save(figure, "memory-cliff")


PICTURES = {
    "front-hessian": hessian,
    "start-die": die,
    "start-log-normalizer": log_normalizer,
    "start-query": query,
    "landscape": landscape,
    "recipe-heads": heads,
    "recipe-training": training,
    "recipe-derivatives": derivatives,
    "recipe-losses": losses,
    "recipe-regimes": regimes,
    "recipe-spectrum": spectrum,
    "recipe-influence": influence,
    "switching-collapse-order": collapse_order,
    "two-measures": two_measures,
    "flow-phases": phases,
    "memory-capacity": capacity,
    "memory-cliff": cliff,
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        PICTURES[chosen]()
