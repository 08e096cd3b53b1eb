"""A page that plays a generation step by step: what was computed, what was read, what the cache held.

The scripts that write text make one with `--trace FILE.html`. It needs nothing but a browser.
"""

import codecs
import html
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.files import write_text

FOLDER = Path(__file__).parent


class Trace:
    """A record of how one text was generated, step by step: a step feeds tokens to the model, and
    writes one.

    Tokens are recorded by their index in the text, and ranges of tokens as the first and the end. A
    step has:
    - n: how many tokens there were; start: the first token in the context;
    - fed: the range of tokens whose keys and values were computed;
    - slots: the token in each of the cache's slots after the step; bytes: the size of the cache;
    - events: sentences for the reader.

    Some steps also have:
    - reused: the range of tokens that were in a cache from before;
    - teacher: the tokens whose entries are a teacher's; replaced: the range whose entries have just
      become so;
    - sinks; evicted: the token in a ring's spare slot, which has left the window;
    - mass: the mass of each of BCT's slots in one head;
    - attention, of a watched model: by layer, the share in thousandths that the newest token pays
      to the token in each slot; memory: the share that it pays to BCT's slots.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: tiktoken.Encoding,
        model: Any,
        ids: Tensor,
        context_start: Callable[[int, int], int] | None = None,
    ) -> None:
        """Begin a record of a text that a model writes after ids (1, T). path: of the page, which is
        titled by the command line; context_start(tokens, n_ctx): where the context begins in a text
        that is read without a cache."""
        self.path, self.tokenizer, self.n_ctx = path, tokenizer, model.config.n_ctx
        self.title = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self.context_start = context_start
        self.ids: list[int] = []
        self.start = self.first_fed = 0
        self.reused: tuple[int, int] | None = None
        self.steps: list[dict[str, Any]] = []
        # the tokens whose entries in the student's cache are a teacher's
        self.teacher: set[int] = set()
        self.n_refreshes = 0
        self.watched: dict[int, Any] = {}  # by layer: what removes the hook
        # by layer: the last pass's attention and its arguments
        self.calls: dict[int, tuple[nn.Module, tuple]] = {}
        self.begin(ids[0].tolist())
        self.watch(model)

    def watch(self, model: Any) -> None:
        """Record the attention of a GPT until write(), in at most six of its layers."""
        for layer in sorted({round(i * (len(model.h) - 1) / 5) for i in range(6)}):
            attention = getattr(model.h[layer], "memory", model.h[layer].attn)  # BCT's, or GPT-2's

            def keep_arguments(module: nn.Module, args: tuple, layer: int = layer) -> None:
                if not module.training:
                    self.calls[layer] = module, args

            keep_arguments.observes = True  # so that a store goes on with the model
            self.watched[layer] = attention.register_forward_pre_hook(keep_arguments)

    def begin(self, ids: Sequence[int], reused: int = 0) -> None:
        """Begin with ids, of which a cache holds the first `reused`; or continue with ids, which
        then begin with the text so far, or with what is left of it after its beginning was
        forgotten."""
        forgotten = 0
        while [*ids[: len(self.ids) - forgotten]] != self.ids[forgotten:]:
            forgotten += 1
        self.ids[forgotten:] = ids
        self.start, self.first_fed = forgotten, forgotten + reused
        self.reused = (self.start, self.first_fed) if reused else None

    def step(self, token: int, cache: Any = None) -> None:
        """Record that a token was written, with the cache, or the pair of models, as it is now."""
        n = len(self.ids)
        if cache is None:
            start = first_fed = self.context_start(n, self.n_ctx)
        else:
            start = n - int(cache.positions(1))
            first_fed = self.first_fed if start == self.start else start
        fed = first_fed, n
        step: dict[str, Any] = {"n": n, "start": start, "fed": fed, "bytes": 0}
        step["events"] = events = []
        refreshes = None
        if cache is not None:
            snapshot = cache.snapshot()
            fits = snapshot.pop("fits", None)  # of a pair of models
            refreshes = snapshot.pop("refreshes", None)
            for name in ("slots", "evicted"):
                if name in snapshot:  # positions, which become indices in the text
                    snapshot[name] = [start + position for position in snapshot[name]]
            step["bytes"] = cache.nbytes
            step |= snapshot
            if start != self.start:
                events.append(
                    f"The context of {self.n_ctx} tokens is full: the oldest half is forgotten, "
                    "and the rest is read again at new positions."
                )
        self.record_attention(step, cache)
        if self.reused:
            step["reused"] = self.reused
            if fed[0] == self.reused[1]:
                events.append(
                    f"{fed[0] - start} of {n - start} tokens were in a cache: {n - fed[0]} are read."
                )
        if refreshes is not None:
            restarted = start != self.start or not self.steps
            self.record_teacher(step, fits, refreshes, restarted)
        self.steps.append(step)
        self.start, self.first_fed = start, n
        self.ids.append(token)

    def record_teacher(
        self, step: dict[str, Any], fits: bool, refreshes: list, restarted: bool
    ) -> None:
        """Add to the step of a pair which entries are the teacher's. fits: whether the teacher's
        cache fits the student; restarted: whether the teacher has just read the whole context."""
        n = step["n"]
        if restarted:
            self.teacher = set()
            event = "The teacher's cache doesn't fit: the student reads the text."
            if fits:
                self.teacher = {*range(step["start"], n)}
                event = "The teacher reads the text, and its cache is handed over."
            step["events"].append(event)
        if fits and len(refreshes) > self.n_refreshes:
            replaced = refreshes[-1].tokens_replaced
            self.teacher |= {*range(n - replaced, n)}
            step["replaced"] = [n - replaced, n]
            step["events"].append(
                f"Refresh: the teacher has read {refreshes[-1].tokens_read} tokens, and its entries "
                f"replace the student's last {replaced}."
            )
        self.n_refreshes = len(refreshes)
        step["teacher"] = sorted(self.teacher)

    def record_attention(self, step: dict[str, Any], cache: Any) -> None:
        """Add to a step what its newest token attended to, if the model is watched and has read it."""
        calls, self.calls = self.calls, {}
        for _, (module, args) in sorted(calls.items()):
            if "mass" in step:
                shares, slots = bct_attention_shares(module, args, cache)
                step.setdefault("memory", []).append(round(1000 * slots))
            else:
                q, k, _, *mask = args
                T = q.size(2)
                if "sinks" in step and 1 < T < step["n"] - step["start"]:
                    return  # a chunk read by a ring that held tokens: its keys weren't in the order of the slots
                shares = attention_shares(q, k, *mask)
                if "slots" in step and len(shares) == T:  # the keys are the tokens fed, in order
                    shares = shares[[index - step["n"] for index in step["slots"]]]
            thousandths = [round(1000 * share) for share in shares.tolist()]
            step.setdefault("attention", []).append(thousandths)

    def write(self) -> None:
        """Write the page, and stop watching the model."""
        for hook in self.watched.values():
            hook.remove()
        # A character that spans several tokens is shown with the last of them.
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tokens = [utf8.decode(self.tokenizer.decode_single_token_bytes(i)) for i in self.ids]
        layers = sorted(self.watched) if any("attention" in step for step in self.steps) else None
        data = {"title": self.title, "tokens": tokens, "steps": self.steps, "layers": layers}
        write_page(self.path, self.title, data, "tracing.html")


def write_page(path: Path, title: str, data: dict[str, Any], template: str) -> None:
    """Write a page from a template, with the data that its script plays."""
    before, after = (FOLDER / template).read_text(encoding="utf-8").split("null /* data */")
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = before.replace("TITLE", html.escape(title)) + text + after
    write_text(path, page)


def attention_shares(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the share of attention (S,) that the last query in q (B, H, T, D) pays to each of the
    keys k (B, H, S, D): the mean over the heads of the first text. With an identity matrix as
    values, attention returns its weights."""
    last_row = None if mask is None else mask[..., -1:, :]
    identity = torch.eye(k.size(2), dtype=k.dtype, device=k.device).expand(*k.shape[:3], -1)
    shares = F.scaled_dot_product_attention(q[:, :, -1:], k, identity, last_row, enable_gqa=True)
    return shares[0].mean(dim=0)[0]


def bct_attention_shares(memory: Any, args: tuple, cache: Any) -> tuple[Tensor, float]:
    """Return the shares of attention that a BCT's last query pays: to each token that is held as it
    is, and to all memory slots together. The state after a pass is what its last query has read."""
    _, q, *_, layer = args
    slots, recent = cache.layers[layer]
    M, R = slots.values.size(2), recent.k.size(2)
    n_empty = max(0, R - len(cache))
    k, _, mask = memory.readable(slots, recent, n_empty)
    shares = attention_shares(q.float(), k, mask)
    return shares[M + n_empty :], float(shares[:M].sum())
