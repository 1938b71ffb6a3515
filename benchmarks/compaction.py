"""Compact caches on real models: what it costs to replace many keys by a few.

SmolLM2-135M reads 1,024 tokens of a text; in every layer and head their rotated keys are replaced by budget
keys; then it reads the next 256 tokens over those and its own keys. Increase in loss, in nats a token, over
that with the whole cache. All methods are ours:

    random             keys drawn at random
    sinks + window     the first 4 and the last
    subset             the keys of largest mean squared attention from the queries of the last 512 tokens
    subset + fit       these, with log-weights (non-negative least squares) and values (ridge) fitted to the
                       queries' mass and output, as Attention Matching does
    collapse + fit     `xt.compact`: the heaviest half kept, the others joined in clusters

"placed" are the queries of all 1,024 tokens, rotated to the 256 places where later tokens will stand. With
"layers share" a layer's part of the budget is in proportion to the error that the method without a fit leaves
in it. Settings were chosen on the texts `CHOSEN_ON`, and are reported on others.

MiniLM has no cache: it reads 512 tokens, and every layer attends to compact keys, found with the queries that
read them. Its number is the distance of the text's embedding from that without compaction, over its length.
"""

import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

import exptilt as xt
import harness
from exptilt.attention.compaction import share_budget
from exptilt.lens import models
from exptilt.lens.caches import at_next_places

PAGE = harness.FOLDER.parent / "two_measures.md"
PREFIX, NEXT, LAST = 1024, 256, 512
RATIOS = (4, 10, 20, 50)
CHOSEN_ON = ("Shakespeare", "manual")
Cache = tuple[Tensor, Tensor, Tensor]  # key, value (heads, budget, dim), log-weight (heads, budget)


def random(k: Tensor, v: Tensor, q: Tensor, budget: int) -> Cache:
    at = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(0))[:budget]
    return k[:, at], v[:, at], k.new_zeros(k.shape[0], budget)


