"""From files of weights to named tensors, and from these to the parameters of a model."""

import math
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from formats.products import is_faster
from support.files import lacks_memory, regular_file
from support.geometry import rotary_settings

LLAMA_TENSORS = {  # our parameter: the tensors that it joins, matrices as (out, in)
    "wte": ("embed_tokens",),
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.ln_q": ("self_attn.q_norm",),
    "attn.ln_k": ("self_attn.k_norm",),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
    "ln_f": ("norm",),
    "lm_head": ("lm_head",),
}
GEMMA_TENSORS = LLAMA_TENSORS | {
    "attn.ln_out": ("post_attention_layernorm",),
    "ln_2": ("pre_feedforward_layernorm",),
    "mlp.ln_out": ("post_feedforward_layernorm",),
}
LATENT_TENSORS = LLAMA_TENSORS | {
    "attn.q_down": ("self_attn.q_a_proj",),
    "attn.ln_q": ("self_attn.q_a_layernorm",),
    "attn.q_up": ("self_attn.q_b_proj",),
    "attn.kv_down": ("self_attn.kv_a_proj_with_mqa",),
    "attn.ln_kv": ("self_attn.kv_a_layernorm",),
    "attn.kv_up": ("self_attn.kv_b_proj",),
}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one .safetensors or .bin file. Raises ValueError if it is damaged or something else."""
    with regular_file(path).open("rb") as file:  # a file that can't be opened raises OSError here
        # Files from before PyTorch 1.6 aren't zipped, and can't be mapped.
        is_zipped = file.read(4) == b"PK\x03\x04"
    damaged = f"{path} is cut off, a Git LFS pointer, or not a"
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{damaged} safetensors file") from error
    try:  # weights_only, since a pickle could run code
        with warnings.catch_warnings(action="ignore"):  # of a file that is refused below
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipped)
    except Exception as error:  # a damaged file makes it raise errors of ten kinds
        if lacks_memory(error):
            raise
        raise ValueError(f"{damaged} PyTorch file of plain tensors") from error
    if not isinstance(tensors, dict):
        tensors = {None: tensors}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{path} holds something else than named tensors")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise ValueError(f"{path}: {name} is sparse, or without numbers")
    return tensors


def drop_head(tensors: dict[str, Tensor], where: str) -> None:
    """Remove lm_head.weight from the tensors of a model whose head shares the embeddings' matrix.
    Raises ValueError if the two differ."""
    head = tensors.pop("lm_head.weight", None)
    name = "wte.weight" if "wte.weight" in tensors else "embed_tokens.weight"
    embeddings = tensors.get(name, head)
    if head is not None and (head.dtype != embeddings.dtype or not torch.equal(head, embeddings)):
        raise ValueError(
            f"lm_head.weight of {where} differs from {name}, but this model shares the two"
        )


def check_tensors(tensors: dict[str, Tensor], model: nn.Module, where: str) -> None:
    """Raise ValueError if tensors are missing, unexpected, or not of the shapes and types that a model needs."""
    shapes = {name: tuple(part.shape) for name, part in public_parts(model).items()}
    faults = [f"{name} is missing" for name in shapes if name not in tensors]
    faults += [f"{name} is unexpected" for name in tensors if name not in shapes]
    for name, tensor in tensors.items():
        if name in shapes and tensor.shape != shapes[name]:
            faults.append(f"{name} has shape {tuple(tensor.shape)} instead of {shapes[name]}")
        elif not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            faults.append(f"{name} holds {tensor.dtype}, not floats of 16 bits or more")
    if faults:
        rest = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(
            f"the weights of {where} don't fit its config.json: {'; '.join(faults[:8])}{rest}"
        )


def public_parts(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters as public files hold them, by the tensors' names: views that can
    be written to.

    A Llama's matrices are (in, out) in our parameters and (out, in) in the files. A parameter that
    joins several matrices, or their biases, has a view for each of them.
    """
    config, parts = model.config, dict(model.named_parameters())
    if not rotary_settings(config):
        return parts
    names = LLAMA_TENSORS
    if getattr(config, "gemma", False):
        names = GEMMA_TENSORS
    elif "latent" in getattr(config, "kinds", ()):
        names = LATENT_TENSORS
        if config.q_rank is None:
            names = names | {"attn.q_up": ("self_attn.q_proj",)}
    kv_width = config.n_kv_head * config.head_dim
    public = {}
    for name, parameter in parts.items():
        layer, part, numbers = re.fullmatch(r"(?:h\.(\d+)\.)?(.*)\.(weight|bias)", name).groups()
        prefix = "" if layer is None else f"layers.{layer}."
        matrix = parameter if layer is None else parameter.t()  # a vector stays as it is
        tensors = names[part]
        sizes = [len(matrix) // len(tensors)] * len(tensors)
        if part == "attn.c_attn":
            sizes = [len(matrix) - 2 * kv_width, kv_width, kv_width]
        for tensor, rows in zip(tensors, matrix.split(sizes), strict=True):
            public[f"{prefix}{tensor}.{numbers}"] = rows
    return public


class WithoutDraws(TorchFunctionMode):
    """A with-block in which nn.init.normal_() does nothing. On "meta" there is nothing to draw; all the
    same, PyTorch would import its compiler for it, which takes a second or two."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        if function is nn.init.normal_:
            return options["tensor"]
        return function(*args, **options or {})


def copy_tensors(
    tensors: dict[str, Tensor], model: nn.Module, device: torch.device | str, where: str
) -> nn.Module:
    """Return a model without memory (on "meta") on a device, in eval mode, with the numbers of the tensors, which are
    taken out of the dict. Raises ValueError if they don't fit, or aren't finite."""
    check_tensors(tensors, model, where)
    model = model.to_empty(device=device)  # which keeps the strides
    with torch.no_grad():
        for name, part in public_parts(model).items():
            tensor = tensors.pop(name)  # one that isn't mapped is freed at once
            part.copy_(as_ours(name, tensor, model.config))
            check_finite(name, part, tensor, where)
    return model.eval()


def as_ours(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Return a public tensor as our layers need it. Gemma 3's norms multiply by 1 + weight. In the
    rotated numbers of a latent layer's queries and keys, a pair is two neighbours; in ours it is a
    number of each half."""
    if getattr(config, "gemma", False) and name.endswith("norm.weight"):
        return 1 + tensor.float()
    if "latent" in getattr(config, "kinds", ()):
        if name.endswith(("q_proj.weight", "q_b_proj.weight")):
            return in_halves(tensor, config.n_head, config.rope_dim)
        if name.endswith("kv_a_proj_with_mqa.weight"):
            return in_halves(tensor, 1, config.rope_dim)
    return tensor


def in_halves(matrix: Tensor, n_head: int, rope_dim: int) -> Tensor:
    """Return a matrix (out, in) whose last rope_dim rows of each head, numbered from 0, are in the
    order 0, 2, 4, ..., 1, 3, 5, ..."""
    rows = matrix.unflatten(0, (n_head, -1))  # (H, rows of a head, in)
    pairs = rows[:, -rope_dim:]
    ordered = torch.cat([rows[:, :-rope_dim], pairs[:, ::2], pairs[:, 1::2]], dim=1)
    return ordered.flatten(0, 1)


def check_finite(name: str, part: Tensor, tensor: Tensor, where: str) -> None:
    """Raise ValueError if a part of a model has NaN or infinity among its numbers, either from the
    file's tensor or from the cast to the model's dtype."""
    if all(math.isfinite(x) for x in part.aminmax()):
        return
    largest, limit = tensor.abs().max(), torch.finfo(part.dtype).max
    if not math.isfinite(largest):
        raise ValueError(f"{name} of {where} holds numbers that aren't finite (NaN or infinity)")
    dtype = str(part.dtype).removeprefix("torch.")
    raise ValueError(
        f"{name} of {where} holds {largest:g}, and {dtype} at most {limit:g}: choose another --dtype"
    )


def choose_dtype(tensors: dict[str, Tensor], device: torch.device | str) -> torch.dtype:
    """Return what most of the tensors hold, if a device is faster in it than in float32, else float32; print which."""
    (stored, _), *_ = Counter(tensor.dtype for tensor in tensors.values()).most_common(1)
    dtype = stored if stored in (torch.bfloat16, torch.float16) else torch.float32
    if dtype is not torch.float32 and not is_faster(dtype, device):
        dtype = torch.float32
    names = [str(name).removeprefix("torch.") for name in (dtype, stored)]
    reason = (
        "as its weights are read"
        if dtype is stored
        else f"since {names[1]} would be no faster here"
    )
    print(f"[computing in {names[0]}, {reason}]")
    return dtype


@torch.no_grad()
def round_weights(model: nn.Module, bits: int) -> nn.Module:
    """Round the matrices of a model's blocks to `bits` bits, and return the model. The rounded
    numbers are held as before: a twin is another model, not a smaller or faster one."""
    for block in model.h:
        for weight in block.parameters():
            if weight.dim() == 2:
                codes, scale, low = round_matrix(weight, bits)
                weight.copy_(codes * scale + low)
    return model


def round_matrix(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix (in, out) as whole numbers (in, out) from 0 to 2^bits - 1, and the scale and
    the smallest number (1, out) that the numbers which make one output share."""
    low, high = weight.float().aminmax(dim=0, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    return ((weight.float() - low) / scale).round(), scale, low
