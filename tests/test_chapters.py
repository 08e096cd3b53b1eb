"""The chapters are up to date, their stubs fail, their solutions pass, and no test of theirs looks at a solution."""

import ast
import os
import re
import shutil
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch

import chapters.builder.__main__ as build
from chapters import conftest
from chapters.builder import blocks, filler, pages, side_by_side, site
from gpt_kv_cache import GPT, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from support.files import import_file
from tests.helpers import ROOT, process, recorded, refused, run

CHAPTERS = ROOT / "chapters"
FOLDERS = [*blocks.FOLDERS.values()]
UNSHOWN = "08_measuring/rounding.py"  # a script whose output is that of a processor
with_solutions = pytest.mark.skipif(
    not (FOLDERS[0] / "solution.py").exists(), reason="a copy without solutions"
)


python = partial(process, sys.executable)


def copy_of_the_chapters(tree: Path, *without: str) -> Path:
    """Make a tree with the chapters copied and all else linked to, and return it."""
    for path in ROOT.iterdir():
        if path.name not in ("chapters", ".git"):
            (tree / path.name).symlink_to(path)
    shutil.copytree(
        CHAPTERS, tree / "chapters", ignore=shutil.ignore_patterns("__pycache__", *without)
    )
    return tree


@pytest.mark.slow
@recorded
@with_solutions  # whose checks chapter 9 runs
def test_chapters_are_up_to_date() -> None:
    stubs = ["--stubs"] if os.environ.get("STUBS") else []
    for command in (["-m", "chapters.builder", "--check", *stubs], [CHAPTERS / UNSHOWN]):
        ran = python(*command)
        assert ran.code == 0, ran.err


@pytest.mark.slow
@with_solutions
@pytest.mark.parametrize("written", [True, False], ids=["solutions", "stubs"])
def test_solutions_pass_as_exercises_and_stubs_fail(written: bool, tmp_path: Path) -> None:
    """Solutions under the other name, where no test can read what isn't there; pristine stubs beside their solutions,
    whatever the reader has made of exercise.py."""
    copy_of_the_chapters(tmp_path, *(["solution.py"] if written else []))
    for folder in FOLDERS:
        solution = (folder / "solution.py").read_text()
        exercise = solution if written else blocks.stub_of(solution)
        (tmp_path / "chapters" / folder.name / "exercise.py").write_text(exercise)
    ran = python("-m", "pytest", "chapters", "-p", "no:cacheprovider", folder=tmp_path)
    earned, total = map(int, re.search(r"total +(\d+) of (\d+)", ran.out).groups())
    assert total == 10 * len(FOLDERS) and earned == (total if written else 0), ran.out
    assert (ran.code == 0) == written and "solution.py" not in ran.out
    assert written or not re.search(r"\d+ (passed|skipped)", ran.out), ran.out


@pytest.mark.slow
@with_solutions
def test_the_points_of_a_class(tmp_path: Path) -> None:
    name, folder = "02_kv_cache", tmp_path / "class"
    solution = (CHAPTERS / name / "solution.py").read_text()
    cheats = {
        "dan": "import atexit\natexit.register(print, '\\n  2.1   9 of 4')",
        "eve": "import torch as t\nt.isclose = lambda a, *others, **options: t.ones_like(a) > 0",
        "fay": "exec(compile(open('gpt_kv_cache.py').read(), '', 'exec'))",
    }
    files = {"anna/my copy/chapters": solution}
    files |= {
        name: solution.replace("\nimport", f"\n{cheat}\nimport", 1)
        for name, cheat in cheats.items()
    }
    for place, text in files.items():
        (folder / place / name).mkdir(parents=True)
        (folder / place / name / "exercise.py").write_text(text)
    (folder / "cara").mkdir()
    table = tmp_path / "points.csv"
    ran = python("-m", "chapters.grade", folder, "--chapters", 2, "--output", table)
    assert ran.code == 0, ran.err
    head, *rows = (line.split(",") for line in table.read_text().splitlines())
    assert head == ["student", "2.1", "2.2", "2.3", "2.4", "2.5", "total", "note"]
    ends = [["anna", "10", ""], ["cara", "0", f"{name}: no exercise.py"]]
    ends += [[name, "0", ""] for name in cheats]
    assert [[row[0], *row[-2:]] for row in rows] == ends


@pytest.mark.slow
def test_an_error_while_a_file_loads_costs_its_own_exercises_only(tmp_path: Path) -> None:
    files = {
        "00_setup": "\n\ndef f(:\n",
        "01_gpt2": "def causal_mask(pos, k_pos):\n    return k_pos <= pos[:, None]\n",
        "02_kv_cache": "\n\nraise SystemExit(3)\n",
    }
    for name, code in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "exercise.py").write_text(code)
    folders = [f"chapters/{name}" for name in files]
    options = ["-m", "ex0_1 or ex1_1 or ex2_5", f"--from={tmp_path}", "-p", "no:cacheprovider"]
    printed = python("-m", "pytest", *folders, *options).out
    for name, error in (
        ("00_setup", "SyntaxError: invalid syntax"),
        ("02_kv_cache", "SystemExit: 3"),
    ):
        assert f'File "{tmp_path}/{name}/exercise.py", line 3' in printed and error in printed
    assert re.search(r"0\.1 +0 of 2\n +1\.1 +1 of 1\n +2\.5 +0 of 1\n", printed), printed


