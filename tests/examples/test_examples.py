"""Examples run, and print nothing absurd."""

import importlib.util
import re
import runpy
import types
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import exptilt as xt

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


TOUR = EXAMPLES / "tour.ipynb"


def run_notebook(path):
    """The cells of a notebook, run where it lies."""
    book = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells), "clear the outputs before committing"
    where = {"metadata": {"path": str(path.parent)}}
    return NotebookClient(book, timeout=600, kernel_name="python3", resources=where).execute()


def printed(name, capsys):
    """The lines that an example prints, among them numbers, and none that is absurd."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"\d\.\d", said)
    assert not re.search(r"\b(nan|inf)\b", said)
    return said.splitlines()


@pytest.mark.parametrize("name", ["maximum_entropy", "tilting_measures"])
def test_an_example_prints_numbers(name, capsys):
    assert printed(name, capsys)


@pytest.mark.slow
def test_the_tour_runs():
    book = run_notebook(TOUR)
    shown = [
        output
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    assert len(shown) >= 5


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it measures for minutes: run it by hand")
def test_the_notebook_for_a_gpu_runs_as_far_as_it_goes_without_one():
    cells = [cell for cell in run_notebook(EXAMPLES / "gpu.ipynb").cells if cell.cell_type == "code"]
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "No GPU that torch can use was found; nothing was measured." in said
    assert "exit code 1" in said
    assert said.endswith("There is no file to send.\n")


def test_the_flow_to_equilibrium(capsys):
    header, *lines = printed("flow_to_equilibrium", capsys)
    assert header.startswith("renormaliser")
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert (counts["sphere"], counts["whiten"]) == (1, 5)
    assert counts["batch"] < 5


@pytest.mark.slow
def test_laps_on_an_oval(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nascar.py"])
    own, chain = printed("nascar", capsys)
    likelihood = [float(line.split("likelihood ")[1].split(",")[0]) for line in (own, chain)]
    assert likelihood[0] > likelihood[1] + 20
    assert all(int(line.split("right ")[1].split()[0]) > 95 for line in (own, chain))


def test_the_turning_target(capsys):
    lines = printed("turning_target", capsys)
    assert [line.split(":")[0] for line in lines] == ["extended", "unscented"]
    assert all(float(line.split("worst ")[1].split(";")[0]) < 1.0 for line in lines)


def test_the_manoeuvring_target(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["manoeuvring_target.py", str(tmp_path / "picture.png")])
    error, mode = printed("manoeuvring_target", capsys)
    filtered, measured = (float(word) for word in error.replace(",", "").split() if word[0].isdigit())
    assert filtered < 0.7 * measured
    assert int(mode.split(" in ")[1].split("%")[0]) > 70
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"),
    [("mean_flow", 25), ("energy_transformer", 15), ("forces", 30), ("learn_at_test_time", 15)],
)
def test_training_through_derivatives_gets_better(name, steps, capsys, tmp_path):
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    gained = main(["--steps", str(steps), "--picture", str(tmp_path / "picture.png")])
    assert gained > 0.01
    assert (tmp_path / "picture.png").stat().st_size > 5_000
    assert re.search(r"\d\.\d", capsys.readouterr().out)


def test_forces_do_not_depend_on_where_the_cluster_is():
    """Turned and moved, the energy stays and forces turn; they are those of small steps."""
    forces = runpy.run_path(str(EXAMPLES / "forces.py"))
    torch.manual_seed(0)
    model, x = forces["Potential"]().double(), torch.randn(2, 5, 3, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    energy, force = forces["forces"](model, x.clone())
    moved, pushed = forces["forces"](model, x @ turn.mT + 3)
    torch.testing.assert_close(moved, energy)
    torch.testing.assert_close(pushed, force @ turn.mT)
    step = torch.randn_like(x)
    slope = (model(x + 1e-5 * step) - model(x - 1e-5 * step)) / 2e-5
    torch.testing.assert_close(slope, -(force * step).sum((1, 2)), rtol=1e-5, atol=1e-7)


def test_patches_of_digits_come_back():
    for name in ("mean_flow", "energy_transformer"):
        example = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        digits = torch.randn(3, 8, 8)
        tokens = example["patches"](digits)
        assert tokens.shape == (3, 16, 4)
        assert torch.equal(tokens[:, 0], digits[:, :2, :2].flatten(1))
        assert torch.equal(example["images"](tokens), digits)


@pytest.mark.slow
def test_mean_flow_compiled_and_under_autocast():
    """Compiled, the loss and its gradient are the same; autocast changes them by bfloat16's digits."""
    example = runpy.run_path(str(EXAMPLES / "mean_flow.py"))
    torch.manual_seed(0)
    model, x, digit = example["Velocity"](layers=1), torch.randn(4, 16, 4), torch.arange(4)

    def run(loss, bits=False):
        torch.manual_seed(1)
        with xt.differentiable(model), torch.autocast("cpu", torch.bfloat16, enabled=bits):
            value = loss(model, x, digit)
        return value.detach(), torch.autograd.grad(value, model.write.weight)[0]

    eager = run(example["loss"])
    torch.testing.assert_close(run(torch.compile(example["loss"], backend="aot_eager")), eager)
    torch.testing.assert_close(run(example["loss"], bits=True), eager, rtol=0.05, atol=0.01)


