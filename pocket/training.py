"""Training by a recipe, in one process or under torchrun; an interrupted run goes on."""

import os
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from pocket.batches import RANK, Corpus, batch_at
from pocket.recipes import Batch, Recipe, schedule
from pocket.starts import initial_models
from support.files import regular_file, write_atomically
from support.fingerprints import fingerprint

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # torchrun says so


def train(recipe: Recipe, run_folder: Path, stop_at: int | None = None) -> tuple[GPT, list[float]]:
    """Train by the recipe and return the model and the loss of every step (nats per token).

    The state is kept in run/last.pt, and a run that finds one goes on from there. Raises ValueError if it
    is damaged or belongs to another recipe. stop_at ends early, after so many steps.
    """
    if "RANK" in os.environ and not dist.is_initialized():  # under torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    planned_steps = schedule(recipe)[:stop_at]
    rows = min(step.phase.rows for step in planned_steps)
    if rows < PROCESSES:
        raise ValueError(f"{PROCESSES} processes are too many for batches of {rows} rows")
    # loaded one after the other, so that none stays in memory
    origins = (load_model(name, model_class=GPT) for name in (recipe.init, recipe.begin) if name)
    identity = "; ".join([repr(recipe), *map(fingerprint, origins)])
    state_path = run_folder / "last.pt"
    saved_state = None
    if state_path.exists():
        saved_state = read_state(state_path)
        if saved_state["recipe"] != identity:
            raise ValueError(
                f"{state_path} is of another recipe, or of other weights; move it away to start anew"
            )
    device = torch.device("cpu")
    has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        has_bfloat16 = True
    # products in bfloat16, but not on a CPU that only emulates it, which takes ten times as long as with float32
    mixed_precision = torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16)
    text = Corpus(recipe)
    model, teacher = initial_models(recipe, text, device)
    optimizer = new_optimizer(recipe, model)
    losses = []
    if saved_state:
        model.load_state_dict(saved_state["model"])
        optimizer.load_state_dict(saved_state["optimizer"])
        losses = saved_state["losses"]

    def save() -> None:
        state = {
            "recipe": identity,
            "losses": losses,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        if RANK == 0:
            write_atomically(state_path, lambda file: torch.save(state, file))

    last_save = time.monotonic()
    parallel_model = model
    if dist.is_initialized():
        parallel_model = nn.parallel.DistributedDataParallel(model)
    steps = range(len(losses), len(planned_steps))
    progress_bar = tqdm(
        steps, "training", len(planned_steps), initial=len(losses), disable=RANK > 0
    )
    for step in progress_bar:
        for parameter_group in optimizer.param_groups:
            parameter_group["lr"] = planned_steps[step].lr * parameter_group["factor"]
        whole_batch = batch_at(recipe, step, text)
        batch = Batch(*(part[RANK::PROCESSES].to(device) for part in whole_batch))
        with mixed_precision:
            token_losses = recipe.losses(parallel_model, teacher, batch)
        loss = (token_losses * batch.weights).sum()
        optimizer.zero_grad()
        (loss * PROCESSES).backward()  # of which the mean over processes is the sum
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(loss)
        losses.append(loss.item())
        progress_bar.set_postfix(loss=f"{mean(losses[-50:]):.3f}")
        if time.monotonic() - last_save > 300:  # seconds
            save()
            last_save = time.monotonic()
    save()
    return model.eval(), losses


def new_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a group for each parameter; "factor" multiplies its learning rate. Matrices
    decay by the recipe's weight decay, a memory's own parameters never do."""
    groups = []
    for name, parameter in model.named_parameters():
        group = {"params": [parameter], "weight_decay": 0.0, "factor": 1.0}
        if ".memory." in name:
            group["factor"] = recipe.new_rate
        elif parameter.dim() > 1:
            group["weight_decay"] = recipe.weight_decay
        groups.append(group)
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of a run. Raises ValueError if the file is damaged or something else, OSError if it isn't
    there."""
    regular_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # of a file that is refused below
            state = torch.load(path, map_location="cpu", weights_only=True)
        return {name: state[name] for name in ("recipe", "losses", "model", "optimizer")}
    except Exception as error:  # what torch.load raises on a damaged file is of ten kinds
        raise ValueError(
            f"{path} is damaged, or no run's state; move it away to start anew"
        ) from error
