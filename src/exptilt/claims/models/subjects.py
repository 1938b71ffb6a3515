r"""Measurements of trained models, and of a control with random weights for each.

A `Profile` holds all numbers that the questions need of one model, as trained or of the same architecture
with weights drawn anew. Profiles of models that do not come with the package are kept
in ``kept/models.json`` (made by ``python examples/profile_models.py``), so that the ledger has a column for
each.

Numbers of weights alone (x is what the attention module reads, a row):

    symmetry      ‖sym M‖²/‖M‖² of M = W_q W_k', ½ for a random matrix
    definiteness  the positive part of M's spectrum
    alignment     cosine of W_v W_o and W_k W_q': of what a head writes and where its own G grows (F3)
    tied          cosine of an MLP's W_out and W_in': 1 for a classical Hopfield layer (C5)

Each comes as a z-score against the same number of permuted heads, that is W_q of one head with W_k of
another of the same layer, or of permuted neurons.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt.claims.ledger import MODEL
from exptilt.claims.mixing import forward_exists
from exptilt.lens import models, study
from exptilt.lens.questions.hidden_states import cloud

CHECKPOINTS = (0, 256, 1024, 4096)  # of the model that comes with the package
KEPT = Path(__file__).parent / "kept" / "models.json"
HEADS = (
    "log_normalizer_variation",
    "normalizer_cv",
    "link_r2",
    "gaussian_r2",
    "local_gaussian_r2",
    "gaussian_output_error",
    "local_gaussian_output_error",
    "ascent_cosine",
    "ascent_gain",
)
LAYERS = ("kurtosis", "gaussian_p", "hidden_norm", "attention_expansion", "mlp_expansion")
WINDOWS = (2, 3, 4, 6)  # numbers of tokens for which forward transitions are tested


@dataclass(frozen=True)
class Profile:
    """Numbers of one model.

    Attributes:
        model: its name.
        weights: "trained", "random" or the step of a checkpoint.
        heads: for each number, lists by layer of values by head; None for a missing value.
        layers: for each number, a list with a value for each layer or place between layers.
        values: single numbers.
    """

    model: str
    weights: str
    heads: dict[str, list[list[float | None]]]
    layers: dict[str, list[float | None]]
    values: dict[str, float | None]

    def head(self, name: str) -> np.ndarray:
        """One number for every head in a row, without missing values; a single NaN if all are missing."""
        return _row(self.heads.get(name))

    def layer(self, name: str) -> np.ndarray:
        """One number for every layer, without missing values; a single NaN if all are missing."""
        return _row(self.layers.get(name))

    def value(self, name: str) -> float:
        """A single number; NaN if there is none."""
        found = self.values.get(name)
        return np.nan if found is None else found


def _row(given: Any) -> np.ndarray:
    row = np.array([] if given is None else given, dtype=float).ravel()
    row = row[np.isfinite(row)]
    return row if len(row) else np.full(1, np.nan)


@lru_cache(maxsize=8)
def profile(model: str, weights: str, tokens: int, seed: int) -> Profile:
    """The profile of a model or of its control, computed once for each."""
    with models.quiet():
        net, tokenizer, texts = _load(model, weights, seed)
        return measure(model, weights, net, tokenizer, texts, tokens, seed)


def measure(
    name: str, weights: str, net: nn.Module, tokenizer: Any, texts: Sequence[str], tokens: int, seed: int
) -> Profile:
    """The profile of a loaded model."""
    found = study(net, tokenizer, list(texts), name=name, max_tokens=tokens, seed=seed, progress=False)
    heads = {key: _plain(found.heads[key].value) for key in HEADS}
    layers = {key: _plain(found.layers[key].value) for key in LAYERS}
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    with torch.no_grad():
        heads |= {key: _plain(value) for key, value in _of_weights(net).items()}
        heads["mixed"] = _plain(_mixed(net, ids, seed))
        layers["tied_z"] = _plain(np.array(_tied(net)))
        values = {"vocabulary_sd": _vocabulary(net, ids, tokens)} | _forward_shares(net, ids)
        values["mixed_drawn"] = float(np.median(_mixed(net, ids, seed, drawn=True)))
    return Profile(name, weights, heads, layers, values)


@lru_cache(maxsize=2)
def over_training(model: str, seed: int, tokens: int = 2048) -> dict[int, tuple[float, np.ndarray]]:
    """Distance of hidden states from a Gaussian, and cosines of W_v W_o and W_k W_q', by training step.

    The distance is the sliced Anderson–Darling statistic, mean of layers; there is a cosine for every head.
    Empty for models that have no checkpoints.
    """
    found = {}
    for step in CHECKPOINTS if model == MODEL else ():
        with models.quiet(), torch.no_grad():
            net, tokenizer, texts = _load(model, "trained" if step == CHECKPOINTS[-1] else str(step), seed)
            ids = torch.tensor(tokenizer(texts[0])["input_ids"][:tokens]).view(-1, 128)
            places = net(ids, output_hidden_states=True).hidden_states
            far = np.mean([cloud(place.flatten(0, 1)).sliced for place in places])
            found[step] = float(far), _of_weights(net)["alignment"].ravel()
    return found


def _mixed(
    net: nn.Module, ids: Sequence[Tensor], seed: int, *, drawn: bool = False, tokens: int = 256
) -> np.ndarray:
    """Residual of keys as affine mixes of their 16 nearest, over that of Gaussian keys, ``(layer, head)``.

    The Gaussian keys have the same mean and covariance. Keys are taken before any rotation by place; with
    `drawn` they come from a W_k drawn anew, which reads the same hidden states.
    """
    seen: list[list[Tensor]] = []
    hooks, generator = [], torch.Generator().manual_seed(seed)
    for module in net.modules():
        if (got := _attention(module)) is not None:
            W = got[1]
            if drawn:
                W = torch.randn(W.shape, dtype=W.dtype, generator=generator)

            def note(_: Any, given: Any, named: Any, K: Tensor = W) -> None:
                x = (given[0] if given else named["hidden_states"])[0].double()
                seen[-1].append(x @ K)

            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    left = tokens
    for text in ids:
        if left > 0:
            seen.append([])
            net(text[:left][None])
            left -= len(text)
    for hook in hooks:
        hook.remove()
    generator.manual_seed(seed)

    def ratio(x: Tensor) -> float:
        mixing = torch.randn(len(x), len(x), dtype=x.dtype, generator=generator) / len(x) ** 0.5
        return _left_by_neighbours(x) / _left_by_neighbours(mixing @ (x - x.mean(0)))

    layers = [torch.cat(parts, 1) for parts in zip(*seen, strict=True)]
    return np.array([[ratio(x) for x in layer] for layer in layers])


def _left_by_neighbours(x: Tensor, count: int = 16) -> float:
    """Residual of points ``(N, D)`` after the best affine mix of near ones, as a share of their variance."""
    distance = torch.cdist(x, x).fill_diagonal_(torch.inf)
    off = x[distance.topk(count, largest=False).indices] - x[:, None]
    gram = off @ off.mT
    ridge = 1e-3 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] + 1e-300
    w = torch.linalg.solve(gram + ridge * torch.eye(count, dtype=x.dtype), torch.ones_like(off[..., :1]))
    left = ((w / w.sum(1, keepdim=True)) * off).sum(1)
    return float(left.square().sum() / (x - x.mean(0)).square().sum())


def kept() -> list[Profile]:
    """The profiles that come with the package."""
    return (
        [Profile(**one) for one in json.loads(KEPT.read_text("utf-8"))["profiles"]] if KEPT.is_file() else []
    )


def _plain(value: Any) -> Any:
    """Nested lists, None for what is not a number."""
    if value is None:
        return []
    values = np.asarray(value, dtype=float)
    found = values.astype(object)
    found[~np.isfinite(values)] = None
    return found.tolist()


def _load(model: str, weights: str, seed: int) -> tuple[nn.Module, Any, list[str]]:
    """A model, its tokenizer and the texts that it reads."""
    folder = models.default_folder()
    series = dict(models.find_checkpoints([folder])) if model == MODEL else {}
    step = int(weights) if weights.isdigit() else CHECKPOINTS[-1]
    try:
        loaded = models.load_model(series.get(step, model))
    except ArgumentError as problem:  # download= is an argument of `load_model` only
        raise ArgumentError(str(problem).replace(" Pass download=True to fetch it.", "")) from None
    net = redrawn(loaded.model, seed) if weights == "random" else loaded.model
    return net, loaded.tokenizer, [models.read_text(folder / "text.txt")]


def redrawn(net: nn.Module, seed: int) -> nn.Module:
    """A model of the same architecture with random weights."""
    torch.manual_seed(seed)
    made: Any = type(net)
    return cast(nn.Module, made(deepcopy(net.config)).eval())


def _vocabulary(net: nn.Module, ids: Sequence[Tensor], tokens: int, window: int = 128) -> float | None:
    """Standard deviation over contexts of log Z of the output softmax; None without an output over words."""
    found = []
    for text in ids:
        for part in text[:tokens].split(window):
            scores = getattr(net(part[None]), "logits", None)
            if scores is None or scores.ndim != 3:
                return None
            found.append(torch.logsumexp(scores[0, 1:].double(), -1))
    return float(torch.cat(found).std())


def _forward_shares(net: Any, ids: Sequence[Tensor], windows: int = 20) -> dict[str, float | None]:
    """Share of heads, over short windows of text, that have a forward transition with a uniform message."""
    before = net.config._attn_implementation
    shares: dict[str, float | None] = {}
    text = torch.cat([one[1:-1] for one in ids])
    net.set_attn_implementation("eager")
    for n in WINDOWS:
        starts = torch.linspace(0, len(text) - n, windows).long()
        given = text[starts[:, None] + torch.arange(n)]
        layers = net(given, output_attentions=True).attentions
        found = [forward_exists(B) for layer in layers for B in layer.flatten(0, 1).double().numpy()]
        shares[f"forward_{n}"] = float(np.mean(found))
    net.set_attn_implementation(before)
    return shares


def _pieces(module: Any) -> list[Tensor] | None:
    """W_q, W_k, W_v ``(head, width, D)`` and W_o ``(head, D, width)`` of an attention module, else None."""
    rows = {
        name: part.weight
        for name, part in module.named_modules()
        if isinstance(getattr(part, "weight", None), Tensor)
    }
    if "c_attn" in rows:  # GPT-2: columns
        width, heads = module.embed_dim, module.num_heads
        q, k, v = (w.mT for w in rows["c_attn"].split(width, 1))
        o = rows["c_proj"].mT
    else:
        sets = (
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            ("query", "key", "value", "dense"),
            ("self.query", "self.key", "self.value", "output.dense"),
        )
        names = next((some for some in sets if all(name in rows for name in some)), None)
        if names is None:
            return None
        q, k, v, o = (rows[name] for name in names)
        heads = len(q) // _head_dim(module)
    D = len(q) // heads
    q, k, v = (w.double().unflatten(0, (-1, D)).mT for w in (q, k, v))
    k, v = (w.repeat_interleave(heads // len(w), 0) for w in (k, v))
    return [q, k, v, o.double().mT.unflatten(0, (heads, D))]


def _attention(module: nn.Module) -> list[Tensor] | None:
    """The matrices of `_pieces` if this is an attention module, else None."""
    return _pieces(module) if type(module).__name__.endswith("Attention") else None


def _head_dim(module: Any) -> int:
    for part in (module, getattr(module, "self", module)):
        for name in ("head_dim", "attention_head_size"):
            if isinstance(found := getattr(part, name, None), int):
                return found
    return 1


def _symmetric(q: Tensor, k: Tensor) -> Tensor:
    """Symmetric share of W_q W_k', ``(...)``, from factors ``(..., width, D)``, without the large matrix."""
    across = q.mT @ k
    size = ((q.mT @ q) * (k.mT @ k)).sum((-2, -1))
    return 0.5 + 0.5 * (across * across.mT).sum((-2, -1)) / size


