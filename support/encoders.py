"""Texts as vectors, and the nearest of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tiktoken
from torch import nn


class TokenEncoder:
    """Texts as unit vectors, without another model: the mean of their tokens' embeddings, less that of all tokens."""

    def __init__(self, model: nn.Module, tokenizer: tiktoken.Encoding) -> None:
        table = model.wte.weight.detach().float().cpu().numpy()
        self.table, self.tokenizer = table - table.mean(axis=0), tokenizer

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Return the embeddings (N, C) of N texts; an empty text is 0."""
        tokens = [self.tokenizer.encode(text, allowed_special="all") for text in texts]
        means = np.stack([self.table[ids].sum(axis=0) / max(1, len(ids)) for ids in tokens])
        return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)


def load_encoder(name: str, model: nn.Module, tokenizer: tiktoken.Encoding) -> Callable[[list[str]], np.ndarray]:
    """Return what turns N texts into unit vectors (N, C): "tokens", or a model of sentence-transformers.

    Raises ValueError if that package is missing, OSError if the model can't be had.
    """
    if name == "tokens":
        return TokenEncoder(model, tokenizer)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(f"the encoder {name} needs `pip install sentence-transformers`, tokens nothing") from error
    encoder = SentenceTransformer(name, device=str(model.wte.weight.device))
    return lambda texts: encoder.encode(texts, normalize_embeddings=True, show_progress_bar=False)


def nearest(stored: np.ndarray, queries: np.ndarray) -> list[int]:
    """Return for each of the queries (Q, C) the index of the stored vector (N, C) with the largest dot product; by
    faiss where it is installed."""
    try:
        import faiss
    except ImportError:
        return (queries @ stored.T).argmax(axis=1).tolist()
    index = faiss.IndexFlatIP(stored.shape[1])
    index.add(np.ascontiguousarray(stored, dtype=np.float32))
    return index.search(np.ascontiguousarray(queries, dtype=np.float32), 1)[1][:, 0].tolist()
