"""What stored keys and values depend on."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 of all that keys and values depend on: geometry, number format and every weight of a model."""
    sha = hashlib.sha256(f"KV pages, version 1; {model.config}".encode())
    for name, parameter in model.named_parameters():
        sha.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        sha.update(raw(parameter.detach().cpu()))
    return sha.hexdigest()


def raw(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor on the CPU."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
