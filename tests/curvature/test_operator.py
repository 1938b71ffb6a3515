"""Products of `Curvature` against dense matrices in float64."""

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from exptilt._support.errors import ArgumentError
from exptilt.curvature import Curvature
from oracles import curvature as oracle

V = 7


def shaken(model):
    """The model in float64 with weights that are far from special."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model.double().eval()


def batch(count, length, seed=0):
    ids = torch.randint(V, (count, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2():
    sizes = {"vocab_size": V, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 8, "n_inner": 6}
    config = tf.GPT2Config(**sizes, loss_type="ForCausalLM", bos_token_id=0, eos_token_id=0)
    return shaken(tf.GPT2LMHeadModel(config))


SMALL = {"vocab_size": V, "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def problem():
    model, data = gpt2(), [batch(2, 5), batch(1, 7, 1)]
    return model, data, oracle.matrices(model, data)


def vectors(count, columns=2, seed=0):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, wanted, within=1e-10):
    torch.testing.assert_close(found, wanted, rtol=0, atol=within * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", ["ggn", "hessian", "fisher", "empirical"])
def test_equals_the_dense_matrix_over_batches_of_several_sizes(problem, kind):
    model, data, dense = problem
    found = Curvature(model, "cross_entropy", data, kind)
    v = vectors(found.shape[0])
    assert found.objective.streamed
    assert found.items == 12
    assert "lm_head.weight is transformer.wte.weight" in repr(found)
    close(found @ v, dense["ggn" if kind == "fisher" else kind] @ v)


def test_gradient_and_slopes_of_sequences(problem):
    model, data, dense = problem
    found = Curvature(model, "cross_entropy", data)
    close(found.gradient(), dense["gradient"])
    v = vectors(found.shape[0], 1)[:, 0]
    slopes = found.slopes(v)
    assert slopes.shape == (3,)
    close(slopes.sum() / found.items, dense["gradient"] @ v)
    close(slopes.square().sum() / found.items, v @ dense["empirical"] @ v)


def test_forms_of_vectors(problem):
    model, data, dense = problem
    found = Curvature(model, "cross_entropy", data)
    v = vectors(found.shape[0], 1)[:, 0]
    wanted = dense["ggn"] @ v
    parts = oracle.unflat(model, v)
    by_name = found @ parts
    assert list(by_name) == list(parts)
    close(torch.cat([x.reshape(-1) for x in by_name.values()]), wanted)
    close(torch.cat([x.reshape(-1) for x in found @ list(parts.values())]), wanted)
    close(found.matvec(v), wanted)
    close(found.matmat(v[:, None])[:, 0], wanted)
    close(found.T @ v, wanted)
    close(found.adjoint() @ v.float().double(), wanted, 1e-6)
    operator = found.to_scipy()
    assert operator.dtype == np.float64
    close(torch.from_numpy(operator @ v.numpy()), wanted)
    close(torch.from_numpy(operator.H @ v.numpy()), wanted)


def test_a_restriction_is_a_diagonal_block(problem):
    model, data, dense = problem
    whole = Curvature(model, "cross_entropy", data)
    layers = whole.layers()
    assert list(layers) == ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.ln_f"]
    begin = 0
    for part in layers.values():
        here = slice(begin, begin + part.shape[0])
        v = vectors(part.shape[0], 1)
        close(part @ v, dense["ggn"][here, here] @ v)
        begin = here.stop
    assert begin == whole.shape[0]
    alias = whole.restrict("lm_head.weight")
    assert alias.parameters.names == ["transformer.wte.weight"]


def test_frozen_parameters_are_constants(problem):
    data = problem[1]
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    found = Curvature(model, "cross_entropy", data)
    keep = slice(model.transformer.wte.weight.numel(), None)
    v = vectors(found.shape[0], 1)
    close(found @ v, problem[2]["ggn"][keep, keep] @ v)
    assert "1 frozen" in repr(found)
    with pytest.raises(ArgumentError, match=r"'transformer.wte' picks only frozen parameters"):
        found.restrict("transformer.wte")
    with pytest.raises(ArgumentError, match=r"transformer.wte.weight of the vector is frozen"):
        found @ {"transformer.wte.weight": torch.zeros(V, 4)}


def test_bert_counts_masked_words_and_keeps_the_padding_row_constant():
    """Nothing is shifted; the embedding's padding row has no gradient in torch, and so no curvature."""
    config = tf.BertConfig(**SMALL, num_hidden_layers=1, max_position_embeddings=8, type_vocab_size=1)
    model = shaken(tf.BertForMaskedLM(config))
    data = [batch(2, 5)]
    data[0]["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    data[0]["labels"][1, 3:] = -100
    data[0]["input_ids"][1, 3:] = 0
    dense = oracle.matrices(model, data, shifted=False, hessian=False)
    for kind in ("ggn", "empirical"):
        found = Curvature(model, "cross_entropy", data, kind)
        assert found.objective.streamed
        assert not found.objective.shifted
        v = vectors(found.shape[0])
        close(found @ v, dense[kind] @ v)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_llamas_norms_are_float32_inside(kind):
    """Tied or not, with softcapped logits; these models round to float32 in every norm."""
    more = {"num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 2}
    if kind == "llama":
        model = shaken(tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, **more)))
    else:
        config = tf.Gemma2Config(**SMALL, **more, final_logit_softcapping=1.5)
        model = shaken(tf.Gemma2ForCausalLM(config))
    data = [batch(1, 5)]
    dense = oracle.matrices(model, data, hessian=False)
    for name in ("ggn", "empirical"):
        found = Curvature(model, "cross_entropy", data, name)
        assert found.objective.streamed
        v = vectors(found.shape[0], 1)
        close(found @ v, dense[name] @ v, 2e-5)


