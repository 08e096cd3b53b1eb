"""Chapter 6 on the real model: `summaries`, the first token if summary tokens stand for a prompt,
and `leak`, how splitting prompts without regard to families finds a relation that isn't there. From
the project's folder: `python3 -m chapters.06_projector.look summaries`.
"""

from __future__ import annotations

import random
import sys

import tiktoken
import torch
from torch import Tensor

from gpt_kv_cache import GPT
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from projector import Layout, Prefill, cache_of_summary, prefill, tail_queries
from studies.projection.segments import summarize
from support.regression import ridge
from support.statistics import kl
from support.tables import table

QUESTIONS = 24  # questions asked
BANK_PROMPTS = 40  # training prompts, for their queries
PENALTY = 0.01  # of the ridge in leak()


def summaries(model: GPT, tokenizer: tiktoken.Encoding) -> None:
    """Print KL of the first token after questions, with summary tokens of three prompts, and with
    these prompts' logits."""

    def prefill_of(question: corpus.Question) -> Prefill:
        return prefill(model, tokenizer.encode(question.prompt))

    def query_bank(layout: Layout) -> Tensor:
        queries = [tail_queries(prompt, layout.tail) for prompt in bank_prompts]
        return torch.cat(queries, 2)  # (L, H, BANK_PROMPTS, D)

    families = corpus.quiz_families("test")
    bank_families = corpus.quiz_families("train")[:BANK_PROMPTS]
    bank_prompts = [prefill_of(family[0]) for family in bank_families]
    banks = {layout: query_bank(layout) for layout in (Layout(1), Layout(32))}
    nats_by_name: dict[str, list[Tensor]] = {}  # by stored prompt, a row a question
    for i, family in enumerate(families[:QUESTIONS]):
        asked = prefill_of(family[2])
        other_family = next_of_kind(family, families[i + 1 :] + families)
        for name, question in (
            ("the prompt itself", family[2]),
            ("the same in other words", family[1]),
            ("of another town or animal", other_family[2]),
        ):
            stored, row = prefill_of(question), []
            for layout, bank in banks.items():
                kv = summarize(stored, layout, bank)  # (L, 2, H, m, D)
                warm = cache_of_summary(model, kv, layout.tail_position(len(asked.ids)))
                logits = model(torch.tensor([asked.ids[-1:]]), warm)[0, -1]
                row.append(kl(asked.logits.double(), logits.double()))
            row.append(kl(asked.logits.double(), stored.logits.double()))
            nats_by_name.setdefault(name, []).append(torch.stack(row))
    print(
        f"{QUESTIONS} questions: mean KL of the first token in nats, and how many have at most 0.05\n"
    )
    table_rows = []
    for name, rows in nats_by_name.items():
        nats = torch.stack(rows)  # (QUESTIONS, 3)
        columns = zip(nats.mean(0).tolist(), (nats <= 0.05).sum(0).tolist(), strict=True)
        table_rows.append([name, *(f"{mean:.2f}, {good_count:>2}" for mean, good_count in columns)])
    header = ["on what is left of", "one summary token", "32 summary tokens", "its logits"]
    print(table(header, table_rows))


Family = list[corpus.Question]


def next_of_kind(family: Family, candidates: list[Family]) -> Family:
    """Return the first other family that asks for the same kind of fact, such as a town's river."""
    kind = family[0].family.split(":")[1::2]
    for candidate in candidates:
        if candidate != family and candidate[0].family.split(":")[1::2] == kind:
            return candidate
    raise ValueError(f"no other family asks for a {' '.join(kind)}")


def leak(model: GPT, tokenizer: tiktoken.Encoding) -> None:
    """Print how well a number that was drawn at random for each family is predicted from its
    prompts' hidden states: with prompts held out, and with families held out."""
    families = [family[:4] for family in corpus.quiz_families("train", header=0)[:100]]
    prompts = [(i, question.prompt) for i, family in enumerate(families) for question in family]
    family_numbers = [i for i, _ in prompts]
    hidden = [prefill(model, tokenizer.encode(text)).hidden for _, text in prompts]
    x = torch.stack(hidden)  # (N, C)
    lots = torch.randn(len(families), generator=torch.Generator().manual_seed(0))
    y = lots[family_numbers][:, None]  # (N, 1)
    print(
        f"{len(prompts)} prompts of {len(families)} families; share of the variance that is explained\n"
    )
    for name, groups in (
        ("prompts held out", range(len(prompts))),
        ("families held out", family_numbers),
    ):
        order = sorted(set(groups))
        random.Random(0).shuffle(order)
        chosen = {*order[: len(order) // 3]}
        held_out = torch.tensor([group in chosen for group in groups])
        mean = x[~held_out].mean(0)
        weight = ridge(x[~held_out] - mean, y[~held_out], PENALTY).float()
        residual = (x[held_out] - mean) @ weight - y[held_out]
        explained = 1 - residual.square().mean() / y[held_out].var()
        print(f"{name:>18}: {float(explained):6.0%}")


def main() -> None:
    torch.set_grad_enabled(False)
    {"summaries": summaries, "leak": leak}[sys.argv[1]](
        load_model("pocket", model_class=GPT), load_tokenizer("pocket")
    )


if __name__ == "__main__":
    main()
