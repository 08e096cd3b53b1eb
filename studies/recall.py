"""How many pairs a memory of fixed size recalls, if the model is trained for it from scratch: BCT by its source's rule.

A text is a row of pairs of a key and a value, then some of its keys are asked again. Two layers learn it from the first
step on with full attention, with the source's sum rule read in several ways, with our rule, and with a window of equal
bytes. `python3 -m studies.recall` takes about half an hour on one core, and goes on where it was interrupted.

Source: Yi et al. 2024 (BCT); Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models"
(the task).
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import hashlib
import inspect
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from gpt_bounded_cache import BCT, GPT, GPTConfig, KVCache, MemoryBlock, SlidingWindowCache
from pocket.ablation import AblatedMemory, AblationConfig
from pocket.evaluation import window_of_equal_bytes
from studies.bounding import SOURCE, THEIRS
from studies.protocol import NOISE, Claim, StudyLine, claim_tables, conditions_of, judged, under
from support.cli import whole_number, writable_folder
from support.conditions import conditions
from support.figures import canvas, label_ends
from support.files import read_json, write_json
from support.tables import Table, page

KEYS, VALUES, ASKED = 512, 64, 64  # of the vocabulary, and keys asked at most at the end of a text
POSITIONS = 1024  # of a step's texts together
RATE, WARMUP = 1e-2, 50  # AdamW's learning rate, and steps of its linear rise
GEOMETRY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_inner": 64}
NEAR = 0.03  # ours: recalls that differ by less are equal


@dataclass(frozen=True)
class Size:
    """What is trained, and asked."""

    pairs: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    slots: tuple[int, ...] = (4, 16, 64, 256)
    seeds: int = 3
    steps: int = 400
    few: tuple[int, ...] = (16,)  # slots of the methods that aren't trained with every number
    answers: int = 1024  # at least, for each number of pairs


QUICK = Size(pairs=(4, 8), slots=(4,), seeds=1, steps=60, few=(4,), answers=256)


# --- The task -------------------------------------------------------------------------------------------------------


def texts(pairs: int, asked: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return texts (rows, pairs + asked) and the answers (rows, asked). A position holds a key and its value, as
    key * (VALUES + 1) + value, or a key that is asked and no value, VALUES. The keys of a text are all different."""
    keys = torch.rand(rows, KEYS, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(VALUES, (rows, pairs), generator=generator)
    which = torch.rand(rows, pairs, generator=generator).argsort(dim=1)[:, :asked]
    ids = torch.cat([keys, keys.gather(1, which)], dim=1) * (VALUES + 1)
    return ids + F.pad(values, (0, which.size(1)), value=VALUES), values.gather(1, which)


class Recaller(GPT):
    """A GPT-2 for these texts: a position's embedding is its key's and its value's, and a prediction is a value.

    Weights begin with a standard deviation of 1 / sqrt(width): 0.02, GPT-2's own, is too narrow for a width of 64.
    """

    def init_weights(self) -> None:
        super().init_weights()
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and name != "wpe.weight":
                parameter.data /= 0.02 * math.sqrt(self.config.n_embd)

    def embed(self, ids: Tensor, pos: Tensor) -> Tensor:
        return self.wte(ids // (VALUES + 1)) + super().embed(KEYS + ids % (VALUES + 1), pos)

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.ln_f(x), self.wte.weight[KEYS : KEYS + VALUES])


# --- The memories ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceConfig(AblationConfig):
    """Geometry of a BCT, with what the source leaves open."""

    begin: float = 0.0  # MV_0 is drawn once from N(0, begin²), and isn't trained
    through_keys: bool = False  # MV holds values only, and a query finds them by MK; else keys too, and it finds those


class SourceMemory(AblatedMemory):
    """BCT's attention with the options of a SourceConfig."""

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        begin = config.begin * torch.randn(2, config.n_head, config.slots, config.head_dim)
        self.register_buffer("begin", begin)

    def empty(self, x: Tensor) -> list[Tensor]:
        keys, values, *rest = super().empty(x)
        return [keys + (self.addresses if self.config.through_keys else self.begin[0]), values + self.begin[1], *rest]

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: KVCache, layer: int) -> Tensor:
        """Return what the queries read; through MK nothing is added to a slot's key, which is MK to begin with."""
        return super().forward(x, q, torch.zeros_like(k) if self.config.through_keys else k, v, memory, layer)


