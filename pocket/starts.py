"""How models begin training: with an induction circuit, with slots' addresses near the keys, or
pruned from a teacher."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import gpt_bounded_cache as bounded
from gpt_kv_cache import GPT, GPTConfig, KVCache
from llama_kv_cache import Llama, rotate, rotation
from load_gpt2_weights import load_model
from pocket.batches import Corpus
from pocket.recipes import Pruning, Recipe
from support.geometry import kv_heads

MAX_KEYS = 3000  # keys of a head that k-means groups into slots' addresses, at most


def weights_by_head(model: GPT | Llama, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of a layer's weights by heads: queries (H, C, D), keys and values (K, C, D) each, and outputs to the
    residual stream (H, D, C)."""
    config, attention = model.config, model.h[layer].attn
    H, K, D = config.n_head, kv_heads(config), config.head_dim
    joined = attention.c_attn.weight.unflatten(1, (H + 2 * K, D)).movedim(1, 0)
    return *joined.split([H, K, K]), attention.c_proj.weight.unflatten(0, (H, D))


def quiet_parts(model: GPT | Llama, parts: Sequence[slice]) -> None:
    """Scale the embeddings down in these parts of the width; from layer 1 on, let heads write what they read, up to a
    projection."""
    # large, so that a step of training changes it little; ln_f keeps the logits as they were
    model.wte.weight *= 5
    model.ln_f.weight /= 5
    for part in parts:
        model.wte.weight[:, part] *= 0.1
    for layer in range(1, model.config.n_layer):
        *_, value, output = weights_by_head(model, layer)
        output.copy_(value.mT.repeat_interleave(len(output) // len(value), dim=0))


@torch.no_grad()
def start_as_copier(model: GPT) -> None:
    """Let training start from an induction circuit: "A B C ... A B" makes C likely.

    The width is split into position | content | one back | two back. wpe holds sinusoids in `position`. Heads 0 and 1
    of layer 0 look one and two positions back (their queries are their keys, rotated by as much) and copy a projection
    of the content there into `one back` and `two back`. Head 0 of layer 1 looks for tokens that follow the present
    one and the one before it, and adds their content to its own; all other heads from layer 1 on begin by adding, a
    little, what they look at. These are starting values: all of it stays trainable.

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    C, D = model.config.n_embd, model.config.head_dim
    P, n = C // 3 // 2 * 2, D // 2
    W = C - 2 * n - P  # of the content
    position, content = slice(0, P), slice(P, P + W)
    looking_back = slice(C - 2 * n, C - n), slice(C - n, C)
    project = torch.randn(W, n) / math.sqrt(W)

    frequency = 1000.0 ** -torch.linspace(0, 1, P // 2)
    angle = torch.arange(model.config.n_ctx)[:, None] * frequency
    quiet_parts(model, (position, *looking_back))
    model.wpe.weight *= 0.1
    model.wpe.weight[:, position] = 0.25 * torch.cat([angle.sin(), angle.cos()], dim=1)

    first_layer, i = weights_by_head(model, 0), torch.arange(n)
    sin, cos = i, i + P // 2  # of the n highest frequencies: they tell neighbours apart
    for head in (0, 1):
        query, key, value, output = (part[head].zero_() for part in first_layer)
        rotation_angle = (head + 1) * frequency[:n]
        key[sin, i] = 2.5
        key[cos, n + i] = 2.5
        query[sin, i] = 2.5 * rotation_angle.cos()  # sin(p - t) = sin p cos t - cos p sin t
        query[cos, i] = -2.5 * rotation_angle.sin()
        query[cos, n + i] = 2.5 * rotation_angle.cos()  # cos(p - t) = cos p cos t + sin p sin t
        query[sin, n + i] = 2.5 * rotation_angle.sin()
        value[content, :n] = project
        output[:n, looking_back[head]] = 0.5 * torch.eye(n)

    query, key, value, output = (part[0].zero_() for part in weights_by_head(model, 1))
    query[content, :n] = 4 * project
    key[looking_back[0], :n] = 4 * torch.eye(n)
    query[looking_back[0], n:D] = 2 * torch.eye(n)
    key[looking_back[1], n:D] = 2 * torch.eye(n)
    value[content, :n] = project
    output[:n, content] = 1.5 * project.t()


@torch.no_grad()
def start_llama_as_copier(model: Llama) -> None:
    """Let training start from the same circuit where positions rotate queries and keys.

    The width is split into content | one back | two back | constant. In layer 0 all keys of a group are the constant, in
    the pairs that turn fast, and the queries of heads 0 and 1 are the same turned one and two tokens back. In layer 1
    the first head of each of two groups looks, in the pairs that turn slowly, for tokens that follow the present one,
    or that stand two after the one before it, and adds their content to its own.
    """
    config = model.config
    C, D = config.n_embd, config.head_dim
    n = D // 2  # pairs of a head
    W = C - 2 * n - 1  # of the content
    content = slice(0, W)
    looking_back = slice(W, W + n), slice(W + n, W + 2 * n)
    project = torch.randn(W, n) / math.sqrt(W)
    fast = torch.arange(D) % n < n // 2  # numbers i and n + i are a pair

    quiet_parts(model, looking_back)
    model.wte.weight[:, -1] = 0.5  # the constant

    query, key, value, output = weights_by_head(model, 0)
    for weights in (query[:2], key[0], value[0], output[:2]):
        weights.zero_()
    key[0, -1, fast] = 1.0
    value[0, content, :n] = project
    for head in (0, 1):
        rotation_ahead = rotation(torch.tensor([-1 - head]), config)
        query[head, -1] = rotate(key[0, -1].view(1, 1, 1, D), rotation_ahead).flatten()
        output[head, :n, looking_back[head]] = 0.5 * torch.eye(n)

    query, key, value, output = weights_by_head(model, 1)
    searches = (content, 4 * project), (looking_back[0], 4 * torch.eye(n))
    for shared, (width_part, matrix) in enumerate(searches):
        head = shared * config.n_head // config.n_kv_head  # the first of the group
        for weights in (query[head], key[shared], value[shared], output[head]):
            weights.zero_()
        query[head, width_part, ~fast] = matrix
        key[shared, looking_back[shared], ~fast] = 4 * torch.eye(n)
        value[shared, content, :n] = project
        output[head, :n, content] = 0.75 * project.t()


@torch.no_grad()
def k_means(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return k centres (k, D) of points (N, D) by Lloyd's algorithm; a centre that loses its points becomes another."""
    centres = points[torch.randperm(len(points), generator=generator)[:k]]
    for _ in range(15):
        nearest = torch.cdist(points, centres).argmin(dim=1)
        for i in range(k):
            members = points[nearest == i]
            replacement = points[torch.randint(len(points), (1,), generator=generator)]
            centres[i] = (members if len(members) else replacement).mean(dim=0)
    return centres


@torch.no_grad()
def start_memory(model: bounded.BCT, plain: GPT, ids: Tensor, generator: torch.Generator) -> None:
    """Give a BCT a start in which writing makes sense: a token is written to the slots whose
    address is nearest to its key.

    W_wq begins as W_k, and each head's addresses as the centres, by k-means, of the keys that the plain model computes
    for the texts ids (B, T). Small random addresses would make all slots the same mean.
    """
    cache = KVCache()
    plain(ids, cache)
    for block, (keys, _) in zip(model.h, cache.layers, strict=True):
        query, attention = block.memory.c_query, block.attn.c_attn
        query.weight.copy_(attention.weight.chunk(3, 1)[1])
        if query.bias is not None:
            query.bias.copy_(attention.bias.chunk(3)[1])
        keys = keys.transpose(0, 1).flatten(1, 2).cpu()  # (H, B * T, D)
        keys = keys[:, torch.randperm(keys.size(1), generator=generator)[:MAX_KEYS]]
        centres = torch.stack([k_means(head, model.config.slots, generator) for head in keys])
        block.memory.addresses.copy_(centres - keys.mean(dim=1, keepdim=True))


@torch.no_grad()
def prune(teacher: GPT, config: GPTConfig, ids: Tensor) -> GPT:
    """Return a narrower model. It keeps those of the teacher's hidden dimensions and, layer by
    layer, MLP neurons that are most active (by mean absolute value) on texts ids (B, T)."""
    activity = {}

    def record_activity(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        activity[layer] = inputs[0].abs().mean((0, 1))

    readers = [layer for block in teacher.h for layer in (block.attn.c_attn, block.mlp.c_fc)]
    writers = [block.mlp.c_proj for block in teacher.h]
    hooks = [layer.register_forward_pre_hook(record_activity) for layer in readers + writers]
    teacher(ids)
    for hook in hooks:
        hook.remove()
    # the most active dimensions, in their order
    stream_activity = sum(activity[layer] for layer in readers)
    active_dimensions = stream_activity.topk(config.n_embd).indices.sort().values
    active_neurons = []
    for layer in writers:
        active_neurons.append(activity[layer].topk(config.n_inner).indices.sort().values)
    parameters = {}
    for name, parameter in teacher.named_parameters():
        neurons = active_neurons[int(name.split(".")[1])] if ".mlp." in name else None
        if name.endswith(("c_attn.weight", "c_fc.weight")):  # read the residual stream
            parameter = parameter[active_dimensions]
        elif name.endswith("mlp.c_proj.weight"):
            parameter = parameter[neurons]
        if ".c_fc." in name:
            parameter = parameter[..., neurons]
        elif ".c_attn." not in name:  # all others write to the stream, or are as wide
            parameter = parameter[..., active_dimensions]
        parameters[name] = parameter
    student = GPT(config)
    # strict would want lm_head, which is wte, by its own name too
    student.load_state_dict(parameters, strict=False)
    return student.to(ids.device)


def initial_models(
    recipe: Recipe, text: Corpus, device: torch.device
) -> tuple[nn.Module, nn.Module | None]:
    """Return the model as training begins, and the teacher that it learns from, if any."""
    torch.manual_seed(0)
    if recipe.init is None:
        model = recipe.model_class(recipe.config)
        if recipe.kind == "teacher":
            start_as_copier(model)
        elif recipe.kind == "llama":
            start_llama_as_copier(model)
        return model.to(device).train(), None
    teacher = load_model(recipe.init, model_class=GPT, device=device).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    rows, _ = text.draw_rows(replace(recipe.phases[0], documents=16, shuffled=0), generator)
    sample_ids = rows[:, :-1].to(device)
    if isinstance(recipe, Pruning):
        model = prune(teacher, recipe.config, sample_ids)
        if recipe.begin:
            model.load_state_dict(load_model(recipe.begin, model_class=GPT).state_dict())
    else:
        model = recipe.model_class(recipe.config)
        model.load_state_dict(teacher.state_dict(), strict=False)
        if recipe.clusters:
            start_memory(model, teacher, sample_ids, generator)
    return model.to(device).train(), teacher
