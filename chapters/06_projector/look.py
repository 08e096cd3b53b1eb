"""Chapter 6 on the real model: `summaries`, the first token if summary tokens stand for a prompt, and `leak`, how a
split of prompts that isn't one of families finds a relation that isn't there. From the project's folder:
`python3 -m chapters.06_projector.look summaries`.
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
from studies.projection.segments import measure_segments, summarize
from studies.projection.ways import divergence
from support.regression import ridge
from support.tables import table

QUESTIONS, OTHERS, PENALTY = 24, 40, 0.01  # asked; more, for their queries; of the ridge in leak()


def summaries(model: GPT, tokenizer: tiktoken.Encoding) -> None:
    """Print KL of the first token after questions, on summary tokens of three prompts and by these prompts' logits."""

    def exact(question: corpus.Question) -> Prefill:
        return prefill(model, tokenizer.encode(question.prompt))

    def bank(layout: Layout) -> Tensor:
        return torch.cat(
            [tail_queries(model, other, layout.tail) for other in others], 2
        )  # (L, H, OTHERS, D)

    families = corpus.quiz_families("test")
    others = [exact(family[0]) for family in corpus.quiz_families("train")[:OTHERS]]
    layouts = {layout: bank(layout) for layout in (Layout(1), Layout(32))}
    kl: dict[str, list[Tensor]] = {}  # of each way, a row a question
    for i, family in enumerate(families[:QUESTIONS]):
        kind = family[0].family.split(":")[1::2]  # such as a town's river
        another = next(
            f
            for f in families[i + 1 :] + families
            if f[0].family.split(":")[1::2] == kind and f != family
        )
        asked = exact(family[2])
        for name, question in (
            ("the prompt itself", family[2]),
            ("the same in other words", family[1]),
            ("of another town or animal", another[2]),
        ):
            source, row = exact(question), []
            for layout, queries in layouts.items():
                kv = summarize(measure_segments(model, source, layout, queries))  # (L, 2, H, m, D)
                warm = cache_of_summary(model, kv, layout.tail_position(len(asked.ids)))
                row.append(
                    divergence(asked.logits, model(torch.tensor([asked.ids[-1:]]), warm)[0, -1])
                )
            kl.setdefault(name, []).append(
                torch.stack([*row, divergence(asked.logits, source.logits)])
            )
    print(
        f"{QUESTIONS} questions: mean KL of the first token in nats, and how many have at most 0.05\n"
    )
    lines = []
    for name, rows in kl.items():
        found = torch.stack(rows)  # (QUESTIONS, 3)
        cells = zip(found.mean(0).tolist(), (found <= 0.05).sum(0).tolist(), strict=True)
        lines.append([name, *(f"{mean:.2f}, {n:>2}" for mean, n in cells)])
    print(
        table(["on what is left of", "one summary token", "32 summary tokens", "its logits"], lines)
    )


def leak(model: GPT, tokenizer: tiktoken.Encoding) -> None:
    """Print how well a number is predicted that was drawn by lot for each family, from the hidden state of its prompts:
    with prompts held out, and with families held out."""
    families = [family[:4] for family in corpus.quiz_families("train", header=0)[:100]]
    prompts = [(i, question.prompt) for i, family in enumerate(families) for question in family]
    x = torch.stack(
        [prefill(model, tokenizer.encode(text)).hidden for _, text in prompts]
    )  # (N, C)
    lots = torch.randn(len(families), generator=torch.Generator().manual_seed(0))
    y = torch.stack([lots[i] for i, _ in prompts])[:, None]  # (N, 1)
    print(
        f"{len(prompts)} prompts of {len(families)} families; share of the variance that is explained\n"
    )
    for name, key in (
        ("prompts held out", range(len(prompts))),
        ("families held out", [i for i, _ in prompts]),
    ):
        order = sorted(set(key))
        random.Random(0).shuffle(order)
        chosen = {*order[: len(order) // 3]}
        held_out = torch.tensor([i in chosen for i in key])
        mean = x[~held_out].mean(0)
        w = ridge(x[~held_out] - mean, y[~held_out], PENALTY).float()
        rest = (x[held_out] - mean) @ w - y[held_out]
        print(f"{name:>18}: {float(1 - rest.square().mean() / y[held_out].var()):6.0%}")


def main() -> None:
    torch.set_grad_enabled(False)
    {"summaries": summaries, "leak": leak}[sys.argv[1]](
        load_model("pocket", model_class=GPT), load_tokenizer("pocket")
    )


if __name__ == "__main__":
    main()
