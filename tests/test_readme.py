"""README.md and the studies' pages tell the truth: commands, maps and figures."""

import re
import runpy
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from chapters.builder import filler, pages
from tests.helpers import run

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = ("borrow", "chapters", "studies", "benchmarks", "pocket")
FOUND = [*ROOT.glob("*.md"), *(path for room in ROOMS for path in ROOT.glob(f"{room}/**/*.md"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in FOUND}


@pytest.mark.parametrize("name", [name for name in filler.PAGES if name != "live"])
def test_excerpts_and_figures_are_those_of_the_files(name: str) -> None:
    """All but outputs and pictures, which take longer: `python3 -m chapters.builder` mends them."""
    page = filler.PAGES[name]
    assert filler.filled(page, keep=("output", "picture")) == page.read_text(encoding="utf-8")


def test_the_python_examples_run_one_after_the_other() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    ran = run(lambda _: exec(code, {}))
    assert ran.code == 0 and ran.err == "" and "slot  position  token" in ran.out


@cache
def help_of(script: str) -> str:
    """Return the --help of a script, run in this process as `python3 SCRIPT` runs it; "-m" before a module."""
    module, *words = script.removeprefix("-m ").split()
    run_it = runpy.run_module if script.startswith("-m ") else runpy.run_path
    argv = [module, *words, "--help"]
    with mock.patch("sys.argv", argv), mock.patch("sys.path", [*sys.path]):
        ran = run(lambda _: run_it(module, run_name="__main__"))
    assert ran.code == 0 and ran.err == "", (script, ran.err)
    return ran.out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")
def test_commands_of_pages_exist_and_every_script_has_help() -> None:
    """Every script and module that is run is there, and knows the options that it is given."""
    plain = []  # chapters' scripts that take no options
    for path in ROOT.glob("chapters/[0-9]*/*.py"):
        if "CommandLine" not in path.read_text(encoding="utf-8"):
            plain.append(path.relative_to(ROOT).as_posix())
    for path, text in TEXTS.items():
        commands = r"python3 (-m (?:studies|benchmarks|chapters\.[a-z])(?:\.?\w+)*|(?!tests)[\w/]+\.py)([^|;&\n`#<]*)"
        for script, rest in re.findall(commands, text.replace("\\\n", " ")):
            if script in plain:  # test_chapters runs it
                continue
            known = help_of(script)
            if default := re.search(r"\n  ACTION +default: (\w+)", known):
                named = re.match(r" ([a-z]+)", rest)
                known = help_of(f"{script} {(named or default)[1]}")
            for option in re.findall(r"(?<=\s)--[a-z-]+", rest):
                assert option in known, f"{path}: {script}{rest}"
    for script in [*ROOT.glob("*.py"), *ROOT.glob("studies/[a-z]*.py")]:
        if script.read_text(encoding="utf-8").endswith("  main()\n"):
            assert "usage:" in help_of(str(script))


def test_links_lead_to_files_and_headings() -> None:
    shown = {path: pages.render_page(text) for path, text in TEXTS.items()}
    links = 0
    for path, text in TEXTS.items():
        text = pages.COMMENT.sub("", text)
        for name, heading in re.findall(r"\]\((?!\w+:)([^)# ]*)#?([^) ]*)\)", text):
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), f"{path}: {name}"
            if heading and target in shown:
                assert f'id="{heading}"' in shown[target], f"{path}: {name}#{heading}"
            links += 1
    assert links > 100


def test_the_front_page_is_short() -> None:
    assert len(README.split()) <= 900
