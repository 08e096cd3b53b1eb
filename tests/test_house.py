"""The house: imports go one way, a file is short, and each GPT file stands alone."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPT_FILES = ["gpt_baseline", "gpt_kv_cache", "gpt_bounded_cache"]
METHODS = ["recycle", "projector", "overfill", "speculate", "paged"]
FLOORS = [["support"], GPT_FILES, ["load_gpt2_weights"], ["pocket"], METHODS, ["studies", "benchmarks"], ["chapters"]]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
LINES = 400  # of code in a file, tables of data aside


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of ours by its dotted name, chapters' exercises and tests aside."""
    files = [p for p in [*ROOT.glob("*.py"), *(p for name in FLOOR for p in ROOT.glob(f"{name}/**/*.py"))]]
    kept = [p for p in files if not (p.relative_to(ROOT).parts[0] == "chapters" and p.parent.name[:2].isdigit())]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): ast.parse(p.read_text("utf-8")) for p in kept}


def imported(tree: ast.Module, known: set[str], door: bool) -> set[str]:
    """The modules of ours that a file imports anywhere; with door, only those that main() imports, else all others."""
    inside = {id(node) for top in tree.body if getattr(top, "name", "") == "main" for node in ast.walk(top)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and (id(node) in inside) == door:
            names = [alias.name for alias in node.names]
            whole = [f"{node.module}.{name}" for name in names] + [node.module] if hasattr(node, "module") else names
            found |= {name for name in whole if name in known}
    return found


def test_no_import_closes_a_circle_and_main_alone_may_call_upward() -> None:
    trees = modules()
    graph = {name: imported(tree, {*trees}, door=False) for name, tree in trees.items()}
    for name, below in graph.items():  # what only a type checker sees counts too
        for other in below:
            assert FLOOR[other.partition(".")[0]] <= FLOOR[name.partition(".")[0]], f"{name} imports {other}"
    left = dict(graph)
    while ready := [name for name, below in left.items() if not below & {*left}]:
        left = {name: below for name, below in left.items() if name not in ready}
    assert left == {}, "these import each other"


def test_support_stands_on_nothing_and_nothing_stands_on_chapters() -> None:
    trees = modules()
    for name, tree in trees.items():
        all_of_it = imported(tree, {*trees}, door=False) | imported(tree, {*trees}, door=True)
        room = name.partition(".")[0]
        assert room != "support" or {other.partition(".")[0] for other in all_of_it} <= {"support"}
        assert room == "chapters" or not any(other.startswith("chapters") for other in all_of_it), name


def test_a_file_is_a_noun() -> None:
    from tests.test_diff import code_lines

    for name in modules():
        path = f"{name.replace('.', '/')}.py"
        if name not in GPT_FILES:  # they have a budget of their own, with their diffs
            assert len(code_lines((ROOT / path).read_text("utf-8"))) <= LINES, path


def test_a_gpt_file_alone_beside_torch_generates_from_random_weights(tmp_path: Path) -> None:
    for name in GPT_FILES:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text((ROOT / f"{name}.py").read_text("utf-8"), "utf-8")
    code = f"""import importlib, sys, torch
assert {str(ROOT)!r} not in sys.path
for name in {GPT_FILES}:
    sys.path[0] = name
    file = importlib.import_module(name)
    for kind in {{getattr(file, kind, file.GPT) for kind in ("GPT", "BCT")}}:
        model = kind(kind.config_class(vocab_size=9, n_ctx=8, n_layer=1, n_head=1, n_embd=4)).eval()
        assert torch.cat([*file.generate(model, torch.tensor([[1, 2]]), 20)], 1).shape == (1, 20)
    del sys.modules[name]  # the next one has to do without it
    assert not {{*{GPT_FILES}, "load_gpt2_weights", "support", "tiktoken"}} & {{*sys.modules}}, name
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env={"PATH": "", "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
