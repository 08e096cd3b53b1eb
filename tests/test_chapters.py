"""The chapters are up to date, their stubs fail, their solutions pass, and no test of theirs looks at a solution."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import chain
from pathlib import Path

import pytest
import torch

import chapters.builder.__main__ as build
from chapters import conftest
from chapters.builder import blocks, pages, side_by_side
from gpt_kv_cache import GPT, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from support.files import import_file
from tests.helpers import recorded

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "chapters"
FOLDERS = build.folders([])
with_solutions = pytest.mark.skipif(
    not (FOLDERS[0] / "solution.py").exists(), reason="a copy without solutions"
)


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600, cwd=cwd
    )


def outcomes(root: Path, report: Path) -> tuple[dict[str, str], str]:
    """Run the chapters' tests of a tree; return what became of each, and what was printed."""
    options = ["-p", "no:cacheprovider", f"--junitxml={report}"]
    result = run("-m", "pytest", "chapters", *options, cwd=root)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}.{case.get('name')}"] = kinds[0] if kinds else "passed"
    return found, result.stdout


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
    result = run(
        "-m", "chapters.builder", "--check", *(["--stubs"] if os.environ.get("STUBS") else [])
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_excerpts_are_those_of_the_files(folder: Path) -> None:
    """Code and differences, with the numbers of their lines: `python3 -m chapters.builder` mends them."""
    makers = {"code": blocks.code, "diff": blocks.diff}
    for kind, words, shown in blocks.BLOCK.findall((folder / "README.md").read_text()):
        if kind in makers:
            assert shown == makers[kind](*shlex.split(words)) + "\n", words


@pytest.mark.slow
@with_solutions
@pytest.mark.parametrize("written", [True, False], ids=["solutions", "stubs"])
def test_solutions_pass_as_exercises_and_stubs_fail(written: bool, tmp_path: Path) -> None:
    """Solutions under the other name, where no test can read what isn't there; pristine stubs beside their solutions,
    whatever the reader has made of exercise.py."""
    copy_of_the_chapters(tmp_path, *(["solution.py"] if written else []))
    for folder in FOLDERS:
        solution = (folder / "solution.py").read_text()
        exercise = solution if written else build.stub_of(solution)
        (tmp_path / "chapters" / folder.name / "exercise.py").write_text(exercise)
    found, printed = outcomes(tmp_path, tmp_path / "report.xml")
    expected = {"passed"} if written else {"failure", "error"}
    assert found and {name: what for name, what in found.items() if what not in expected} == {}
    earned, total = map(int, re.search(r"total +(\d+) of (\d+)", printed).groups())
    assert total >= 5 * len(FOLDERS) and earned == (total if written else 0)
    assert "solution.py" not in printed


@pytest.mark.slow
@with_solutions
def test_the_points_of_a_class(tmp_path: Path) -> None:
    name = "02_kv_cache"
    for student, path in (("anna", "my copy/chapters"), ("ben", "."), ("cara", "elsewhere")):
        (tmp_path / "class" / student / path / name).mkdir(parents=True)
    solution = (CHAPTERS / name / "solution.py").read_text()
    (tmp_path / "class/anna/my copy/chapters" / name / "exercise.py").write_text(solution)
    (tmp_path / "class/ben" / name / "exercise.py").write_text(build.stub_of(solution))
    table = tmp_path / "points.csv"
    result = run(
        "-m", "chapters.grade", str(tmp_path / "class"), "--chapters", "2", "--output", str(table)
    )
    assert result.returncode == 0, result.stderr
    head, *rows = (line.split(",") for line in table.read_text().splitlines())
    assert head == ["student", "2.1", "2.2", "2.3", "2.4", "2.5", "total", "note"]
    ends = [["anna", "10", ""], ["ben", "0", ""], ["cara", "0", f"{name}: no exercise.py"]]
    assert [[row[0], *row[-2:]] for row in rows] == ends


LOADS_WITH = {
    "def f(:": "SyntaxError: invalid syntax",
    "thread = None + 1": "TypeError: unsupported operand",
    "@dataclasses.dataclass\nclass A:\n    x: list = []": "ValueError: mutable default",
    "raise SystemExit(3)": "SystemExit: 3",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", LOADS_WITH)
def test_an_error_while_a_file_loads_costs_its_own_exercises_only(
    tmp_path: Path, code: str
) -> None:
    for name in ("00_setup", "01_gpt2"):
        (tmp_path / name).mkdir()
    (tmp_path / "00_setup/exercise.py").write_text(f"import dataclasses\n\n{code}\n")
    (tmp_path / "01_gpt2/exercise.py").write_text(
        "def causal_mask(pos, k_pos):\n    return k_pos <= pos[:, None]\n"
    )
    options = ["-m", "ex0_1 or ex1_1", f"--from={tmp_path}", "-p", "no:cacheprovider"]
    printed = run("-m", "pytest", "chapters/00_setup", "chapters/01_gpt2", *options).stdout
    assert (
        f'File "{tmp_path}/00_setup/exercise.py", line 3' in printed and LOADS_WITH[code] in printed
    )
    assert re.search(r"0\.1 +0 of 2\n +1\.1 +1 of 1\n", printed), printed
    assert "INTERNALERROR" not in printed and "conftest.py" not in printed


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
def test_exercises_markers_and_points_agree(folder: Path) -> None:
    number = int(folder.name.partition("_")[0])
    readme = (folder / "README.md").read_text()
    (test,) = folder.glob("test_*.py")
    points = {k: v for k, v in conftest.points().items() if k.startswith(f"ex{number}_")}
    tree = ast.parse(test.read_text())
    listed = {
        f"ex{m[1]}_{m[2]}": int(m[3])
        for m in re.finditer(r"^\| (\d+)\.(\d+) \|.*\| (\d+) \|$", readme, re.M)
    }
    assert points == listed
    marked = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            marked[node.name] = re.findall(r"pytest\.mark\.(ex\d+_\d+)", decorators)
    assert all(len(marks) == 1 for marks in marked.values()), marked
    assert {marks[0] for marks in marked.values()} == {*points}
    assert re.match(rf"# {number}\. ", readme) and "minutes" in readme.partition("##")[0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_links_and_images_of_chapters_exist(folder: Path) -> None:
    text = re.sub(r"```.*?```", "", (folder / "README.md").read_text(), flags=re.S)
    links = re.findall(r"(!?)\[([^\]]*)\]\(([^)#]+)(?:#[^)]*)?\)", text)
    for image, words, target in links:
        if not target.startswith("http"):
            assert (folder / target).exists(), target
        assert words or not image, f"{target} has no alternative text"


def test_a_page_leads_to_its_neighbours_and_into_itself() -> None:
    text = "# 2. The `KV` cache\n\n## It's *new*: a & b\n\n## Run it\n\n## Run it\n"
    page = pages.page(text, build.links(CHAPTERS / "02_kv_cache" / "README.md"))
    assert re.findall(r'<h\d id="(.*?)">', page) == [
        "2-the-kv-cache",
        "its-new-a--b",
        "run-it",
        "run-it-1",
    ]
    neighbours = ["../01_gpt2/index.html", "../index.html", "../03_bounded/index.html"]
    assert re.findall(r'<a href="(.*?)">', page) == 2 * neighbours
    assert build.links(FOLDERS[0] / "README.md")[0] == ("../index.html", "All chapters")
    assert build.links(FOLDERS[-1] / "README.md")[-1] == ("../index.html", "All chapters")
    assert build.links(CHAPTERS / "README.md") == []
    assert pages.target("01_gpt2/README.md#run-it") == "01_gpt2/index.html#run-it"


def test_every_hunk_has_words() -> None:
    said = side_by_side.words(
        {folder / "README.md": (folder / "README.md").read_text() for folder in FOLDERS}
    )
    for pair in side_by_side.PAIRS:
        found = {*said[pair]}
        for words in chain.from_iterable(said[pair].values()):
            if several := re.match(r"hunks (\d+) to (\d+): ", words):
                found |= {*range(int(several[1]), int(several[2]) + 1)}
        assert found == {*range(1, len(blocks.hunks(*pair)) + 1)}, pair


def test_transformers_reads_the_folder_that_engines_are_given(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export = blocks.import_file(CHAPTERS / "10_beyond" / "export.py")
    export.main([str(tmp_path / "served")])
    ours, model = load_tokenizer("pocket"), load_model("pocket", model_class=GPT)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "served")
    for text in (
        next(iter(corpus.documents("test", 1))).text,
        " été 你好\n\n x 12 it's<|endoftext|>",
    ):
        assert theirs(text)["input_ids"] == ours.encode(text, allowed_special="all")
    assert theirs.eos_token_id == ours.eot_token
    ids = torch.tensor([ours.encode("Halek lives in")])
    expected = torch.cat([ids, *generate(model, ids, 20)], dim=1)
    for folder in (tmp_path / "served", ROOT / "pocket" / "teacher"):
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert torch.equal(reference.generate(ids, max_new_tokens=20, do_sample=False), expected)


@pytest.mark.parametrize(
    ("mark", "culprit"),
    [
        ("code gpt_baseline.py Nothing", "Nothing"),
        ("code gpt_kv_cache.py KVCache", "show a part"),
        ("diff gpt_baseline.py gpt_kv_cache.py 11", "11"),
        ("output python3 nowhere.py", "can't open file"),
        ("picture nothing", "nothing"),
    ],
)
def test_a_mark_that_fits_nothing_is_refused(mark: str, culprit: str) -> None:
    readme = CHAPTERS / "02_kv_cache" / "README.md"

    class Readme(type(readme)):
        def read_text(self, *_: object, **__: object) -> str:
            return f"# 2. Chapter\n\n<!-- {mark} -->\n<!-- end -->\n"

    with pytest.raises(ValueError, match="chapters/02_kv_cache/README.md: .*" + re.escape(culprit)):
        blocks.text_of(Readme(readme))


@pytest.mark.slow
@recorded
@with_solutions
def test_what_is_stale_is_said_and_mended(tmp_path: Path) -> None:
    tree = copy_of_the_chapters(tmp_path)
    readme = tree / "chapters" / "02_kv_cache" / "README.md"
    fresh = readme.read_text()
    readme.write_text(fresh.replace("torch.stack([k, v])", "torch.stack([v, k])"))
    exercise = tree / "chapters" / "02_kv_cache" / "exercise.py"
    exercise.write_text("done by a student\n")
    result = run("-m", "chapters.builder", "2", "--check", "--stubs", cwd=tree)
    assert (
        result.returncode == 2
        and "02_kv_cache/README.md" in result.stderr
        and "exercise.py" in result.stderr
    )
    assert len(result.stderr.strip().splitlines()) == 1
    assert run("-m", "chapters.builder", "2", cwd=tree).returncode == 0
    assert readme.read_text() == fresh and exercise.read_text() == "done by a student\n"
    assert run("-m", "chapters.builder", "2", "--stubs", cwd=tree).returncode == 0
    assert "NotImplemented" in exercise.read_text()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a shell's way to write paths")
def test_commands_of_chapters_exist() -> None:
    """Every script that a chapter's fenced commands name is there, and knows the options they give."""
    helps: dict[str, str] = {}
    for folder in FOLDERS:
        for block in re.findall(r"```bash\n(.*?)```", (folder / "README.md").read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                for command in re.findall(r"python3 ((?!-m|-c)\S+\.py)([^|;&]*)", line):
                    script, rest = command
                    assert (ROOT / script).is_file(), line
                    if script not in helps:
                        done = run(script, "--help")
                        assert done.returncode == 0, f"{line}: {done.stderr}"
                        helps[script] = done.stdout
                    for option in re.findall(r"(?<=\s)(--[a-z-]+)", rest):
                        assert option in helps[script] or option == "--help", line
