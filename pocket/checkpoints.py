"""The files of a trained model: weights, figures, card and loss curve."""

import shutil
from pathlib import Path
from typing import Any

import jinja2
import torch
from safetensors.torch import save_file
from torch import Tensor

import gpt_bounded_cache as bounded
from gpt_kv_cache import GPT, GPTConfig
from llama_kv_cache import Llama
from load_gpt2_weights import LLAMA_FIELDS, find_file, parts_of
from pocket import coherence, corpus
from pocket.evaluation import measure
from pocket.recipes import TEACHER, Recipe, size_of
from support.figures import figure
from support.files import read_json, write_atomically, write_json, write_text

TEMPLATE = Path(__file__).resolve().parent / "card.md.jinja"


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
    sizes = ("n_ctx", "n_embd", "n_layer", "n_head", "n_inner")
    config |= {name: getattr(c, name) for name in sizes}
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
    }
    config |= {public: getattr(c, ours) for public, ours in LLAMA_FIELDS.items()}
    for name, parameter in model.named_parameters():
        for public, part in parts_of(name, parameter, c).items():
            tensors[public if public == "lm_head.weight" else f"model.{public}"] = part
    return config, tensors


def card(recipe: Recipe, model: torch.nn.Module, figures: dict) -> str:
    """Return the card of a model with the figures that measure() found."""
    steps, tokens = size_of(recipe)
    fields = {
        "recipe": recipe,
        "steps": steps,
        "tokens": tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "new": sum(p.numel() for name, p in model.named_parameters() if ".memory." in name),
        "figures": figures,
    }
    if recipe.kind == "teacher":
        fields["closed_book"] = len(corpus.closed_book_questions("test"))
        questions = corpus.explain_questions("test", 1) + corpus.recall_questions("test", 4)[::3]
        questions.append(corpus.closed_book_questions("test")[0])
        fields["samples"] = [  # up to the next question that it asks itself
            (question, written(recipe, model, question.prompt).partition("\nQuestion:")[0])
            for question in questions
        ]
        fields["stories"] = []
        for seed, opening in enumerate(coherence.openings("test", 3)):
            options = {"temperature": 0.8, "generator": torch.Generator().manual_seed(seed)}
            fields["stories"].append((opening, written(recipe, model, opening, **options)))
    elif recipe.kind == "llama":
        fields["known"] = read_json(find_file("pocket", "figures.json"))
        fields["teacher"] = TEACHER.config
    template = jinja2.Template(
        TEMPLATE.read_text("utf-8"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return template.render(fields)


def written(recipe: Recipe, model: GPT, prompt: str, **options: object) -> str:
    """Return how a model goes on after a prompt."""
    ids = [recipe.tokenizer.encode_ordinary(prompt)]
    return coherence.written(model, recipe.tokenizer, ids, **options)[0]


def finish(recipe: Recipe, model: GPT, losses: list[float], folder: Path) -> None:
    """Write a model as it is shipped, in fp16, with its loss curve and, if it was trained on the corpus, its figures
    and card. It gets the tokenizer of the model that it comes from, if that has its own; the shipped ones share one."""
    model = model.half().float()
    if recipe.text is None:
        figures = measure(recipe, model)
        text = card(recipe, model, figures)  # before anything is written
        write_json(folder / "figures.json", figures)
        write_text(folder / "README.md", text)
    mean_of = min(100, len(losses))

    def draw_on(axes: Any) -> None:
        axes.plot(losses, color="C0", alpha=0.25, linewidth=0.5, label="each step")
        means = torch.tensor(losses).unfold(0, mean_of, 1).mean(1)
        steps = range(mean_of - 1, len(losses))
        axes.plot(steps, means, color="C0", label=f"mean of {mean_of} steps")

    figure(
        folder / "loss.png",
        draw_on,
        xlabel="step",
        ylabel="loss (nats per token)",
        ylim=(0, None),
        title="Training loss (of what each phase reads)",
    )
    if recipe.init and folder.resolve().parent != TEMPLATE.parent:
        own = find_file(recipe.init, "config.json").with_name("tokenizer.tiktoken")
        if own.is_file():
            write_atomically(folder / own.name, lambda file: shutil.copyfile(own, file))
    export(model, folder)
