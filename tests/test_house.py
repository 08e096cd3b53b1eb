"""The house: imports go one way, no room grows unnoticed, and each GPT file stands alone.

`python3 tests/test_house.py` prints the weight of each room.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPT_FILES = ["gpt_baseline", "gpt_kv_cache", "gpt_bounded_cache", "llama_kv_cache"]
LIVE_WEIGHTS = ROOT / "chapters" / "live" / "weights.js"
METHODS = ["recycle", "projector", "pair", "overfill", "speculate", "paged", "compress"]
FLOORS = [
    ["support"],
    GPT_FILES,
    ["formats"],
    ["load_gpt2_weights"],
    ["pocket"],
    METHODS,
    ["borrow"],
    ["examine"],
    ["demos"],
    ["studies", "benchmarks"],
    ["chapters"],
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
WEIGHTLESS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Tokens of each room when somebody last looked. A commit that needs more than a twentieth above
# raises its room's record, or records a new room, in one line.
RECORDS = {
    "tests": 115000,
    "chapters' exercises": 77400,
    "studies": 37800,
    "pocket": 18155,
    "lectures": 16146,
    "support": 20900,
    "benchmarks": 12062,
    "chapters' tools": 11200,
    "projector.py": 7150,
    "load_gpt2_weights.py": 4960,
    "paged.py": 3728,
    "overfill.py": 3830,
    "recycle.py": 4470,
    "borrow": 8450,
    "examine.py": 5085,
    "demos": 3080,
    "compress.py": 3600,
    "speculate.py": 2900,
    "pocket's sentences": 1112,
    "pair.py": 855,
}


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


def weight(text: str) -> int:
    """Return the tokens of code in a Python file: a name, however long, and a string are one each; comments,
    docstrings, line breaks and indentation are none. So neither short names nor dense lines make a file lighter."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            docstring_lines |= {*range(docstring.lineno, docstring.end_lineno + 1)}
    count = depth = 0  # of f-strings that are open: newer Pythons split them, and they count once
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if depth == 0 and token.type not in WEIGHTLESS and token.start[0] not in docstring_lines:
            count += 1
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_START"):
            depth += 1
        elif kind.endswith("STRING_END"):
            depth -= 1
    return count


def room_of(path: Path) -> str:
    """Return the room that the weight of a file counts in."""
    first, *rest = path.relative_to(ROOT).parts
    if path.stem in GPT_FILES:
        return "lectures"
    if first == "chapters":
        return "chapters' exercises" if rest[0][:2].isdigit() else "chapters' tools"
    if first == "pocket" and rest[0] == "sentences":
        return "pocket's sentences"
    return first


def weights() -> Counter[str]:
    """Return the tokens of each room."""
    total: Counter[str] = Counter()
    for pattern in ["*.py", "tests/**/*.py", *(f"{room}/**/*.py" for room in FLOOR)]:
        for path in ROOT.glob(pattern):
            if path.name != "exercise.py" and "results" not in path.parts:  # made of solution.py
                total[room_of(path)] += weight(path.read_text("utf-8"))
    return total


def words_of_other_code() -> int:
    """Return the words of what isn't Python and is written by hand: claims, templates, scripts of pages."""
    paths = [path for ending in ("toml", "jinja", "js") for path in ROOT.glob(f"*/**/*.{ending}")]
    return sum(len(path.read_text("utf-8").split()) for path in paths if path != LIVE_WEIGHTS)


def report() -> str:
    """Return each room's tokens beside its record, and the words of other code."""
    rows = [f"{'room':22}{'tokens':>10}{'record':>10}"]
    for room, tokens in weights().most_common():
        rows.append(f"{room:22}{tokens:10,}{RECORDS.get(room, 0):10,}")
    rows.append(f"{'toml, jinja, js':22}{words_of_other_code():10,}   words")
    return "\n".join(rows)


def test_no_room_grows_by_more_than_a_twentieth_unnoticed() -> None:
    print(report())
    for room, tokens in weights().items():
        assert room in RECORDS, (
            f"{room} has no record: add {tokens} to RECORDS in tests/test_house.py"
        )
        assert tokens <= 1.05 * RECORDS[room], (
            f"{room} has {tokens:,} tokens, its record is {RECORDS[room]:,}: is there less to add? "
            "If not, write the new figure into RECORDS in the same commit, and why"
        )


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


if __name__ == "__main__":
    print(report())
