"""Does a model with a cache compute what it computes without one?

Shapes: T tokens, V vocabulary.
"""

import torch
from torch import Tensor, nn


@torch.no_grad()
def check_logits(
    model: nn.Module, ids: Tensor | None = None, expected: Tensor | None = None
) -> None:
    """Raise ValueError unless a text that is read with a cache, in pieces, gets the logits that it gets without one.

    ids: the text (1, T), of at least 4 tokens; by default up to 520 random ones, so that a window of 512 shows.
    expected: the logits (1, T, V); by default those of model(ids). A difference may be of the square root of the
    dtype's precision: 0.0003 of the logits' norm in float32, 0.09 in bfloat16.
    """
    weight = model.wte.weight
    if ids is None:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, min(520, model.context)), generator=draw)
    if ids.dim() != 2 or ids.size(1) < 4:
        raise ValueError(f"a check takes one text of at least 4 tokens, got {tuple(ids.shape)}")
    ids = ids.to(weight.device)
    if expected is None:
        expected = model(ids)
    cache, logits = model.new_cache(), []
    sizes = [ids.size(1) - 3, 2, 1]  # a prompt, a piece on a warm cache, a single token
    for piece in ids.split(sizes, dim=1):
        n_read = len(cache)
        logits.append(model(piece, cache))
        if len(cache) != n_read + piece.size(1):
            raise ValueError(
                f"after {n_read} tokens and {piece.size(1)} more the cache counts {len(cache)}: "
                "does forward() end with cache.commit(pos)?"
            )
    got = torch.cat(logits, dim=1).float()
    difference = float((got - expected.float()).norm() / expected.float().norm())
    allowed = torch.finfo(weight.dtype).eps ** 0.5
    if not difference <= allowed:  # nor NaN
        raise ValueError(
            f"with a cache, logits differ from those without one by {difference:.2g} of their norm, "
            f"and at most {allowed:.2g} is rounding"
        )
