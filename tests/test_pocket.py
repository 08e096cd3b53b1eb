"""The models that come along: small, readable by others, and able to do what their cards say."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch

from gpt_bounded_cache import BoundedMemory
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus, evaluation
from pocket.recipes import RECIPES, schedule
from support.files import read_json
from tests.helpers import N_CTX, ROOT

FOLDER = ROOT / "pocket"
SHIPPED = [name for name in RECIPES if name != "bct-sum"]


def shipped_model(name: str) -> torch.nn.Module:
    """The shipped model of a folder, in the class of its recipe."""
    return load_model(str(FOLDER / name), model_class=RECIPES[name].model_class)


def figures_of(name: str) -> dict:
    return read_json(FOLDER / name / "figures.json")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pocket")


@pytest.mark.parametrize("name", ["teacher", "llama"])
def test_transformers_computes_the_same(name: str, tokenizer) -> None:
    model_class = pytest.importorskip("transformers").AutoModelForCausalLM
    reference = model_class.from_pretrained(FOLDER / name, dtype=torch.float32).eval()
    model = shipped_model(name)
    ids = torch.tensor([tokenizer.encode_ordinary(corpus.document("test", 0).text)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_are_those_of_their_recipes_figures_and_cards(name: str) -> None:
    recipe, model, figures = RECIPES[name], shipped_model(name), figures_of(name)
    assert model.config == replace(recipe.config, dropout=0.0)
    config = read_json(FOLDER / name / "config.json")
    assert config.get("resid_pdrop", 0.0) == recipe.config.dropout
    card = (FOLDER / name / "README.md").read_text()
    steps = schedule(recipe)
    tokens = sum(step.phase.rows * step.phase.context for step in steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for said in (
        f"{len(steps):,} steps",
        f"{tokens / 1e6:.1f} million",
        f"{parameters:,} parameters",
    ):
        assert said in card
    ways = [way for way in ("full", "bct", "window", "sinks", "student") if way in figures]
    columns = [figures[way] for way in ways] or [figures]
    if name == "llama":
        columns.insert(0, figures_of("teacher"))
    for figure in columns[0]:
        cells = " | ".join(f"{column[figure]:.4f}" for column in columns)
        assert f"| {figure} | {cells} |\n" in card
    if name == "bct":
        equal_bytes = evaluation.window_of_equal_bytes(model.config)
        assert [figures[way]["tokens"] for way in ("window", "sinks")] == [equal_bytes] * 2
    if "kl" in figures:
        assert " | ".join(f"{nats:.3f}" for nats in figures["kl"].values()) in card
    names = {"README.md", "config.json", "figures.json", "loss.png", "model.safetensors"}
    extra_names = {"teacher": {"tokenizer.tiktoken"}, "bct": {"ablation.json"}}.get(name, set())
    assert {path.name for path in (FOLDER / name).iterdir()} == names | extra_names


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_recorded_figures_are_those_of_the_weights(name: str, tokenizer) -> None:
    """All texts of a figure, but not all figures: of every model what it makes of lists, and each other kind of one."""
    model, recorded = shipped_model(name), figures_of(name)
    figures = recorded.get("student", recorded.get("bct", recorded))
    lists = evaluation.list_losses(model, tokenizer)
    expected = [figures["list_first_nats"], figures["list_second_nats"]]
    assert lists == pytest.approx(expected, rel=1e-2)
    if name == "llama":
        perplexity = evaluation.perplexity(model, tokenizer, "test")
        assert perplexity == pytest.approx(figures["perplexity"], rel=1e-3)
    if name == "teacher":
        questions = corpus.recall_questions("test", 300)
        _, right = evaluation.score_answers(model, tokenizer, questions)
        assert fmean(right) == pytest.approx(figures["recall_share"], abs=0.01)
    if name == "student":
        teacher, way = load_model("pocket"), {"every 16": 16}
        nats = evaluation.divergences(teacher, model, tokenizer, way)["every 16"]
        assert nats == pytest.approx(recorded["kl"]["every 16"], rel=1e-2)


@pytest.mark.slow
def test_a_bct_goes_on_past_the_context_as_well_as_before(tokenizer) -> None:
    ids = torch.tensor(evaluation.held_out_rows(tokenizer, 50, 4 * N_CTX)[:2])
    with torch.no_grad():
        logits = shipped_model("bct")(ids[:, :-1], BoundedMemory()).transpose(1, 2)
    nats = torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
    assert nats[:, 2 * N_CTX :].mean() < nats[:, :N_CTX].mean() + 0.2
