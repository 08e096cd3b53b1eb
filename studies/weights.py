"""Real weights: `python3 -m studies.weights` shows that the lecture files agree on them, and repeats two studies.

GPT-2 (0.5 GB) and DialoGPT-medium (0.9 GB) are downloaded on first use. The recycling paper's experiment runs on its
own model, and the projection study on data/capitals.csv, pairs of questions about a capital in other words, each after
two answered ones; their results go into one folder.
`python3 load_gpt2_weights.py gpt2 --verify` compares the text with published continuations.
"""

import torch

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from compress import read_in_pieces
from llama_kv_cache import Llama
from load_gpt2_weights import NAMES, find_file, load_model, load_tokenizer
from recycle import DATA
from studies.core import StudyLine
from studies.projection import study as projection
from studies.recycling import study as recycling
from support.files import read_json
from support.tables import table

DIALOGUE = "microsoft/DialoGPT-medium"  # the model of the recycling study
PROMPT = "Explain machine learning in simple terms."  # the first that the recycling paper stores

# By file: its generate() and its model, and what makes a cache for a context.
WAYS = {
    "gpt_baseline.py": (gpt_baseline, None),
    "gpt_kv_cache.py": (gpt_kv_cache, lambda n_ctx: gpt_kv_cache.KVCache()),
    "gpt_bounded_cache.py": (gpt_bounded_cache, gpt_bounded_cache.SlidingWindowCache),
}


@torch.inference_mode()
def agreement(
    name: str, device: str, dtype: torch.dtype, n_new: int
) -> dict[str, tuple[bool, float]]:
    """Return for each of the three GPT files, which write with a Llama too, whether it writes the greedy tokens of the
    first with these weights, and the largest difference of their logits as a share of the largest logit.

    Raises OSError or ValueError, as load_model() does, if the weights can't be had or read."""
    tokenizer = load_tokenizer(name)
    prompt = torch.tensor([tokenizer.encode(PROMPT)], device=device)
    llama = read_json(find_file(name, "config.json")).get("model_type") == "llama"
    found, first, exact = {}, None, None
    for file, (module, new_cache) in WAYS.items():
        kind = Llama if llama else module.GPT
        model = load_model(name, model_class=kind, device=device, dtype=dtype)
        n_ctx, options = model.config.n_ctx, {"stop_id": tokenizer.eot_token}
        if new_cache:
            options["cache"] = new_cache(n_ctx)
        text = torch.cat([prompt, *module.generate(model, prompt, n_new, **options)], dim=1)
        first = text if first is None else first  # all read the same text
        logits = read_in_pieces(model, new_cache(n_ctx), first)[0] if new_cache else model(first)
        exact = logits if exact is None else exact
        apart = (logits - exact).abs().max() / exact.abs().max()
        found[file] = torch.equal(text, first), float(apart)
    return found


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "weights", "few tokens, turns and pairs", models=NAMES)
    cli.set_defaults(model="gpt2")
    with cli.parse(argv) as args:
        quick = ["--quick"] * args.quick
        dtype = f"{args.dtype}".removeprefix("torch.")
        common = [*quick, "--device", args.device, "--seed", f"{args.seed}", "--dtype", dtype]
        rows = []
        for name in (args.model, DIALOGUE):
            found = agreement(name, args.device, args.dtype, 10 if args.quick else 100)
            for file, (same, apart) in found.items():
                rows.append([name, file, "yes" if same else "NO", f"{apart:.0e}"])
        print(table(["weights", "file", "same greedy tokens", "logits differ by"], rows))
        if any(row[2] == "NO" for row in rows):
            raise ValueError("the three files write different texts, as the table above says")
        pairs = ["--pairs", f"{DATA / 'capitals.csv'}"]
        for study, model, more in (recycling, DIALOGUE, []), (projection, args.model, pairs):
            name = study.__name__.split(".")[1]
            print(f"\n=== {name}, on {model}\n", flush=True)
            study.main(["--model", model, "--out", f"{args.out / name}", *more, *common])
        print(f"Everything is in {args.out}.")


if __name__ == "__main__":
    main()
