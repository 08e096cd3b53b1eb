"""What several studies measure with: a model by its name, and the conditions of their rows."""

from __future__ import annotations

import argparse

import torch
from torch import nn

from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from studies.core import Rows
from support.conditions import conditions, is_geometry, random_model


def model_of(args: argparse.Namespace) -> tuple[GPT, str]:
    """Return the model that --model names, with random weights if that is a geometry, and its name
    in a record."""
    if is_geometry(args.model):
        model = random_model(GPT, args.model).to(args.device, args.dtype)
        return model, f"{args.model}, random weights"
    return load_model(args.model, device=args.device, dtype=args.dtype), args.model


def begin(rows: Rows, name: str, model: nn.Module, *details: str) -> None:
    """Let the next rows be measured with a model, on this machine, under conditions in detail."""
    on, threads = conditions(name, model), torch.get_num_threads()
    threads = "1 thread" if threads == 1 else f"{threads} threads"
    size = f"{name}: {on['parameters']:,} parameters"
    rows.begin(size, *details, threads, on["machine"], on["date"])
