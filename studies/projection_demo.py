"""The projection study in seconds: the bare run of projector.py, and the library that its `ask` makes."""

from __future__ import annotations

from statistics import mean, median

import tiktoken
from tqdm import tqdm

from gpt_kv_cache import GPT
from projector import Layout, Library
from studies.projection_methods import NEIGHBOUR, divergence, library_of, methods, raw_tokens
from studies.projection_prompts import Experiment, pocket_families
from studies.projection_quality import GOOD_KL, choose_tau
from studies.projection_times import read_cold, read_rest, timed, whole_start
from support.tables import table

FAMILIES = {"train": 20, "valid": 4, "test": 16}  # of three questions each
OURS = raw_tokens(Layout(8, tail=16))  # the best of the whole study on quiz questions
EXPLANATION = """
Exact: the cold start, and the rival, which stores the questions' shared beginning and reads the rest.
Approximate: the others. They read the end of the question or nothing of it, and a stored neighbour stands in.
Only the first token is approximate: the prompt is read meanwhile, and all others come from the exact cache.
To survive its own test a warm start must save at least 35%, with KL <= 0.05 on at least 80% of the prompts.

The whole test, on four kinds of prompts, takes 15 to 30 minutes (--quick: one): python3 projector.py study"""


def demo(model: GPT, tokenizer: tiktoken.Encoding, seed: int) -> None:
    """Fit the proposal on a few quiz questions, and print its first tokens on others beside the exact ones."""
    families = pocket_families("quiz", seed, FAMILIES, wordings=3)
    experiment = Experiment(model, tokenizer, "quiz", families, "pairs", seed)
    compared = {"as proposed: 8 projected summary tokens, 1 token read": methods()[0],
                "ours: 8 summary tokens as stored, 16 tokens read": OURS,
                "control: the neighbour's logits, nothing read": NEIGHBOUR}
    starts = {"cold: the prompt is read": lambda p: read_cold(experiment, p),
              "rival: exact shared prefix, the rest read": lambda p: read_rest(experiment, p)}
    for name, method in tqdm(compared.items(), "fitting", leave=False):
        starts[name] = whole_start(experiment, method)
    asked = [p for p, _ in experiment.related("test")]
    seconds = timed(starts, [(p,) for p in asked], 5)
    cold = next(iter(seconds.values()))
    rows = []
    for name, start in starts.items():
        pairs = [(p.exact.logits, start(p).flatten()) for p in asked]
        kl = [float(divergence(*pair)) for pair in pairs]
        saved = 1 - mean(warm / exact for warm, exact in zip(seconds[name], cold, strict=True))
        rows.append([name, f"{1000 * median(seconds[name]):.1f}", f"{saved:.0%}", f"{mean(kl):.2f}",
                     f"{mean(x <= GOOD_KL for x in kl):.0%}",
                     f"{mean(int(exact.argmax()) == int(found.argmax()) for exact, found in pairs):.0%}"])
    total = sum(len(family) for split in families.values() for family in split)
    print(f"{total} quiz questions of about {mean(len(p.ids) for p in asked):.0f} tokens. The maps are fitted on "
          f"{len(experiment.train)}; {len(asked)} others are asked,\nand for each of them a question in other words is "
          "stored. Times include finding it.\n")
    print(table(["the first token", "ms", "saved", "KL(cold || warm)", "KL <= 0.05", "same token"], rows))
    print(EXPLANATION)


def quiz_library(model: GPT, tokenizer: tiktoken.Encoding, seed: int) -> Library:
    """Return a library of quiz questions to start warm from, its threshold chosen on validation questions."""
    experiment = Experiment(model, tokenizer, "quiz", pocket_families("quiz", seed, wordings=3), "pairs", seed)
    return library_of(experiment, OURS, "test", choose_tau(experiment)[0], guard=True)
