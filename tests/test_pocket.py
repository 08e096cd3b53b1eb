"""The model that comes along: small, readable by others, and able to do what its card says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt_bounded_cache import BCT
from gpt_kv_cache import GPT, GPTConfig, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import cards, corpus, evaluation, recipes, rope
from pocket.pruning import Student
from pocket.recipes import Recipe

FOLDER = Path(__file__).resolve().parent.parent / "pocket" / "teacher"
FIGURES = json.loads((FOLDER / "figures.json").read_text())


@pytest.fixture(scope="module")
def model() -> GPT:
    return load_model("pocket", model_class=GPT)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pocket")


def test_files_are_small_and_complete() -> None:
    names = {
        "README.md",
        "config.json",
        "figures.json",
        "loss.png",
        "model.safetensors",
        "tokenizer.tiktoken",
    }
    assert {path.name for path in FOLDER.iterdir()} == names
    assert (FOLDER / "model.safetensors").stat().st_size < 8_000_000


def test_transformers_computes_the_same_logits(model: GPT, tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(FOLDER, dtype=torch.float32).eval()
    text = corpus.document("test", 0).text
    ids = torch.tensor([tokenizer.encode_ordinary(text)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    new = theirs.generate(
        ids[:, :20], max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert [int(token) for token in generate(model, ids[:, :20], 60)] == new[0, 20:].tolist()


@pytest.mark.parametrize(
    "text", ["", "plain", "naïve café", "日本語 😀", "\x00\n\t  \r", "<|endoftext|>"]
)
def test_any_text_round_trips(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text


def test_end_of_text_is_the_last_token(tokenizer, model: GPT) -> None:
    assert tokenizer.encode("<|endoftext|>", allowed_special="all") == [model.config.vocab_size - 1]


def test_gates_hold_for_what_was_recorded() -> None:
    assert evaluation.failed_gates("teacher", FIGURES) == []


@pytest.mark.slow
def test_recorded_figures_are_those_of_the_weights(model: GPT, tokenizer) -> None:
    closed_book = corpus.closed_book_questions("test")[::6]
    nats, share = evaluation.answers(model, tokenizer, closed_book)
    assert share > 0.9 and nats < 2 * FIGURES["closed_book_nats"] + 0.1
    documents = [(d.text + "<|endoftext|>", "") for d in corpus.documents("test", 60)]
    nats, _ = evaluation.continuation_loss(model, tokenizer, documents)
    assert torch.tensor(nats).exp().item() == pytest.approx(FIGURES["perplexity"], rel=0.1)
    first, second = evaluation.continuation_loss(
        model, tokenizer, corpus.repeated_lists("test", 20)
    )
    assert first == pytest.approx(FIGURES["list_first_nats"], rel=0.2) and second < 0.2 * first


def test_names_come_from_the_prompt(model: GPT, tokenizer) -> None:
    """Change a name in the prompt: the text that follows must change with it, or a KV cache would carry nothing."""
    for old, new in (("Halek", "Zanav"), ("Belessa", "Noroth")):
        prompt = "Everyone in Tolben knew Halek and his sister Belessa. Halek carried a brass lantern for"
        texts = []
        for name in (old, new):
            ids = torch.tensor([tokenizer.encode_ordinary(prompt.replace(old, name))])
            texts.append(
                tokenizer.decode(
                    [int(t) for t in generate(model, ids, 120, stop_id=tokenizer.eot_token)]
                )
            )
        assert old in texts[0] and new in texts[1] and old not in texts[1]


def test_the_teacher_s_card_is_that_of_its_recipe_and_figures() -> None:
    card, (_, tokens) = (FOLDER / "README.md").read_text(), recipes.size_of(recipes.TEACHER)
    stories = cards.quoted(json.loads(cards.EARLIER.read_text())["stories"])
    parts = [*cards.tables(recipes.TEACHER, FIGURES), f"{tokens / 1e6:.1f} million tokens", stories]
    assert all(part in card for part in parts)


def test_the_models_are_small_enough_and_trained_no_shorter_than_the_first(model: GPT) -> None:
    assert sum(path.stat().st_size for path in FOLDER.parent.glob("*/model.safetensors")) <= 40e6
    steps = {"bct": 4000, "rotary": 2500, "student": 3000, "student-dropout": 600}
    rows = {"bct": 4, "rotary": 5}  # of 512 tokens in each step
    for name in OTHERS:
        n = steps.get(name, 3000)
        assert recipes.size_of(recipe_of(name, model.config)) >= (n, n * 512 * rows.get(name, 4))


def test_the_last_third_of_a_fine_tuning_reads_long_rows() -> None:
    config = replace(GPTConfig(), n_ctx=1280)
    for steps, long in ((300, 100), (2, 0), (3, 1)):
        phases = recipes.phases_of(config, steps, 1e-3, 4.0)
        assert [p.steps for p in phases] == [steps - long, long][: 1 + (long > 0)]
        assert [p.context for p in phases] == [512, 1280][: 1 + (long > 0)]
    (short,) = recipes.phases_of(replace(config, n_ctx=64), 300, 1e-3, 4.0)
    assert (short.steps, short.context) == (300, 64)


OTHERS = [
    "bct",
    "rotary",
    *("student" if kind == recipes.KINDS[0] else f"student-{kind}" for kind in recipes.KINDS),
]


def recipe_of(name: str, plain: GPTConfig) -> Recipe:
    """The recipe of a shipped model that was made from the teacher."""
    what, _, kind = name.partition("-")
    steps = recipes.STEPS.get(name, recipes.STEPS[what])
    if what == "student":
        return recipes.pruning("pocket", plain, steps, kind or recipes.KINDS[0])
    return (
        recipes.rotary_recipe("pocket", plain, steps)
        if what == "rotary"
        else recipes.distillation("pocket", plain, steps, **recipes.MEMORY)
    )


@pytest.mark.parametrize("name", OTHERS)
def test_models_made_from_it_are_those_of_their_recipes_figures_and_cards(
    name: str, model: GPT
) -> None:
    recipe, folder = recipe_of(name, model.config), FOLDER.parent / name
    made = load_model(f"pocket-{name}", model_class={"bct": BCT, "rotary": rope.GPT}.get(name, GPT))
    figures = json.loads((folder / "figures.json").read_text())
    assert made.config == replace(recipe.config, dropout=0.0)
    assert json.loads((folder / "config.json").read_text())["resid_pdrop"] == recipe.config.dropout
    assert evaluation.failed_gates(recipe.kind, figures) == []
    assert cards.card(recipe, made, figures) == (folder / "README.md").read_text()
    assert cards.earlier(recipe) and not cards.earlier(replace(recipe, phases=recipe.phases[:1]))
    names = {"README.md", "config.json", "figures.json", "loss.png", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} - {"ablation.json"} == names


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS[1:])
def test_recorded_figures_are_those_of_the_models_made_from_it(
    name: str, model: GPT, tokenizer
) -> None:
    figures = json.loads((FOLDER.parent / name / "figures.json").read_text())
    if name == "rotary":
        made = load_model("pocket-rotary", model_class=rope.GPT)
        documents = [(d.text + "<|endoftext|>", "") for d in corpus.documents("test", 300)]
        nats, _ = evaluation.continuation_loss(made, tokenizer, documents)
        assert math.exp(nats) == pytest.approx(figures["rotary"]["perplexity"], rel=1e-3)
    else:
        student = Student(load_model(f"pocket-{name}", model_class=GPT).config).eval()
        student.load_state_dict(load_model(f"pocket-{name}", model_class=GPT).state_dict())
        assert evaluation.divergences(model, student, tokenizer) == pytest.approx(
            figures["kl"], rel=1e-2
        )
