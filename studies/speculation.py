"""Exact speculation beside refreshes: at equally many passes of the teacher, which text is better, and how fast is it?

`python3 -m studies.speculation` takes a few minutes. Each prompt is continued by the teacher alone, by speculation with
drafts of several lengths, and by refreshes after bursts of as many tokens. Source: see speculate.py; the comparison is
ours.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gpt_kv_cache import GPT, generate
from overfill import Pair, generate_refreshed, load_pair, speculative, teacher_nats
from speculate import DRAFTS, Passes, speculate
from studies.protocol import StudyLine, conditions_of, with_interval
from studies.refreshing_measures import pocket_prompts
from support.cli import whole_number
from support.conditions import machine
from support.files import write_json
from support.statistics import bootstrap
from support.tables import Table, page

LENGTHS = (4, 8, 16)
METHODS = {"teacher alone": ("", 0), **{f"exact, {k} by the student": ("student", k) for k in LENGTHS},
           **{f"exact, {k} from the text": ("text", k) for k in LENGTHS},
           **{f"refreshed every {k}": ("refresh", k) for k in LENGTHS}}  # fmt: skip


def write(teacher: GPT, student: GPT, ids: Tensor, n: int, method: str, temperature: float,
          seed: int) -> dict[str, Any]:  # fmt: skip
    """Return a method's text after a prompt (1, T), its time, and the teacher's work."""
    by, k = METHODS[method]
    pair, passes, began = Pair(teacher, student, ids), Passes(), time.perf_counter()
    options = {"temperature": temperature, "generator": torch.Generator(ids.device).manual_seed(seed)}
    if by in DRAFTS:
        tokens = speculate(pair, n, k, DRAFTS[by], passes, **options)
    else:
        tokens = generate_refreshed(pair, n, speculative(k), **options) if by else generate(teacher, ids, n, **options)
    written = [int(token) for token in tokens]
    seconds = time.perf_counter() - began
    nats = teacher_nats(teacher, ids, torch.tensor([written], device=ids.device)).mean().item()
    count = {"": n - 1, "refresh": len(pair.refreshes)}.get(by, passes.count)
    return {"ids": written, "seconds": seconds, "nats": nats, "passes": count, "drafted": passes.drafted,
            "agreed": passes.agreed}  # fmt: skip


@torch.no_grad()
def measure(teacher: GPT, student: GPT, prompts: Sequence[Sequence[int]], n: int) -> dict[str, dict[str, Any]]:
    """Return the figures of all methods, greedy and sampled; the methods take turns at each prompt."""
    found: dict[str, dict[str, Any]] = {}
    for what, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        texts = [torch.tensor([ids], device=teacher.wte.weight.device) for ids in prompts]
        runs = [{method: write(teacher, student, ids, n, method, temperature, seed) for method in METHODS}
                for seed, ids in enumerate(tqdm(texts, desc=what, leave=False))]  # fmt: skip
        for method in METHODS:
            those = [run[method] for run in runs]
            drafted = sum(run["drafted"] for run in those)
            found.setdefault(method, {})[what] = {
                "perplexity": [math.exp(x) for x in bootstrap(np.array([run["nats"] for run in those]))],
                "passes_in_1000": 1000 * sum(run["passes"] for run in those) / (n * len(those)),
                "agreed": sum(run["agreed"] for run in those) / drafted if drafted else None,
                "tokens_per_s": statistics.median(n / run["seconds"] for run in those),
                "same": sum(run[method]["ids"] == run["teacher alone"]["ids"] for run in runs),
            }
    return found


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return the teacher's work in each method, the quality of its text by the teacher, and its speed."""
    rows = []
    for method, r in record["methods"].items():
        greedy, sampled = r["greedy"], r["sampled"]
        agreed = [f"{x['agreed']:.0%}" if x["agreed"] is not None else "" for x in (greedy, sampled)]
        rows.append([method, f"{greedy['passes_in_1000']:.0f}, {sampled['passes_in_1000']:.0f}",
                     ", ".join(filter(None, agreed)) or "-", f"{greedy['same']} of {record['prompts']}",
                     with_interval(sampled["perplexity"]),
                     f"{greedy['tokens_per_s']:.0f}, {sampled['tokens_per_s']:.0f}"])  # fmt: skip
    models = " and ".join(f"{record[key]} of {n:,} parameters" for key, n in zip(
        ("teacher", "student"), record["parameters"], strict=True))  # fmt: skip
    known = {key: record[key] for key in ("threads", "machine", "date") if key in record}
    return [
        f"{record['prompts']} held-out prompts of {record['prompt_tokens']} tokens and {record['tokens']} written ones "
        f"each; {conditions_of({'model': models, **known})}. Where a cell has two figures, the first is for "
        "greedy text, the second for text sampled at temperature 1; a dash: no drafts.",
        Table(["", "teacher's passes in 1,000 tokens", "share of drafts kept", "greedy text: the teacher's",
               "sampled: perplexity", "tokens/s"], rows),
        verdict(record["methods"]),
    ]  # fmt: skip


def verdict(methods: dict[str, Any]) -> str:
    """Return the conclusion for refreshes, at about as many passes of the teacher, and for the time."""
    def at(method: str, how: str) -> str:
        r = methods[method][how]
        return f"{r['passes_in_1000']:.0f} passes in 1,000 tokens and a perplexity of {r['perplexity'][0]:.2f}"

    alone = methods["teacher alone"]["sampled"]
    times = {name: r["sampled"]["tokens_per_s"] / alone["tokens_per_s"] for name, r in methods.items()}
    fastest = max((name for name in methods if name.startswith("exact")), key=times.__getitem__)
    return (f"Greedy, the teacher's own text takes {at('exact, 16 by the student', 'greedy')} with drafts of 16; a "
            f"refresh every 8 tokens takes {at('refreshed every 8', 'greedy')}, of another text. Sampled, drafts "
            f"of 8 take {at('exact, 8 by the student', 'sampled')}; a refresh every 4 takes "
            f"{at('refreshed every 4', 'sampled')}. Drafts save time only where they cost much less than the teacher. "
            f"Here the student, refreshed every 16 tokens, writes {times['refreshed every 16']:.2f} times as fast as "
            f"the teacher, and in sampled text the fastest speculation ({fastest}) {times[fastest]:.2f} times as fast.")


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "speculation", "four prompts and shorter texts", model="--teacher")
    cli.add_argument("--student", default="pocket-student", metavar="NAME", help="the model that drafts")
    cli.add_argument("--prompts", type=whole_number(2), metavar="N", help="texts; default: 20, with --quick 4")
    with cli.parse(argv) as args:
        teacher, student, tokenizer = load_pair(args.model, args.student, device=args.device, dtype=args.dtype)
        n, prompts = (64, args.prompts or 4) if args.quick else (256, args.prompts or 20)
        record = {
            "teacher": args.model, "student": args.student, "prompts": prompts, "prompt_tokens": 192, "tokens": n,
            "parameters": [sum(p.numel() for p in model.parameters()) for model in (teacher, student)],
            "threads": torch.get_num_threads(), "machine": machine(args.device), "date": time.strftime("%Y-%m-%d"),
            "methods": measure(teacher, student, pocket_prompts(tokenizer, "test", prompts, 192), n),
        }  # fmt: skip
        write_json(args.out / "summary.json", record)
        print(page([*tables(record), f"Written to {args.out}"]))


if __name__ == "__main__":
    main()
