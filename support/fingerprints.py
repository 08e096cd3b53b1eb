"""Fingerprints of what stored keys and values depend on."""

import hashlib
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor, nn

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)
# Attributes that every module has for PyTorch's own use; of these, keys depend on parameters,
# buffers, modules and hooks.
MODULE_FIELDS = {*vars(nn.Module())}
# Where a model of transformers was loaded from, and how it samples.
IGNORED = {"name_or_path", "_name_or_path", "generation_config"}


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 of a model's config, number format and weights. This is enough for our own
    models, whose config says everything else; identity() is for any model."""
    digest = hashlib.sha256(f"KV pages, version 1; {model.config}".encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(raw_bytes(parameter.detach().cpu()))
    return digest.hexdigest()


def identity(model: nn.Module) -> str:
    """Return a SHA-256 of all that a model is made of: its modules' classes, weights, buffers,
    forward hooks and other attributes, such as a whole configuration or the eps of a norm. Models
    of the same identity compute the same keys and values, if the code of their classes is the same.

    Raises ValueError if an attribute has no value that could be compared, such as a lock.
    """
    return describe(model, "model", {})


def describe(value: Any, name: str, described: dict[int, tuple[Any, str]]) -> str:
    """Return a text that is the same for equal values in any process: a SHA-256, or the repr of a
    number or text. described: by id, the values met so far with their texts. Raises ValueError as
    identity() does."""
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    if id(value) in described:
        return described[id(value)][1]
    described[id(value)] = value, "a part of itself"  # until it is known
    digest = hashlib.sha256(type(value).__qualname__.encode())
    if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta":
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(raw_bytes(value.detach().cpu()))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(value.tobytes())
    else:
        for key, part in parts_of(value, name).items():
            digest.update(f"{key} = {describe(part, f'{name}.{key}', described)}; ".encode())
    described[id(value)] = value, digest.hexdigest()
    return digest.hexdigest()


def parts_of(value: Any, name: str) -> dict[str, Any]:
    """Return the parts that a value consists of, by name. Raises ValueError if they can't be
    determined."""
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        parts = {key: part for key, part in attributes.items() if key not in MODULE_FIELDS}
        parts |= value._parameters | value._buffers | value._modules | {"hooks": hooks_of(value)}
    elif isinstance(value, dict):
        parts = {repr(key): part for key, part in value.items()} | attributes
    elif isinstance(value, list | tuple):
        parts = {str(i): part for i, part in enumerate(value)} | attributes
    elif isinstance(value, set | frozenset):
        parts = {repr(part): None for part in value} | attributes
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = [value.__defaults__, value.__kwdefaults__]
        parts = {f"{value.__module__}.{value.__qualname__}": [value.__code__, cells, defaults]}
    elif isinstance(value, CodeType):
        parts = {"code": [value.co_code, value.co_names, value.co_consts]}
    elif isinstance(value, MethodType):
        parts = {"function": value.__func__, "object": value.__self__}
    elif isinstance(value, partial):
        parts = {"function": value.func, "arguments": [value.args, value.keywords]}
    elif attributes and not isinstance(value, type | Tensor):
        parts = attributes
    elif " at 0x" not in repr(value) and not isinstance(value, Tensor):
        parts = {repr(value): None}
    else:
        raise ValueError(f"keys may depend on {name}, a {type(value).__qualname__}: can't tell how")
    return {key: parts[key] for key in sorted(parts, key=str) if key not in IGNORED}


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
        versions.append({key: value for key, value in settings if type(value) in PLAIN_TYPES})
    return versions


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor on the CPU."""
    return tensor.contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8).numpy()
