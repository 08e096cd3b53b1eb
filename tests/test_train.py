"""The recipe behind pocket/: resumable, and the same under torchrun."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gpt_bounded_cache
from gpt_bounded_cache import BCTConfig
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from llama_kv_cache import Llama
from load_gpt2_weights import load_model, load_tokenizer
from pocket import batches, checkpoints, corpus, evaluation, recipes, starts, train, training
from pocket.recipes import RECIPES, Phase, Recipe
from pocket.tokenizer import TOKENIZER, VOCABULARY, train_tokenizer
from tests.helpers import ROOT, process, run
from tests.test_equivalence import randomize

TINY = Recipe(
    config=GPTConfig(vocab_size=VOCABULARY, n_ctx=64, n_layer=2, n_head=2, n_embd=48, head_dim=16),
    phases=(
        Phase(steps=3, documents=0, lists=4, context=32, lr=1e-3),
        Phase(steps=3, documents=2, lists=1, context=64, lr=1e-3, answers=5.0),
        Phase(steps=2, documents=1, lists=0, context=64, lr=5e-4, shuffled=1),
    ),
    documents=10,
    warmup=2,
)
PLAIN = GPTConfig(vocab_size=VOCABULARY, n_ctx=32, n_layer=2, n_head=3, n_embd=24)
CPU = torch.device("cpu")


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    """A folder with a small random model."""
    torch.manual_seed(0)
    model = GPT(PLAIN)
    randomize(model)
    checkpoints.export(model, tmp_path / "teacher")
    return str(tmp_path / "teacher")


def recipe_of(name: str, teacher: str, steps: int = 3, recent: int = 3) -> Recipe:
    """The recipe of a shipped model, for one that begins as the small teacher."""
    config = recipes.narrowed(PLAIN)
    if name == "bct":
        config = BCTConfig(**vars(PLAIN), slots=5, recent=recent)
    phase = Phase(steps, 3, 0, PLAIN.n_ctx, 1e-3, shuffled=1, answers=4.0)
    changes = {"init": teacher, "config": config, "phases": (phase,)}
    return replace(RECIPES[name], documents=10, warmup=2, **changes)


def models_at_start(recipe: Recipe) -> tuple[nn.Module, nn.Module]:
    """The model as training begins, and its teacher."""
    return starts.initial_models(recipe, batches.Corpus(recipe), CPU)


def ids_of(B: int, T: int) -> Tensor:
    return torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(0))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


# --- Runs


def test_a_run_that_was_interrupted_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole_model, whole = training.train(TINY, tmp_path / "whole")
    _, losses = training.train(TINY, tmp_path / "parts", stop_at=5)
    assert len(losses) == 5
    model, losses = training.train(TINY, tmp_path / "parts")
    assert losses == whole and len(losses) == 8
    assert_same(model, whole_model)
    assert [p.name for p in (tmp_path / "parts").iterdir()] == ["last.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bct", "student"])
def test_fine_tuning_learns_and_goes_on_to_the_same_end(
    name: str, teacher: str, tmp_path: Path
) -> None:
    recipe = recipe_of(name, teacher, 60)
    model, losses = training.train(recipe, tmp_path / "whole")
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    training.train(recipe, tmp_path / "parts", stop_at=7)
    again, same = training.train(recipe, tmp_path / "parts")
    assert same == losses
    assert_same(model, again)


def test_a_run_of_another_recipe_or_from_other_weights_is_refused(
    teacher: str, tmp_path: Path
) -> None:
    recipe = recipe_of("bct", teacher)
    training.train(recipe, tmp_path, stop_at=1)
    with pytest.raises(ValueError, match="another recipe"):
        training.train(replace(recipe, documents=9), tmp_path)
    model = load_model(teacher, model_class=GPT)
    model.wte.weight.data[0, 0] += 1
    checkpoints.export(model, Path(teacher))
    with pytest.raises(ValueError, match="other weights"):
        training.train(recipe, tmp_path)


def test_a_trained_model_gets_its_files(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("bct", teacher)
    model, losses = training.train(recipe, tmp_path / "run")
    monkeypatch.setattr(checkpoints, "measure", lambda *_: {"perplexity": 1.0})  # takes minutes
    made = tmp_path / "made"
    checkpoints.finish(recipe, model, losses, made)
    written = {"config.json", "figures.json", "loss.png", "model.safetensors", "tokenizer.tiktoken"}
    assert {path.name for path in made.iterdir()} == written
    assert load_model(str(made), model_class=recipe.model_class).config == recipe.config
    words = ("--memory", "bct", "--model", made, "--max-new-tokens", 9)
    assert run(gpt_bounded_cache.main, *words).code == 0  # the script of the lecture reads it


TWO_PROCESSES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from tests.test_train import recipe_of, training
training.train(recipe_of("bct", sys.argv[2], 5), Path(sys.argv[3]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_as_one_does(teacher: str, tmp_path: Path) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    words = [script, ROOT, teacher, tmp_path / "two"]
    done = process(sys.executable, *torchrun, *words, folder=tmp_path)
    assert done.code == 0, done.err
    _, one = training.train(recipe_of("bct", teacher, 5), tmp_path / "one")
    two = torch.load(tmp_path / "two" / "last.pt")["losses"]
    assert one == pytest.approx(two, rel=1e-2)  # bf16; after a step the gradients of both count


# --- Batches and phases


# sha256 of rates and batches: with another one the shipped models could not be made again.
PINNED = {
    "teacher": "3749e5999376d82da448c7ffc8f56780f08c1e290a25079bbe7d74cac1826390",
    "bct": "de72430c20370fbc57decf3a42a00b4a50811d4b19d4e3ed6919060ad58c11f3",
    "student": "5fb549d6e2439dfbb7134fde3f11fb6bc258c09cd9113107acac01018cd71512",
    "student-prompt": "866ad0bcfbfd131b03700a5cd1bbe9565bf633e110c95e9a35afa09228d6a41e",
    "student-alone": "6c8107dbeab67b313d1f4ca47970764e80c85f18f96d30580b7492b3e577b6f4",
}
STEPS = (0, 1, 2, 3, 499, 500, 2904, 2905, 10504)


@pytest.fixture(scope="module")
def text() -> batches.Corpus:
    return batches.Corpus(replace(recipes.TEACHER, documents=400))


@pytest.mark.parametrize("name", PINNED)
def test_the_batches_of_shipped_models_are_pinned(name: str, text: batches.Corpus) -> None:
    recipe = RECIPES[name]
    steps = len(recipes.schedule(recipe))
    digest = hashlib.sha256()
    for step in [*(step for step in STEPS if step < steps), steps - 1]:
        batch = batches.batch_at(recipe, step, text)
        share = (batch.weights / batch.weights.max()).round(decimals=3)
        for part in (batch.rows, batch.before, batch.segments, share):
            digest.update(part.contiguous().numpy().tobytes())
        digest.update(f"{recipes.schedule(recipe)[step].lr:.9f}".encode())
    assert digest.hexdigest() == PINNED[name]


def test_every_second_step_reads_on_after_another_text(teacher: str) -> None:
    recipe = recipe_of("bct", teacher)
    model, plain = models_at_start(recipe)
    text, read = batches.Corpus(recipe), []
    model.register_forward_pre_hook(
        lambda _, inputs: read.append((inputs[0], torch.is_grad_enabled()))
    )
    for step in range(2):
        recipe.losses(model, plain, batches.batch_at(recipe, step, text))
    assert [learns for _, learns in read] == [True, False, True]
    (before, _), (rows, _) = read[1:]
    assert torch.equal(before, rows.roll(1, dims=0)[:, -before.size(1) :])


# --- Models as they begin


@pytest.mark.parametrize("name", ["teacher", "llama"])
def test_training_starts_from_an_induction_circuit(name: str) -> None:
    model, _ = starts.initial_models(RECIPES[name], None, CPU)
    words = torch.randperm(1500)[:40]
    with torch.no_grad():
        logits = model(torch.cat([words, words])[None])[0, 40:-1]
    better = (logits > logits.gather(1, words[1:, None])).sum(1)  # than the right next token
    assert better.float().median() < 50  # by chance: 768


def test_a_distillation_starts_as_its_teacher(teacher: str) -> None:
    model, plain = models_at_start(recipe_of("bct", teacher, recent=32))
    ids = ids_of(3, 32)
    assert not any(parameter.requires_grad for parameter in plain.parameters())  # frozen
    with torch.no_grad():  # as long as no token leaves the recent ones
        torch.testing.assert_close(model(ids), plain(ids), atol=1e-4, rtol=1e-4)


def test_a_student_keeps_the_heads_and_the_most_active_of_the_rest(teacher: str) -> None:
    plain = load_model(teacher, model_class=GPT)
    loud, quiet = list(range(3, 19)), [0, 1, 2, *range(19, 24)]
    with torch.no_grad():  # of the hidden dimensions 8 hardly show, of layer 1's neurons 40
        for block in plain.h:
            for norm in (block.ln_1, block.ln_2):
                norm.weight[quiet], norm.bias[quiet] = 1e-3, 0.0
        plain.h[1].mlp.c_fc.weight[:, :40], plain.h[1].mlp.c_fc.bias[:40] = 0.0, -20.0
    student = starts.prune(plain, recipes.narrowed(PLAIN), ids_of(4, 32)).h[1]
    for part, expected in [
        (student.attn.c_attn, plain.h[1].attn.c_attn.weight[loud]),
        (student.mlp.c_proj, plain.h[1].mlp.c_proj.weight[40:, loud]),
    ]:
        assert torch.equal(part.weight, expected)
    assert_same(starts.prune(plain, PLAIN, ids_of(4, 32)), plain)  # nothing is cut


def test_a_student_reads_the_teachers_cache_up_to_its_segment(teacher: str) -> None:
    model, plain = models_at_start(recipe_of("student", teacher))
    model.eval()
    ids = ids_of(2, 32)
    start = torch.stack([torch.arange(32) // 8 * 8, torch.arange(32) * 0])
    cache = KVCache()
    tolerance = {"atol": 1e-4, "rtol": 1e-4}
    with torch.no_grad():
        plain(ids, cache)
        logits = model(ids, recipes.SegmentCache(cache, start))
        torch.testing.assert_close(logits[1], model(ids)[1], **tolerance)  # its own cache only
        for t in (0, 7, 8, 20, 31):  # one token at a time, on what a refresh leaves
            taken_over = cache.clone()
            taken_over.truncate(t // 8 * 8)
            taken_over.layers = [kv[:, :1] for kv in taken_over.layers]
            expected = model(ids[:1, t // 8 * 8 : t + 1], taken_over)[0, -1]
            torch.testing.assert_close(logits[0, t], expected, **tolerance)


# --- Figures and files


@pytest.mark.slow
def test_answers_agrees_with_greedy_decoding() -> None:
    model, tokenizer = load_model("pocket"), load_tokenizer("pocket")
    questions = corpus.recall_questions("valid", 12) + corpus.closed_book_questions("valid")[::60]
    _, right = evaluation.score_answers(model, tokenizer, questions)
    for question, is_right in zip(questions, right, strict=True):
        ids = torch.tensor([tokenizer.encode_ordinary(question.prompt)])
        written = tokenizer.decode([*map(int, generate(model, ids, 20))])
        line = written.partition("<|endoftext|>")[0].partition("\n")[0]
        assert is_right == (line == f" {question.answer}")


def test_export_writes_what_load_model_reads(tmp_path: Path) -> None:
    config = GPTConfig(**vars(PLAIN) | {"n_embd": 20, "n_inner": 24})
    for model in (GPT(config), Llama(recipes.LLAMA.config)):
        checkpoints.export(model, tmp_path)
        loaded = load_model(str(tmp_path))
        assert loaded.config == model.config
        assert_same(model.half().float(), loaded)


@pytest.mark.slow
def test_the_shipped_tokenizer_is_the_one_that_the_corpus_gives(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    train_tokenizer(tmp_path / "tokenizer.tiktoken")
    assert (tmp_path / "tokenizer.tiktoken").read_bytes() == TOKENIZER.read_bytes()


@pytest.mark.parametrize(
    ("content", "end"), [({"losses": [0.5] * 1000}, -300), ({"recipe": Path}, None), ([1], None)]
)
def test_a_damaged_state_is_noticed(content: object, end: int | None, tmp_path: Path) -> None:
    file = tmp_path / "last.pt"
    torch.save(content, file)
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ValueError, match="last.pt is damaged"):
        training.train(TINY, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_the_command_trains_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = []
    monkeypatch.setattr(train, "train", lambda *_: (nn.Linear(1, 1), []))
    monkeypatch.setattr(train, "finish", lambda recipe, *rest: finished.append((recipe, rest[-1])))
    for words, name in [
        ("llama", "llama"),
        ("bct", "bct"),
        ("bct --rule sum", "bct-sum"),
        ("student --kind prompt", "student-prompt"),
    ]:
        assert run(train.main, *words.split(), "--out", tmp_path).code == 0
        assert finished.pop() == (RECIPES[name], tmp_path)
    ran = run(train.main, "llama", "--rule", "sum")  # makes no sense
    assert ran.code == 2 and "--rule" in ran.err.splitlines()[-1]