class SourceBlock(MemoryBlock):
    """A BCT's block with a SourceMemory."""

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self.memory = SourceMemory(config)


class RecallingBCT(Recaller, BCT):
    """A BCT for these texts."""

    config_class, block_class = SourceConfig, SourceBlock

    def init_weights(self) -> None:
        """Start with addresses of N(0, 1): with narrow ones a write goes to all slots alike, and training is slow."""
        super().init_weights()
        for block in self.h:
            nn.init.normal_(block.memory.addresses)


SUM = {"rule": "sum", "step": False, "forget": False}
FULL, WINDOW, OURS, DIRECT = "full attention", "window of equal bytes", "our rule", "sum"
BOUNDED: dict[str, dict[str, Any]] = {  # options of a SourceConfig
    DIRECT: SUM,
    "sum, read through MK": SUM | {"through_keys": True},
    "sum, random start": SUM | {"begin": 1.0},
    "sum, random start, through MK": SUM | {"begin": 1.0, "through_keys": True},
    "sum, with a step size": SUM | {"step": True},
    OURS: {},
}
MAIN = (OURS, DIRECT, "sum, read through MK", WINDOW)  # trained with every number of slots
READINGS = [name for name, options in BOUNDED.items() if options and not options["step"]]  # of the source's rule
STEP = "sum, with a step size"


def build(method: str, slots: int, seed: int, positions: int) -> tuple[Recaller, Callable[[], KVCache]]:
    """Return a new model of a method, the same for a seed every time, and what makes its caches."""
    torch.manual_seed(seed)
    geometry = GEOMETRY | {"vocab_size": KEYS + VALUES + 1, "n_ctx": positions}
    bounded = SourceConfig(**geometry, slots=max(1, slots), recent=0, **BOUNDED.get(method, {}))
    if method in BOUNDED:
        model = RecallingBCT(bounded)
        return model, model.new_cache
    return Recaller(GPTConfig(**geometry)), {
        FULL: KVCache, WINDOW: lambda: SlidingWindowCache(window_of_equal_bytes(bounded))}[method]  # fmt: skip


def positions_of(size: Size) -> int:
    return max(size.pairs) + min(ASKED, max(size.pairs))


