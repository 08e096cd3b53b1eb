"""Lists the studies: `python3 -m studies`."""

import argparse
import ast
import textwrap
from pathlib import Path

if __name__ == "__main__":
    argparse.ArgumentParser("python3 -m studies").parse_args()
    folder = Path(__file__).parent
    commands = {path.parent.name: path for path in folder.glob("*/study.py")}
    commands |= {path.stem: path for path in folder.glob("[!_]*.py")}
    for name, path in sorted(commands.items()):
        code = path.read_text("utf-8")
        if "\nmain = " in code or "\ndef main(" in code:
            about = ast.get_docstring(ast.parse(code)).partition("\n\n")[0]
            line = f"python3 -m studies.{name:<11} {about}"
            print(textwrap.fill(line, 100, subsequent_indent=" " * 31))
    print("\nEach has --help; those that measure have --quick, of a minute or two.")
