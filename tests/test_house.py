"""The house: imports go one way, and each GPT file stands alone."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPT_FILES = ["gpt_baseline", "gpt_kv_cache", "gpt_bounded_cache", "llama_kv_cache"]
LIVE_WEIGHTS = ROOT / "chapters" / "live" / "weights.js"
METHODS = ["recycle", "projector", "pair", "overfill", "speculate", "paged", "compress"]
FLOORS = [
    ["support"],
    ["examine"],
    GPT_FILES,
    ["hybrid_kv_cache"],
    ["formats"],
    ["load_gpt2_weights"],
    ["pocket"],
    METHODS,
    ["borrow"],
    ["demos"],
    ["studies", "benchmarks"],
    ["chapters"],
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of ours by its dotted name, chapters' exercises and tests aside."""
    found = {}
    for path in [*ROOT.glob("*.py"), *(p for name in FLOOR for p in ROOT.glob(f"{name}/**/*.py"))]:
        if not path.parent.name[:2].isdigit():
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name] = ast.parse(path.read_text("utf-8"))
    return found


def imported(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The modules of ours that a file imports anywhere: those of main() apart, which is a door."""
    main = [top for top in tree.body if getattr(top, "name", "") == "main"]
    rest = [top for top in tree.body if top not in main]
    found = []
    for part in (rest, main):
        names: set[str] = set()
        for node in ast.walk(ast.Module(part, [])):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found.append(names & {*modules()})
    return found[0], found[1]


def test_no_import_closes_a_circle_and_main_alone_may_call_upward() -> None:
    graph = {name: imported(tree)[0] for name, tree in modules().items()}
    for name, below in graph.items():  # what only a type checker sees counts too
        for other in below:
            higher = FLOOR[other.partition(".")[0]] > FLOOR[name.partition(".")[0]]
            assert not higher, f"{name} imports {other}"
    left = dict(graph)
    while ready := [name for name, below in left.items() if not below & {*left}]:
        left = {name: below for name, below in left.items() if name not in ready}
    assert left == {}, "these import each other"


def test_support_stands_on_nothing_and_nothing_stands_on_chapters() -> None:
    for name, tree in modules().items():
        room = name.partition(".")[0]
        below = {other.partition(".")[0] for names in imported(tree) for other in names}
        assert room != "support" or below <= {"support"}
        assert room == "chapters" or "chapters" not in below, name


def test_no_file_is_over_a_megabyte_but_weights() -> None:
    for folder in (".", *(f"{room}/**" for room in [*FLOOR, "data", "tests"])):
        for path in ROOT.glob(f"{folder}/*"):
            if path.is_file() and path.suffix != ".safetensors" and path != LIVE_WEIGHTS:
                assert path.stat().st_size < 1_000_000, path


def test_a_gpt_file_alone_beside_torch_generates_from_random_weights(tmp_path: Path) -> None:
    for name in GPT_FILES:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(
            (ROOT / f"{name}.py").read_text("utf-8"), "utf-8"
        )
    code = f"""import importlib, sys, torch
assert {str(ROOT)!r} not in sys.path
for name in {GPT_FILES}:
    sys.path[0] = name
    file = importlib.import_module(name)
    for kind in {{getattr(file, kind) for kind in ("GPT", "BCT", "Llama") if hasattr(file, kind)}}:
        model = kind(kind.config_class(vocab_size=9, n_ctx=8, n_layer=1, n_head=3, n_embd=12)).eval()
        assert torch.cat([*file.generate(model, torch.tensor([[1, 2]]), 20)], 1).shape == (1, 20)
    del sys.modules[name]  # the next one has to do without it
    assert not {{*{GPT_FILES}, "load_gpt2_weights", "support", "tiktoken"}} & {{*sys.modules}}, name
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
