"""Write the pocket model to a folder that transformers, vLLM and SGLang read, tokenizer included.

Its weights and configuration are theirs already. Its tokenizer, a list of merges, becomes tokenizer.json.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.insert(0, f"{sys.path[0]}/../..")  # run as a file, from any folder

import shutil
from pathlib import Path

from load_gpt2_weights import load_tokenizer
from support.cli import CommandLine

TEACHER = Path(__file__).resolve().parents[2] / "pocket" / "teacher"


def export(folder: Path) -> None:
    """Write the model to a new or empty folder. Raises ValueError if it holds files, or without transformers."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: it must be a new or an empty folder")
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError as error:
        raise ValueError(
            "transformers is needed, which writes the tokenizer: pip install transformers"
        ) from error
    ours, end = load_tokenizer("pocket"), "<|endoftext|>"
    merges = TikTokenConverter(
        str(TEACHER / "tokenizer.tiktoken"), pattern=ours._pat_str, extra_special_tokens=[end]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=merges.converted(), bos_token=end, eos_token=end
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(TEACHER / name, folder / name)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 %(prog)s served")
    cli.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    with cli.parse(argv) as args:
        export(args.folder)
        print(f"written: {args.folder}")


if __name__ == "__main__":
    main()
