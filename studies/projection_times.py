"""How soon a first token comes: whole warm starts, every layout on the plane of KL and time, and prompts of any length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from gpt_kv_cache import GPT, KVCache, generate
from projector import Layout, Projector, cache_of, exact_cache, generate_warm
from studies.projection_methods import Method, first_logits, library_of, one_token, raw_tokens
from studies.projection_prompts import PROPOSED, Experiment, Prompt
from studies.projection_quality import Query, interval, mean_error


def timed(runs: dict[str, Callable[..., Any]], asked: Sequence[tuple[Any, ...]],
          repeats: int) -> dict[str, list[float]]:
    """Return the median seconds of each run for each of the prompts asked, in turn, until its result is there."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in asked] for name in runs}
    for repeat in range(repeats + 1):
        for i, arguments in enumerate(asked):
            for name, run in runs.items():
                begun = time.perf_counter()
                result = run(*arguments)
                if isinstance(result, Tensor):
                    result.argmax().item()  # waits for the device
                if repeat:  # the first warms up
                    seconds[name][i].append(time.perf_counter() - begun)
    return {name: [*map(statistics.median, several)] for name, several in seconds.items()}


def read_cold(experiment: Experiment, prompt: Prompt) -> Tensor:
    """Return the logits of the first token after reading all."""
    with torch.no_grad():
        return experiment.model(torch.tensor([prompt.ids], device=experiment.device), KVCache(), last_only=True)


def read_rest(experiment: Experiment, prompt: Prompt, n: int | None = None) -> Tensor:
    """Return the logits of the first token after reading the text behind the shared prefix, or n stored tokens."""
    kv = (prompt.exact.kv[..., :n, :] if n else experiment.shared.kv).to(experiment.model.wte.weight)
    cache = KVCache([layer[:, None] for layer in kv], torch.arange(kv.size(-2), device=kv.device))
    with torch.no_grad():
        return experiment.model(torch.tensor([prompt.ids[len(cache) :]], device=kv.device), cache, last_only=True)


def whole_start(experiment: Experiment, method: Method) -> Callable[[Prompt], Tensor]:
    """Return the logits of a prompt's first token by all steps of a method: retrieval, summary tokens, tail."""
    stored = experiment.stored("test")
    library = library_of(experiment, method if method.layout else None, "test", guard=method.name.startswith("ours"))

    def start(prompt: Prompt) -> Tensor:
        if method.logits:
            return method.logits(experiment, stored[library.find(prompt.text)[0]])
        warm = library.warm_start(prompt.text, prompt.ids)
        if warm is None:
            return read_cold(experiment, prompt)
        tail = torch.tensor([prompt.ids[-method.layout.tail :]], device=experiment.device)
        with torch.no_grad():
            return experiment.model(tail, warm, last_only=True)

    return start


