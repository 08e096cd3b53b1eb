"""The recipe behind pocket/: resumable, the same under torchrun, and refusing to keep a model that can't copy."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gpt_bounded_cache
import gpt_kv_cache
from gpt_baseline import GPT, GPTConfig
from gpt_bounded_cache import BCT
from load_gpt2_weights import load_model, load_tokenizer, read_tokenizer
from pocket import (
    batches,
    checkpoints,
    corpus,
    evaluation,
    pruning,
    recipes,
    rope,
    starts,
    train,
    training,
)
from pocket.recipes import Batch, Phase, Recipe
from pocket.tokenizer import TOKENIZER, VOCABULARY, train_tokenizer
from tests.test_equivalence import randomize

ROOT = Path(__file__).resolve().parent.parent
TINY = Recipe(
    config=GPTConfig(vocab_size=VOCABULARY, n_ctx=64, n_layer=2, n_head=2, n_embd=48, head_dim=16),
    phases=(
        Phase(steps=3, documents=0, lists=4, context=32, lr=1e-3),
        Phase(steps=3, documents=3, lists=1, context=48, lr=1e-3),
        Phase(steps=3, documents=2, lists=1, context=64, lr=1e-3, answers=5.0),
        Phase(steps=2, documents=1, lists=0, context=64, lr=5e-4, shuffled=1),
    ),
    documents=50,
    warmup=2,
)


def test_a_run_that_was_interrupted_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole_model, whole = training.train(TINY, tmp_path / "whole")
    for stop in (2, 5):
        _, losses = training.train(TINY, tmp_path / "parts", stop_at=stop)
        assert len(losses) == stop
    model, losses = training.train(TINY, tmp_path / "parts")
    assert losses == whole and len(losses) == 11
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), whole_model.parameters(), strict=True)
    )
    assert [p.name for p in (tmp_path / "parts").iterdir()] == [
        "last.pt"
    ]  # nothing unfinished is left


def test_a_run_of_another_recipe_is_refused(tmp_path: Path) -> None:
    training.train(TINY, tmp_path, stop_at=1)
    with pytest.raises(ValueError, match="another recipe"):
        training.train(replace(TINY, seed=1), tmp_path)


def test_a_run_from_other_weights_is_refused(teacher: str, tmp_path: Path) -> None:
    recipe = replace(recipes.distillation(teacher, PLAIN, 3, **MEMORY), documents=60)
    training.train(recipe, tmp_path, stop_at=1)
    model = load_model(teacher, model_class=GPT)
    model.wte.weight.data[0, 0] += 1
    checkpoints.export(model, Path(teacher))
    with pytest.raises(ValueError, match="other weights"):
        training.train(recipe, tmp_path)


@pytest.mark.slow
def test_two_processes_compute_the_losses_of_one(tmp_path: Path) -> None:
    _, expected = training.train(TINY, tmp_path / "one")
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import json, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
        "from tests.test_train import TINY\nfrom pocket import batches, training\n"
        f"_, losses = training.train(TINY, Path({str(tmp_path / 'two')!r}))\n"
        f"if batches.rank() == 0:\n    Path({str(tmp_path / 'losses.json')!r}).write_text(json.dumps(losses))\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(driver),
    ]
    subprocess.run(command, check=True, timeout=300, capture_output=True, cwd=tmp_path)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(expected, rel=2e-3)  # bf16 products of half a batch each


PLAIN = GPTConfig(vocab_size=VOCABULARY, n_ctx=32, n_layer=2, n_head=2, n_embd=24, head_dim=8)
MEMORY = {"slots": 5, "recent": 3}


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    """A folder with a small random model and the tokenizer of pocket."""
    torch.manual_seed(0)
    model = GPT(PLAIN)
    randomize(model)
    checkpoints.export(model, tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.tiktoken").write_bytes(TOKENIZER.read_bytes())
    return str(tmp_path / "teacher")


def begun(recipe: Recipe) -> tuple[nn.Module, nn.Module]:
    """The model as training begins, and its teacher."""
    return starts.start(recipe, batches.text_of(recipe), torch.device("cpu"))


def batch_of(rows: Tensor, before: Tensor) -> Batch:
    """A batch in which all tokens count the same; the last token of a row is only predicted."""
    weights = torch.ones(len(rows), rows.size(1) - 1)
    return Batch(rows, weights / weights.sum(), before, torch.zeros_like(weights, dtype=torch.long))


@pytest.mark.slow
def test_a_distillation_goes_on_to_the_same_end_and_learns(teacher: str, tmp_path: Path) -> None:
    recipe = replace(recipes.distillation(teacher, PLAIN, 40, **MEMORY), documents=60, warmup=5)
    whole_model, whole = training.train(recipe, tmp_path / "whole")
    training.train(recipe, tmp_path / "parts", stop_at=7)
    model, losses = training.train(recipe, tmp_path / "parts")
    assert losses == whole and len(losses) == 40
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), whole_model.parameters(), strict=True)
    )
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    plain = load_model(teacher, model_class=GPT)
    assert not torch.equal(
        model.h[0].attn.c_attn.weight, plain.h[0].attn.c_attn.weight
    )  # all of it is tuned


def test_a_distillation_starts_as_its_teacher_with_addresses_near_its_keys(teacher: str) -> None:
    recipe = replace(recipes.distillation(teacher, PLAIN, 3, slots=5, recent=32), documents=20)
    model, plain = begun(recipe)
    ids = torch.randint(VOCABULARY, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # as long as no token leaves the recent ones
        torch.testing.assert_close(model(ids), plain(ids), atol=1e-4, rtol=1e-4)
    for block in model.h:
        keys = block.attn.c_attn.weight[:, 16:32]
        assert torch.equal(block.memory.c_query.weight, keys)
        assert len(block.memory.addresses.flatten(0, 1).unique(dim=0)) == 10


def test_k_means_finds_the_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    points = centres.repeat_interleave(50, dim=0) + 0.1 * torch.randn(200, 2, generator=generator)
    found = starts.k_means(
        points[torch.randperm(200, generator=generator)], 4, torch.Generator().manual_seed(4)
    )
    assert torch.cdist(centres, found).min(dim=1).values.max() < 0.1


def test_what_a_distillation_loses_is_the_divergence_from_the_teacher(teacher: str) -> None:
    recipe = replace(recipes.distillation(teacher, PLAIN, 3, window=32), documents=20)
    model, plain = begun(recipe)
    rows = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(0))
    same = recipe.losses(model, plain, batch_of(rows, rows[:, :0]))
    assert (
        same.shape == (2, 32) and same.abs().max() < 1e-2
    )  # a window of the context sees everything; bf16
    other = replace(recipe, window=2).losses(model, plain, batch_of(rows, rows))
    assert other[:, :2].abs().max() < 1e-2 < other[:, 2:].mean()


def test_every_second_step_reads_on_after_another_text(
    teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(recipes.distillation(teacher, PLAIN, 3, **MEMORY), documents=20)
    model, plain = begun(recipe)
    text = batches.text_of(recipe)
    read: list[tuple[Tensor, bool]] = []
    model.register_forward_pre_hook(
        lambda module, inputs: read.append((inputs[0], torch.is_grad_enabled()))
    )
    for step in range(2):
        training.loss_at(recipe, step, model, text, torch.device("cpu"), plain)
    (_, first_grad), (before, before_grad), (rows, rows_grad) = read
    assert first_grad and rows_grad and not before_grad
    assert rows.shape == (4, 32) and 1 <= before.size(1) < 32
    assert torch.equal(before, rows.roll(1, dims=0)[:, -before.size(1) :])
    for rank in range(2):  # each process reads what one alone would
        monkeypatch.setattr(training, "world_size", lambda: 2)
        monkeypatch.setattr(training, "rank", lambda rank=rank: rank)
        read.clear()
        training.loss_at(recipe, 1, model, text, torch.device("cpu"), plain)
        assert torch.equal(read[0][0], before[rank::2]) and torch.equal(read[1][0], rows[rank::2])


COMMANDS = {
    "bct": ["--slots", "5", "--recent", "3"],
    "bct-sum": ["--rule", "sum", "--slots", "5"],
    "student": [],
}


def command_of(what: str, teacher: str, folder: Path, out: str) -> list[str]:
    """What one runs on GPT-2's own weights: WHAT --init gpt2 --text FILE."""
    (folder / "text.txt").write_text(
        "<|endoftext|>".join(d.text for d in corpus.documents("train", 20))
    )
    command = [
        what.removesuffix("-sum"),
        "--init",
        teacher,
        "--text",
        str(folder / "text.txt"),
        "--steps",
        "5",
    ]
    return [
        *command,
        *COMMANDS[what],
        "--out",
        str(folder / out),
        "--state",
        str(folder / f"run-{out}"),
    ]


