"""Training by a recipe: a run that was interrupted goes on, alone or under torchrun."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import gpt_bounded_cache as bounded
import gpt_kv_cache
from gpt_baseline import GPT
from pocket.batches import Corpus, lists_batch, rank, segment_starts, text_of, world_size
from pocket.recipes import Distillation, Pruning, Recipe, learning_rate, phase_at, size_of
from pocket.starts import start, start_memory
from support.files import write_atomically
from support.statistics import kl


def loss_at(recipe: Recipe, step: int, model: nn.Module, text: Corpus, device: torch.device,
            teacher: nn.Module | None = None) -> Tensor:  # fmt: skip
    """Return this process's part of the step's mean loss (nats per token), from its share of the rows: of the next
    token or, where there is a teacher, of what it predicts (the divergence from it)."""
    phase, progress = phase_at(recipe, step)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    longest = 1.0 if phase.documents else progress
    rows, weights = lists_batch(phase, recipe.config.vocab_size, longest, generator)
    if phase.documents:
        rows, weights = (torch.cat(pair) for pair in zip(text.batch(phase, generator), (rows, weights), strict=True))
    segments = torch.zeros_like(weights, dtype=torch.long)
    if isinstance(recipe, Pruning):
        segments, counts = segment_starts(recipe.mode, *weights.shape, generator)
        weights = weights * counts
    weights = weights * world_size() / weights.sum()  # gradients are averaged over processes: the mean over all rows
    mine = slice(rank(), None, world_size())
    before, rows, weights, segments = (x[mine].to(device) for x in (rows.roll(1, dims=0), rows, weights, segments))
    if isinstance(recipe, Pruning):
        return (student_divergence(model, teacher, rows[:, :-1], segments) * weights).sum()
    if teacher is not None:
        length = int(torch.randint(1, recipe.phases[0].context, (1,), generator=generator)) if step % 2 else 0
        nats = divergence(recipe, model, teacher, rows[:, :-1], before[:, -1 - length : -1])
        return (nats * weights).sum()
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(rows[:, :-1])
    nats = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return (nats * weights.flatten()).sum()


def student_divergence(model: nn.Module, teacher: gpt_kv_cache.GPT, rows: Tensor, start: Tensor) -> Tensor:
    """Return KL(teacher || student) in nats at every token of rows (B, T), with segments that begin at start (B, T)."""
    cache = gpt_kv_cache.KVCache()
    with torch.autocast(rows.device.type, torch.bfloat16):
        expected = teacher(rows, cache)
        got = model(rows, cache, start=start)
    return kl(expected, got)


def divergence(recipe: Distillation, model: nn.Module, teacher: nn.Module, rows: Tensor, before: Tensor) -> Tensor:
    """Return KL(teacher || model) in nats at every token of rows (B, T). A model with slots has first read other texts,
    before (B, any), without a gradient; the teacher never has."""
    cache = None
    if recipe.slots or recipe.window:
        cache = bounded.BoundedMemory() if recipe.slots else bounded.SlidingWindowCache(recipe.window)
    with torch.autocast(rows.device.type, torch.bfloat16):
        expected = teacher(rows)
        if recipe.slots and before.size(1):
            with torch.no_grad():
                model(before, cache)
        got = model(rows, cache)
    return kl(expected, got)


def train(recipe: Recipe, run: Path, stop_at: int | None = None) -> tuple[GPT, list[float]]:
    """Train by the recipe and return the model and the loss of every step (nats per token).

    The state is kept in run/last.pt, and a run that finds one goes on from there. Raises ValueError if it
    belongs to another recipe. stop_at ends early, after so many steps.
    """
    if "RANK" in os.environ and not dist.is_initialized():  # under torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    steps, _ = size_of(recipe)
    if (rows := min(phase_at(recipe, step)[0].rows for step in range(steps))) < world_size():
        raise ValueError(f"{world_size()} processes are too many for batches of {rows} rows")
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    model, teacher = start(recipe, device)
    text = text_of(recipe)
    if isinstance(recipe, Distillation) and recipe.slots and recipe.clusters:
        generator = torch.Generator().manual_seed(recipe.seed)
        sample = replace(recipe.phases[0], documents=16, shuffled=0)
        start_memory(model, text.batch(sample, generator)[0][:, :-1].to(device), generator)
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and ".memory." not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 and ".memory." not in name]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if new := [p for name, p in model.named_parameters() if ".memory." in name]:
        groups.append({"params": new, "weight_decay": 0.0, "factor": recipe.new_rate})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)

    identity = repr(recipe)
    losses: list[float] = []
    if (run / "last.pt").exists():
        state = torch.load(run / "last.pt", map_location=device, weights_only=True)
        if state["recipe"] != identity:
            raise ValueError(f"{run / 'last.pt'} belongs to another recipe; move it away to start anew")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]

    def save() -> None:
        if rank() == 0:
            state = {"recipe": identity, "losses": losses}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            write_atomically(run / "last.pt", lambda file: torch.save(state, file))

    steps = min(stop_at or sys.maxsize, steps)
    saved = time.monotonic()
    parallel = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    with tqdm(initial=len(losses), total=steps, desc="training", disable=rank() > 0) as bar:
        while (step := len(losses)) < steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step) * group.get("factor", 1.0)
            loss = loss_at(recipe, step, parallel, text, device, teacher)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss = loss.detach() / world_size()
            if dist.is_initialized():
                dist.all_reduce(loss)
            losses.append(loss.item())
            bar.update()
            bar.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
            if time.monotonic() - saved > 300:  # seconds
                save()
                saved = time.monotonic()
    save()
    return model.eval(), losses


def compact(state: dict[str, Any]) -> dict[str, Any]:
    """Return a run's state at half of its size, to go on from on another machine: weights in fp16, moments in bf16."""
    moments = {
        i: {name: x.bfloat16() if x.dim() else x for name, x in of.items()}
        for i, of in state["optimizer"]["state"].items()
    }
    weights = {name: weight.half() for name, weight in state["model"].items()}
    return state | {"model": weights, "optimizer": state["optimizer"] | {"state": moments}}
