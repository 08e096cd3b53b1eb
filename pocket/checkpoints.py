"""The files of a trained model: weights, figures, card and loss curve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import gpt_bounded_cache as bounded
from gpt_kv_cache import GPT, GPTConfig
from llama_kv_cache import Llama
from load_gpt2_weights import LLAMA_SIZES, find_file, parts_of, turned
from pocket.cards import card
from pocket.evaluation import gates, measure
from pocket.recipes import Recipe
from support.figures import figure
from support.files import write_atomically, write_json, write_text

SIZES = ("n_ctx", "n_embd", "n_layer", "n_head", "n_inner")


def export(model: GPT | Llama, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write config.json and model.safetensors in Hugging Face format."""
    to_public = llama_format if isinstance(model, Llama) else gpt2_format
    config, tensors = to_public(model)
    end = model.config.vocab_size - 1
    config |= {"bos_token_id": end, "eos_token_id": end}
    tensors = {name: x.detach().to("cpu", dtype).contiguous() for name, x in tensors.items()}
    write_json(folder / "config.json", config)
    write_atomically(
        folder / "model.safetensors",
        lambda file: save_file(tensors, file, metadata={"format": "pt"}),
    )


def gpt2_format(model: GPT) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a GPT-2, or of one of ours that is made of it."""
    c = model.config
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "vocab_size": c.vocab_size,
        "n_positions": c.n_ctx,
    }
    config |= {name: getattr(c, name) for name in SIZES}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), c.dropout)
    if c.n_head * c.head_dim != c.n_embd:
        config["head_dim"] = c.head_dim  # our own key: Hugging Face's GPT-2 has no such models
    if isinstance(c, bounded.BCTConfig):
        config |= {name: value for name, value in vars(c).items() if name not in vars(GPTConfig())}
        config["model_type"] = "bct"  # nor such: what reads it as a plain GPT-2 must refuse it
    return config, {f"transformer.{name}": p for name, p in model.named_parameters()}


def llama_format(model: Llama) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config of a Llama, and its tensors by their public names, matrices as (out, in)."""
    c, tensors = model.config, {}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tied,
    }
    config |= {public: getattr(c, ours) for public, ours in LLAMA_SIZES.items()}
    for name, parameter in model.named_parameters():
        parts = parts_of(name, parameter, c)
        matrix = parameter.t() if turned(name, c) else parameter
        sizes = [shape[0] for shape in parts.values()]
        for public, part in zip(parts, matrix.split(sizes), strict=True):
            head = public.startswith("lm_head.")
            tensors[public if head else f"model.{public}"] = part
    return config, tensors


def plot_losses(recipe: Recipe, losses: list[float], path: Path) -> None:
    """Draw the loss of every step (faint) and its running mean over 100 steps, or all if they are fewer."""
    n = min(100, len(losses))

    def draw_on(axes: Any) -> None:
        axes.plot(losses, color="C0", alpha=0.25, linewidth=0.5, label="each step")
        mean = torch.tensor(losses).unfold(0, n, 1).mean(1)
        axes.plot(range(n - 1, len(losses)), mean, color="C0", label=f"mean of {n} steps")
        begin = 0
        for number, phase in enumerate(recipe.phases, 1):
            axes.axvline(begin, color="grey", linewidth=0.8)
            axes.text(begin, max(losses), f" {number}", va="top", fontsize=8)
            begin += phase.steps

    figure(
        path,
        draw_on,
        xlabel="step",
        ylabel="loss (nats per token)",
        ylim=(0, None),
        title="Training loss (of what each phase reads)",
    )


def copy_tokenizer(init: str, folder: Path) -> None:
    """Give a model the tokenizer of the one that it comes from, if that has its own; the shipped ones share one."""
    own = find_file(init, "config.json").with_name("tokenizer.tiktoken")
    if own.is_file() and folder.resolve().parent != Path(__file__).resolve().parent:
        write_atomically(folder / own.name, lambda file: shutil.copyfile(own, file))


def finish(recipe: Recipe, model: GPT, losses: list[float], folder: Path) -> None:
    """Write a model as it is shipped, in fp16, with its loss curve and, if it was trained on the corpus, its figures
    and card. Raises ValueError, and writes nothing, if it fails a gate."""
    model = model.half().float()
    if recipe.text is None:
        figures = measure(recipe, model)
        print(json.dumps(figures, indent=2))
        failed = [gate for gate, passed in gates(recipe, figures).items() if not passed]
        if failed:
            raise ValueError(
                f"the model is not kept, because these don't hold: {'; '.join(failed)}"
            )
        text = card(recipe, model, figures)
        write_json(folder / "figures.json", figures)
        write_text(folder / "README.md", text)
    plot_losses(recipe, losses, folder / "loss.png")
    if recipe.init:
        copy_tokenizer(recipe.init, folder)
    export(model, folder)
