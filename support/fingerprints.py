"""Fingerprints of everything that stored keys and values depend on."""

import hashlib

import numpy as np
import torch
from torch import Size, Tensor, nn


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 of all that keys and values depend on: geometry, number format and every weight of a model."""
    digest = hashlib.sha256(f"KV pages, version 1; {model.config}".encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(raw_bytes(parameter.detach().cpu()))
    return digest.hexdigest()


def parameter_versions(model: nn.Module) -> list[tuple[int, Size, int]]:
    """Return where each parameter of a model lies, its shape, and how often PyTorch has changed it in
    place: another list later on means other weights.

    Noticed: a parameter that is added, taken away or replaced, and a change in place that PyTorch
    counts, such as an optimizer's. Not noticed: a change in place through .data or NumPy, which
    nobody counts, or one under torch.inference_mode().
    """
    versions = []
    for parameter in model.parameters():
        changes = 0 if parameter.is_inference() else parameter._version
        versions.append((parameter.data_ptr(), parameter.shape, changes))
    return versions


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor on the CPU."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
