"""The files of a trained model: weights, figures and loss curve."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import gpt_bounded_cache as bounded
from formats.configs import LLAMA_FIELDS
from formats.tensors import public_parts
from gpt_kv_cache import GPT, GPTConfig
from llama_kv_cache import Llama
from pocket.evaluation import measure
from pocket.recipes import Recipe
from pocket.tokenizer import TOKENIZER
from support.figures import write_figure
from support.files import write_atomically, write_json

HERE = Path(__file__).resolve().parent


def export(model: GPT | Llama, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write config.json and model.safetensors in Hugging Face format. The last token of the
    vocabulary ends a text."""
    to_public = llama_format if isinstance(model, Llama) else gpt2_format
    fields, tensors = to_public(model)
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id"), model.config.vocab_size - 1)
    for name, tensor in tensors.items():
        tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
    write_json(folder / "config.json", fields)
    write_atomically(
        folder / "model.safetensors",
        lambda file: save_file(tensors, file, metadata={"format": "pt"}),
    )


def gpt2_format(model: GPT) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a GPT-2, or of one of our models that derive from it."""
    config = model.config
    fields = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "vocab_size": config.vocab_size,
        "n_positions": config.n_ctx,
    }
    sizes = ("n_ctx", "n_embd", "n_layer", "n_head", "n_inner")
    fields |= {name: getattr(config, name) for name in sizes}
    fields |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)
    if config.n_head * config.head_dim != config.n_embd:
        fields["head_dim"] = config.head_dim  # our own key: Hugging Face's GPT-2 has no such models
    if isinstance(config, bounded.BCTConfig):
        for name, value in vars(config).items():
            if name not in vars(GPTConfig()):
                fields[name] = value
        fields["model_type"] = "bct"  # nor this: a reader of plain GPT-2s must refuse it
    tensors = {f"transformer.{name}": tensor for name, tensor in model.named_parameters()}
    return fields, tensors


def llama_format(model: Llama) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config of a Llama, and its tensors by their public names, matrices as (out, in)."""
    config, tensors = model.config, {}
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
    }
    for public_name, our_name in LLAMA_FIELDS.items():
        fields[public_name] = getattr(config, our_name)
    for name, tensor in public_parts(model).items():
        tensors[name if name == "lm_head.weight" else f"model.{name}"] = tensor
    return fields, tensors


def finish(recipe: Recipe, model: GPT, losses: list[float], folder: Path) -> None:
    """Write a model as it is shipped, in fp16, with its loss curve and figures. Outside of pocket it gets a copy of the
    tokenizer; the shipped ones share one. Their cards, README.md, are written by hand: a test holds them to the figures."""
    model = model.half().float()
    export(model, folder)  # first: what follows takes minutes
    if folder.resolve().parent != HERE:
        write_atomically(folder / TOKENIZER.name, partial(shutil.copyfile, TOKENIZER))
    window = min(100, len(losses))

    def draw_on(axes: Any) -> None:
        axes.plot(losses, color="C0", alpha=0.25, linewidth=0.5, label="each step")
        means = torch.tensor(losses).unfold(0, window, 1).mean(1)
        axes.plot(
            range(window - 1, len(losses)), means, color="C0", label=f"mean of {window} steps"
        )

    write_figure(
        folder / "loss.png",
        draw_on,
        xlabel="step",
        ylabel="loss (nats per token)",
        ylim=(0, None),
        title="Training loss (of what each phase reads)",
    )
    write_json(folder / "figures.json", measure(recipe, model))
