"""The tokenizer of pocket: a byte-level BPE of its corpus."""

import base64
import json
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from formats.tokenizers import byte_characters
from pocket import corpus
from support.files import write_atomically

TOKENIZER = Path(__file__).resolve().parent / "teacher" / "tokenizer.tiktoken"
VOCABULARY = 1536  # 256 bytes, 1279 merges, <|endoftext|>


def train_tokenizer(path: Path) -> None:
    """Train a byte-level BPE on documents of the corpus and write it as tiktoken ranks: base64 of the bytes, rank.

    The 256 bytes come first, so any UTF-8 text has an encoding.
    """
    tokenizer = ByteLevelBPETokenizer()  # it cuts texts by GPT-2's pattern
    texts = (document.text for document in corpus.documents("train", 20_000))
    tokenizer.train_from_iterator(texts, VOCABULARY - 1, min_frequency=0, show_progress=False)

    tokens = [bytes([byte]) for byte in range(256)]
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    for left, right in json.loads(tokenizer.to_str())["model"]["merges"]:
        tokens.append(bytes(byte_of[character] for character in left + right))
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    write_atomically(path, lambda file: file.write_bytes(b"".join(lines)))
