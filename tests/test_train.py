"""The recipe behind pocket/: resumable, the same under torchrun, and refusing to keep a model that can't copy."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gpt_bounded_cache
from gpt_bounded_cache import BCT
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from llama_kv_cache import rotate, rotation
from load_gpt2_weights import load_model, load_tokenizer, read_tokenizer
from pocket import (
    batches,
    checkpoints,
    conversion,
    corpus,
    evaluation,
    pruning,
    recipes,
    starts,
    train,
    training,
)
from pocket.recipes import Phase, Recipe
from pocket.tokenizer import TOKENIZER, VOCABULARY, train_tokenizer
from support.statistics import kl
from tests.test_equivalence import randomize

ROOT = Path(__file__).resolve().parent.parent
TINY = Recipe(
    config=GPTConfig(vocab_size=VOCABULARY, n_ctx=64, n_layer=2, n_head=2, n_embd=48, head_dim=16),
    phases=(
        Phase(steps=3, documents=0, lists=4, context=32, lr=1e-3),
        Phase(steps=3, documents=2, lists=1, context=64, lr=1e-3, answers=5.0),
        Phase(steps=2, documents=1, lists=0, context=64, lr=5e-4, shuffled=1),
    ),
    documents=50,
    warmup=2,
)
PLAIN = GPTConfig(vocab_size=VOCABULARY, n_ctx=32, n_layer=2, n_head=3, n_embd=24)
MEMORY = {"slots": 5, "recent": 3}
CPU = torch.device("cpu")


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    """A folder with a small random model and the tokenizer of pocket."""
    torch.manual_seed(0)
    model = GPT(PLAIN)
    randomize(model)
    checkpoints.export(model, tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.tiktoken").write_bytes(TOKENIZER.read_bytes())
    return str(tmp_path / "teacher")


def recipe_of(what: str, teacher: str, steps: int = 3, **options: object) -> Recipe:
    """A recipe that makes something of the small teacher."""
    if what == "bct":
        recipe = recipes.distillation(teacher, PLAIN, steps, **options)
    elif what == "llama":
        recipe = replace(recipes.uptraining(PLAIN, steps), init=teacher)
    else:
        recipe = recipes.pruning(teacher, PLAIN, steps, what)
    return replace(recipe, documents=60, warmup=2)


def begun(recipe: Recipe) -> tuple[nn.Module, nn.Module]:
    """The model as training begins, and its teacher."""
    return starts.start(recipe, batches.text_of(recipe), CPU)


def ids_of(B: int, T: int) -> Tensor:
    return torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(0))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


# --- Runs


def test_a_run_that_was_interrupted_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole_model, whole = training.train(TINY, tmp_path / "whole")
    for stop in (2, 5):
        _, losses = training.train(TINY, tmp_path / "parts", stop_at=stop)
        assert len(losses) == stop
    model, losses = training.train(TINY, tmp_path / "parts")
    assert losses == whole and len(losses) == 8
    assert_same(model, whole_model)
    assert [p.name for p in (tmp_path / "parts").iterdir()] == ["last.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bct", "llama", *recipes.KINDS])
def test_fine_tuning_learns_and_goes_on_to_the_same_end(
    what: str, teacher: str, tmp_path: Path
) -> None:
    recipe = recipe_of(what, teacher, 60, **(MEMORY if what == "bct" else {}))
    model, losses = training.train(recipe, tmp_path / "whole")
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    if what != "dropout":  # whose draws go on from where they are
        training.train(recipe, tmp_path / "parts", stop_at=7)
        again, same = training.train(recipe, tmp_path / "parts")
        assert same == losses
        assert_same(model, again)
    assert not any(p.requires_grad for p in begun(recipe)[1].parameters())


def test_a_run_of_another_recipe_or_from_other_weights_is_refused(
    teacher: str, tmp_path: Path
) -> None:
    recipe = recipe_of("bct", teacher, **MEMORY)
    training.train(recipe, tmp_path, stop_at=1)
    with pytest.raises(ValueError, match="another recipe"):
        training.train(replace(recipe, documents=59), tmp_path)
    model = load_model(teacher, model_class=GPT)
    model.wte.weight.data[0, 0] += 1
    checkpoints.export(model, Path(teacher))
    with pytest.raises(ValueError, match="other weights"):
        training.train(recipe, tmp_path)


def test_more_processes_than_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training, "world_size", lambda: 3)
    with pytest.raises(ValueError, match="3 processes .* 2 rows"):
        training.train(TINY, tmp_path)


COMMANDS = {"bct": [], "bct-sum": ["--rule", "sum"], "student": []}


def command_of(what: str, teacher: str, folder: Path, out: str) -> list[str]:
    """What one runs on GPT-2's own weights: WHAT --init gpt2 --text FILE."""
    texts = [d.text for d in corpus.documents("train", 20)]
    (folder / "text.txt").write_text("<|endoftext|>".join(texts))
    command = [what.removesuffix("-sum"), *COMMANDS[what], "--init", teacher, "--steps", "5"]
    return [*command, "--text", str(folder / "text.txt"), "--out", str(folder / out)]


