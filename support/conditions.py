"""The conditions of a measurement: GPT-2's sizes, untrained models, the machine and the date."""

import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES = {  # GPT-2's own; 355M is DialoGPT-medium's, too
    "124M": {},
    "355M": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "774M": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "1558M": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
GEOMETRIES = f"{', '.join(SIZES)} or LAYERSxHEADSxWIDTH"


def is_geometry(name: str) -> bool:
    """Return whether a name means a geometry: one of SIZES, or LAYERSxHEADSxWIDTH."""
    return name in SIZES or bool(re.fullmatch(r"[1-9]\d?x[1-9]\d?x[1-9]\d{0,3}", name))


def processor_name(device: str) -> str:
    """Return the name of the processor or GPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        model_name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = model_name[1].strip() if model_name else name
    return f"{name}, {os.cpu_count()} cores"


def conditions(name: str, model: nn.Module) -> dict[str, Any]:
    """Return the conditions for a record: the model, the machine and the day."""
    config, weight = model.config, model.wte.weight
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.n_layer,
        "heads": config.n_head,
        "width": config.n_embd,
        "context": config.n_ctx,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "machine": processor_name(weight.device.type),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
