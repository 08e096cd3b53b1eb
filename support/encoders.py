"""Encoders, which turn texts into unit vectors: dot products of these say how similar texts are."""

from collections.abc import Callable, Sequence

import numpy as np
import tiktoken
import torch
from torch import Tensor, nn

from support.files import download_error
from support.regression import cross_validate, ridge

Encoder = Callable[[list[str]], np.ndarray]  # turns N texts into unit vectors (N, C)


def token_encoder(model: nn.Module, tokenizer: tiktoken.Encoding) -> Encoder:
    """Return an encoder that needs no other model: the mean embedding of a text's tokens, minus
    that of the vocabulary, as a unit vector. An empty text gives zeros."""
    embeddings = model.wte.weight.detach().float().cpu().numpy()
    embeddings = embeddings - embeddings.mean(axis=0)

    def encode(texts: list[str]) -> np.ndarray:
        tokens = [tokenizer.encode(text, allowed_special="all") for text in texts]
        means = np.stack([embeddings[ids].sum(axis=0) / max(1, len(ids)) for ids in tokens])
        return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)

    return encode


class PairEncoder:
    """An encoder that is fitted on families of paraphrases and needs no other model.

    Ridge regression maps the set of a text's tokens to the mean set of its family. So a token
    counts as much as it says about what paraphrases have in common.
    """

    def __init__(
        self, tokenizer: tiktoken.Encoding, tokens: Sequence[int], mean: Tensor, weight: Tensor
    ) -> None:
        """tokens: the V tokens that count; mean (V,): of their sets; weight (V, V): of the map."""
        self.tokenizer, self.mean, self.weight = tokenizer, mean, weight
        self.column_of = {token: i for i, token in enumerate(tokens)}

    def token_sets(self, texts: Sequence[str]) -> Tensor:
        """Return a matrix (N, V): 1 if a text has one of the tokens that count, else 0."""
        sets = torch.zeros(len(texts), len(self.column_of))
        for row, text in zip(sets, texts, strict=True):
            for token in self.tokenizer.encode(text, allowed_special="all"):
                if token in self.column_of:
                    row[self.column_of[token]] = 1.0
        return sets

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings (N, V) of N texts."""
        embeddings = (self.token_sets(texts) - self.mean) @ self.weight
        return (embeddings / embeddings.norm(dim=1, keepdim=True).clamp(min=1e-12)).numpy()

    @classmethod
    def fit(
        cls, tokenizer: tiktoken.Encoding, texts: Sequence[str], families: Sequence[str]
    ) -> "PairEncoder":
        """Fit on texts, with the penalty for which held-out texts most often have a text of their
        own family nearest. families: of each text."""
        tokens = set()
        for text in texts:
            tokens |= {*tokenizer.encode(text, allowed_special="all")}
        tokens = sorted(tokens)
        unmapped = cls(tokenizer, tokens, torch.zeros(len(tokens)), torch.eye(len(tokens)))
        sets, names = unmapped.token_sets(texts), np.array(families)

        def fit_rows(rows: Tensor, penalty: float) -> PairEncoder:
            mean = sets[rows].mean(0)
            same_family = torch.from_numpy(names[rows][:, None] == names[rows]).float()  # (N, N)
            target = same_family / same_family.sum(1, keepdim=True) @ sets[rows] - mean
            return cls(tokenizer, tokens, mean, ridge(sets[rows] - mean, target, penalty).float())

        def count_errors(train: Tensor, test: Tensor, penalty: float) -> float:
            embeddings = fit_rows(train, penalty)([texts[i] for i in test])
            similarities = embeddings @ embeddings.T - 2 * np.eye(len(embeddings))
            return float((names[test][similarities.argmax(1)] != names[test]).sum())

        return fit_rows(torch.arange(len(sets)), cross_validate(count_errors, families))


def load_encoder(name: str, model: nn.Module, tokenizer: tiktoken.Encoding) -> Encoder:
    """Return the encoder "tokens", or a model of sentence-transformers.

    Raises ValueError if that package is missing, OSError if the model can't be downloaded or read.
    """
    if name == "tokens":
        return token_encoder(model, tokenizer)
    device = str(model.wte.weight.device)
    try:
        import huggingface_hub as hub
        from sentence_transformers import SentenceTransformer

        try:
            encoder = SentenceTransformer(name, device=device, local_files_only=True)
        except (OSError, ValueError):  # neither a folder nor in the cache
            # One request that fails at once: SentenceTransformer would retry for more than a minute.
            repo = name if "/" in name else f"sentence-transformers/{name}"
            hub.get_hf_file_metadata(hub.hf_hub_url(repo, "config.json"), timeout=10)
            encoder = SentenceTransformer(name, device=device)
    except ModuleNotFoundError as error:
        raise ValueError(f"the encoder {name} needs `pip install sentence-transformers`") from error
    # Any fault of a network, its settings, a server or a full disk.
    except Exception as error:
        raise download_error(f"the encoder {name}", error) from error
    return lambda texts: encoder.encode(texts, normalize_embeddings=True, show_progress_bar=False)
