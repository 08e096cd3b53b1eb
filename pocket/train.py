"""Train the small models that the scripts run on when no other is named.

  python3 pocket/train.py tokenizer                           a byte-level BPE of the corpus
  python3 pocket/train.py teacher                             the model itself: an interrupted run goes on
  torchrun --nproc-per-node 2 pocket/train.py teacher         the same run, data-parallel
  python3 pocket/train.py llama                               a Llama of the same size, by the same recipe
  python3 pocket/train.py bct                                 the teacher with BCT's bounded memory, fine-tuned
  python3 pocket/train.py bct --rule sum                      the same by the BCT paper's own rule, section 3.2 of it
  torchrun --nproc-per-node 8 pocket/train.py bct --init gpt2 --text FILE --out FOLDER
  python3 pocket/train.py student                             a narrower model that decodes on the teacher's cache
  python3 pocket/train.py student --kind prompt               the same, trained otherwise: also alone, dropout
  torchrun --nproc-per-node 8 pocket/train.py student --init gpt2-medium --text FILE --out FOLDER
  python3 pocket/train.py ablation                            which parts of BCT do what, by short runs of each

The finding behind the recipe: a GPT-2 this small, with random learned positions, forms no induction head within
ten million tokens. It writes fluent text whose names have nothing to do with the prompt, so that nothing could be
learned from its KV cache. Hence start_as_copier(); hence rows of random lists: when training went on with documents
only, the model unlearned copying (14 nats per token of a repeated random list, after 3 million tokens of documents);
and hence rows of shuffled vocabulary, in which only the prompt helps: with answers weighing more, they took the share
of early facts that are recalled late from 17% to 54% in the second half of the first generation's training.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, f"{sys.path[0]}/..")  # run as a file, from any folder

import argparse
from pathlib import Path

import torch.distributed as dist

from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from pocket import recipes
from pocket.ablation import ablation
from pocket.batches import RANK
from pocket.checkpoints import finish
from pocket.tokenizer import TOKENIZER, train_tokenizer
from pocket.training import train
from support.cli import CommandLine, whole_number, writable_folder

HERE = Path(__file__).resolve().parent


def recipe_of(args: argparse.Namespace) -> recipes.Recipe:
    """Return the recipe of what is to be trained."""
    if args.what == "teacher":
        return recipes.TEACHER
    if args.what == "llama":
        return recipes.LLAMA
    init = args.init or "pocket"
    config = load_model(init, model_class=GPT).config
    if args.what == "student":
        return recipes.pruning(init, config, args.steps, args.kind or recipes.KINDS[0], args.text)
    memory = recipes.PAPER if args.rule == "sum" else recipes.MEMORY
    return recipes.distillation(init, config, args.steps, args.text, **memory)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="torchrun --nproc-per-node 2 pocket/train.py teacher")
    cli.add_argument(
        "what",
        choices=("tokenizer", "teacher", "llama", "bct", "student", "ablation"),
        help="what to train",
    )
    cli.add_argument(
        "--out",
        type=writable_folder,
        metavar="FOLDER",
        help="for the result, and in run/ for the run's state; default: in pocket, and runs/",
    )
    cli.add_argument("--init", metavar="NAME", help="the model to change; default: pocket")
    cli.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text, <|endoftext|> between texts; default: the corpus",
    )
    cli.add_argument(
        "--steps",
        type=whole_number(1),
        metavar="N",
        help="of training; default: as many as pocket's took",
    )
    cli.add_argument(
        "--kind",
        choices=recipes.KINDS,
        help="what it reads in training: segments as between refreshes; alone, its own cache; prompt, the "
        f"teacher's of a prompt; dropout, segments with dropout; default: {recipes.KINDS[0]}",
    )
    cli.add_argument(
        "--rule",
        choices=("mean", "sum"),
        help="how a slot reads its writes: mean, ours, with gates; sum, the paper's own; default: mean",
    )
    cli.only("bct, student", "--init", "--text", "--steps")
    cli.only("student", "--kind")
    cli.only("bct", "--rule")
    with cli.parse(argv) as args:
        if (args.init or args.text or args.steps) and args.out is None:
            raise ValueError(
                "--out FOLDER is needed: only the defaults may replace pocket's models"
            )
        if args.what == "tokenizer":
            train_tokenizer((args.out or TOKENIZER.parent) / TOKENIZER.name)
        elif args.what == "ablation":
            out, run = folders(args.out, "bct")
            ablation(run, out / "ablation.json")
        else:
            recipe = recipe_of(args)
            out, run = folders(args.out, recipe.name)
            model, losses = train(recipe, run)
            if RANK == 0:
                finish(recipe, model.cpu(), losses, out)
        if dist.is_initialized():
            dist.destroy_process_group()


def folders(out: Path | None, name: str) -> tuple[Path, Path]:
    """Return where the result goes, and the state of a run."""
    return (out, out / "run") if out else (HERE / name, HERE.parent / "runs" / name)


if __name__ == "__main__":
    main()
