"""Fingerprints of everything that stored keys and values depend on."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

SAMPLES = 64  # numbers of every parameter that are compared: about a millisecond for GPT-2 small


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 of all that keys and values depend on: geometry, number format and every weight of a model."""
    sha = hashlib.sha256(f"KV pages, version 1; {model.config}".encode())
    for name, parameter in model.named_parameters():
        sha.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        sha.update(raw(parameter.detach().cpu()))
    return sha.hexdigest()


class Weights:
    """Notices that a model's weights are no longer those of the moment at which this was made, without reading all.

    Noticed for certain: a parameter that is added, taken away or replaced; a change in place through PyTorch; and a
    change through .data or NumPy of a parameter's every number. If the latter reaches only a fraction f of the numbers,
    it is noticed with a chance of 1 - (1 - f)^64 for each parameter: SAMPLES of them, drawn at random, are compared.
    Not noticed: a change that is undone before changed() is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, generator = model, torch.Generator()
        generator.seed()  # its own, so that nobody else's draws move
        self.samples = [(torch.randint(p.numel(), (SAMPLES,), generator=generator) if p.numel() > SAMPLES
                         else torch.arange(p.numel())).to(p.device) for p in model.parameters()]  # fmt: skip
        self.seen = self.places(), self.numbers()

    def places(self) -> list[tuple[int, torch.Size, int]]:
        """Return where each parameter lies, its shape, and how often PyTorch has changed it in place."""
        return [(p.data_ptr(), p.shape, 0 if p.is_inference() else p._version) for p in self.model.parameters()]

    def numbers(self) -> bytes:
        """Return the sampled numbers."""
        taken = [p.detach().take(i) for p, i in zip(self.model.parameters(), self.samples, strict=True)]
        return raw(torch.cat(taken).cpu()).tobytes()

    def changed(self) -> bool:
        """Return whether a change is noticed."""
        return self.places() != self.seen[0] or self.numbers() != self.seen[1]


def raw(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor on the CPU."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
