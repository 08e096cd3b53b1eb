"""Train the small models that the scripts run on when no other is named.

  python pocket/train.py tokenizer                           a byte-level BPE of the corpus
  python pocket/train.py teacher                             the model itself: an interrupted run goes on
  torchrun --nproc-per-node 2 pocket/train.py teacher        the same run, data-parallel
  python pocket/train.py llama                               the teacher as a Llama, trained on
  python pocket/train.py bct                                 the teacher with BCT's bounded memory, fine-tuned
  python pocket/train.py bct --rule sum                      the same by the BCT paper's own rule, section 3.2 of it
  torchrun --nproc-per-node 8 pocket/train.py bct --init gpt2 --text FILE     the same for real GPT-2 weights
  python pocket/train.py rotary                              the teacher with rotary positions, fine-tuned
  python pocket/train.py student                             a narrower model that decodes on the teacher's cache
  python pocket/train.py student --kind prompt               the same, trained otherwise: also alone, dropout
  torchrun --nproc-per-node 8 pocket/train.py student --init gpt2-medium --text FILE --out FOLDER
  python pocket/train.py ablation                            which parts of BCT do what, by short runs of each

The finding behind the recipe: a GPT-2 this small, with random learned positions, forms no induction head within
ten million tokens. It writes fluent text whose names have nothing to do with the prompt, so that nothing could be
learned from its KV cache. Hence start_as_copier(); hence rows of random lists: when training went on with documents
only, the model unlearned copying (14 nats per token of a repeated random list, after 3 million tokens of documents);
and hence rows of shuffled vocabulary, in which only the prompt helps: with answers weighing more, they took the share
of early facts that are recalled late from 17% to 54% in the second half of the first generation's training.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.insert(0, f"{sys.path[0]}/..")  # run as a file, from any folder

from pathlib import Path

import torch.distributed as dist

from gpt_baseline import GPT
from load_gpt2_weights import load_model
from pocket.ablation import ablation
from pocket.batches import rank
from pocket.checkpoints import finish
from pocket.recipes import (
    DROPOUT,
    KINDS,
    MEMORY,
    PAPER,
    STEPS,
    TEACHER,
    distillation,
    pruning,
    rotary_recipe,
    size_of,
    uptraining,
)
from pocket.starts import MOST_SLOTS
from pocket.tokenizer import train_tokenizer
from pocket.training import train
from support.cli import CommandLine, whole_number, writable_folder

HERE = Path(__file__).resolve().parent
TRAINED = ("teacher", "bct", "llama", "rotary", "student")
TAKERS = {  # of the options
    "out": ("tokenizer", *TRAINED, "ablation"),
    "state": (*TRAINED, "ablation"),
    "stop_at": TRAINED,
    "init": ("bct", "rotary", "student"),
    "text": ("bct", "student"),
    "steps": (*TRAINED[1:], "ablation"),
    "kind": ("student",),
    "rule": ("bct",),
    "slots": ("bct",),
    "recent": ("bct",),
}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="torchrun --nproc-per-node 2 pocket/train.py teacher")
    cli.add_argument("what", choices=TAKERS["out"], help="what to train")
    cli.add_argument(
        "--out",
        type=writable_folder,
        metavar="FOLDER",
        help="where the result goes; default: its folder in pocket",
    )
    cli.add_argument(
        "--state",
        type=writable_folder,
        metavar="FOLDER",
        help="where an interrupted run's state is kept, to go on from; default: runs/WHAT",
    )
    cli.add_argument(
        "--stop-at",
        type=whole_number(1),
        metavar="N",
        help="stop after N steps, and write no result",
    )
    cli.add_argument(
        "--init", metavar="NAME", help="bct, rotary, student: the model to change; default: pocket"
    )
    cli.add_argument(
        "--text",
        metavar="FILE",
        help="bct, student: UTF-8 text to train on, with <|endoftext|> between "
        "texts; default: the pocket corpus",
    )
    cli.add_argument(
        "--steps",
        type=whole_number(1),
        metavar="N",
        help="steps of training; default: "
        + ", ".join(f"{name} {n:,}" for name, n in STEPS.items()),
    )
    cli.add_argument(
        "--kind",
        choices=KINDS,
        help="student: what it reads in training: segments as "
        "between refreshes; alone, its own cache; prompt, the teacher's of a prompt; dropout, segments "
        f"with dropout of {DROPOUT}; default: {KINDS[0]}",
    )
    cli.add_argument(
        "--rule",
        choices=("mean", "sum"),
        help="bct: how a slot reads its writes: mean, ours, with gates; or sum, the paper's own rule and "
        "nothing else; default: mean",
    )
    cli.add_argument(
        "--slots",
        type=whole_number(1, MOST_SLOTS),
        metavar="M",
        help=f"bct: slots of a head; default: {MEMORY['slots']}, or {PAPER['slots']} with --rule "
        "sum",
    )
    cli.add_argument(
        "--recent",
        type=whole_number(0),
        metavar="R",
        help=f"bct: tokens kept exactly beside the slots; default: {MEMORY['recent']}, or "
        f"{PAPER['recent']} with --rule sum",
    )
    with cli.parse(argv) as args:
        for option, takers in TAKERS.items():
            name, given = f"--{option.replace('_', '-')}", getattr(args, option) is not None
            if given and args.what not in takers:
                raise ValueError(f"{name} is an option of {', '.join(takers)}, not of {args.what}")
        init = args.init or "pocket"
        kind = args.kind or KINDS[0]
        name = args.what if kind == KINDS[0] else f"{args.what}-{kind}"
        default = MEMORY
        if args.rule == "sum":
            name, default = "bct-sum", PAPER
        out = args.out or HERE / {"tokenizer": "teacher", "ablation": "bct"}.get(args.what, name)
        run = args.state or HERE.parent / "runs" / name
        steps = args.steps or STEPS.get(
            name if init == "pocket" else args.what, STEPS.get(args.what)
        )
        memory = default | {
            key: value for key in MEMORY if (value := getattr(args, key)) is not None
        }
        if args.out is None and (init != "pocket" or args.text or args.steps or memory != default):
            raise ValueError(
                "--out FOLDER is needed: only a run with the defaults may replace what is in pocket"
            )
        if args.what == "tokenizer":
            train_tokenizer(out / "tokenizer.tiktoken", documents=20_000)
        elif args.what == "ablation":
            ablation(steps, run, out / "ablation.json")
        else:
            recipe = TEACHER
            if args.what != "teacher":
                config = load_model(init, model_class=GPT).config
                if memory["recent"] > config.n_ctx:
                    raise ValueError(
                        f"--recent {memory['recent']} is more than the context of {init}, {config.n_ctx}"
                    )
                recipe = {
                    "bct": lambda: distillation(init, config, steps, text=args.text, **memory),
                    "llama": lambda: uptraining(config, steps),
                    "rotary": lambda: rotary_recipe(init, config, steps),
                    "student": lambda: pruning(init, config, steps, kind, args.text),
                }[args.what]()
            model, losses = train(recipe, run, args.stop_at)
            if rank() == 0 and len(losses) == size_of(recipe)[0]:
                finish(recipe, model.cpu(), losses, out)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
