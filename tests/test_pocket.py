"""The models that come along: small, readable by others, and able to do what their cards say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt_bounded_cache import BCT
from gpt_kv_cache import GPT, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import cards, corpus, evaluation, recipes
from pocket.pruning import Student
from pocket.recipes import Recipe

FOLDER = Path(__file__).resolve().parent.parent / "pocket"
STUDENTS = ["student", *(f"student-{kind}" for kind in recipes.KINDS[1:])]
OTHERS = ["bct", "llama", *STUDENTS]
CLASSES = {"bct": BCT, "llama": None}


def made(name: str) -> torch.nn.Module:
    """The shipped model of a folder, in the class of its recipe."""
    return load_model(str(FOLDER / name), model_class=CLASSES.get(name, GPT))


def figures_of(name: str) -> dict:
    return json.loads((FOLDER / name / "figures.json").read_text())


def recipe_of(name: str) -> Recipe:
    """The recipe of a shipped model."""
    what, _, kind = name.partition("-")
    plain = recipes.TEACHER.config
    if name == "teacher":
        return recipes.TEACHER
    if what == "student":
        return recipes.pruning("pocket", plain, None, kind or recipes.KINDS[0])
    if what == "llama":
        return recipes.uptraining(plain)
    return recipes.distillation("pocket", plain, **recipes.MEMORY)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pocket")


@pytest.mark.parametrize("name", ["pocket", "pocket-llama"])
def test_transformers_computes_the_same(name: str, tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    folder = FOLDER / name.removeprefix("pocket-").replace("pocket", "teacher")
    auto = transformers.AutoModelForCausalLM
    theirs, model = auto.from_pretrained(folder, dtype=torch.float32).eval(), load_model(name)
    ids = torch.tensor([tokenizer.encode_ordinary(corpus.document("test", 0).text)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-3, rtol=1e-4)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    new = theirs.generate(ids[:, :20], max_new_tokens=60, **options)
    ours = generate(model, ids[:, :20], 60)
    assert [int(token) for token in ours] == new[0, 20:].tolist()


@pytest.mark.parametrize("name", ["pocket", "pocket-llama"])
def test_names_come_from_the_prompt(name: str, tokenizer) -> None:
    """Change a name in the prompt: the text that follows must change with it, or a KV cache would carry nothing."""
    prompt = (
        "Everyone in Tolben knew Halek and his sister Belessa. Halek carried a brass lantern for"
    )
    texts = []
    for person in ("Halek", "Zanav"):
        ids = torch.tensor([tokenizer.encode_ordinary(prompt.replace("Halek", person))])
        new = generate(load_model(name), ids, 120, stop_id=tokenizer.eot_token)
        texts.append(tokenizer.decode([int(t) for t in new]))
    assert "Halek" in texts[0] and "Zanav" in texts[1] and "Halek" not in texts[1]


def test_the_models_are_small_enough() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*/model.safetensors")) <= 40e6


@pytest.mark.parametrize("name", ["teacher", *OTHERS])
def test_shipped_models_are_those_of_their_recipes_figures_and_cards(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, model, figures = recipe_of(name), made(name), figures_of(name)
    config = json.loads((FOLDER / name / "config.json").read_text())
    assert model.config == replace(recipe.config, dropout=0.0)
    assert config.get("resid_pdrop", 0.0) == recipe.config.dropout
    assert evaluation.failed_gates(recipe, figures) == []
    card = (FOLDER / name / "README.md").read_text()
    if name == "teacher":  # what it writes takes a minute to write
        monkeypatch.setattr(cards, "written", lambda *_, **options: "\0")
        for part in cards.card(recipe, model, figures).split("\0"):
            assert part in card
    else:
        assert cards.card(recipe, model, figures) == card
    names = {"README.md", "config.json", "figures.json", "loss.png", "model.safetensors"}
    more = {"teacher": {"tokenizer.tiktoken"}, "bct": {"ablation.json"}}.get(name, set())
    assert {path.name for path in (FOLDER / name).iterdir()} == names | more


@pytest.mark.slow
@pytest.mark.parametrize("name", ["teacher", "llama"])
def test_recorded_figures_are_those_of_the_weights(name: str, tokenizer) -> None:
    model, figures = made(name), figures_of(name)
    found = evaluation.perplexity(model, tokenizer, "test")
    assert found == pytest.approx(figures["perplexity"], rel=1e-3)
    _, share = evaluation.answers(model, tokenizer, corpus.recall_questions("test", 300))
    assert share == pytest.approx(figures["recall_share"], abs=0.01)
    lists = evaluation.list_losses(model, tokenizer, "test")
    expected = (figures["list_first_nats"], figures["list_second_nats"])
    assert lists == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDENTS)
def test_recorded_divergences_are_those_of_the_students(name: str, tokenizer) -> None:
    student = Student(made(name).config).eval()
    student.load_state_dict(made(name).state_dict())
    found = evaluation.divergences(load_model("pocket"), student, tokenizer)
    assert found == pytest.approx(figures_of(name)["kl"], rel=1e-2)
