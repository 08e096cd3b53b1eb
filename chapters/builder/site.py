"""Make a site of the chapters' pages: the course, the live page, the files side by side, and the trace.

`python3 -m chapters.builder.site FOLDER --source URL` copies them to a folder that needs nothing else. What they link to
and the folder doesn't have, such as a line of a script, is at URL, where the repository's files can be read.
"""

import html
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from chapters.builder.blocks import CHAPTERS, ROOT
from support.cli import CommandLine
from support.files import read_text, write_atomically, write_text

KINDS = (".html", ".svg", ".png", ".js")
MAKERS = CHAPTERS / "builder"  # whose templates aren't pages
LINK = re.compile(r'(?<=\s)(href|src)="([^"]*)"')


def published_files() -> list[Path]:
    """Return the pages, and what they show."""
    found = (path for path in CHAPTERS.rglob("*") if path.suffix in KINDS)
    return sorted(path for path in found if not path.is_relative_to(MAKERS))


def with_source_links(page: Path, text: str, published: set[Path], source: str) -> str:
    """Return a page's text, in which links to files that aren't published lead to the source."""

    def lead(match: re.Match[str]) -> str:
        address = urlsplit(html.unescape(match[2]))
        target = Path(os.path.normpath(page.parent / address.path))
        if address.scheme or address.netloc or not address.path or target in published:
            return match[0]
        fragment = f"#{address.fragment}" if address.fragment else ""
        leads_to = f"{source.rstrip('/')}/{target.relative_to(ROOT).as_posix()}{fragment}"
        return f'{match[1]}="{html.escape(leads_to)}"'

    return LINK.sub(lead, text)


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
        if args.folder.exists() and any(args.folder.iterdir()):
            raise ValueError(f"{args.folder} isn't empty: the site goes into a new folder")
        files = published_files()
        for path in files:
            copy = args.folder / path.relative_to(CHAPTERS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".html":
                text = with_source_links(path, read_text(path), {*files}, args.source)
                write_text(copy, text)
            else:
                content = path.read_bytes()
                write_atomically(copy, lambda file, content=content: file.write_bytes(content))
        print(f"{len(files)} files in {args.folder}: open index.html")


if __name__ == "__main__":
    main()
