"""The common parts of the studies: their command line, files of prompts, and the form of a claim and its verdict."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from string import ascii_lowercase
from typing import TypedDict

import torch

from gpt_kv_cache import GPT
from load_gpt2_weights import NAMES, load_model
from support.cli import CommandLine, writable_folder
from support.conditions import is_geometry, random_model
from support.tables import Table

MINUTES = {  # that a command's full run took on an undisturbed core
    "article": 10,
    "bounding": 10,
    "recall": 30,
    "pretraining": 60,
    "lengths": 3,
    "recycling": 1,
    "recycling --model 355M": 25,
    "latency": 5,
    "projection": 120,
    "refreshing": 150,
    "speculation": 5,
    "compression": 20,
}


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
        again: bool = False,
    ) -> None:
        """quick: the study's reduced form with --quick; model: the option that names the model, "" for none: the
        study has one thread then; again: whether single ways can be measured once more."""
        super().__init__(doc, f"python3 -m studies.{name} --quick", models)
        self.study = name
        if model:
            self.add_model_arguments(model)
        if again:
            what = "measure these ways once more: a name, or a pattern such as 'raw-*'"
            self.add_argument("--again", default="", metavar="WAYS", help=what)
        self.add_argument("--quick", action="store_true", help=f"{quick}, in at most a minute")
        self.add_argument(
            "--out",
            default=f"results/{out or name}",
            metavar="FOLDER",
            type=writable_folder,
            help="where results go",
        )

    def resolved(self, args: argparse.Namespace) -> argparse.Namespace:
        """Set the threads of a study without a model, too, and say how long a full run takes."""
        if "threads" not in args:
            torch.set_num_threads(1)
        command, model = self.study, getattr(args, "model", None)
        if model != self.get_default("model"):
            command += f" --model {model}"
        if command in MINUTES and not args.quick:
            print(
                f"The full run takes about {MINUTES[command]} minutes on one core, less what is "
                "recorded already; --quick takes at most one.\n",
                flush=True,
            )
        return super().resolved(args)


def model_of(args: argparse.Namespace) -> tuple[GPT, str]:
    """Return the model that --model names, with random weights if that is a geometry, and its name
    in a record."""
    if is_geometry(args.model):
        model = random_model(GPT, args.model).to(args.device, args.dtype)
        return model, f"{args.model}, random weights"
    return load_model(args.model, device=args.device, dtype=args.dtype), args.model


class Claim(TypedDict):
    """A claim in its source's own words, the conditions of both sides, and our finding."""

    source: str  # its title; "" if it is ours
    section: str
    quote: str
    theirs: str  # conditions
    ours: str
    figure: str  # what decides, with its interval
    verdict: str
    stated: str  # whether it is tested as stated, and why not: "partly: ..."
    command: str  # python3 -m studies.COMMAND measures it


ANSWERS = {"HOLDS": "YES", "DOES NOT HOLD": "NO"}  # to our questions


def answer_of(claim: Claim) -> str:
    """Return the verdict on a claim, or the answer to a question of ours."""
    verdict = claim["verdict"]
    return verdict if claim["source"] else ANSWERS.get(verdict, verdict)


def claim_tables(claims: Sequence[Claim]) -> list[str | Table]:
    """Return claims as a table, and our questions as another, after the conditions of each source
    and ours, which the claims name by a letter if there are several."""
    parts: list[str | Table] = []
    theirs = {claim["source"]: claim["theirs"] for claim in claims if claim["source"]}
    parts += [f"Conditions of {source}: {text}." for source, text in theirs.items()]
    conditions = [*dict.fromkeys(claim["ours"] for claim in claims)]
    letters = dict(zip(conditions, ascii_lowercase, strict=False))
    if len(conditions) == 1:
        parts.append(f"Here: {conditions[0]}.")
    elif conditions:
        parts.append("Here:\n\n" + "\n".join(f"- ({letters[on]}) {on}" for on in conditions))
    rows, questions = [], []
    for claim in claims:
        where = [claim["section"]] if claim["source"] else []
        if len(conditions) > 1:
            where.append(letters[claim["ours"]])
        place = f" ({'; '.join(where)})" if where else ""
        found = ": ".join(filter(None, (answer_of(claim), claim["figure"])))
        if claim["source"]:
            rows.append([f'"{claim["quote"]}"{place}', found, claim["stated"]])
        else:
            questions.append([f"{claim['quote']}{place}", found])
    if rows:
        parts.append(Table(["claim", "found here", "tested as stated"], rows, left=3))
    if questions:
        parts.append(Table(["question of ours", "found here"], questions, left=2))
    return parts