@pytest.mark.parametrize("what", COMMANDS)
def test_the_command_changes_any_model_on_any_text(
    what: str, teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train.main(command_of(what, teacher, tmp_path, "one"))
    made = tmp_path / "one"
    files = ["config.json", "loss.png", "model.safetensors", "run", "tokenizer.tiktoken"]
    assert sorted(path.name for path in made.iterdir()) == files
    assert load_tokenizer(str(made)).n_vocab == VOCABULARY
    config = load_model(str(made), model_class=GPT if what == "student" else BCT).config
    if what == "student":
        assert (config.n_embd, config.n_head, config.head_dim) == (16, 3, 8)
        return
    memory = (config.slots, config.recent, config.rule)
    assert memory == ((32, 0, "sum") if what == "bct-sum" else (24, 8, "mean"))
    page = tmp_path / "steps.html"
    words = ["--model", str(made), "--max-new-tokens", "9", "--trace", str(page)]
    gpt_bounded_cache.main(["--memory", "bct", *words])  # the script of the lecture reads it
    assert "KV cache" in capsys.readouterr().out and page.exists()


@pytest.mark.slow
@pytest.mark.parametrize("what", COMMANDS)
def test_the_command_runs_under_torchrun_too(what: str, teacher: str, tmp_path: Path) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    script = str(ROOT / "pocket" / "train.py")
    command = [sys.executable, *torchrun, script, *command_of(what, teacher, tmp_path, "two")]
    subprocess.run(command, check=True, timeout=300, capture_output=True, cwd=tmp_path)
    train.main(command_of(what, teacher, tmp_path, "one"))
    runs = [torch.load(tmp_path / name / "run" / "last.pt") for name in ("one", "two")]
    one, two = (run["losses"] for run in runs)
    assert one == pytest.approx(two, rel=1e-2)  # bf16; after a step the gradients of both count


def one_sentence(argv: list[str], capsys: pytest.CaptureFixture) -> str:
    """What the command line says as it refuses."""
    with pytest.raises(SystemExit, match="2"):
        train.main(argv)
    *bars, message = capsys.readouterr().err.splitlines()
    assert all("corpus:" in bar or not bar for bar in bars)  # of progress
    return message


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("bct --kind alone", "--kind"),
        ("bct --steps 5", "--out FOLDER is needed"),
        ("llama --init gpt2", "--init"),
    ],
)
def test_command_line_refuses_what_makes_no_sense(
    argv: str, said: str, capsys: pytest.CaptureFixture
) -> None:
    assert said in one_sentence(argv.split(), capsys)


