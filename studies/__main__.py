"""Lists the studies: `python3 -m studies`."""

from __future__ import annotations

import ast
from pathlib import Path

if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            print(f"python3 -m studies.{path.stem:<11} {ast.get_docstring(tree).splitlines()[0]}")
    print("\nEach has --help; those that measure have --quick, of a minute at most.")