@pytest.mark.slow
def test_torch_does_not_compile_two_derivatives():
    """As the page says; when torch learns it, the page is to change."""
    example = runpy.run_path(str(EXAMPLES / "energy_transformer.py"))
    model = example["Energy"](layers=1, dropout=0.0)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        example["loss"](compiled, *torch.randn(2, 2, 8, 4)).backward()


PRESS = EXAMPLES / "kvpress_collapse.py"


def small_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15)
    return LlamaForCausalLM(config).eval()


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is not None, reason="kvpress is installed")
def test_the_press_says_that_kvpress_is_missing():
    with pytest.raises(SystemExit, match=r"pip install kvpress.*transformers below 5\.3"):
        runpy.run_path(str(PRESS))


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
def test_the_press_runs_in_kvpress():
    from transformers import AttentionInterface

    example, model = runpy.run_path(str(PRESS)), small_llama()
    ids = torch.randint(60, (1, example["PROMPT"] + 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits[0, example["PROMPT"] : -1]
    want = float(torch.nn.functional.cross_entropy(logits, ids[0, example["PROMPT"] + 1 :]))
    AttentionInterface.register("with log-weights", example["attention"])
    model.set_attn_implementation("with log-weights")
    found = [example["measure"](model, ids, example["CollapsePress"](x)) for x in (0.0, 0.5, 0.95)]
    assert [held for held, _ in found] == [example["PROMPT"], 256, 26]
    assert abs(found[0][1] - want) < 1e-4
    assert abs(found[1][1] - want) < 0.1


def test_what_the_press_leaves_answers_like_compact_keys(monkeypatch):
    """Its attention adds the log-weights, with a stand-in for kvpress, which only calls `compress`."""
    names = ("BasePress", "KnormPress", "StreamingLLMPress")
    stand_in = types.SimpleNamespace(**dict.fromkeys(names, object))
    monkeypatch.setitem(__import__("sys").modules, "kvpress", stand_in)
    example, model = runpy.run_path(str(PRESS)), small_llama()
    module = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 90, 8, generator=generator) for n in (4, 2, 2))
    example["attention"](module, q, k, v, None, scaling=module.scaling)
    press = example["CollapsePress"](0.9)
    press.post_init_from_model(model)
    keys, values = press.compress(module, None, k, v, None, {})
    assert keys.shape == (1, 2, 9, 8)
    new = [torch.randn(1, n, 5, 8, generator=generator) for n in (4, 2, 2)]
    joined = [torch.cat([x, y], -2) for x, y in ((keys, new[1]), (values, new[2]))]
    found = example["attention"](module, new[0], *joined, None, scaling=module.scaling)[0]
    queries = example["at_next_places"](model, module, q, example["NEXT"])
    want = xt.compact(k, v, 9, queries, scale=module.scaling).with_fresh(*new).output
    torch.testing.assert_close(found.transpose(1, 2), want)
