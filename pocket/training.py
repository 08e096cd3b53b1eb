"""Training by a recipe: a run that was interrupted goes on, alone or under torchrun."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from pocket.batches import RANK, Corpus, batch_at
from pocket.recipes import Batch, Recipe, schedule
from pocket.starts import start
from support.files import regular, write_atomically
from support.fingerprints import fingerprint

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # torchrun says so


def train(recipe: Recipe, run: Path, stop_at: int | None = None) -> tuple[GPT, list[float]]:
    """Train by the recipe and return the model and the loss of every step (nats per token).

    The state is kept in run/last.pt, and a run that finds one goes on from there. Raises ValueError if it
    is damaged or belongs to another recipe. stop_at ends early, after so many steps.
    """
    if "RANK" in os.environ and not dist.is_initialized():  # under torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    plan = schedule(recipe)[:stop_at]
    rows = min(step.phase.rows for step in plan)
    if rows < PROCESSES:
        raise ValueError(f"{PROCESSES} processes are too many for batches of {rows} rows")
    # one after the other: none is kept in memory
    origins = (load_model(name, model_class=GPT) for name in (recipe.init, recipe.begin) if name)
    identity = "; ".join([repr(recipe), *map(fingerprint, origins)])
    path, state = run / "last.pt", None
    if path.exists():
        state = read_state(path)
        if state["recipe"] != identity:
            raise ValueError(
                f"{path} is of another recipe, or of other weights; move it away to start anew"
            )
    device, native = torch.device("cpu"), torch.cpu.get_capabilities().get("avx512_bf16", False)
    if torch.cuda.is_available():
        device, native = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), True
    # products in bfloat16, but not on a CPU that only emulates it, which takes ten times as long as with float32
    mixed_precision = torch.autocast(device.type, torch.bfloat16, enabled=native)
    text = Corpus(recipe)
    model, teacher = start(recipe, text, device)
    groups = []
    for name, parameter in model.named_parameters():
        new = ".memory." in name
        decay = recipe.weight_decay if parameter.dim() > 1 and not new else 0.0
        factor = recipe.new_rate if new else 1.0
        groups.append({"params": [parameter], "weight_decay": decay, "factor": factor})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)

    losses = []
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]

    def save() -> None:
        state = {"recipe": identity, "losses": losses}
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if RANK == 0:
            write_atomically(path, lambda file: torch.save(state, file))

    saved = time.monotonic()
    parallel = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    steps = range(len(losses), len(plan))
    bar = tqdm(steps, "training", len(plan), initial=len(losses), disable=RANK > 0)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = plan[step].lr * group["factor"]
        parts = (part[RANK::PROCESSES].to(device) for part in batch_at(recipe, step, text))
        batch = Batch(*parts)  # this process's share
        with mixed_precision:
            losses_of = recipe.losses(parallel, teacher, batch)
        loss = (losses_of * batch.weights).sum()
        optimizer.zero_grad()
        (loss * PROCESSES).backward()  # of which the mean over processes is the sum
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(loss)
        losses.append(loss.item())
        bar.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
        if time.monotonic() - saved > 300:  # seconds
            save()
            saved = time.monotonic()
    save()
    return model.eval(), losses


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of a run. Raises ValueError if the file is damaged or something else, OSError if it isn't
    there."""
    regular(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {name: state[name] for name in ("recipe", "losses", "model", "optimizer")}
    except Exception as error:  # what torch.load raises on a damaged file is of ten kinds
        raise ValueError(
            f"{path} is damaged, or no run's state; move it away to start anew"
        ) from error
