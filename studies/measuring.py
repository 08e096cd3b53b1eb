"""What several studies measure with: a model by its name, and the conditions of their rows."""

from __future__ import annotations

import argparse

from torch import nn

from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from studies.core import Rows, machine_of
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
    on = conditions(name, model)
    rows.begin(f"{name}: {on['parameters']:,} parameters", *details, *machine_of(on))