def _definite(q: Tensor, k: Tensor) -> Tensor:
    """Positive part of the spectrum of the symmetric part of W_q W_k'."""
    D = q.shape[-1]
    R = torch.linalg.qr(torch.cat([q, k], -1)).R
    half = R[..., :D] @ R[..., D:].mT
    values = torch.linalg.eigvalsh((half + half.mT) / 2)
    part: Tensor = values.clamp_min(0).sum(-1) / values.abs().sum(-1)
    return part


def _aligned(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """Cosine of W_v W_o and W_k W_q', all heads against all, ``(head of v and o, head of q and k)``."""
    dot = torch.einsum("awd,bwe->abde", v, k) * torch.einsum("adw,bwe->abde", o, q)
    sizes = [((a.mT @ a) * (b.mT @ b)).sum((-2, -1)).sqrt() for a, b in ((v, o.mT), (k, q))]
    return dot.sum((-2, -1)) / (sizes[0][:, None] * sizes[1])


def _score(table: Tensor) -> Tensor:
    """Entries on the diagonal ``(head,)``, less the mean of the others, over their standard deviation."""
    others = table[~torch.eye(len(table), dtype=torch.bool)]
    return (table.diagonal() - others.mean()) / others.std()


def _of_weights(net: nn.Module) -> dict[str, np.ndarray]:
    found: dict[str, list[Tensor]] = {}
    for got in filter(None, map(_attention, net.modules())):
        q, k, v, o = got
        pairs = [
            torch.stack([f(q, k.roll(-n, 0)) for n in range(len(q))], 1) for f in (_symmetric, _definite)
        ]
        # Column n pairs head a with head a + n: the first is the head itself.
        for name, table in zip(("symmetry", "definiteness"), pairs, strict=True):
            others = table[:, 1:]
            found.setdefault(name, []).append(table[:, 0])
            found.setdefault(f"{name}_z", []).append((table[:, 0] - others.mean()) / others.std())
        table = _aligned(q, k, v, o)
        found.setdefault("alignment", []).append(table.diagonal())
        found.setdefault("alignment_z", []).append(_score(table))
    return {name: torch.stack(rows).numpy() for name, rows in found.items()}


def _tied(net: nn.Module, draws: int = 16) -> list[float]:
    """Inner product of each MLP's W_out and W_in', in standard deviations over permuted neurons."""
    kinds = (
        ("c_fc", "c_proj"),
        ("up_proj", "down_proj"),
        ("ffn", "ffn_output"),
        ("intermediate.dense", "output.dense"),
    )
    scores, generator = [], torch.Generator().manual_seed(0)
    for module in net.modules():
        for into, out in kinds:
            try:
                a, b = (cast(Tensor, module.get_submodule(name).weight) for name in (into, out))
            except AttributeError:
                continue
            if a.ndim != 2 or a.shape != b.mT.shape or a.shape[0] == a.shape[1]:
                continue
            a, b = (a, b.mT) if a.shape[0] > a.shape[1] else (a.mT, b)  # (neuron, width)
            orders = [torch.randperm(len(a), generator=generator) for _ in range(draws)]
            others = torch.stack([(a[order] * b).sum() for order in orders])
            scores.append(float(((a * b).sum() - others.mean()) / others.std()))
    return scores
