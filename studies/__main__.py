"""Lists the studies: `python3 -m studies`."""

import argparse
import ast
import textwrap
from pathlib import Path

if __name__ == "__main__":
    argparse.ArgumentParser("python3 -m studies").parse_args()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code = path.read_text("utf-8")
        if code.endswith("    main()\n"):
            about = ast.get_docstring(ast.parse(code)).partition("\n\n")[0]
            line = f"python3 -m studies.{path.stem:<11} {about}"
            print(textwrap.fill(line, 100, subsequent_indent=" " * 31))
    print("\nEach has --help; those that measure have --quick, of a minute at most.")