def test_a_classifier_has_one_label_a_text():
    config = tf.BertConfig(**SMALL, num_hidden_layers=1, max_position_embeddings=8, num_labels=3)
    model = shaken(tf.BertForSequenceClassification(config))
    data = [{"input_ids": batch(3, 5)["input_ids"], "labels": torch.tensor([0, 2, 1])}]
    found = Curvature(model, "cross_entropy", data, "hessian")
    model(**data[0]).loss.backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    close(found.gradient(), wanted, 1e-6)  # transformers takes its loss in float32
    assert found.items == 3
    assert not found.objective.streamed


def regression():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in (4, 3)]
    return model, data


def squares(output, batch):
    return (output - batch[1]).square()


def test_a_function_of_output_and_batch():
    model, data = regression()
    found = Curvature(model, squares, data)
    assert found.items == 14
    x, y = (torch.cat([b[i] for b in data]) for i in (0, 1))

    def outputs(w):
        return torch.func.functional_call(model, oracle.unflat(model, w), (x,))

    J = torch.autograd.functional.jacobian(outputs, oracle.flat(model)).flatten(0, 1)
    close(found.dense(), 2 * J.T @ J / 14)
    bend = torch.autograd.functional.hessian(lambda w: (outputs(w) - y).square().mean(), oracle.flat(model))
    close(Curvature(model, squares, data, "hessian").dense(), bend)
    by_row = (2 * (outputs(oracle.flat(model)) - y)[..., None] * J.view(7, 2, -1)).sum(1)
    close(Curvature(model, squares, data, "empirical").dense(), by_row.T @ by_row / 14)


def test_fisher_of_a_function_by_draws():
    """Gradients at labels that the model draws, the same ones in every product."""
    model, data = regression()

    def sample(output, batch, generator):
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        return batch[0], output + noise * 0.5**0.5

    found = Curvature(model, squares, data, "fisher", sample=sample, seed=3)
    wanted = torch.zeros(26, 26, dtype=torch.float64)
    for place, (x, _) in enumerate(data):
        drawn = sample(model(x), (x,), torch.Generator().manual_seed(3 + place))[1].detach()

        def losses(w, x=x, drawn=drawn):
            return (
                (torch.func.functional_call(model, oracle.unflat(model, w), (x,)) - drawn).square().flatten()
            )

        slopes = torch.autograd.functional.jacobian(losses, oracle.flat(model))
        wanted += slopes.T @ slopes / found.items
    close(found.dense(), wanted)


def test_bfloat16_and_float32_follow_float64(problem):
    _, data, dense = problem
    v = vectors(222, 1)
    for dtype, within in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        other = gpt2().to(dtype)
        found = Curvature(other, "cross_entropy", data)
        assert found.dtype == dtype
        product = found @ v
        assert product.dtype == torch.float64
        close(product, dense["ggn"] @ v, within)


def test_products_are_kept_and_taken_up_again(problem, tmp_path, monkeypatch):
    data, model = problem[1], gpt2()
    found = Curvature(model, "cross_entropy", data, checkpoint=tmp_path / "kept")
    v = vectors(222, 2)
    first = found @ v
    assert len(list((tmp_path / "kept").iterdir())) == 2
    again = Curvature(model, "cross_entropy", data, checkpoint=tmp_path / "kept")
    calls = []
    monkeypatch.setattr(again, "_one", lambda *_: calls.append(1))
    assert torch.equal(again @ v, first)
    assert not calls
    with torch.no_grad():
        model.transformer.ln_f.bias.add_(1.0)  # other weights: other products
    assert not torch.equal(Curvature(model, "cross_entropy", data, checkpoint=tmp_path / "kept") @ v, first)
    for path in (tmp_path / "kept").iterdir():
        path.write_bytes(b"no array")
    with pytest.raises(ArgumentError, match=r"is no product that was kept"):
        Curvature(model, "cross_entropy", data, checkpoint=tmp_path / "kept") @ v


