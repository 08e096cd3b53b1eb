"""Real weights: `python3 -m studies.weights` shows that the lecture files agree on them, and repeats two studies.

GPT-2 (0.5 GB) and DialoGPT-medium (0.9 GB) are downloaded on first use. Published continuations are reproduced; then
the recycling paper's experiment runs on its own model, and the projection study on questions about capitals. All of it
goes into one folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor, nn

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
import llama_kv_cache
from llama_kv_cache import Llama
from load_gpt2_weights import EXPECTED_OUTPUTS, NAMES, find_file, load_model, load_tokenizer
from studies import projection, recycling
from studies.protocol import StudyLine
from support.conditions import conditions
from support.files import read_csv, read_json, write_csv, write_json
from support.tables import table

CAPITALS = Path(__file__).resolve().parent.parent / "data" / "capitals.csv"
HEADER = (
    "Q: What is the capital of Italy?\nA: Rome\n\nQ: Name the capital city of Japan.\nA: Tokyo\n\n"
)
WORDINGS = (
    "What is the capital of {}?",
    "Name the capital city of {}.",
    "Which city is the capital of {}?",
)
PROMPT = "Explain machine learning in simple terms."  # the first that the recycling paper stores

# By file, or way: the model, whose generate() writes, and what makes a cache for a context.
RING = gpt_bounded_cache.SlidingWindowCache
WAYS = {
    "gpt_baseline.py": (gpt_baseline.GPT, gpt_baseline, None),
    "gpt_kv_cache.py": (gpt_kv_cache.GPT, gpt_kv_cache, lambda n_ctx: gpt_kv_cache.KVCache()),
    "gpt_bounded_cache.py": (gpt_bounded_cache.GPT, gpt_bounded_cache, RING),
}
LLAMA_WAYS = {
    "llama_kv_cache.py, no cache": (Llama, gpt_baseline, None),
    "llama_kv_cache.py": (Llama, llama_kv_cache, lambda n_ctx: llama_kv_cache.KVCache()),
    "llama_kv_cache.py, preallocated": (Llama, gpt_bounded_cache, RING),
}


@torch.inference_mode()
def agreement(name: str, device: str, dtype: torch.dtype, n_new: int) -> dict[str, Any]:
    """Return whether the three GPT files, or a Llama's file with three caches, write the same greedy tokens with these
    weights, the largest difference of their logits as a share of the largest logit, and how many published
    continuations they reproduce.

    Raises OSError or ValueError, as load_model() does, if the weights can't be had or read."""
    tokenizer = load_tokenizer(name)
    llama = read_json(find_file(name, "config.json")).get("model_type") == "llama"
    ways = LLAMA_WAYS if llama else WAYS
    published = [
        entry for entry in read_json(EXPECTED_OUTPUTS)["continuations"] if entry["model"] == name
    ]
    texts, logits, same = {}, {}, {}
    for file, (model_class, module, new_cache) in ways.items():
        model = load_model(name, model_class=model_class, device=device, dtype=dtype)
        about = conditions(name, model)

        def written(
            prompt: str,
            n: int,
            model: nn.Module = model,
            module: Any = module,
            new_cache: Any = new_cache,
        ) -> list[int]:
            ids = torch.tensor([tokenizer.encode(prompt, allowed_special="all")], device=device)
            options = {"stop_id": tokenizer.eot_token}
            if new_cache:
                options["cache"] = new_cache(model.config.n_ctx)
            return [int(token) for token in module.generate(model, ids, n, **options)]

        texts[file] = written(PROMPT, n_new)
        first = next(iter(texts.values()))  # all read the same text
        ids = torch.tensor([tokenizer.encode(PROMPT) + first], device=device)
        logits[file] = read(model, ids, new_cache and new_cache(model.config.n_ctx))
        same[file] = sum(continues(tokenizer, entry, written) for entry in published)
    exact = next(iter(logits.values()))
    return {
        **about,
        "tokens": len(first),
        "same_tokens": {file: ids == first for file, ids in texts.items()},
        "difference": {
            file: float((x - exact).abs().max() / exact.abs().max()) for file, x in logits.items()
        },
        "published": len(published),
        "reproduced": same,
    }


def read(model: nn.Module, ids: Tensor, cache: Any) -> Tensor:
    """Return the logits (T, V) of a text (1, T): read whole without a cache, else token by token."""
    if cache is None:
        return model(ids)[0]
    return torch.cat([model(ids[:, t : t + 1], cache)[0] for t in range(ids.size(1))])


def continues(
    tokenizer: tiktoken.Encoding, entry: dict[str, str], written: Callable[[str, int], list[int]]
) -> bool:
    """Return whether a text goes on as it was published."""
    n = len(tokenizer.encode(entry["continuation"], allowed_special="all"))
    return tokenizer.decode(written(entry["prompt"], n)) == entry["continuation"]


def write_pairs(path: Path) -> None:
    """Write a CSV file of similar prompts: each question about a capital in other words, after two answered."""
    rows = []
    for row in read_csv(CAPITALS, "country", "capital"):
        first, *others = (
            f"{HEADER}Q: {wording.format(row['country'])}\nA:" for wording in WORDINGS
        )
        rows += [[first, other, f" {row['capital']}"] for other in others]
    write_csv(path, ["source", "target", "answer"], rows)


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "weights", "few tokens, turns and pairs", models=NAMES)
    cli.set_defaults(model="gpt2")
    what = "the model of the recycling study"
    dialogue = "microsoft/DialoGPT-medium"
    cli.add_argument("--dialogue", default=dialogue, metavar="NAME", help=what)
    with cli.parse(argv) as args:
        quick = ["--quick"] * args.quick
        common = [*quick, "--device", args.device, "--seed", f"{args.seed}"]
        common += ["--dtype", f"{args.dtype}".removeprefix("torch.")]
        common += ["--threads", f"{torch.get_num_threads()}"]
        new = 10 if args.quick else 100
        names = (args.model, args.dialogue)
        record = {name: agreement(name, args.device, args.dtype, new) for name in names}
        write_json(args.out / "agreement.json", record)
        rows = []
        for name, found in record.items():
            for file, same in found["same_tokens"].items():
                apart = f"{found['difference'][file]:.0e}"
                texts = f"{found['reproduced'][file]} of {found['published']}"
                rows.append([name, file, "yes" if same else "NO", apart, texts])
        header = ["weights", "file", "same greedy tokens", "logits differ by", "published texts"]
        print(table(header, rows))
        if any(row[2] == "NO" for row in rows):
            figures = args.out / "agreement.json"
            raise ValueError(f"the three files write different texts: {figures} has the figures")
        pairs = args.out / "pairs.csv"
        write_pairs(pairs)
        print(f"\n=== Recycling, on {args.dialogue}\n", flush=True)
        out = ["--out", f"{args.out / 'recycling'}"]
        recycling.main(["--model", args.dialogue, *out, *common])
        print(f"\n=== Projection, on {args.model}\n", flush=True)
        out = ["--out", f"{args.out / 'projection'}"]
        projection.main(["--model", args.model, "--pairs", f"{pairs}", *out, *common])
        print(f"Everything is in {args.out}.")


if __name__ == "__main__":
    main()
