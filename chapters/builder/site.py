"""Make a site of the chapters' pages: the course, the live page, the files side by side, and the trace.

`python3 -m chapters.builder.site FOLDER --source URL` copies them to a folder that needs nothing else. What they link to
and the folder doesn't have, such as a line of a script, is at URL, where the repository's files can be read.
"""

import html
import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from chapters.builder.blocks import CHAPTERS, ROOT
from support.cli import CommandLine
from support.files import read_text, write_text

MAKERS = CHAPTERS / "builder"  # whose templates aren't pages
SHOWN_ELSEWHERE = "figures"  # the site's folder for pictures from other rooms
LINK = re.compile(r'(?<=\s)(href|src)="([^"]*)"')


def published_files() -> list[Path]:
    """Return the pages, their scripts and their pictures."""
    found = (path for path in CHAPTERS.rglob("*") if path.suffix in (".html", ".js", ".svg"))
    return sorted(path for path in found if not path.is_relative_to(MAKERS))


def site_of(source: str) -> dict[Path, str | Path]:
    """Return the site: by the path of each file in it, the text of a page, or the file to copy.

    Links to files that aren't published lead to the source; pictures from other rooms come along."""
    published = published_files()
    files: dict[Path, str | Path] = {path.relative_to(CHAPTERS): path for path in published}
    for page in [path for path in published if path.suffix == ".html"]:

        def lead(match: re.Match[str], page: Path = page) -> str:
            address = urlsplit(html.unescape(match[2]))
            target = Path(os.path.normpath(page.parent / address.path))
            if address.scheme or address.netloc or not address.path or target in published:
                return match[0]
            if match[1] == "src":
                copy = Path(SHOWN_ELSEWHERE) / "_".join(target.relative_to(ROOT).parts)
                files[copy] = target
                leads_to = os.path.relpath(CHAPTERS / copy, page.parent)
            else:
                fragment = f"#{address.fragment}" if address.fragment else ""
                leads_to = f"{source.rstrip('/')}/{target.relative_to(ROOT).as_posix()}{fragment}"
            return f'{match[1]}="{html.escape(leads_to)}"'

        files[page.relative_to(CHAPTERS)] = LINK.sub(lead, read_text(page))
    return files


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.builder.site site --source URL")
    cli.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that is new or empty")
    cli.add_argument(
        "--source", required=True, metavar="URL", help="where the repository's files can be read"
    )
    with cli.parse(argv) as args:
        if not urlsplit(args.source).netloc:
            raise ValueError(
                f"--source must be an address such as https://host/path, got {args.source!r}"
            )
        if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
            raise ValueError(f"{args.folder} isn't an empty folder: the site goes into a new one")
        files = site_of(args.source)
        for path, content in files.items():
            copy = args.folder / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                write_text(copy, content)
            else:
                shutil.copyfile(content, copy)
        print(f"{len(files)} files in {args.folder}: open index.html")


if __name__ == "__main__":
    main()
