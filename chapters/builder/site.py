"""Make a site of the chapters: the course as HTML pages, the live page, the files side by side, and a trace.

`python3 -m chapters.builder.site FOLDER` writes them to a folder; open its index.html. What they link to and the folder
doesn't have, such as a line of a script, is in these files beside it, or with `--source URL` at that address. Then the
folder needs nothing else.
"""

import html
import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from chapters.builder.blocks import CHAPTERS, ROOT, run_process, title_of
from chapters.builder.pages import render_page
from support.cli import CommandLine
from support.files import read_text, write_text

LINK = re.compile(r'(?<=\s)(href|src)="([^"]*)"')
TRACE = CHAPTERS / "trace.html"  # made for the site only
PUBLISHED = (
    "*.md",
    "[0-9]*/README.md",
    "*.svg",
    "[0-9]*/*.svg",
    "live/*",
    "side_by_side/*",
    "../studies/README.md",
    "../studies/*/README.md",
    "../studies/*/*.png",
)


def published_files() -> dict[Path, Path]:
    """Return the path on the site of each file that is published: texts become pages."""
    found = {TRACE: Path(TRACE.name)}
    for pattern in PUBLISHED:
        for path in map(Path.resolve, CHAPTERS.glob(pattern)):
            here = path.relative_to(CHAPTERS if CHAPTERS in path.parents else ROOT).as_posix()
            found[path] = Path(here.replace("README", "index").replace(".md", ".html"))
    return found


def neighbour_links(path: Path) -> list[tuple[str, str]]:
    """Return the texts that a text leads to, each with its words: the chapter before, all chapters, the next one."""
    texts = sorted(CHAPTERS.glob("[0-9]*/README.md"))
    if path not in texts:
        return [] if path.stem == "README" else [("README.md", "All chapters")]
    number = texts.index(path)
    links = [(f"../{text.parent.name}/README.md", title_of(read_text(text))) for text in texts]
    before = [(page, f"← {title}") for page, title in links[:number][-1:]]
    after = [(page, f"{title} →") for page, title in links[number + 1 :][:1]]
    return [*before, ("../README.md", "All chapters"), *after]


def page_of(path: Path, published: dict[Path, Path], folder: Path, source: str | None) -> str:
    """Return a text or a page as it is on the site, which is made in a folder. Links to files that aren't published lead
    to the source, by default these files."""
    here = (folder / published[path].parent).resolve()

    def lead(match: re.Match[str]) -> str:
        address = urlsplit(html.unescape(match[2]))
        if address.scheme or not address.path:
            return match[0]
        target = Path(os.path.normpath(path.parent / address.path))
        if target in published or not source:
            there = folder.resolve() / published.get(target, target)
            leads_to = Path(os.path.relpath(there, here)).as_posix()
        else:
            leads_to = f"{source}/{target.relative_to(ROOT).as_posix()}"
        fragment = f"#{address.fragment}" if address.fragment else ""
        return f'{match[1]}="{html.escape(leads_to + fragment)}"'

    text = read_text(path)
    if path.suffix == ".md":
        text = render_page(text, neighbour_links(path))
    return LINK.sub(lead, text)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.builder.site site")
    cli.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    cli.add_argument(
        "--source", metavar="URL", help="where the repository's files can be read; default: here"
    )
    with cli.parse(argv) as args:
        args.folder.mkdir(parents=True)
        published = published_files()
        for path, address in published.items():
            copy = args.folder / address
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path == TRACE:
                words = "gpt_kv_cache.py --max-new-tokens 40 --trace".split()
                run_process("python3", *words, str(copy.resolve()), check=True)
            elif path.suffix in (".md", ".html"):
                write_text(copy, page_of(path, published, args.folder, args.source))
            else:
                shutil.copyfile(path, copy)
        print(f"{len(published)} files in {args.folder}: open index.html")


if __name__ == "__main__":
    main()