def test_a_text_that_is_too_short_is_refused(
    teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text("Too short.")
    out = ["--out", str(tmp_path / "x")]
    argv = ["bct", "--init", teacher, "--text", str(tmp_path / "text.txt"), *out]
    assert "a row of 32 doesn't fit" in one_sentence(argv, capsys)
    assert not (tmp_path / "x").exists()


@pytest.fixture
def no_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail as soon as the corpus is read, which takes a minute."""
    monkeypatch.setattr(corpus, "documents", lambda *_: pytest.fail("the corpus was read"))


@pytest.mark.parametrize("damage", ["text", "cut", "code", "list"])
def test_a_damaged_state_is_noticed_first(
    damage: str, tmp_path: Path, no_corpus: None, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "run" / "last.pt"
    file.parent.mkdir()
    torch.save({"code": {"recipe": Path}, "list": [1]}.get(damage, {"losses": [0.5] * 1000}), file)
    content = file.read_bytes()
    content = {"text": b"not a state", "cut": content[:-300]}.get(damage, content)
    file.write_bytes(content)
    assert str(file) in one_sentence(["teacher", "--out", str(tmp_path)], capsys)
    assert file.read_bytes() == content and [*tmp_path.rglob("*.pt")] == [file]


# --- Batches and phases


def test_answers_weigh_what_the_phase_says() -> None:
    tokenizer = read_tokenizer(TOKENIZER)
    text = batches.Corpus(20, tokenizer)
    phase = Phase(steps=1, documents=5, lists=0, context=64, lr=0, answers=10.0)
    rows, weights = text.batch(phase, torch.Generator().manual_seed(0))
    assert weights.unique().tolist() == [1.0, 10.0]
    for row, row_weights in zip(rows, weights, strict=True):
        heavy = tokenizer.decode(row[1:][row_weights > 1].tolist())
        told = tokenizer.decode(row.tolist()).replace("<|endoftext|>", "").split("Answer:")[1:]
        assert heavy == "".join(answer[: answer.find("\n") + 1 or None] for answer in told)
    everything = "<|endoftext|>".join(d.text for d in corpus.documents("train", 20))
    whole = [*tokenizer.encode(everything, allowed_special="all"), tokenizer.eot_token]
    assert text.tokens.tolist() == whole  # cut by lines, or whole


def test_shuffled_rows_keep_nothing_but_which_tokens_are_the_same() -> None:
    text = batches.Corpus(20, recipes.TEACHER.tokenizer)
    plain = Phase(steps=1, documents=4, lists=0, context=64, lr=0, answers=5.0)
    rows, _ = text.batch(plain, torch.Generator().manual_seed(0))
    half = replace(plain, documents=1, shuffled=3)
    shuffled, weights = text.batch(half, torch.Generator().manual_seed(0))
    assert torch.equal(shuffled[0], rows[0]) and (weights[1:] == 1).all()
    for before, after in zip(rows[1:], shuffled[1:], strict=True):
        assert torch.equal(before[:, None] == before, after[:, None] == after)
        assert 0.2 < (before != after).float().mean() < 0.8
    assert (rows[1:] == shuffled[1:]).sum(0).float().var() > 0  # not the same half in every row


def test_lists_are_known_the_second_time_only() -> None:
    phase = Phase(steps=1, documents=0, lists=6, context=64, lr=0)
    rows, known = batches.lists_batch(phase, 10_000, 0.7, torch.Generator().manual_seed(0))
    assert rows.shape == (6, 65) and known.shape == (6, 64) and known.unique().tolist() == [0, 1]
    for row, mask in zip(rows.tolist(), known.tolist(), strict=True):
        assert sum(mask) > 10
        for t, is_known in enumerate(mask):
            if is_known:  # seen before after the same token
                assert (row[t], row[t + 1]) in pairwise(row[: t + 1])


def test_segments_are_those_between_two_refreshes() -> None:
    generator = torch.Generator().manual_seed(0)
    at, strides = torch.arange(512), set()
    start, counts = batches.segment_starts("segments", 200, 512, generator)
    assert counts.eq(1).all() and (start <= at).all() and start.diff(dim=1).ge(0).all()
    for row in start:
        lengths = row.unique()[1:].diff().unique().tolist()
        assert len(lengths) <= 1  # all but the first and the last are as long
        strides |= {*lengths}
    assert strides == {4, 8, 16, 32, 64, 128, 256}  # of 512: one boundary, as in "prompt"
    start, counts = batches.segment_starts("prompt", 50, 512, generator)
    first = start.max(dim=1, keepdim=True).values
    assert torch.equal(start, torch.where(at < first, 0, first))
    assert torch.equal(counts, (at >= first).float())
    start, counts = batches.segment_starts("alone", 3, 16, generator)
    assert not start.any() and counts.all()


def test_every_second_step_reads_on_after_another_text(teacher: str) -> None:
    recipe = recipe_of("bct", teacher, **MEMORY)
    model, plain = begun(recipe)
    text = batches.text_of(recipe)
    read: list[tuple[Tensor, bool]] = []
    model.register_forward_pre_hook(
        lambda module, inputs: read.append((inputs[0], torch.is_grad_enabled()))
    )
    for step in range(2):
        training.loss_at(recipe, step, model, text, CPU, plain)
    (_, first_grad), (before, before_grad), (rows, rows_grad) = read
    assert first_grad and rows_grad and not before_grad
    assert rows.shape == (4, 32) and 1 <= before.size(1) < 32
    assert torch.equal(before, rows.roll(1, dims=0)[:, -before.size(1) :])


def test_learning_rate_rises_and_falls_in_every_course() -> None:
    course = Phase(steps=6, documents=1, lists=0, context=8, lr=2.0)
    phases = (course, replace(course, context=16), replace(course, steps=5, lr=1.0))
    courses = replace(TINY, phases=phases)
    rates = [recipes.learning_rate(courses, step) for step in range(17)]
    assert rates[0] == 1.0 and rates[1] == max(rates)
    assert rates[1:12] == sorted(rates[1:12], reverse=True) and 0.2 < rates[11] < 0.25
    assert rates[12] == 0.5 and rates[13] == max(rates[12:])
    uptraining = replace(recipes.uptraining(recipes.TEACHER.config, 9), warmup=2)
    rates = [1e3 * recipes.learning_rate(uptraining, step) for step in range(9)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3])


# --- Models as they begin


def test_training_starts_from_an_induction_circuit() -> None:
    torch.manual_seed(0)
    model = GPT(recipes.TEACHER.config)
    starts.start_as_copier(model)
    words = torch.randperm(1500)[:40]
    ids = torch.cat([words, words])[None]
    pos = torch.arange(ids.size(1))
    with torch.no_grad():
        q, k, _ = model.h[0].attn.project(model.h[0].ln_1(model.wte(ids) + model.wpe(pos)))
        scores = (q[0, 0] @ k[0, 0].T / model.config.head_dim**0.5).masked_fill(
            pos > pos[:, None], -torch.inf
        )
        logits = model(ids)[0, 40:-1]
    assert scores.softmax(-1).diagonal(-1).mean() > 0.9  # looks one back
    better = (logits > logits.gather(1, ids[0, 41:, None])).sum(1)  # than the right next token
    assert better.float().median() < 50  # by chance: 768


def test_a_distillation_starts_as_its_teacher_with_addresses_near_its_keys(teacher: str) -> None:
    model, plain = begun(recipe_of("bct", teacher, slots=5, recent=32))
    ids = ids_of(3, 32)
    with torch.no_grad():  # as long as no token leaves the recent ones
        torch.testing.assert_close(model(ids), plain(ids), atol=1e-4, rtol=1e-4)
    for block in model.h:
        assert torch.equal(block.memory.c_query.weight, block.attn.c_attn.weight[:, 24:48])
        assert len(block.memory.addresses.flatten(0, 1).unique(dim=0)) == 15


def assert_looks_back(q: Tensor, k: Tensor, n: int) -> None:
    """q and k (T, D): each query's best key is n tokens before it, whatever the tokens are."""
    best = (q @ k.T).tril()[n:].argmax(dim=1)
    assert best.tolist() == list(range(len(q) - n))


@pytest.fixture(scope="module")
def converted() -> tuple[GPT, nn.Module, Tensor]:
    """The shipped teacher, the Llama that it becomes before any training, and held-out rows."""
    model = load_model("pocket", model_class=GPT)
    config = recipes.uptraining(model.config, 300).config
    phase = Phase(steps=1, documents=4, lists=0, context=256, lr=0)
    text = batches.Corpus(100, recipes.TEACHER.tokenizer)
    rows, others = (text.batch(phase, torch.Generator().manual_seed(i))[0] for i in range(2))
    return model, conversion.as_llama(model, config, rows[:, :-1]).eval(), others[:, :-1]


@torch.no_grad()
def test_a_llama_begins_near_the_gpt2_that_it_is_made_of(converted: tuple) -> None:
    model, llama, ids = converted
    sizes = [sum(p.numel() for p in made.parameters()) for made in (model, llama)]
    assert abs(sizes[1] / sizes[0] - 1) < 0.01
    assert kl(model(ids), llama(ids)).mean() < 3.5 < kl(model(ids), llama(ids) * 0).mean()
    x = llama.h[0].ln_1(llama.wte(ids[:1, :40]))
    q, k, _ = llama.h[0].attn.project(x)
    turned = rotation(torch.arange(40), llama.config)
    for head in (0, 1):
        fast = torch.arange(32) % 16 < 8
        assert_looks_back(
            rotate(q, turned)[0, head][:, fast], rotate(k, turned)[0, 0][:, fast], head + 1
        )


@torch.no_grad()
def test_what_a_llama_reads_of_its_stream_is_what_a_gpt2_reads(converted: tuple) -> None:
    """Matrices, biases and LayerNorm, on a stream whose norm is the mean one."""
    model, _, ids = converted
    torch.manual_seed(0)
    for reading in conversion.read(model, ids, 0.3):
        x = conversion.centred(torch.randn(5, 192))
        x *= reading.rms / x.square().mean(1, keepdim=True).sqrt()
        constant = reading.rms * reading.share / (1 - reading.share**2) ** 0.5
        weight, bias = torch.randn(192, 7), torch.randn(7)
        normed = nn.functional.rms_norm(x + constant, (192,))
        got = normed @ reading.matrix(reading.joined(weight, bias))
        torch.testing.assert_close(got, reading.norm(x) @ weight + bias, atol=1e-2, rtol=1e-2)


def test_shared_factors_lose_nothing_if_there_are_enough() -> None:
    torch.manual_seed(0)
    products = [torch.randn(9, 2) @ torch.randn(2, 7) for _ in range(3)]
    x, y = torch.randn(99, 9), torch.randn(99, 7)
    left, right = x.T @ x / 99, y.T @ y / 99
    one, others = conversion.shared(products, left, right, 6)
    for product, other in zip(products, others, strict=True):
        torch.testing.assert_close(one @ other, product, atol=1e-3, rtol=1e-3)


def test_a_student_keeps_the_heads_and_the_most_active_of_the_rest(teacher: str) -> None:
    c = recipe_of("segments", teacher).config
    assert (c.n_layer, c.n_head, c.head_dim, c.n_ctx, c.n_embd, c.n_inner) == (2, 3, 8, 32, 16, 56)
    plain = load_model(teacher, model_class=GPT)
    loud, quiet = list(range(3, 19)), [0, 1, 2, *range(19, 24)]
    with torch.no_grad():  # of the hidden dimensions 8 hardly show, of layer 1's neurons 40
        for block in plain.h:
            for norm in (block.ln_1, block.ln_2):
                norm.weight[quiet], norm.bias[quiet] = 1e-3, 0.0
        plain.h[1].mlp.c_fc.weight[:, :40], plain.h[1].mlp.c_fc.bias[:40] = 0.0, -20.0
    model = pruning.pruned(plain, c, ids_of(4, 32))
    kept, whole = dict(model.named_parameters()), dict(plain.named_parameters())
    for name, expected in {
        "wte.weight": whole["wte.weight"][:, loud],
        "h.0.attn.c_attn.weight": whole["h.0.attn.c_attn.weight"][loud],
        "h.1.mlp.c_fc.weight": whole["h.1.mlp.c_fc.weight"][loud][:, 40:],
        "h.1.mlp.c_proj.weight": whole["h.1.mlp.c_proj.weight"][40:][:, loud],
    }.items():
        assert torch.equal(kept[name], expected), name
    assert_same(pruning.pruned(plain, PLAIN, ids_of(4, 32)), plain)  # nothing is cut


def test_a_student_reads_the_teachers_cache_up_to_its_segment(teacher: str) -> None:
    model, plain = begun(recipe_of("segments", teacher))
    model.eval()
    ids = ids_of(2, 32)
    start = torch.stack([torch.arange(32) // 8 * 8, torch.arange(32) * 0])
    cache = KVCache()
    close = {"atol": 1e-4, "rtol": 1e-4}
    with torch.no_grad():
        plain(ids, cache)
        logits = model(ids, cache, start=start)
        torch.testing.assert_close(logits[1], model(ids)[1], **close)  # its own cache only
        for t in (0, 7, 8, 20, 31):  # one token at a time, on what a refresh leaves
            taken = cache.clone()
            taken.truncate(t // 8 * 8)
            taken.layers = [kv[:, :1] for kv in taken.layers]
            one = model(ids[:1, t // 8 * 8 : t + 1], taken)[0, -1]
            torch.testing.assert_close(logits[0, t], one, **close)


# --- Figures and files


def test_a_model_that_can_not_copy_fails_the_gates() -> None:
    figures = {"name_nats": 7.0, "closed_book_share": 0.0}
    figures |= {"list_first_nats": 7.0, "list_second_nats": 7.0}
    assert len(evaluation.failed_gates(recipes.TEACHER, figures)) == 3


@pytest.mark.slow
def test_answers_agrees_with_greedy_decoding() -> None:
    model, tokenizer = load_model("pocket"), load_tokenizer("pocket")
    questions = corpus.recall_questions("valid", 20) + corpus.closed_book_questions("valid")[::60]
    right = 0
    for question in questions:
        ids = torch.tensor([tokenizer.encode_ordinary(question.prompt)])
        new = generate(model, ids, 20, stop_id=tokenizer.eot_token)
        line = tokenizer.decode([t.item() for t in new]).split("\n")[0]
        right += line.removesuffix("<|endoftext|>") == f" {question.answer}"
    share = evaluation.answers(model, tokenizer, questions)[1]
    assert share == pytest.approx(right / len(questions))


def test_export_writes_what_load_model_reads(converted: tuple, tmp_path: Path) -> None:
    config = GPTConfig(**vars(PLAIN) | {"n_embd": 20, "n_inner": 24})
    for model in (GPT(config), converted[1]):
        checkpoints.export(model, tmp_path)
        loaded = load_model(str(tmp_path))
        assert loaded.config == model.config
        assert_same(model.half().float(), loaded)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
def test_the_shipped_tokenizer_is_the_one_that_the_corpus_gives(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    train_tokenizer(tmp_path / "tokenizer.tiktoken")
    assert (tmp_path / "tokenizer.tiktoken").read_bytes() == TOKENIZER.read_bytes()