def window(k: Tensor, v: Tensor, q: Tensor, budget: int) -> Cache:
    n, first = k.shape[1], min(4, budget // 2)
    at = torch.cat([torch.arange(first), torch.arange(n - budget + first, n)])
    return k[:, at], v[:, at], k.new_zeros(k.shape[0], budget)


def ours(k: Tensor, v: Tensor, q: Tensor, budget: int, **options: Any) -> Cache:
    few = xt.compact(k, v, budget, q, **options)
    return few.key, few.value, few.log_weight


def fitted(k: Tensor, v: Tensor, q: Tensor, budget: int) -> Cache:
    """Subset, log-weights and values: the rival."""
    scale, found = k.shape[-1] ** -0.5, []
    for k_, v_, q_ in zip(k, v, q.reshape(k.shape[0], -1, k.shape[-1]), strict=True):
        s = scale * q_ @ k_.mT
        G = s.logsumexp(-1, keepdim=True)
        p = (s - G).exp()
        at = p.square().mean(0).topk(budget).indices
        A, out = p[:, at], p @ v_
        gram, right, w = A.mT @ A, A.sum(0), torch.ones(budget)
        for _ in range(300):  # multiplicative steps for min |A w − 1|², w ≥ 0
            w = w * right / (gram @ w).clamp(min=1e-12)
        P = A * w.clamp(min=1e-12)
        P = P / P.sum(-1, keepdim=True)
        left = P.mT @ P + 0.01 * torch.eye(budget)  # the trial's ridge towards the values themselves
        move = torch.linalg.solve(left, P.mT @ (out - P @ v_[at]))
        found.append((k_[at], v_[at] + move, w.clamp(min=1e-12).log()))
    return tuple(torch.stack(x) for x in zip(*found, strict=True))  # type: ignore[return-value]


Layers = list[tuple[Tensor, Tensor, Tensor]]  # key, value, queries of each layer
Method = Callable[[Layers, int], list[Cache]]


def each(way: Callable[..., Cache], **options: Any) -> Method:
    """A method that gives every layer the same budget."""
    return lambda layers, budget: [way(*layer, budget, **options) for layer in layers]


def shared(way: Callable[..., Cache], method: str) -> Method:
    """A method whose budget the layers share, by the error of `xt.compact` with this method."""

    def run(layers: Layers, budget: int) -> list[Cache]:
        given = [{"key": k, "value": v, "queries": q, "method": method} for k, v, q in layers]
        parts = share_budget(given, budget)
        return [way(*layer, part) for layer, part in zip(layers, parts, strict=True)]

    return run


# whether queries are placed, and the method
METHODS: dict[str, tuple[bool, Method]] = {
    "random": (False, each(random)),
    "sinks + window": (False, each(window)),
    "subset": (False, each(ours, method="subset")),
    "subset + fit": (False, each(fitted)),
    "subset + fit, placed": (True, each(fitted)),
    "collapse + fit, placed": (True, each(ours)),
    "subset + fit, placed, layers share": (True, shared(fitted, "subset")),
    "collapse + fit, placed, layers share": (True, shared(ours, "collapse")),
}
ENCODER: dict[str, Callable[..., Cache]] = {
    "random": random,
    "sinks + window": window,
    "subset": partial(ours, method="subset"),
    "subset + fit": fitted,
    "collapse + fit": ours,
}


class Decoder:
    """SmolLM2 whose attention is kept while it reads a prefix, and goes over compact keys afterwards."""

    def __init__(self) -> None:
        loaded = models.load_model("smollm2")
        self.model, self.tokenizer = loaded.model.eval(), loaded.tokenizer
        self.seen: dict[int, tuple[Tensor, ...]] = {}
        self.caches: dict[int, Cache] | None = None
        AttentionInterface.register("compact", self.attention)
        self.model.set_attn_implementation("compact")

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        """What transformers calls in place of its attention."""
        if self.caches is None:
            self.seen[module.layer_idx] = query[0], key[0], value[0]
            output = xt.attend(query, key, value, causal=True).output
        else:
            k, v, b = self.caches[module.layer_idx]
            old = xt.attend(query, k[None], v[None], log_weight=b[None])
            output = xt.merge([old, xt.attend(query, key, value, causal=True)]).output
        return output.transpose(1, 2), None

    @torch.no_grad()
    def read(self, ids: Tensor, start: int = 0) -> Tensor:
        """Logits of tokens that begin at place `start`."""
        place = torch.arange(start, start + ids.shape[1])[None]
        out = self.model(input_ids=ids, position_ids=place, use_cache=False)
        return out.logits

    def placed(self, layer: int, query: Tensor) -> Tensor:
        """The queries of a layer at the places of later tokens."""
        return at_next_places(self.model, self.model.model.layers[layer].self_attn, query[None], NEXT)[0]

    def loss(self, ids: Tensor, caches: dict[int, Cache]) -> float:
        """Loss of the tokens after the prefix, over these caches."""
        self.caches = caches
        logits = self.read(ids[:, PREFIX : PREFIX + NEXT], PREFIX)[0, :-1]
        self.caches = None
        target = ids[0, PREFIX + 1 : PREFIX + NEXT]
        return float(torch.nn.functional.cross_entropy(logits, target))


class Encoder:
    """MiniLM whose layers attend to compact keys."""

    def __init__(self) -> None:
        loaded = models.load_model("minilm")
        self.model, self.tokenizer = loaded.model.eval(), loaded.tokenizer
        self.way: Callable[[Tensor, Tensor, Tensor], Cache] | None = None
        AttentionInterface.register("compact encoder", self.attention)
        self.model.set_attn_implementation("compact encoder")

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        """What transformers calls in place of its attention."""
        weight = None
        if self.way is not None:
            key, value, weight = (x[None] for x in self.way(key[0], value[0], query[0]))
        return xt.attend(query, key, value, log_weight=weight).output.transpose(1, 2), None

    @torch.no_grad()
    def embedding(self, text: str, way: Callable[[Tensor, Tensor, Tensor], Cache] | None) -> Tensor:
        """The mean of the last layer over 512 tokens."""
        self.way = way
        ids = self.tokenizer(text, return_tensors="pt").input_ids[:, :512]
        return self.model(input_ids=ids).last_hidden_state[0].mean(0)


def texts() -> dict[str, str]:
    """Real texts that are here anyway: Shakespeare, Python's manual, a page of the docs, licences."""
    from pydoc_data import topics

    manual = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    plays = models.read_text(models.default_folder() / "text.txt")
    found = {
        "Shakespeare": plays[:12000],
        "manual": manual[60000:90000],
        "Shakespeare, later": plays[12000:],
        "manual, later": manual[200000:230000],
    }
    found["theory page"] = (PAGE.parent / "theory.md").read_text("utf-8")[:30000]
    licence = Path(sysconfig.get_paths()["purelib"]) / "torch-2.13.0+cpu.dist-info"
    named = [
        p for p in licence.rglob("*") if p.is_file() and p.name.upper().startswith(("LICENSE", "NOTICE"))
    ]
    longest = max(named, key=lambda p: p.stat().st_size, default=None)
    if longest is not None:
        found["licences"] = longest.read_text("utf-8", "replace")[:30000]
    return found


def measure_decoder(ratios: tuple[int, ...], names: list[str], keep: Callable[[Any], None]) -> None:
    """Rows of SmolLM2, and the longest that each method took; given to `keep` after each text."""
    model, rows, seconds = Decoder(), [], {}
    for name in names:
        ids = model.tokenizer(texts()[name], return_tensors="pt").input_ids[:, : PREFIX + NEXT]
        started = time.process_time()
        model.read(ids[:, :PREFIX])
        forward = time.process_time() - started
        seen = [model.seen[i] for i in sorted(model.seen)]
        whole = model.loss(ids, dict(enumerate((k, v, k.new_zeros(k.shape[:2])) for _, k, v in seen)))
        print(f"{name}: loss {whole:.4f}, forward {forward:.1f} s", flush=True)
        for label, (placed, method) in METHODS.items():
            started = time.process_time()
            asked = [model.placed(i, q) if placed else q[:, -LAST:] for i, (q, *_) in enumerate(seen)]
            past = [(k, v, q) for q, (_, k, v) in zip(asked, seen, strict=True)]
            ready = time.process_time() - started
            for ratio in ratios:
                started = time.process_time() - ready
                caches = method(past, PREFIX // ratio)
                took = (time.process_time() - started) / forward
                gain = model.loss(ids, dict(enumerate(caches))) - whole
                rows.append({"text": name, "ratio": ratio, "method": label, "loss": whole, "increase": gain})
                seconds.setdefault(label, []).append(took)
                print(f"  {ratio:3d}x {label:38s} +{gain:.4f}   {took:.2f} forward passes", flush=True)
        keep({"rows": rows, "cost": {label: max(x) for label, x in seconds.items()}})


def measure_encoder(ratios: tuple[int, ...], names: list[str]) -> list[dict[str, Any]]:
    """Rows of MiniLM: how far compaction moves the embedding of a text, over its length."""
    model, rows = Encoder(), []
    for name in names:
        whole = model.embedding(texts()[name], None)
        for label, way in ENCODER.items():
            for ratio in ratios:
                found = model.embedding(texts()[name], partial(way, budget=512 // ratio))
                far = float((found - whole).norm() / whole.norm())
                rows.append({"text": name, "ratio": ratio, "method": label, "increase": far})
    return rows


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Mean increase in loss over the texts, by method and ratio, and the cost in forward passes."""
    rows = [
        [label, *(f"{x:.3f}" for x in found.values()), f"{results['cost'][label]:.2f}"]
        for label, found in means(results["rows"]).items()
    ]
    ratios = sorted({row["ratio"] for row in results["rows"]})
    return [f"nats a token, {texts_of(results)}", *(f"{ratio}×" for ratio in ratios), "forward passes"], rows


def encoder_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Mean distance of MiniLM's embedding over the texts, by method and ratio."""
    rows = [
        [label, *(f"{x:.3f}" for x in found.values())] for label, found in means(results["encoder"]).items()
    ]
    ratios = sorted({row["ratio"] for row in results["encoder"]})
    return ["change of the embedding", *(f"{ratio}×" for ratio in ratios)], rows


def texts_of(results: dict[str, Any]) -> str:
    count = len({row["text"] for row in results["rows"]})
    return f"{count} texts" if count > 1 else "1 text"


def means(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Mean increase over the texts, by method and ratio."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        found.setdefault(row["method"], {}).setdefault(row["ratio"], []).append(row["increase"])
    return {label: {n: sum(x) / len(x) for n, x in sorted(parts.items())} for label, parts in found.items()}


def paint(axes: Any, results: dict[str, Any]) -> None:
    """Increase in loss over the ratio, for some of the methods, mean over the texts."""
    from exptilt.report.figures import INK, SERIES

    looks = {
        "sinks + window": (INK, ":"),
        "subset": (INK, "--"),
        "subset + fit": (SERIES[1], ":"),
        "subset + fit, placed": (SERIES[1], "--"),
        "subset + fit, placed, layers share": (SERIES[1], "-"),
        "collapse + fit, placed": (SERIES[0], "--"),
        "collapse + fit, placed, layers share": (SERIES[0], "-"),
    }
    for label, (colour, style) in looks.items():
        x = means(results["rows"])[label]
        axes.plot(list(x), list(x.values()), style, marker="o", markersize=3.5, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xticks(list(RATIOS), [f"{n}×" for n in RATIOS])
    axes.minorticks_off()
    axes.set_xlabel("keys before, over keys after")
    axes.set_ylabel("increase in loss, nats a token")
    axes.legend(handlelength=4)


PICTURES = {"compaction": "Increase in loss by ratio of keys and method, mean over the texts"}
PARTS = (
    harness.Part(PAGE, "compaction", "compaction", table, PICTURES),
    harness.Part(PAGE, "compaction of an encoder", "compaction", encoder_table),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    ratios = (20,) if arguments.quick else RATIOS
    names = [name for name in texts() if name not in CHOSEN_ON][: 1 if arguments.quick else None]
    folder, encoder = harness.folder(arguments.quick), measure_encoder(ratios, names)
    kept: list[Path] = []

    def keep(found: Any) -> None:
        kept.append(harness.save("compaction", {**found, "encoder": encoder}, folder=folder))

    measure_decoder(ratios, names, keep)
    path = kept[-1]
    for shown in (table, encoder_table):
        harness.print_table(*shown(harness.read(path)))
    if not arguments.quick:
        harness.plot("compaction", lambda axes: paint(axes, harness.read(path)), folder=path.parent)
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
