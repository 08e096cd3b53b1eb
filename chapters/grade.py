"""The points of a class as CSV: a line for each student, a column for each exercise.

`python3 -m chapters.grade FOLDER` tests every copy in FOLDER, one sub-folder a student, and writes points.csv. A copy
holds the chapters' folders with the student's exercise.py, at any depth. What students wrote is run as it is: grade
work by strangers in a container.
"""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from chapters.builder.blocks import FOLDERS, run_process
from support.cli import CommandLine
from support.files import read_text, writable_folder, write_csv

SECONDS = 900  # for a chapter of a student


def grade_chapter(copy: Path, chapter: Path) -> tuple[dict[str, int], str]:
    """Return a student's points for each exercise of a chapter, and what went wrong, if anything did."""
    files = sorted(copy.glob(f"**/{chapter.name}/exercise.py"))
    if len(files) != 1:
        return {}, f"{chapter.name}: {len(files) or 'no'} exercise.py"
    command = "python3 -m pytest -p no:cacheprovider".split()
    with TemporaryDirectory() as folder:
        points = Path(folder) / "points.json"
        options = [str(chapter), f"--from={files[0].parents[1]}", f"--points={points}"]
        try:
            run_process(*command, *options, errors="replace", timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return {}, f"{chapter.name}: stopped after {SECONDS} seconds"
        if not points.exists():
            return {}, f"{chapter.name}: the tests didn't run"
        results = json.loads(read_text(points))
        return {exercise: earned for exercise, (earned, *_) in results.items()}, ""


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.grade handed_in --chapters 2 3")
    cli.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder with a sub-folder for each student"
    )
    cli.add_argument(
        "--chapters", nargs="+", type=int, choices=FOLDERS, metavar="N", help="default: all"
    )
    cli.add_argument("--output", type=Path, default="points.csv", metavar="FILE", help="the table")
    with cli.parse(argv) as args:
        writable_folder(args.output.parent)  # or hours would be lost
        students = sorted(path for path in args.folder.iterdir() if path.is_dir())
        if not students:
            raise ValueError(f"there is no student's folder in {args.folder}")
        rows, exercises = [], set()
        for student in tqdm(students, unit="student", disable=None):
            points, notes = {}, []
            for number in sorted(args.chapters or FOLDERS):
                earned, note = grade_chapter(student, FOLDERS[number])
                points |= earned
                notes += [note] if note else []
            exercises |= points.keys()
            rows.append((student.name, points, "; ".join(notes)))
        columns = sorted(exercises, key=lambda exercise: [*map(int, exercise.split("."))])
        table = [
            [name, *(points.get(column, 0) for column in columns), sum(points.values()), note]
            for name, points, note in rows
        ]
        write_csv(args.output, ["student", *columns, "total", "note"], table)
        print(f"written: {args.output}, {len(students)} students, {len(columns)} exercises")


if __name__ == "__main__":
    main()