def latencies(experiment: Experiment, asked: dict[Method, list[Query]], repeats: int) -> dict[str, dict[str, Any]]:
    """Return seconds to the first, second and eighth token of whole starts, and the share of the time to the first that
    is saved, on average over prompts, with its 95% interval."""
    queries = next(iter(asked.values()))
    prompts = [q.prompt for q in queries[:: max(1, len(queries) // 16)][:16]]
    gaps: dict[tuple[str, int], list[float]] = {}

    def eight(method: Method | None, emit: int) -> Callable[[Prompt], None]:
        library = library_of(experiment, method, "test") if method else None

        def run(prompt: Prompt) -> None:
            ids, at = torch.tensor([prompt.ids], device=experiment.device), []
            warm = library.warm_start(prompt.text, prompt.ids) if library else None
            tokens = (generate(experiment.model, ids, 8) if warm is None else
                      generate_warm(experiment.model, ids, warm, method.layout.tail, 8, emit=emit))
            for token in tokens:
                int(token)
                at.append(time.perf_counter())
            gaps.setdefault((method.name if method else "cold", emit), []).append(at[1] - at[0])

        return run

    cached = [method for method in asked if method.layout]
    starts: dict[str, Callable[[Prompt], Any]] = {"cold": lambda p: read_cold(experiment, p)}
    starts["exact prefix hit"] = lambda p: read_rest(experiment, p, len(p.ids) - 1)
    starts |= {method.name: whole_start(experiment, method) for method in asked}
    args = [(p,) for p in prompts]
    ttft = timed(starts, args, repeats)
    eighth = timed({"cold": eight(None, 1)} | {m.name: eight(m, 1) for m in cached}, args[:8], repeats)
    never_swapped = timed({m.name: eight(m, 8) for m in cached}, args[:8], repeats)
    result: dict[str, dict[str, Any]] = {}
    for name, seconds in ttft.items():
        rows = [{"family": p.family, "saved": 1 - warm / cold}
                for p, warm, cold in zip(prompts, seconds, ttft["cold"], strict=True)]
        result[name] = {"ttft": statistics.median(seconds), "saved": interval(rows, lambda r: r["saved"])}
        for key, several in (("eighth", eighth), ("eighth_without_swap", never_swapped)):
            result[name][key] = statistics.median(several[name]) if name in several else None
        if (name, 1) in gaps:
            result[name]["second_after_first"] = statistics.median(gaps[name, 1])
    return result


def on_the_plane(experiment: Experiment, split: str, counts: Sequence[int],
                 tails: Sequence[int]) -> list[dict[str, Any]]:
    """Chart KL against the time to the first token, retrieval included, over exact prefix x summary tokens x tail, with
    the relative as the source. Last comes the exact prefix alone, with all of the rest read.
    """
    asked = experiment.related(split)
    candidates = []
    for prefix in dict.fromkeys((0, experiment.prefix)):
        for tail in tails:
            for m in counts:
                layout = Layout(m, tail, prefix)
                if all(len(x.ids) - prefix - tail >= m for pair in asked for x in pair):
                    candidates.append(raw_tokens(layout))
                    if tail == 1 and m == 1:
                        candidates.append(one_token(prefix))
    points = []
    for method in tqdm(candidates, desc=f"{experiment.name}: plane", leave=False):
        points.append({"way": method, "name": method.name,
                       **{key: getattr(method.layout, key) for key in ("m", "tail", "prefix")},
                       **mean_error(experiment, method, asked)})
    runs = {m.name: (lambda p, r, m=m: first_logits(experiment, m, r, p)) for m in candidates}
    if experiment.prefix:
        points.append({"way": None, "name": "exact prefix, all of the rest", "m": 0, "tail": 0,
                       "prefix": experiment.prefix, "kl": 0.0, "good": 1.0})
        runs[points[-1]["name"]] = lambda p, r: read_rest(experiment, p)
    library = library_of(experiment, None, split)
    runs |= {"cold": lambda p, r: read_cold(experiment, p), "retrieval": lambda p, r: library.find(p.text)}
    seconds = timed(runs, asked[:: max(1, len(asked) // 8)][:8], 5)
    times = {name: statistics.median(several) for name, several in seconds.items()}
    for point in points:
        point["saved"] = 1 - (times[point["name"]] + times["retrieval"] * (point["m"] > 0)) / times["cold"]
    experiment.forget({method.layout for method in candidates})
    return points


def by_length(model: GPT, lengths: Sequence[int], repeats: int) -> list[dict[str, float]]:
    """Return seconds to the first token over the length of the prompt: cold, after an exact prefix hit, and from
    summary tokens, mapped at every start, as proposed, or when they were stored. Times don't depend on the numbers."""
    c, m, device = model.config, PROPOSED.m, model.wte.weight.device
    summaries = torch.zeros(2, c.n_layer, 2, c.n_head, m, c.head_dim)
    projector, summaries = Projector(summaries, summaries, penalty=1.0), summaries[:1]
    rows = []
    for T in tqdm(lengths, desc="times by length", leave=False):
        ids = torch.randint(c.vocab_size, (1, T), device=device)
        exact = exact_cache(model, ids[:, :-1])

        @torch.no_grad()
        def feed(cache: KVCache, ids: Tensor = ids) -> Tensor:
            return model(ids[:, -1:] if len(cache) else ids, cache, last_only=True)

        def warm(mapped: bool, T: int = T, feed: Callable[[KVCache], Tensor] = feed) -> Tensor:
            return feed(cache_of(model, (projector(summaries) if mapped else summaries)[0], T - 1))

        runs = {
            "cold": lambda feed=feed: feed(KVCache()),
            "exact prefix hit": lambda feed=feed, exact=exact: feed(KVCache([*exact.layers], exact.pos)),
            f"{m} summary tokens, mapped at the start": lambda warm=warm: warm(True),
            f"{m} summary tokens": lambda warm=warm: warm(False),
        }
        rows.append({"length": T} | {name: several[0] for name, several in timed(runs, [()], repeats).items()})
    return rows
