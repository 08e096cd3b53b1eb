"""A page that plays a generation step by step: what was computed, what was read, what the cache held.

The scripts that write text make one with `--trace FILE.html`. It needs nothing but a browser.
"""

from __future__ import annotations

import codecs
import html
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import tiktoken

from support.files import write_atomically

HERE = Path(__file__).parent


class Trace:
    """What every step of one text's generation did: a step feeds tokens to the model, and writes one.

    What is recorded of a step, by the tokens' indices in the text: n, how many there were; start, the first of them in
    the context; fed, the first and the end of those whose keys and values were computed; slots, which tokens the
    cache's slots hold afterwards (first slot, first token, how many); bytes; and, where there are such, reused (the
    first and the end of those that were in a cache from before), teacher (first and how many, where a teacher's entries
    are), replaced (those that are newly so), evicted (the one in a ring's spare slot: it has left the window), mass
    (what each of BCT's slots has in one head) and events.
    """

    def __init__(self, title: str, tokenizer: tiktoken.Encoding, n_ctx: int, path: Path,
                 context_start: Callable[[int, int], int] | None = None) -> None:
        self.title, self.tokenizer, self.n_ctx, self.path = title, tokenizer, n_ctx, path
        self.context_start = context_start  # where the context begins without a cache
        self.ids: list[int] = []
        self.start = self.fed = 0
        self.reused: tuple[int, int] | None = None
        self.steps: list[dict[str, Any]] = []
        self.teacher: list[bool] = []  # by token: is its entry in the student's cache a teacher's?
        self.refreshes = 0

    def begin(self, ids: Sequence[int], reused: int = 0) -> None:
        """Begin with ids, of which a cache holds the first `reused`; or go on with them: they begin with the text so
        far, or with what is left of it after its beginning has been forgotten."""
        forgotten = next(i for i in range(len(self.ids) + 1) if [*ids[: len(self.ids) - i]] == self.ids[i:])
        self.ids[forgotten:] = ids
        self.start, self.fed = forgotten, forgotten + reused
        self.reused = (self.start, self.fed) if reused else None

    def step(self, token: int, cache: Any = None) -> None:
        """Record that a token was written, with the cache, or the pair of models, as it is now."""
        n = len(self.ids)
        pair = cache if hasattr(cache, "teacher") else None
        held = cache.cache if pair else cache
        start = self.context_start(n, self.n_ctx) if held is None else n - held.next_pos
        fed = (start if held is None or start != self.start else self.fed), n
        step: dict[str, Any] = {"n": n, "start": start, "fed": fed, "bytes": 0 if cache is None else cache.nbytes,
                                "events": []}  # fmt: skip
        if held is not None:
            step |= contents(held, start, n)
            if start != self.start:
                step["events"].append(f"The context of {self.n_ctx} tokens is full: the oldest half is forgotten, "
                                      "and what is left moves to other positions and is read again.")  # fmt: skip
        if self.reused:
            step["reused"] = self.reused
            if fed[0] == self.reused[1]:
                step["events"].append(f"{fed[0] - start} of {n - start} tokens were in a cache that was kept: only "
                                      f"{n - fed[0]} are read.")  # fmt: skip
        if pair:
            self.record_pair(step, pair, restarted=start != self.start or not self.steps)
        self.steps.append(step)
        self.start, self.fed = start, n
        self.ids.append(token)

    def record_pair(self, step: dict[str, Any], pair: Any, restarted: bool) -> None:
        """Add to a step whose entries are whose."""
        n = step["n"]
        self.teacher += [False] * (n - len(self.teacher))
        if restarted:
            self.teacher[step["fed"][0] : n] = [pair.fits] * (n - step["fed"][0])
            step["events"].append("The teacher reads the text, and its cache is handed over." if pair.fits else
                                  "The student reads the text itself: the teacher's cache doesn't fit.")  # fmt: skip
        if len(pair.refreshes) > self.refreshes and pair.fits:
            count = pair.refreshes[-1].replaced
            self.teacher[n - count : n] = [True] * count
            step["replaced"] = [n - count, n]
            step["events"].append(f"Refresh: the teacher has read {pair.refreshes[-1].tokens} tokens, and its entries "
                                  f"replace the student's last {count}.")  # fmt: skip
        self.refreshes = len(pair.refreshes)
        step["teacher"] = runs([i for i, by in enumerate(self.teacher) if by])

    def write(self) -> None:
        """Write the page."""
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character goes to the last of its tokens
        tokens = [utf8.decode(self.tokenizer.decode_single_token_bytes(i)) for i in self.ids]
        write_page(self.path, self.title, {"title": self.title, "tokens": tokens, "steps": self.steps}, "tracing.html")


def write_page(path: Path, title: str, data: dict[str, Any], template: str) -> None:
    """Write a template's page with data, which its script plays."""
    before, after = (HERE / template).read_text(encoding="utf-8").split("null /* data */")
    page = before.replace("TITLE", html.escape(title)) + json.dumps(data).replace("<", "\\u003c") + after
    write_atomically(path, lambda file: file.write_text(page, encoding="utf-8"))


def contents(cache: Any, start: int, n: int) -> dict[str, Any]:
    """Return which tokens, from start to n, are in which slots of a cache, and how many slots there are."""
    if isinstance(cache.layers[0], list):  # BCT: slots, and recent tokens
        layer = len(cache.layers) // 2
        _, _, mass, recent, *_ = cache.layers[layer]
        held = min(recent.size(2), n)
        mass = [round(x, 3) for x in mass[0, 0, :, 0].tolist()]
        return {"slots": [[0, n - held, held]], "size": held, "mass": mass, "layer": layer}
    held = runs([p + start for p in cache.pos.tolist()])
    starts = accumulate((count for _, count in held), initial=0)
    found = {"slots": [[slot, first, count] for slot, (first, count) in zip(starts, held, strict=False)],
             "size": cache.layers[0].size(3)}  # fmt: skip
    if hasattr(cache, "visible"):  # a ring: later queries see nothing that the last one doesn't
        hidden = cache.pos[~cache.visible(cache.pos, cache.pos.max())]
        found["evicted"] = [p + start for p in hidden.tolist()]
    return found


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return a sequence as runs of consecutive numbers: first and count."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return found
