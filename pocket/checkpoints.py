"""The files of a trained model: weights, figures, card and loss curve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

import gpt_bounded_cache as bounded
import gpt_kv_cache
from gpt_baseline import GPT, GPTConfig
from load_gpt2_weights import find_file, load_model, load_tokenizer, read_tokenizer
from pocket import coherence, rope
from pocket.cards import card, memory_card, rotary_card, student_card
from pocket.evaluation import Windowed, divergences, evaluate, failed_gates, perplexities, window_of_equal_bytes
from pocket.pruning import Student
from pocket.recipes import Distillation, Pruning, Recipe
from pocket.tokenizer import TOKENIZER
from support.files import write_atomically


def export(model: GPT, folder: Path) -> None:
    """Write config.json and model.safetensors (fp16) in Hugging Face format."""
    c = model.config
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "vocab_size": c.vocab_size, "n_positions": c.n_ctx, "n_ctx": c.n_ctx,
        "n_embd": c.n_embd, "n_layer": c.n_layer, "n_head": c.n_head, "n_inner": c.n_inner,
        "attn_pdrop": c.dropout, "embd_pdrop": c.dropout, "resid_pdrop": c.dropout,
        "bos_token_id": c.vocab_size - 1, "eos_token_id": c.vocab_size - 1,
    }  # fmt: skip
    if c.n_head * c.head_dim != c.n_embd:
        config["head_dim"] = c.head_dim  # our own key: Hugging Face's GPT-2 has no such models
    if isinstance(c, bounded.BCTConfig):
        config |= {name: value for name, value in vars(c).items() if name not in vars(GPTConfig())}
        config["model_type"] = "bct"  # nor such: what reads it as a plain GPT-2 must refuse it
    if isinstance(c, rope.GPTConfig):
        config |= {"model_type": "rotary", "rotary": True}
    tensors = {f"transformer.{name}": p.detach().half().contiguous().cpu() for name, p in model.named_parameters()}
    write_atomically(
        folder / "config.json", lambda file: file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    )
    write_atomically(folder / "model.safetensors", lambda file: save_file(tensors, file, metadata={"format": "pt"}))


def plot_losses(recipe: Recipe, losses: list[float], path: Path) -> None:
    """Draw the loss of every step (faint) and its running mean over 100 steps, or all if they are fewer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    n = min(100, len(losses))
    mean = torch.tensor(losses).unfold(0, n, 1).mean(1)
    axes.plot(losses, color="tab:blue", alpha=0.25, linewidth=0.5, label="each step")
    axes.plot(range(n - 1, len(losses)), mean, color="tab:blue", label=f"mean of {n} steps")
    start = 0
    for number, phase in enumerate(recipe.phases, 1):
        axes.axvline(start, color="grey", linewidth=0.8)
        axes.text(start, max(losses), f" {number}", va="top", fontsize=8)
        start += phase.steps
    axes.set(
        xlabel="step", ylabel="loss (nats per token)", title="Training loss (of what each phase reads)", ylim=(0, None)
    )
    axes.legend(loc="center right")
    figure.tight_layout()
    write_atomically(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    plt.close(figure)


def finish(recipe: Recipe, model: GPT, losses: list[float], folder: Path) -> None:
    """Measure the model as it will be shipped, in fp16; write it, its card, figures and loss curve if it passes.

    Raises ValueError, and writes nothing, if it fails a gate.
    """
    model = model.half().float()
    tokenizer = read_tokenizer(TOKENIZER)
    figures = evaluate(model, tokenizer)
    near, far = perplexities(model, tokenizer, "test", [256, 512, recipe.config.n_ctx])
    writer = gpt_kv_cache.GPT(recipe.config).eval()
    writer.load_state_dict(model.state_dict())
    for name, temperature in (("", 0.0), ("sampled_", 0.8)):
        stories = coherence.write(writer, tokenizer, coherence.openings("test", 200), temperature)
        figures |= {name + key: share for key, share in coherence.measure(stories)[0].items()}
    figures |= {"perplexity_before_512": near, "perplexity_after_512": far}
    print(json.dumps(figures, indent=2))
    if failed := failed_gates(figures):
        raise ValueError(f"the model is not kept, because these don't hold: {'; '.join(failed)}")
    plot_losses(recipe, losses, folder / "loss.png")
    write_atomically(folder / "figures.json", lambda file: file.write_text(json.dumps(figures, indent=2) + "\n"))
    text = card(recipe, model, figures, tokenizer)
    write_atomically(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))
    export(model, folder)