def test_pictures_show_real_tokens() -> None:
    tokenizer, shown = load_tokenizer("pocket"), 0
    for path in sorted(CHAPTERS.glob("*/pictures.py")):
        module = import_file(path)
        for tokens in [value for name, value in vars(module).items() if name.startswith("TEXT")]:
            real = [tokenizer.decode([i]) for i in tokenizer.encode("".join(tokens))]
            assert tokens == real, f"{path.parent.name}: {tokens}"
            shown += 1
    assert shown >= 7


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_exercise_has_points_and_tests(folder: Path) -> None:
    number = int(folder.name.partition("_")[0])
    (test,) = folder.glob("test_*.py")
    points = {k: v for k, v in conftest.exercise_points().items() if k.startswith(f"ex{number}_")}
    assert sum(points.values()) == 10
    marked = set()
    for node in ast.parse(test.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            (mark,) = re.findall(r"pytest\.mark\.(ex\d+_\d+)", decorators)
            marked.add(mark)
    assert marked == {*points}


def test_a_page_leads_to_its_neighbours_and_into_itself() -> None:
    text = "# 2. The `KV` cache\n\n## It's *new*: a & b\n"
    page = pages.render_page(text, site.neighbour_links(CHAPTERS / "02_kv_cache" / "README.md"))
    assert re.findall(r'<h\d id="(.*?)">', page) == ["2-the-kv-cache", "its-new-a--b"]
    neighbours = ["../01_gpt2/README.md", "../README.md", "../03_bounded/README.md"]
    assert re.findall(r'<a href="(.*?)">', page) == 2 * neighbours


def test_every_hunk_has_words() -> None:
    readmes = [folder / "README.md" for folder in FOLDERS]
    said = side_by_side.margin_words({readme: readme.read_text() for readme in readmes})
    for pair in side_by_side.PAIRS:
        found = {*said[pair]}
        for words in chain.from_iterable(said[pair].values()):
            if several := re.match(r"hunks (\d+) to (\d+): ", words):
                found |= {*range(int(several[1]), int(several[2]) + 1)}
        assert found == {*range(1, len(blocks.find_hunks(*pair)) + 1)}, pair


def test_transformers_reads_the_folder_that_engines_are_given(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export = blocks.import_file(CHAPTERS / "10_beyond" / "export.py")
    export.main([str(tmp_path / "served")])
    ours, model = load_tokenizer("pocket"), load_model("pocket", model_class=GPT)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "served")
    for text in (corpus.document("test", 0).text, " été 你好\n\n x 12 it's<|endoftext|>"):
        assert theirs(text)["input_ids"] == ours.encode(text, allowed_special="all")
    assert theirs.eos_token_id == ours.eot_token
    ids = torch.tensor([ours.encode("Halek lives in")])
    expected = torch.cat([ids, *generate(model, ids, 20)], dim=1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served").eval()
    assert torch.equal(reference.generate(ids, max_new_tokens=20, do_sample=False), expected)


@pytest.mark.parametrize(
    ("mark", "culprit"),
    [
        ('code("gpt_baseline.py", "Nothing")', "Nothing"),
        ('code("gpt_baseline.py", "GPTConfig", "class")', "no whole statement"),
        ('diff("gpt_baseline.py", "gpt_kv_cache.py", 11)', "11"),
        ('output("python3 nowhere.py")', "can't open file"),
        ('picture("nothing")', "nothing"),
        ('pictures("mask")', "pictures"),
        ('format(rows("latency").path, ".1f") }} -->\n<!-- {{ picture("work")', "no <!-- end -->"),
    ],
)
def test_a_mark_that_fits_nothing_is_refused(
    mark: str, culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"# 2. Chapter\n\n<!-- {{{{ {mark} }}}} -->\n<!-- end -->\n"
    monkeypatch.setattr(filler, "read_text", lambda path: text)
    with pytest.raises(ValueError, match="chapters/02_kv_cache/README.md: .*" + re.escape(culprit)):
        filler.filled(filler.PAGES["2"])


@with_solutions
def test_what_is_stale_is_said_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "07_overfill"  # whose page shows no commands
    shutil.copytree(CHAPTERS / folder.name, folder)
    readme, exercise = folder / "README.md", folder / "exercise.py"
    monkeypatch.setitem(filler.PAGES, "7", readme)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    builder = partial(run, build.main, 7)
    assert builder("--stubs").code == 0
    fresh, stub = readme.read_text(), exercise.read_text()
    readme.write_text(fresh.replace("= self.student(", "= self.teacher("))
    exercise.write_text("done by a student\n")
    refused(builder("--check", "--stubs"), "07_overfill/README.md", "exercise.py")
    assert builder().code == 0
    assert readme.read_text() == fresh and exercise.read_text() == "done by a student\n"
    assert builder("--stubs").code == 0 and exercise.read_text() == stub
    assert "NotImplemented" in stub
