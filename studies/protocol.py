"""The common parts of the studies: their command line, files of prompts, and the form of a claim and its verdict."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from load_gpt2_weights import NAMES
from support.cli import CommandLine, whole_number, writable_folder
from support.files import read_csv, read_json
from support.tables import Table

HERE = Path(__file__).resolve().parent
NOISE = 0.05  # ours: times that differ by less are equal


class StudyLine(CommandLine):
    """The command line of a study: a model, --quick and --out."""

    def __init__(
        self,
        doc: str | None,
        name: str,
        quick: str,
        model: str = "--model",
        out: str = "",
        models: str = NAMES,
        turns: int = 0,
    ) -> None:
        """quick: the study's reduced form with --quick; model: the option that names the model, "" for none; turns:
        the default of --turns beside --threads, 0 if there are none."""
        super().__init__(doc, f"python3 -m studies.{name} --quick", models)
        if model:
            self.add_model_arguments(model)
        if turns:
            self.add_argument(
                "--turns", type=whole_number(1), default=turns, metavar="N", help="turns to measure"
            )
            self.add_argument(
                "--threads", type=whole_number(1), default=1, metavar="N", help="CPU threads"
            )
        self.add_argument("--quick", action="store_true", help=f"{quick}, in at most a minute")
        self.add_argument(
            "--out",
            default=f"results/{out or name}",
            metavar="FOLDER",
            type=writable_folder,
            help="where results go",
        )

    def resolved(self, args: argparse.Namespace) -> argparse.Namespace:
        """Set the threads of a study without a model, too."""
        if "threads" in args and "device" not in args:
            torch.set_num_threads(args.threads)
        return super().resolved(args)


class Claim(TypedDict):
    """A claim in its source's own words, the conditions of both sides, and our finding."""

    source: str  # its title; "" if it is ours
    section: str
    quote: str
    theirs: str  # conditions
    ours: str
    figure: str  # what decides, with its interval
    verdict: str
    stated: str  # tested as stated: yes, partly, no
    why: str


ANSWERS = {"HOLDS": "YES", "DOES NOT HOLD": "NO"}  # to our questions


def claim_tables(claims: Sequence[Claim]) -> list[str | Table]:
    """Return claims as a table for each source and conditions, which stand above it; ours come last."""
    parts: list[str | Table] = []
    for source in dict.fromkeys(claim["source"] for claim in claims):
        of_source = [claim for claim in claims if claim["source"] == source]
        if source:
            parts.append(f"Conditions of {source}: {of_source[0]['theirs']}.")
        for ours in dict.fromkeys(claim["ours"] for claim in of_source):
            parts.append(
                f"Here: {ours}." if source else f"Ours, claimed by no source. Here: {ours}."
            )
            rows = [
                [
                    f'"{c["quote"]}" ({c["section"]})' if source else c["quote"],
                    ": ".join(
                        filter(
                            None,
                            (
                                c["verdict"] if source else ANSWERS.get(c["verdict"], c["verdict"]),
                                c["figure"],
                            ),
                        )
                    ),
                    ": ".join(filter(None, (c["stated"], c["why"]))),
                ]
                for c in of_source
                if c["ours"] == ours
            ]
            n = 3 if source else 2
            header = ["claim" if source else "question", "found here", "tested as stated"]
            parts.append(Table(header[:n], [row[:n] for row in rows], left=n))
    return parts


def read_prompts(path: Path) -> list[str]:
    """Return the column prompt of a CSV file. Raises ValueError if it has none, or none that isn't empty."""
    prompts = [row["prompt"] for row in read_csv(path, "prompt")]
    if not prompts or not all(prompts):
        raise ValueError(
            f"{path} has {len(prompts)} prompts, {sum(not p for p in prompts)} of them empty"
        )
    return prompts


def conditions_of(record: dict[str, Any], *data: str) -> str:
    """Return the model, the data and the machine of a record as a line."""
    c = {"model": record.get("teacher")} | (record.get("conditions") or record)
    size = (
        f": {c['parameters']:,} parameters ({c['layers']} layers of width {c['width']:,})"
        if "parameters" in c
        else ""
    )
    threads = f"{c['threads']} thread{'s' * (c['threads'] > 1)}" if "threads" in c else ""
    return "; ".join(
        filter(None, [f"{c['model']}{size}", *data, threads, c.get("machine"), c.get("date")])
    )


def benchmark() -> dict[str, Any]:
    """Return the newest benchmark on one thread, with its conditions in the form of the studies'."""
    record = read_json(
        sorted((HERE.parent / "benchmarks" / "results").glob("*-1-thread"))[-1] / "summary.json"
    )
    g = record["geometry"]
    machine = f"{record['machine']}{', disturbed meanwhile' * record['disturbed']}"
    return record | {
        "model": f"{record['model']}, random weights",
        "machine": machine,
        "parameters": g["weights"] // 4,
        "layers": g["n_layer"],
        "width": g["n_embd"],
    }
