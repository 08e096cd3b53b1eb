"""Fingerprints of what stored keys and values depend on."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor, nn

# Models of the lectures, by their class. Each has a class of configuration of its own, which names
# it in a fingerprint.
LECTURES = {"GPT", "BCT", "Llama"}
PLAIN = (bool, int, float, str)


def fingerprint(model: nn.Module, identity: str = "") -> str:
    """Return a SHA-256 of a model's class, configuration, parameters and buffers. A class by the name
    of a lecture's model, or a subclass of one, counts as that model.

    Nothing else is noticed, such as a hook, an attribute that isn't in the configuration, the code
    of a class, or weights that aren't parameters: if keys or values depend on it, identity has to
    name it. Raises ValueError if the configuration doesn't show its values.
    """
    config = f"{model.config}"
    if " at 0x" in config:
        raise ValueError(f"a configuration must show its values, as a dataclass does, got {config}")
    digest = hashlib.sha256(f"KV pages, version 1; {config}".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(raw_bytes(tensor.detach().cpu()))
    classes = [kind.__name__ for kind in type(model).__mro__]
    if LECTURES.isdisjoint(classes):
        digest.update(f"class {classes[0]}; ".encode())
    if identity:
        digest.update(f"identity {identity}; ".encode())
    return digest.hexdigest()


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the functions that a module calls before and after its forward(), without those that
    say by an attribute `observes` that they change nothing."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if not getattr(hook, "observes", False)]


def model_versions(model: nn.Module) -> list[tuple[int, Size, int] | dict[str, Any] | list[Any]]:
    """Return a list that differs from an earlier one if the model has changed: for each module the
    address and shape of its weights and buffers, how often PyTorch has changed them in place, its
    hooks and its plain settings.

    Noticed: a weight, buffer or hook that is added, removed or replaced; a change in place that PyTorch
    counts, such as an optimizer's; a changed number or text among a module's own attributes. Not
    noticed: a change in place that PyTorch doesn't count, through .data or NumPy or under
    torch.inference_mode(); a change inside an attribute, such as a configuration.
    """
    versions = []
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                changes = 0 if tensor.is_inference() else tensor._version
                versions.append((tensor.data_ptr(), tensor.shape, changes))
        versions.append(hooks_of(module))
        settings = vars(module).items()
        versions.append({key: value for key, value in settings if isinstance(value, PLAIN)})
    return versions


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor on the CPU."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
