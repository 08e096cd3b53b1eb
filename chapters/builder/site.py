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

from chapters.builder.blocks import CHAPTERS, ROOT, chapter_folders, run_process, title_of
from chapters.builder.pages import render_page
from support.cli import CommandLine
from support.files import read_text, write_text

LINK = re.compile(r'(?<=\s)(href|src)="([^"]*)"')
TRACE = CHAPTERS / "trace.html"  # made for the site only


def published_files() -> dict[Path, Path]:
    """Return the path on the site of each file that is published: texts become pages."""
    found = {TRACE: Path(TRACE.name)}
    for path in [*CHAPTERS.glob("*.md"), *CHAPTERS.glob("[0-9]*/README.md")]:
        name = path.stem.replace("README", "index")
        found[path] = path.relative_to(CHAPTERS).with_name(f"{name}.html")
    for pattern in ("*.svg", "[0-9]*/*.svg", "live/*", "side_by_side/*"):
        found |= {path: path.relative_to(CHAPTERS) for path in CHAPTERS.glob(pattern)}
    for path in ROOT.glob("studies/*/*.png"):  # which chapters show
        found[path] = Path("figures", path.parent.name, path.name)
    return found


def neighbour_links(path: Path) -> list[tuple[str, str]]:
    """Return the texts that a text leads to, each with its words: the chapter before, all chapters, the next one."""
    if path.parent == CHAPTERS:
        return [] if path.stem == "README" else [("README.md", "All chapters")]
    chapters, links = chapter_folders([]), [("../README.md", "All chapters")]
    index = chapters.index(path.parent)
    for folder in chapters[max(0, index - 1) : index + 2]:
        title = title_of(read_text(folder / "README.md"))
        address = f"../{folder.name}/README.md"
        if folder < path.parent:
            links.insert(0, (address, f"← {title}"))
        if folder > path.parent:
            links.append((address, f"{title} →"))
    return links


def page_of(path: Path, published: dict[Path, Path], folder: Path, source: str | None) -> str:
    """Return a text or a page as it is on the site, which is made in a folder. Links to files that aren't published lead
    to the source, by default these files."""
    here = published[path].parent

    def lead(match: re.Match[str]) -> str:
        address = urlsplit(html.unescape(match[2]))
        if address.scheme or address.netloc or not address.path:
            return match[0]
        target = Path(os.path.normpath(path.parent / address.path))
        if target in published:
            leads_to = Path(os.path.relpath(published[target], here)).as_posix()
        elif source:
            leads_to = f"{source.rstrip('/')}/{target.relative_to(ROOT).as_posix()}"
        else:
            leads_to = Path(os.path.relpath(target, (folder / here).resolve())).as_posix()
        fragment = f"#{address.fragment}" if address.fragment else ""
        return f'{match[1]}="{html.escape(leads_to + fragment)}"'

    text = read_text(path)
    if path.suffix == ".md":
        text = render_page(text, neighbour_links(path))
    return LINK.sub(lead, text)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.builder.site site")
    cli.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that is new or empty")
    cli.add_argument(
        "--source", metavar="URL", help="where the repository's files can be read; default: here"
    )
    with cli.parse(argv) as args:
        if args.source and not urlsplit(args.source).netloc:
            raise ValueError(
                f"--source must be an address such as https://host/path, got {args.source!r}"
            )
        if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
            raise ValueError(f"{args.folder} isn't an empty folder: the site goes into a new one")
        published = published_files()
        for path, address in published.items():
            copy = args.folder / address
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path == TRACE:
                words = (
                    "gpt_kv_cache.py",
                    "--max-new-tokens",
                    "40",
                    "--trace",
                    str(copy.resolve()),
                )
                run_process("python3", *words, check=True)
            elif path.suffix in (".md", ".html"):
                write_text(copy, page_of(path, published, args.folder, args.source))
            else:
                shutil.copyfile(path, copy)
        print(f"{len(published)} files in {args.folder}: open index.html")


if __name__ == "__main__":
    main()