@pytest.mark.parametrize("what", COMMANDS)
def test_the_command_changes_any_model_on_any_text(what: str, teacher: str, tmp_path: Path) -> None:
    train.main(command_of(what, teacher, tmp_path, "one"))
    files = ["config.json", "loss.png", "model.safetensors", "tokenizer.tiktoken"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == files
    assert load_tokenizer(str(tmp_path / "one")).n_vocab == VOCABULARY
    config = load_model(str(tmp_path / "one"), model_class=GPT if what == "student" else BCT).config
    if what == "bct":
        assert (config.slots, config.recent, config.rule) == (5, 3, "mean")
    elif what == "bct-sum":
        assert (config.slots, config.recent, config.rule) == (5, 0, "sum")
    else:
        assert (config.n_embd, config.n_head, config.head_dim) == (16, 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("what", COMMANDS)
def test_the_command_runs_under_torchrun_too(what: str, teacher: str, tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command = [
        *torchrun,
        str(ROOT / "pocket" / "train.py"),
        *command_of(what, teacher, tmp_path, "two"),
    ]
    subprocess.run(command, check=True, timeout=300, capture_output=True, cwd=tmp_path)
    train.main(command_of(what, teacher, tmp_path, "one"))
    losses = [torch.load(tmp_path / f"run-{name}" / "last.pt")["losses"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(
        losses[1], rel=1e-2
    )  # bf16; after a step the gradients of both count


def test_rotary_heads_begin_by_looking_one_and_two_positions_back(
    teacher: str, tmp_path: Path
) -> None:
    recipe = replace(recipes.rotary_recipe(teacher, PLAIN, 3), documents=20)
    model, plain = begun(recipe)
    attention, pos = model.h[0].attn, torch.arange(20)
    q, k, _ = attention.project(torch.randn(1, 20, model.config.n_embd))  # whatever the tokens are
    for head in (0, 1):
        scores = (rope.rotate(q[0, head], pos) @ rope.rotate(k[0, head], pos).T).tril()
        assert scores[head + 1 :].argmax(dim=1).tolist() == list(range(20 - head - 1))
    rows = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(0))
    assert recipe.losses(model, plain, batch_of(rows, rows[:, :0])).mean() > 1e-2
    _, losses = training.train(recipe, tmp_path)
    assert len(losses) == 3 and losses[2] < 2 * losses[0]
    assert not model.wpe.weight.any() and not model.wpe.weight.requires_grad


def student_of(teacher: str, kind: str = "segments", steps: int = 3) -> recipes.Pruning:
    return replace(recipes.pruning(teacher, PLAIN, steps, kind), documents=60, warmup=2)


def test_a_student_keeps_the_heads_and_the_most_active_of_the_rest(teacher: str) -> None:
    recipe = student_of(teacher)
    c = recipe.config
    assert (c.n_layer, c.n_head, c.head_dim, c.n_ctx) == (2, 2, 8, 32) and (
        c.n_embd,
        c.n_inner,
    ) == (16, 56)
    plain = load_model(teacher, model_class=gpt_kv_cache.GPT)
    loud, quiet = list(range(3, 19)), [0, 1, 2, *range(19, 24)]
    with (
        torch.no_grad()
    ):  # of the hidden dimensions 8 hardly show, and of the neurons of layer 1 40
        for block in plain.h:
            for norm in (block.ln_1, block.ln_2):
                norm.weight[quiet], norm.bias[quiet] = 1e-3, 0.0
        plain.h[1].mlp.c_fc.weight[:, :40], plain.h[1].mlp.c_fc.bias[:40] = 0.0, -20.0
    ids = torch.randint(VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(0))
    model = pruning.pruned(plain, c, ids)
    assert torch.equal(model.wte.weight, plain.wte.weight[:, loud])
    assert torch.equal(model.h[0].attn.c_attn.weight, plain.h[0].attn.c_attn.weight[loud])
    assert torch.equal(model.h[1].attn.c_proj.weight, plain.h[1].attn.c_proj.weight[:, loud])
    assert torch.equal(model.h[1].mlp.c_fc.weight, plain.h[1].mlp.c_fc.weight[loud][:, 40:])
    assert torch.equal(model.h[1].mlp.c_fc.bias, plain.h[1].mlp.c_fc.bias[40:])
    assert torch.equal(model.h[1].mlp.c_proj.weight, plain.h[1].mlp.c_proj.weight[40:][:, loud])
    whole = pruning.pruned(plain, PLAIN, ids)  # nothing is cut
    assert all(
        torch.equal(p, q) for p, q in zip(whole.parameters(), plain.parameters(), strict=True)
    )


def test_segments_are_those_between_two_refreshes() -> None:
    generator = torch.Generator().manual_seed(0)
    at, strides = torch.arange(512), set()
    start, counts = batches.segment_starts("segments", 200, 512, generator)
    assert counts.eq(1).all()
    for row in start:
        assert (row <= at).all() and row.diff().ge(0).all()
        begins = row.unique().tolist()
        lengths = {b - a for a, b in pairwise(begins[1:])}
        assert len(lengths) <= 1  # all but the first and the last are as long
        strides |= lengths
    assert strides == {4, 8, 16, 32, 64, 128, 256}  # of 512: one boundary, as in "prompt"
    start, _ = batches.segment_starts("segments", 300, 1024, generator)
    assert any(row.unique().numel() == 2 for row in start)  # all of the rest in one piece
    start, counts = batches.segment_starts("prompt", 50, 512, generator)
    for row, counted in zip(start, counts, strict=True):
        first = int(row.max())
        assert (
            row.tolist() == [0] * first + [first] * (512 - first) and counted.sum() == 512 - first
        )
    start, counts = batches.segment_starts("alone", 3, 16, generator)
    assert not start.any() and counts.all()


def test_a_student_reads_the_teachers_cache_up_to_its_segment(teacher: str) -> None:
    model, plain = begun(student_of(teacher))
    model.eval()
    ids = torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0))
    start = torch.stack([torch.arange(32) // 8 * 8, torch.arange(32) * 0])
    cache = gpt_kv_cache.KVCache()
    with torch.no_grad():
        plain(ids, cache)
        logits = model(ids, cache, start=start)
        torch.testing.assert_close(
            logits[1], model(ids)[1], atol=1e-4, rtol=1e-4
        )  # begins at 0: its own only
        for t in (0, 7, 8, 20, 31):  # one token at a time, on what a refresh leaves
            taken = cache.clone()
            taken.truncate(t // 8 * 8)
            taken.layers = [kv[:, :1] for kv in taken.layers]
            one = model(ids[:1, t // 8 * 8 : t + 1], taken)[0, -1]
            torch.testing.assert_close(logits[0, t], one, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", recipes.KINDS)
def test_a_student_comes_nearer_to_its_teacher_which_stays_as_it_is(
    teacher: str, kind: str, tmp_path: Path
) -> None:
    recipe = student_of(teacher, kind, 60)
    assert recipe.config.dropout == (0.1 if kind == "dropout" else 0.0)
    model, losses = training.train(recipe, tmp_path / "whole")
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    training.train(recipe, tmp_path / "parts", stop_at=7)
    if kind != "dropout":  # whose draws go on from where they are
        again, same = training.train(recipe, tmp_path / "parts")
        assert same == losses
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
        )
    _, plain = begun(recipe)
    assert not any(p.requires_grad for p in plain.parameters())


def test_only_what_the_student_reads_itself_counts(teacher: str) -> None:
    recipe = student_of(teacher, "prompt")
    batch = batches.batch_at(recipe, 0, batches.text_of(recipe))
    first = batch.segments.max(dim=1, keepdim=True).values
    assert first.min() > 0 and torch.equal(batch.weights > 0, torch.arange(32) >= first)
    assert batch.weights.sum().item() == pytest.approx(1)


def test_a_text_that_is_too_short_is_refused_in_one_sentence(
    teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("Too short.")
    folders = ["--out", str(tmp_path / "x"), "--state", str(tmp_path / "y")]
    with pytest.raises(SystemExit, match="2"):
        train.main(["bct", "--init", teacher, "--text", str(tmp_path / "text.txt"), *folders])
    assert "a row of 32 doesn't fit" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_more_processes_than_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training, "world_size", lambda: 3)
    with pytest.raises(ValueError, match="3 processes .* 2 rows"):
        training.train(TINY, tmp_path)


def test_answers_weigh_what_the_phase_says() -> None:
    tokenizer = read_tokenizer(TOKENIZER)
    text = batches.Corpus(20, 0, recipes.TEACHER.tokenizer)
    phase = Phase(steps=1, documents=5, lists=0, context=64, lr=0, answers=10.0)
    rows, weights = text.batch(phase, torch.Generator().manual_seed(0))
    assert weights.unique().tolist() == [1.0, 10.0]
    for row, row_weights in zip(rows, weights, strict=True):
        heavy = "".join(
            tokenizer.decode([t]) for t, w in zip(row[1:], row_weights, strict=True) if w > 1
        )
        told = tokenizer.decode(row.tolist()).split("Answer:")[1:]
        assert heavy == "".join(answer[: answer.find("\n") + 1 or None] for answer in told).replace(
            "<|endoftext|>", ""
        )
    everything = [
        [*tokenizer.encode_ordinary(d.text), tokenizer.eot_token]
        for d in corpus.documents("train", 20)
    ]
    assert text.tokens.tolist() == [
        token for tokens in everything for token in tokens
    ]  # cut by lines, or whole


def test_shuffled_rows_keep_nothing_but_which_tokens_are_the_same() -> None:
    text = batches.Corpus(20, 0, recipes.TEACHER.tokenizer)
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
            bigrams = set(pairwise(row[: t + 1]))
            if is_known:  # seen before after the same token
                assert (row[t], row[t + 1]) in bigrams


def test_training_starts_from_an_induction_circuit() -> None:
    torch.manual_seed(0)
    model = GPT(recipes.TEACHER.config)
    starts.start_as_copier(model)
    words = torch.randperm(1500)[:40]
    ids = torch.cat([words, words])[None]
    pos = torch.arange(ids.size(1))
    with torch.no_grad():
        x = model.wte(ids) + model.wpe(pos)
        q, k, _ = model.h[0].attn.project(model.h[0].ln_1(x))
        scores = (q[0, 0] @ k[0, 0].T / model.config.head_dim**0.5).masked_fill(
            pos > pos[:, None], -torch.inf
        )
        looks_back = scores.softmax(-1).diagonal(-1)
        logits = model(ids)[0]
    assert looks_back.mean() > 0.9
    rank = (logits[40:-1] > logits[40:-1].gather(1, ids[0, 41:, None])).sum(
        1
    )  # of the right next token
    assert rank.float().median() < 50  # by chance: 768


def test_learning_rate_rises_and_falls_in_every_course() -> None:
    courses = replace(
        TINY,
        warmup=2,
        phases=(
            Phase(steps=4, documents=0, lists=1, context=8, lr=3.0),
            Phase(steps=6, documents=1, lists=0, context=8, lr=2.0),
            Phase(steps=6, documents=1, lists=0, context=16, lr=2.0),
            Phase(steps=5, documents=1, lists=0, context=16, lr=1.0),
        ),
    )
    rates = [recipes.learning_rate(courses, step) for step in range(21)]
    assert rates[:4] == [1.5, 3.0, 3.0, 3.0]
    assert (
        rates[4] == 1.0
        and rates[5] == max(rates[4:16])
        and rates[5:16] == sorted(rates[5:16], reverse=True)
    )
    assert 0.2 < rates[15] < 0.25 and rates[16] == 0.5 and rates[17] == max(rates[16:])
    for lookup in (recipes.phase_at, recipes.learning_rate):
        with pytest.raises(ValueError, match="step 21 is past|past the recipe's end"):
            lookup(courses, 21)


def test_every_fifth_step_of_a_phase_reads_long_rows() -> None:
    mixed = Phase(
        steps=10, documents=3, lists=1, context=16, lr=1.0, shuffled=1, answers=8.0, long=(2, 0, 1)
    )
    recipe = replace(TINY, phases=(*TINY.phases[:2], mixed))
    read = [recipes.phase_at(recipe, step)[0] for step in range(6, 16)]
    long = replace(mixed, documents=2, lists=0, shuffled=1, context=TINY.config.n_ctx)
    assert read == [*[mixed] * 4, long] * 2
    assert recipes.size_of(recipe) == (16, 3 * 4 * 32 + 3 * 4 * 48 + 8 * 5 * 16 + 2 * 3 * 64)


def test_a_model_that_can_not_copy_fails_the_gates() -> None:
    torch.manual_seed(0)
    tokenizer = read_tokenizer(TOKENIZER)
    model = GPT(recipes.TEACHER.config).eval()
    questions = corpus.recall_questions("valid", 4)
    nats, share = evaluation.answers(model, tokenizer, questions)
    assert share == 0 and nats > 5
    bad = {
        "name_nats": nats,
        "closed_book_share": share,
        "list_first_nats": 7.0,
        "list_second_nats": 7.0,
    }
    assert len(evaluation.failed_gates("teacher", bad)) == 3
    good = {
        "name_nats": 0.01,
        "closed_book_share": 0.99,
        "list_first_nats": 2,
        "list_second_nats": 0.1,
    }
    assert evaluation.failed_gates("teacher", good) == []


@pytest.mark.slow
def test_answers_agrees_with_greedy_decoding() -> None:
    from gpt_kv_cache import GPT, generate

    model, tokenizer = load_model("pocket", model_class=GPT), load_tokenizer("pocket")
    questions = corpus.recall_questions("valid", 20) + corpus.closed_book_questions("valid")[::60]
    right = 0
    for question in questions:
        ids = torch.tensor([tokenizer.encode_ordinary(question.prompt)])
        text = tokenizer.decode(
            [t.item() for t in generate(model, ids, 20, stop_id=tokenizer.eot_token)]
        )
        right += text.split("\n")[0].removesuffix("<|endoftext|>") == f" {question.answer}"
    assert evaluation.answers(model, tokenizer, questions)[1] == pytest.approx(
        right / len(questions)
    )


def test_export_writes_what_load_model_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=VOCABULARY, n_ctx=32, n_layer=2, n_head=3, n_embd=20, head_dim=8, n_inner=24
    )
    model = GPT(config).eval()
    checkpoints.export(model, tmp_path)
    loaded = load_model(str(tmp_path), model_class=GPT)
    assert loaded.config == config
    for (name, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.half().float(), b), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
def test_the_shipped_tokenizer_is_the_one_that_the_corpus_gives(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    train_tokenizer(tmp_path / "tokenizer.tiktoken", documents=20_000)
    assert (tmp_path / "tokenizer.tiktoken").read_bytes() == TOKENIZER.read_bytes()


def test_command_line_refuses_what_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        ("nonsense", "nonsense"),
        ("bct --kind alone", "--kind"),
        ("bct --steps 5", "--out"),
        ("teacher --init gpt2", "--init"),
        ("teacher --steps 5", "--steps"),
        ("rotary --text x", "--text"),
        ("student --slots 24", "--slots"),
        ("ablation --recent 8", "--recent"),
        ("bct --slots 9999", "3000"),
        ("tokenizer --state x", "--state"),
        ("tokenizer --stop-at 1", "--stop-at"),
        ("bct --recent 9999 --out x", "9999"),
    ):
        with pytest.raises(SystemExit, match="2"):
            train.main(argv.split())
        message = capsys.readouterr().err
        assert said in message and message.count("\n") == 1


@pytest.mark.parametrize("what", ["teacher", "ablation", "rotary"])
@pytest.mark.parametrize("option", ["--out", "--state"])
@pytest.mark.parametrize("place", ["file", "file/below", "/dev/null/x"])
def test_a_folder_that_can_not_be_is_noticed_first(
    what: str, option: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(corpus, "documents", lambda *_: pytest.fail("the corpus was read"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        train.main([what, option, str(tmp_path / place)])
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and option in message and str(tmp_path / place) in message


STATES = {
    "empty": b"",
    "text": b"not a state",
    "cut": None,
    "a list": [1],
    "a tensor": torch.ones(2),
    "no losses": {"recipe": "x"},
    "a model": {"wte.weight": torch.ones(2, 2)},
    "kinds": {"recipe": 1, "model": [], "optimizer": {}, "losses": 3},
    "code": {"recipe": Path},
}


@pytest.mark.parametrize("damage", STATES)
def test_a_damaged_state_is_noticed_first(
    damage: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "documents", lambda *_: pytest.fail("the corpus was read"))
    content, file = STATES[damage], tmp_path / "last.pt"
    if not isinstance(content, bytes):
        torch.save({"losses": [0.5] * 1000} if content is None else content, file)
        content = file.read_bytes()[: -300 if content is None else None]
    file.write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        train.main(["teacher", "--state", str(tmp_path)])
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and str(file) in message
    assert file.read_bytes() == content and [path.name for path in tmp_path.iterdir()] == [
        "last.pt"
    ]


def test_a_state_of_other_shapes_is_noticed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.train(TINY, tmp_path, stop_at=1)
    state = torch.load(tmp_path / "last.pt")
    state["model"]["ln_f.bias"] = torch.ones(3)
    torch.save(state, tmp_path / "last.pt")
    monkeypatch.setattr(corpus, "documents", lambda *_: pytest.fail("the corpus was read"))
    with pytest.raises(ValueError, match=r"last\.pt"):
        training.train(TINY, tmp_path)


def test_a_bct_by_the_papers_rule_goes_from_its_training_to_the_script(
    teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train.main(command_of("bct-sum", teacher, tmp_path, "one"))
    page = tmp_path / "steps.html"
    words = ["--model", str(tmp_path / "one"), "--max-new-tokens", "9", "--trace", str(page)]
    gpt_bounded_cache.main(["--memory", "bct", *words])
    nbytes = 4 * PLAIN.n_layer * PLAIN.n_head * 5 * 2 * PLAIN.head_dim
    assert f"KV cache {nbytes:,} bytes" in capsys.readouterr().out and page.exists()


def test_the_papers_rule_has_a_folder_of_its_own_and_is_for_bct_alone(
    capsys: pytest.CaptureFixture,
) -> None:
    for words, said in [
        (["bct", "--rule", "sum", "--slots", "5"], "only a run with the defaults"),
        (["student", "--rule", "sum"], "--rule is an option of bct, not of student"),
    ]:
        with pytest.raises(SystemExit) as ended:
            train.main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err
