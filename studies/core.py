"""The command line of a study: it measures what has no row yet, draws its figures, and prints its
claims and its table."""

import argparse
import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from load_gpt2_weights import NAMES, load_model
from studies.claims import by_arithmetic, claim_tables, claims_in, judge_claims
from studies.judging import Claim
from studies.results import Results, Setting
from studies.showing import draw_figures, table_of
from support.cli import CommandLine
from support.conditions import is_geometry
from support.files import writable_folder
from support.tables import Table, page

REAL_MODEL = "smollm2"  # that quality is judged on
RECORDED_MODELS = ("pocket", REAL_MODEL)


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
    ) -> None:
        """quick: what --quick reduces the study to; model: the option that names the model, or ""
        for a study without one."""
        super().__init__(doc, f"python3 -m studies.{name} --quick")
        self.prog = f"python3 -m studies.{name.split()[0]}"
        if model:
            self.add_model_options(models, option=model)
        self.add_argument("--quick", action="store_true", help=f"{quick}, in a minute or two")
        self.add_argument(
            "--out",
            default=f"results/{out or name}",
            metavar="FOLDER",
            type=writable_folder,
            help="where results go",
        )


def load_chosen_model(args: argparse.Namespace) -> tuple[nn.Module, str]:
    """Return the model that --model names, with random weights if that is a geometry, and its name
    in a record."""
    name, recorded_name = args.model, args.model
    if is_geometry(name):
        name, recorded_name = f"random:{name}", f"{name}, random weights"
    return load_model(name, device=args.device, dtype=args.dtype), recorded_name


# --- Measuring --------------------------------------------------------------------------------------


def name_unshown_claims(
    results: Results, other_models: Collection[str], beyond: Sequence[Claim]
) -> None:
    """Print, before a reduced run, the claims that it can't show: those that need rows of other
    models, and those `beyond` it, since it measures too little."""
    recorded = copy.copy(results)
    recorded.rows = {}
    for row in Results(results.study).rows.values():
        if row["model"] not in other_models:
            recorded.remember(row)
    unshown = [*judge_claims(recorded)[1], *beyond]
    words = [claim.plain for claim in claims_in(results.study) if claim in unshown]
    if words:
        print(f"This run can't show: {'; '.join(words)}.\n")


def open_results(
    study: str,
    args: argparse.Namespace,
    recorded_models: Sequence[str] = (),
    difference: str | None = None,
    setting: Setting | None = None,
    beyond: Sequence[Claim] = (),
) -> Results:
    """Return the results for a run, as its command line asks. Claims on quality are judged on
    args.model; without a verdict, all figures are its own.

    difference: why there is no verdict, "" if there is one; by default there is one for recorded
    models. setting: of the figures without one, by default the model. beyond: the claims that a
    reduced run is too small for.
    """
    is_recorded = not difference and (not recorded_models or args.model in recorded_models)
    if args.quick:
        difference = "reduced run"
    elif difference is None:
        difference = "" if is_recorded else "run of another model"
    if "seed" in args and (args.seed, args.dtype) != (0, torch.float32):
        difference = difference or "run with another --seed or --dtype"
    results = Results(study, args.out, difference)
    if recorded_models:
        results.instead = dict.fromkeys(recorded_models, args.model)
        is_its_own = difference or not is_recorded
        if is_its_own and args.model != results.usual.get("model"):
            results.usual |= setting or {"model": args.model}
            results.every["model"] = [args.model]
    if args.quick and is_recorded:
        other_models = {*recorded_models}.difference([getattr(args, "model", "")])
        name_unshown_claims(results, other_models, beyond)
    return results


def page_of(results: Results) -> list[str | Table]:
    """Return the claims and the table of a study, for a terminal. A claim that lacks figures is
    shown by its plain words alone."""
    parts = by_arithmetic([results.study])
    if results.no_verdict_reason:
        parts.append(f"A {results.no_verdict_reason}: figures, and no verdict.")
    findings, lacking = judge_claims(results)
    if findings:
        parts += claim_tables(findings)
    if lacking:
        words = "; ".join(claim.plain for claim in lacking)
        parts.append(f"Left out, as figures are missing: {words}.")
    return parts + table_of(results)


def report(results: Results) -> None:
    """Draw the figures of a run, and print its claims and its table."""
    folder = results.path.parent
    results.progress.close()
    draw_figures(results, folder)
    print(page([*page_of(results), f"Written to {folder}"]))


def run_study(
    doc: str | None,
    study: str,
    quick: str,
    measure: Callable[[Results, Any], None],
    argv: list[str] | None = None,
    rows_of: str = "",
    recorded_models: Sequence[str] = (),
    beyond: Sequence[Claim] = (),
    models: str = NAMES,
) -> None:
    """Run a study as its command line asks. quick: what --quick reduces it to; rows_of: the study
    whose rows and claims it uses, if not its own; recorded_models: those that it gives verdicts on,
    if it takes --model, of `models`, by default the first; beyond: the claims that --quick is too
    small for; measure: appends the rows. Its second argument says whether to append fewer of them;
    for a study that takes --model it is the command line's arguments. The others use one thread."""
    model = "--model" if recorded_models else ""
    cli = StudyLine(doc, study, quick, model=model, out=rows_of, models=models)
    if recorded_models:
        cli.set_defaults(model=recorded_models[0])
    with cli.parse(argv) as args:
        if not recorded_models:
            torch.set_num_threads(1)
        results = open_results(rows_of or study, args, recorded_models, beyond=beyond)
        measure(results, args if recorded_models else args.quick)
        report(results)
