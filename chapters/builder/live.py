"""The weights of the page that runs in a browser, `chapters/live/`: those of `pocket:int8`, as a script."""

import base64
import json

import torch

from chapters.builder.blocks import CHAPTERS
from formats.tensors import round_matrix
from load_gpt2_weights import load_model
from pocket.tokenizer import TOKENIZER
from support.files import read_text

WEIGHTS = CHAPTERS / "live" / "weights.js"


@torch.no_grad()
def weights_script() -> str:
    """Return a script that defines WEIGHTS: the geometry, the tokenizer's ranks, and in `data`, as base64, the tensors
    one after the other.

    `tensors` lists the name of each, the count of its numbers, and n_out. The matrices of the blocks have n_out
    outputs: n_out smallest numbers and n_out scales in float32, then the numbers as bytes, row after row. Of the other
    tensors n_out is 0, and their numbers are in half precision, as in the checkpoint. All is little-endian."""
    model = load_model("pocket")
    tensors, data = [], []
    for name, parameter in model.named_parameters():
        n_out = 0
        if name.startswith("h.") and parameter.dim() == 2:
            codes, scale, low = round_matrix(parameter, bits=8)
            n_out = codes.size(1)
            data += [low.numpy(), scale.numpy(), codes.to(torch.uint8).numpy()]
        else:
            data.append(parameter.half().numpy())
        tensors.append([name, parameter.numel(), n_out])
    geometry = {
        name: getattr(model.config, name) for name in ("n_ctx", "n_layer", "n_head", "n_embd")
    }
    weights = {
        "config": geometry,
        "end_of_text": model.config.vocab_size - 1,
        "ranks": read_text(TOKENIZER),
        "tensors": tensors,
        "data": base64.b64encode(b"".join(part.tobytes() for part in data)).decode(),
    }
    return f"// Made by python3 -m chapters.builder live\nconst WEIGHTS = {json.dumps(weights)};\n"
