"""Lists the studies: `python3 -m studies`."""

import argparse
import ast
from pathlib import Path

if __name__ == "__main__":
    argparse.ArgumentParser("python3 -m studies").parse_args()
    for path in sorted(Path(__file__).parent.glob("*/study.py")):
        about = ast.get_docstring(ast.parse(path.read_text("utf-8"))).partition("\n\n")[0]
        print(f"python3 -m studies.{path.parent.name}\n  {' '.join(about.split())}")
    print("Also: studies.claims, studies.replay, studies.simulation.")
    print("Each has --help; those that measure have --quick, of a minute or two.")