def test_kept_products_are_those_of_the_same_loss_and_precision(tmp_path):
    """Two functions of one name, and a product under autocast, are not taken for each other's."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data, v = [(torch.randn(5, 3), torch.randn(5, 2))], torch.ones(26)

    def product(power, folder):
        loss = lambda output, batch: (output - batch[1]).abs().pow(power)  # noqa: E731
        return Curvature(model, loss, data, "hessian", checkpoint=folder) @ v

    wanted = [product(power, None) for power in (2.0, 3.0)]
    for power, exact in zip((2.0, 3.0), wanted, strict=True):
        torch.testing.assert_close(product(power, tmp_path), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(product(2.0, tmp_path), wanted[0])


SEQUENCES = {"pad_token_id": 0, "decoder_start_token_id": 2}


def encoder_decoder(kind):
    if kind == "bart":
        sizes = {"d_model": 4, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
        for side in ("encoder", "decoder"):
            sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 6}
        return tf.BartForConditionalGeneration(tf.BartConfig(vocab_size=V, **sizes, **SEQUENCES))
    sizes = {"d_model": 4, "d_kv": 2, "d_ff": 6, "num_layers": 1, "num_heads": 2, "eos_token_id": 1}
    return tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=V, **sizes, **SEQUENCES, tie_word_embeddings=kind == "t5, tied")
    )


@pytest.mark.parametrize("kind", ["bart", "t5", "t5, tied"])
def test_encoders_with_decoders(kind):
    """Labels make the decoder's input, are not shifted, and are of unequal number; T5's norms are float32."""
    model, data = shaken(encoder_decoder(kind)), []
    for count, length in ((2, 5), (1, 4)):
        ids = torch.randint(3, V, (count, length), generator=torch.Generator().manual_seed(length))
        mask, labels = torch.ones_like(ids), ids[:, :3].clone()
        mask[0, -1], labels[0, 1] = 0, -100
        data.append({"input_ids": ids, "attention_mask": mask, "labels": labels})

    def total():
        parts = []
        for item in data:
            logits = model(**item).logits.flatten(0, 1)
            parts.append(nn.functional.cross_entropy(logits, item["labels"].flatten(), reduction="none"))
        return torch.cat(parts).sum() / 7

    model.set_attn_implementation("eager")
    slopes = torch.autograd.grad(total(), list(model.parameters()), create_graph=True)
    v = vectors(sum(p.numel() for p in model.parameters()), 1)[:, 0]
    rows = torch.autograd.grad(torch.cat([x.reshape(-1) for x in slopes]) @ v, list(model.parameters()))
    model.set_attn_implementation("sdpa")
    found = Curvature(model, "cross_entropy", data, "hessian")
    assert found.items == 7
    assert found.objective.streamed
    close(found.gradient(), torch.cat([x.detach().reshape(-1) for x in slopes]), 1e-6)
    close(found @ v, torch.cat([x.reshape(-1) for x in rows]), 1e-10 if kind == "bart" else 1e-6)
    ggn, u = Curvature(model, "cross_entropy", data), vectors(len(v), 1, 1)[:, 0]
    assert float((u @ (ggn @ v) - v @ (ggn @ u)).abs()) < 1e-5 * float((v @ (ggn @ v)).abs())


@pytest.mark.parametrize("kind", ["ggn", "hessian", "empirical"])
def test_autocast_is_right_to_the_error_of_bfloat16(problem, kind):
    """No worse than twice a model that is bfloat16 throughout, and in the dtype of the weights."""
    _, data, dense = problem
    v = vectors(222, 1)[:, 0]
    wanted = dense[kind] @ v
    found = Curvature(gpt2().float(), "cross_entropy", data, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = found @ v.float()
    rough = Curvature(gpt2().bfloat16(), "cross_entropy", data, kind) @ v
    assert product.dtype == torch.float32
    assert not torch.equal(product, found @ v.float())
    assert (product.double() - wanted).norm() < 2 * (rough - wanted).norm()


def test_a_compiled_model_is_taken_as_it_was_before():
    model = shaken(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True))
    x, y = torch.randn(2, 2, 3, 4).double()
    v = vectors(sum(p.numel() for p in model.parameters()), 1)[:, 0]

    def product(model):
        return Curvature(model, lambda output, batch: (output - batch[1]).square(), [(x, y)], "hessian") @ v

    torch.testing.assert_close(product(torch.compile(model, backend="eager")), product(model))


class OnlyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


class Custom(nn.Module):
    def forward(self, x):
        return OnlyBackward.apply(x)


def test_a_part_without_a_derivative_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Custom()), nn.Linear(3, 2)).double()
    data = [(torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0]))]
    for kind in ("ggn", "hessian"):
        found = Curvature(model, "cross_entropy", data, kind)
        with pytest.raises(ArgumentError, match=r"1\.0 \(Custom\) has no derivative"):
            found @ torch.ones(20, dtype=torch.float64)
    assert not model[1][0]._forward_hooks


class Overflows(nn.Module):
    def forward(self, x):
        return (x * 1e200).exp()


def test_not_a_number_is_traced_to_its_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Overflows()), nn.Linear(3, 2)).double()
    data = [(torch.ones(4, 3).double(), torch.tensor([0, 1, 1, 0]))]
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    found = Curvature(model, "cross_entropy", data)
    with pytest.raises(ArgumentError, match=r"first in 0\.weight; module 1\.0 returns NaN"):
        found @ torch.ones(20, dtype=torch.float64)
