"""The files of a trained model: weights, figures, card and loss curve."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import gpt_bounded_cache as bounded
from gpt_kv_cache import GPT, GPTConfig
from llama_kv_cache import Llama
from load_gpt2_weights import LLAMA_FIELDS, find_file, public_parts
from pocket.card import model_card
from pocket.evaluation import measure
from pocket.recipes import Recipe
from pocket.tokenizer import TOKENIZER
from support.figures import write_figure
from support.files import write_atomically, write_json, write_text

HERE = Path(__file__).resolve().parent
# what a tokenizer may be made of, and which tokens end its texts
TOKENIZER_FILES = (
    "tokenizer.tiktoken tokenizer.json vocab.json merges.txt generation_config.json".split()
)


def export(
    model: GPT | Llama,
    folder: Path,
    dtype: torch.dtype = torch.float16,
    end_token: int | None = None,
) -> None:
    """Write config.json and model.safetensors in Hugging Face format. end_token: the token that
    ends a text, by default the last."""
    to_public = llama_format if isinstance(model, Llama) else gpt2_format
    fields, tensors = to_public(model)
    if end_token is None:
        end_token = model.config.vocab_size - 1
    fields |= {"bos_token_id": end_token, "eos_token_id": end_token}
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
    """Write a model as it is shipped, in fp16, with its loss curve and, if it was trained on the corpus, its figures
    and card. It gets the tokenizer of the model that it comes from, if that has its own; the shipped ones share one."""
    model = model.half().float()
    export(model, folder, end_token=recipe.tokenizer.eot_token)  # first: what follows takes minutes
    if recipe.init and folder.resolve().parent != HERE:
        source = find_file(recipe.init, "config.json").parent.resolve()
        if source.parent == HERE:
            source = TOKENIZER.parent
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                write_atomically(folder / name, partial(shutil.copyfile, source / name))
            else:  # left by an earlier model
                (folder / name).unlink(missing_ok=True)
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
    if recipe.text is None:
        figures = measure(recipe, model)
        write_json(folder / "figures.json", figures)
        write_text(folder / "README.md", model_card(recipe, model, figures))
