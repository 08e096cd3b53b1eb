"""Train the small models that the scripts run on when no other is named.

  python3 pocket/train.py tokenizer                           a byte-level BPE of the corpus
  python3 pocket/train.py teacher                             the model itself: an interrupted run goes on
  torchrun --nproc-per-node 2 pocket/train.py teacher         the same run, data-parallel
  python3 pocket/train.py llama                               a Llama of the same size, by the same recipe
  python3 pocket/train.py bct                                 the teacher with BCT's bounded memory, fine-tuned
  python3 pocket/train.py bct --rule sum                      the same by the BCT paper's own rule, section 3.2 of it
  python3 pocket/train.py student                             a narrower model that decodes on the teacher's cache
  python3 pocket/train.py student --kind prompt               the same, trained otherwise: also alone, dropout
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

from pathlib import Path

import torch.distributed as dist

from pocket.ablation import ablation
from pocket.batches import RANK
from pocket.checkpoints import finish
from pocket.recipes import RECIPES
from pocket.tokenizer import TOKENIZER, train_tokenizer
from pocket.training import train
from support.cli import CommandLine
from support.files import writable_folder

HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="torchrun --nproc-per-node 2 pocket/train.py teacher")
    actions = cli.add_actions(
        "",
        tokenizer="the tokenizer, of the corpus",
        teacher="the model itself, from the corpus",
        llama="a Llama of the same size, from the corpus",
        ablation="which parts of BCT do what, by short runs of each",
        bct="a model with BCT's bounded memory",
        student="a narrower model that decodes on the teacher's cache",
    )
    *_, bct, student = actions
    for action in actions:
        action.add_argument(
            "--out",
            type=writable_folder,
            metavar="FOLDER",
            help="for the result, and in run/ the run's state; default: in pocket, and runs/",
        )
    student.add_argument(
        "--kind",
        default="segments",
        choices=("segments", "alone", "prompt", "dropout"),
        help="what it reads in training: segments, as between refreshes; alone, its own cache; "
        "prompt, the teacher's cache of a prompt; dropout, segments with dropout",
    )
    bct.add_argument(
        "--rule",
        default="mean",
        choices=("mean", "sum"),
        help="how slots are written and read: mean, ours, with gates; sum, the paper's own",
    )
    with cli.parse(argv) as args:
        if args.action == "tokenizer":
            folder = TOKENIZER.parent if args.out is None else args.out
            train_tokenizer(folder / TOKENIZER.name)
        elif args.action == "ablation":
            result_folder, run_folder = folders(args.out, "bct")
            ablation(run_folder, result_folder / "ablation.json")
        else:
            name = args.action
            if name == "bct" and args.rule == "sum":
                name = "bct-sum"
            elif name == "student" and args.kind != "segments":
                name = f"student-{args.kind}"
            result_folder, run_folder = folders(args.out, name)
            model, losses = train(RECIPES[name], run_folder)
            if RANK == 0:
                finish(RECIPES[name], model.cpu(), losses, result_folder)
        if dist.is_initialized():
            dist.destroy_process_group()


def folders(out: Path | None, name: str) -> tuple[Path, Path]:
    """Return where the result goes, and the state of a run."""
    return (out, out / "run") if out else (HERE / name, HERE.parent / "runs" / name)


if __name__ == "__main__":
    main()
