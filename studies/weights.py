"""Real weights: `python3 -m studies.weights` shows that the lecture files agree on them, and repeats two studies.

GPT-2 (0.5 GB) and DialoGPT-medium (0.9 GB) are downloaded on first use. The recycling paper's
experiment runs on its own model, and the projection study on data/capitals.csv, pairs of questions
that ask for a capital in different words, each after two answered ones; their results go into one
folder. `python3 load_gpt2_weights.py gpt2 --verify` compares the text with published continuations.
"""

from typing import NamedTuple

import torch

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from compress import read_in_pieces
from formats.checkpoints import open_checkpoint
from formats.configs import kind_of, read_config
from llama_kv_cache import Llama
from load_gpt2_weights import (
    NAMES,
    load_model,
    load_tokenizer,
)
from recycle import DATA
from studies.core import StudyLine
from studies.projection import study as projection
from studies.recycling import study as recycling
from support.printing import end_tokens_of
from support.tables import table

DIALOGUE_MODEL = "microsoft/DialoGPT-medium"  # the model of the recycling study
PROMPT = "Explain machine learning in simple terms."  # the first that the recycling paper stores

# By file: its generate(), its model, and a function that makes a cache for a context.
LECTURE_FILES = {
    "gpt_baseline.py": (gpt_baseline, None),
    "gpt_kv_cache.py": (gpt_kv_cache, lambda n_ctx: gpt_kv_cache.KVCache()),
    "gpt_bounded_cache.py": (gpt_bounded_cache, gpt_bounded_cache.SlidingWindowCache),
}


class Agreement(NamedTuple):
    """Whether a file writes another one's greedy tokens, and the largest difference of their logits as a share of the
    largest logit."""

    same_tokens: bool
    difference: float


@torch.inference_mode()
def compare_lecture_files(
    model_name: str, device: str, dtype: torch.dtype, new_tokens: int
) -> dict[str, Agreement]:
    """Return for each of the three GPT files, which write with a Llama too, how it agrees with the first.

    Raises OSError or ValueError, as load_model() does, if the weights can't be had or read."""
    tokenizer = load_tokenizer(model_name)
    prompt = torch.tensor([tokenizer.encode(PROMPT)], device=device)
    checkpoint = open_checkpoint(model_name)
    is_llama = kind_of(read_config(checkpoint.config(), checkpoint.where)) == "Llama"
    agreements, first_text, first_logits = {}, None, None
    for file, (module, new_cache) in LECTURE_FILES.items():
        model_class = Llama if is_llama else module.GPT
        model = load_model(model_name, model_class=model_class, device=device, dtype=dtype)
        n_ctx, options = model.config.n_ctx, {"stop_ids": end_tokens_of(tokenizer)}
        if new_cache:
            options["cache"] = new_cache(n_ctx)
        text = torch.cat([prompt, *module.generate(model, prompt, new_tokens, **options)], dim=1)
        if first_text is None:
            first_text = text
        # all read the same text
        logits = (
            read_in_pieces(model, new_cache(n_ctx), first_text)[0]
            if new_cache
            else model(first_text)
        )
        if first_logits is None:
            first_logits = logits
        difference = (logits - first_logits).abs().max() / first_logits.abs().max()
        agreements[file] = Agreement(torch.equal(text, first_text), float(difference))
    return agreements


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "weights", "few tokens, turns and pairs", models=NAMES)
    cli.set_defaults(model="gpt2")
    with cli.parse(argv) as args:
        dtype = f"{args.dtype}".removeprefix("torch.")
        common_options = ["--device", args.device, "--seed", f"{args.seed}", "--dtype", dtype]
        if args.quick:
            common_options.append("--quick")
        new_tokens = 10 if args.quick else 100
        table_rows = []
        for name in (args.model, DIALOGUE_MODEL):
            agreements = compare_lecture_files(name, args.device, args.dtype, new_tokens)
            for file, (same_tokens, difference) in agreements.items():
                table_rows.append([name, file, "yes" if same_tokens else "NO", f"{difference:.0e}"])
        print(table(["weights", "file", "same greedy tokens", "logits differ by"], table_rows))
        if any(row[2] == "NO" for row in table_rows):
            raise ValueError("the three files write different texts, as the table above says")
        pairs_option = ["--pairs", f"{DATA / 'capitals.csv'}"]
        for study, model, own_options in (
            (recycling, DIALOGUE_MODEL, []),
            (projection, args.model, pairs_option),
        ):
            name = study.__name__.split(".")[1]
            print(f"\n=== {name}, on {model}\n", flush=True)
            options = ["--model", model, "--out", f"{args.out / name}"]
            study.main([*options, *own_options, *common_options])
        print(f"Everything is in {args.out}.")


if __name__ == "__main__":
    main()