def finish_memory(recipe: Distillation, model: bounded.BCT, losses: list[float], folder: Path) -> None:
    """Measure a BCT as it will be shipped, in fp16, beside the model that it comes from; write it and its card.

    Raises ValueError, and writes nothing, if it is no better than a sliding window of equal bytes. A model that was
    trained on another text than the corpus is not measured.
    """
    model = model.half().float()
    if recipe.text is None:
        tokenizer, window = load_tokenizer(recipe.init), window_of_equal_bytes(recipe.config)
        plain = load_model(recipe.init, model_class=bounded.GPT)
        figures = {
            "bct": evaluate(model, tokenizer),
            "full": evaluate(plain, tokenizer),
            "window": evaluate(Windowed(plain, window), tokenizer) | {"tokens": window},
            "sinks": evaluate(Windowed(plain, window - 4, 4), tokenizer) | {"tokens": window},
        }
        print(json.dumps(figures, indent=2))
        if any(figures["bct"][name] >= figures["window"][name] for name in ("perplexity", "recall_nats")):
            raise ValueError(f"the model is not kept, since a sliding window of {window} tokens is better")
        write_atomically(folder / "figures.json", lambda file: file.write_text(json.dumps(figures, indent=2) + "\n"))
        text = memory_card(recipe, model, figures)
        write_atomically(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))
    plot_losses(recipe, losses, folder / "loss.png")
    copy_tokenizer(recipe.init, folder)
    export(model, folder)


def copy_tokenizer(init: str, folder: Path) -> None:
    """Give a model the tokenizer of the one that it comes from, if that has its own; the shipped ones share one."""
    own = find_file(init, "config.json").with_name("tokenizer.tiktoken")
    if own.is_file() and folder.resolve().parent != Path(__file__).resolve().parent:
        write_atomically(folder / own.name, lambda file: shutil.copyfile(own, file))


def finish_rotary(recipe: Distillation, model: rope.GPT, losses: list[float], folder: Path) -> None:
    """Measure a rotary model as it will be shipped, in fp16, beside the one that it comes from; write it and its card.

    Raises ValueError, and writes nothing, if it knows the world or remembers its prompt much worse than that.
    """
    model, plain = model.half().float(), load_model(recipe.init, model_class=GPT)
    tokenizer = load_tokenizer(recipe.init)
    figures = {"learned": evaluate(plain, tokenizer), "rotary": evaluate(model, tokenizer)}
    print(json.dumps(figures, indent=2))
    learned, turned = figures.values()
    if any(turned[name] < learned[name] - 0.15 for name in ("closed_book_share", "recall_share")):
        raise ValueError("the model is not kept, since its answers are worse by more than 15 points")
    write_atomically(folder / "figures.json", lambda file: file.write_text(json.dumps(figures, indent=2) + "\n"))
    text = rotary_card(recipe, model, figures)
    write_atomically(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))
    plot_losses(recipe, losses, folder / "loss.png")
    export(model, folder)


def finish_student(recipe: Pruning, model: Student, losses: list[float], folder: Path) -> None:
    """Measure a student as it will be shipped, in fp16, alone and on its teacher's cache; write it and its card.

    Raises ValueError, and writes nothing, if under no way of reading it comes near to its teacher. A model that was
    trained on another text than the corpus is not measured.
    """
    model = model.half().float()
    if recipe.text is None:
        tokenizer, teacher = load_tokenizer(recipe.init), load_model(recipe.init, model_class=gpt_kv_cache.GPT)
        figures = {"kl": divergences(teacher, model, tokenizer), "student": evaluate(model, tokenizer)}
        print(json.dumps(figures, indent=2))
        if (least := min(figures["kl"].values())) > 0.5:
            raise ValueError(f"the model is not kept: its divergence from the teacher is {least:.2f} nats at least")
        write_atomically(folder / "figures.json", lambda file: file.write_text(json.dumps(figures, indent=2) + "\n"))
        text = student_card(recipe, model, figures)
        write_atomically(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))
    plot_losses(recipe, losses, folder / "loss.png")
    copy_tokenizer(recipe.init, folder)
    export(model, folder)