def trained(method: str, slots: int, seed: int, size: Size) -> dict[str, Any]:
    """Train a model and ask it: the nats of every step's answers, and the share of right values by number of pairs.

    A step's texts have the same number of pairs, drawn from those up to a limit that rises to the largest in the first
    60% of the steps. The texts are those of every other method with this seed; the questions are everybody's.
    """
    model, new_cache = build(method, slots, seed, positions_of(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    generator, nats = torch.Generator().manual_seed(seed), []
    for step in tqdm(range(size.steps), desc=f"{method}, {slots} slots, seed {seed}", leave=False):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * (0.52 + 0.48 * math.cos(math.pi * step / size.steps))
        limit = 2 * min(size.pairs) * (max(size.pairs) / min(size.pairs)) ** (step / (0.6 * size.steps))
        known = [n for n in size.pairs if n <= limit]
        pairs = known[int(torch.randint(len(known), (1,), generator=generator))]
        asked = min(pairs, ASKED)
        ids, answers = texts(pairs, asked, max(1, POSITIONS // (pairs + asked)), generator)
        loss = F.cross_entropy(model(ids, new_cache())[:, pairs:].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        nats.append(loss.item())
    recall = {str(n): right(model.eval(), new_cache, n, size.answers) for n in size.pairs}
    return {"method": method, "slots": slots, "seed": seed, "steps": size.steps, "nats": statistics.mean(nats),
            "recall": recall} | {"bytes": bytes_of(model, new_cache)}  # fmt: skip


@torch.no_grad()
def right(model: Recaller, new_cache: Callable[[], KVCache], pairs: int, answers: int) -> float:
    """Return the share of values that the model recalls, of at least so many asked."""
    asked = min(pairs, ASKED)
    generator = torch.Generator().manual_seed(10**6 + pairs)
    ids, expected = texts(pairs, asked, math.ceil(answers / asked), generator)
    return (model(ids, new_cache())[:, pairs:].argmax(dim=-1) == expected).float().mean().item()


@torch.no_grad()
def bytes_of(model: Recaller, new_cache: Callable[[], KVCache]) -> int:
    """Return the bytes of a text's cache when the text is as long as it may be. The keys of a reading through MK are
    the model's, and no text's."""
    cache = new_cache()
    model(torch.zeros(1, model.config.n_ctx, dtype=torch.long), cache)
    shared = getattr(model.config, "through_keys", False)
    return cache.nbytes - sum(keys.nbytes for keys, *_ in cache.layers if shared)


# --- The grid -------------------------------------------------------------------------------------------------------


def grid(size: Size) -> list[tuple[str, int, int]]:
    """Return the models to train: method, slots (0 for full attention) and seed, seed by seed."""
    one = [(FULL, 0), *((method, slots) for slots in size.slots for method in (*BOUNDED, WINDOW)
                        if method in MAIN or slots in size.few)]  # fmt: skip
    return [(method, slots, seed) for seed in range(size.seeds) for method, slots in one]


def measured(models: Sequence[tuple[str, int, int]], size: Size, state: Path) -> list[dict[str, Any]]:
    """Train and ask these models; each leaves a file in the folder `state`, and one that has its file isn't trained.
    Its name has a hash of all that decides what the model learns."""
    runs = []
    for method, slots, seed in tqdm(models, desc="models", leave=False):
        decides = (size.pairs, size.steps, size.answers, KEYS, VALUES, ASKED, POSITIONS, RATE, WARMUP, GEOMETRY,
                   BOUNDED.get(method), *map(inspect.getsource, (texts, build, trained)))  # fmt: skip
        name = re.sub(r"\W+", "-", f"{method} {slots} {seed}")
        path = state / f"{name}-{hashlib.sha256(repr(decides).encode()).hexdigest()[:12]}.json"
        if not path.exists():
            write_json(path, trained(method, slots, seed, size))
        runs.append(read_json(path))
    return runs


def record_of(runs: list[dict[str, Any]], size: Size) -> dict[str, Any]:
    """Return the record: conditions, sizes, and every model's recall."""
    model, _ = build(FULL, 0, 0, positions_of(size))
    return {"conditions": conditions("two layers of GPT-2, trained from scratch", model), "size": asdict(size),
            "runs": runs}  # fmt: skip


# --- The report -----------------------------------------------------------------------------------------------------


def recalls(record: dict[str, Any], method: str, slots: int, pairs: int) -> list[float]:
    """Return the recall of each seed."""
    return [run["recall"][str(pairs)] for run in record["runs"] if (run["method"], run["slots"]) == (method, slots)]


def cells(record: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the methods and numbers of slots of a record, the methods one after the other."""
    found = dict.fromkeys((run["method"], run["slots"]) for run in record["runs"])
    return sorted(found, key=lambda cell: [FULL, *BOUNDED, WINDOW].index(cell[0]))


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return the recall of every method, its number of slots and of pairs."""
    pairs, size = record["size"]["pairs"], record["size"]
    rows = [[f"{method}, {slots} slots" if slots else method,
             *(f"{statistics.mean(recalls(record, method, slots, n)):.0%}" for n in pairs)]
            for method, slots in cells(record)]  # fmt: skip
    spans = [max(found) - min(found) for cell in cells(record) for n in pairs if (found := recalls(record, *cell, n))]
    return [
        f"Recall: the share of right values among {VALUES}, mean of {size['seeds']} seeds, which differ by up to "
        f"{100 * max(spans):.0f} points (median {100 * statistics.median(spans):.0f}). {conditions_line(record)}.",
        Table(["pairs in the text", *map(str, pairs)], rows),
        f"Every model reads the same {size['steps']} steps of texts, at one learning rate. Full attention keeps "
        "everything. A window has at least the bytes of so many slots. The sum is the source's rule, without our "
        "gates. Unless it says otherwise, slots begin at zero and a query finds them by their summed keys. Random "
        f"starts and the step size were trained with {' and '.join(map(str, size['few']))} slots only; --whole trains "
        "them with all.",
    ]  # fmt: skip


def conditions_line(record: dict[str, Any]) -> str:
    """Return the conditions of the study as a line."""
    size = record["size"]
    return conditions_of(record, f"{size['steps']} steps of {POSITIONS:,} positions, {len({*cells(record)})} "
                         f"kinds of models, {size['seeds']} seeds")  # fmt: skip


def claims(record: dict[str, Any]) -> list[Claim]:
    """Return what the study decides of the source's claims, and our own questions."""
    size, found = record["size"], []
    mean = lambda *cell: statistics.mean(recalls(record, *cell))  # noqa: E731
    memory = {(run["method"], run["slots"]): run["bytes"] for run in record["runs"]}
    a_position = memory[FULL, 0] / (max(size["pairs"]) + min(ASKED, max(size["pairs"])))
    for slots in size["slots"]:
        half = [(name, n) for name in READINGS if (name, slots) in memory for n in size["pairs"]
                if memory[name, slots] <= a_position * (n + min(n, ASKED)) / 2]  # fmt: skip
        if half:
            name, n = max(half, key=lambda cell: mean(cell[0], slots, cell[1]) - mean(FULL, 0, cell[1]))
            lost = [a - b for a, b in zip(*(recalls(record, *cell, n) for cell in ((FULL, 0), (name, slots))),
                                          strict=True)]  # fmt: skip
            larger = max((mean(name, more, n) for more in size["slots"] if more > slots and (name, more) in memory),
                         default=math.inf)
            found.append((slots, n, name, mean(name, slots, n), mean(FULL, 0, n), lost, larger))
    pairs = {slots: [[run["nats"] for run in record["runs"] if (run["method"], run["slots"]) == (method, slots)]
                     for method in (STEP, DIRECT)] for slots in size["few"]}  # fmt: skip
    gains = [1 - a / b for with_it, without in pairs.values() for a, b in zip(with_it, without, strict=True)]
    whole = {slots: (own, sums, window) for slots in size["slots"] for own, *sums, window in [
        [statistics.mean(mean(method, slots, n) for n in size["pairs"]) for method in MAIN]]}
    ahead = lambda by: ", ".join(f"{100 * x:+.0f} with {slots} slots" for slots, x in by.items())  # noqa: E731
    ours = f"{conditions_line(record)}; recall is the mean over numbers of pairs from {min(size['pairs'])} to " \
           f"{max(size['pairs'])}, unless a row says otherwise"  # fmt: skip
    task = "partly: a synthetic task and small models, but built as BCTs; the source's tasks are texts"
    return under(
        SOURCE, THEIRS, ours,
        judged("Abstract, recall", "significantly reduces memory usage while maintaining the model's inference quality",
               all(max(lost) < NEAR for *_, lost, _ in found) if found else None, "points of recall lost to full "
               "attention where the memory is at most half the growing cache, with the reading of the source's rule "
               "and the number of pairs that lose least: "
               + ", ".join(f"{100 * statistics.mean(lost):.0f} with {slots} slots" for slots, *_, lost, _ in found),
               f"{task}; up to {100 * NEAR:.0f} points (our threshold) count as maintained; a loss speaks against the "
               "claim if every seed has it at every size, and more slots, where they were tried, lose less: else it "
               "may be for want of training",
               all(min(lost) > NEAR and larger > best for *_, best, _, lost, larger in found)),
        judged("3.5", "improving its capacity to capture long-range dependencies within the bounded cache",
               all(max(sums) > window for _, sums, window in whole.values()), "points of recall by which the better "
               "reading of the source's rule is ahead of a window of at least as many bytes: " + ahead(
                   {slots: max(sums) - window for slots, (_, sums, window) in whole.items()}),
               f"{task}; \"improving\" is read as more than such a window; the source gives no rule of the "
               "self-supervised learning that it credits", all(max(sums) < window for _, sums, window in
                                                              whole.values())),
        judged("3.5", "vital for stabilizing the learning process and can lead to faster convergence",
               min(gains) > NOISE,
               "mean nats over all steps, with a step size for each token and without: " + "; ".join(
                   f"{slots} slots {statistics.mean(a):.2f} and {statistics.mean(b):.2f}"
                   for slots, (a, b) in pairs.items()) + f"; lower in {sum(g > 0 for g in gains)} of {len(gains)} "
               "pairs of runs", f"partly: the source gives no formula, so the gate is ours; up to {NOISE:.0%} (our "
               "threshold) counts as noise", max(gains) < -NOISE),
    ) + under(
        "", "", ours,
        judged("", "With equal slots and training, does our rule recall more pairs than the sum, read either way?",
               all(own > max(sums) for own, sums, _ in whole.values()), "points of recall ahead of the better "
               "one: " + ahead({slots: own - max(sums) for slots, (own, sums, _) in whole.items()}), "",
               all(own < max(sums) for own, sums, _ in whole.values())),
        judged("", "Does our rule recall more pairs than a window of at least as many bytes?",
               all(own > window for own, _, window in whole.values()), "points of recall ahead: " + ahead(
                   {slots: own - window for slots, (own, _, window) in whole.items()}), "",
               all(own < window for own, _, window in whole.values())),
    )  # fmt: skip


def draw(record: dict[str, Any], out: Path) -> None:
    """Draw recall over pairs, a curve for each number of slots, a panel a method."""
    pairs = record["size"]["pairs"]
    with canvas(out / "recall.png", 2, 2, (11, 7), sharex=True, sharey=True) as (image, panels):
        for axes, method in zip(panels, MAIN, strict=True):
            for name, slots in [(FULL, 0), *((method, slots) for slots in record["size"]["slots"])]:
                means, low, high = ([100 * of(recalls(record, name, slots, n)) for n in pairs]
                                    for of in (statistics.mean, min, max))  # fmt: skip
                color = {"color": "grey", "linestyle": "--"} if name == FULL else {}
                line, = axes.plot(pairs, means, marker="o", markersize=3, **color,
                                  label=FULL if name == FULL else f"{slots} slots")  # fmt: skip
                axes.fill_between(pairs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.set(title=method, ylim=(0, 103), xticks=pairs, xticklabels=pairs)
            label_ends(axes, axes.get_lines())
        for axes, label in ((panels[0], "% recalled"), (panels[2], "% recalled")):
            axes.set_ylabel(label)
        for axes in panels[2:]:
            axes.set_xlabel("pairs in the text")
        image.tight_layout()


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "recall", "four slots, eight pairs and few steps", model="")
    cli.add_argument("--slots", type=whole_number(1, 4096), nargs="+", metavar="M", help="numbers of slots; default: "
                     + " ".join(map(str, Size.slots)))  # fmt: skip
    cli.add_argument("--seeds", type=whole_number(1), metavar="N", help=f"models of a kind; default: {Size.seeds}")
    cli.add_argument("--steps", type=whole_number(1), metavar="N", help=f"steps of training; default: {Size.steps}")
    cli.add_argument("--whole", action="store_true", help="train every method with every number of slots")
    cli.add_argument("--state", default="runs/recall", type=writable_folder, metavar="FOLDER",
                     help="where each trained model leaves its figures, to go on from after an interruption")
    cli.add_argument("--threads", type=whole_number(1), default=1, metavar="N", help="CPU threads")
    with cli.parse(argv) as args:
        size = QUICK if args.quick else Size()
        given = {name: value for name in ("slots", "seeds", "steps") if (value := getattr(args, name))}
        size = replace(size, **{name: tuple(sorted({*x})) if name == "slots" else x for name, x in given.items()})
        if args.whole or not {*size.few} <= {*size.slots}:
            size = replace(size, few=size.slots)
        record = record_of(measured(grid(size), size, args.state), size)
        write_json(args.out / "summary.json", record)
        draw(record, args.out)
        print(page([*tables(record), *([] if args.quick else claim_tables(claims(record))), f"Written to {args.out}"]))


if __name__ == "__main__":
    main()
