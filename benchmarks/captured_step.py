"""A decoding step whose shapes never change: on a GPU it is captured once as a CUDA graph, and then replayed.

PyTorch launches the hundreds of kernels of a step one by one, which takes longer than they do. A graph launches them
all at once, but repeats them as they were: on the same memory, with the same shapes, and without waiting for a number.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpt_bounded_cache import GPT, PreallocatedCache
from load_gpt2_weights import load_model


class ConstantShapesCache(PreallocatedCache):
    """A preallocated cache in which a tensor says where the next token goes, and a mask which slots are filled: a step
    writes to one slot and reads all of them. Steps aren't committed: len() is that of the prompt."""

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add keys and values (B, H, T, D) at positions pos (T,); for one token after a prompt, return all slots
        (B, H, S, D) and a mask (1, S)."""
        if len(self) == 0:
            return super().append(layer, k, v, pos)
        slots = self.layers[layer]  # (2, B, H, S, D)
        # No token is evicted, so a token's slot is its position.
        slots.index_copy_(3, pos, torch.stack([k, v]))
        return slots[0], slots[1], torch.arange(slots.size(3), device=pos.device) <= pos[:, None]


class ConstantShapes:
    """gpt_bounded_cache.py with such steps; it writes until the context is full."""

    def __init__(self, setup: Any) -> None:
        self.model = load_model(str(setup.folder), model_class=GPT, device=setup.device)

    @torch.no_grad()
    def start(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the greedy next tokens (B, 1), the first after the prompt ids (B, T)."""
        model, n_ctx = self.model, self.model.config.n_ctx
        self.cache = cache = ConstantShapesCache(n_ctx)
        token = model(ids, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
        pos = cache.positions(1).to(ids.device)  # as token, a step's input and output

        def step() -> None:
            """Do as GPT.forward(), which also compares the position with n_ctx: that waits for the GPU."""
            x = model.wte(token) + model.wpe(pos)
            for layer, block in enumerate(model.h):
                x = block(x, pos, cache, layer)
            token.copy_(model.head(x)[:, -1].argmax(-1, keepdim=True))
            pos.add_(1)

        yield token.clone()
        run = captured(step, [token, pos]) if ids.is_cuda else step
        for _ in range(n_ctx - ids.size(1)):
            run()
            yield token.clone()

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


def captured(step: Callable[[], None], state: list[Tensor]) -> Callable[[], None]:
    """Return the replay of a step's CUDA graph. state: what the step changes; as PyTorch asks, the step runs once on
    another stream before it is captured, and that run is undone."""
    before = [tensor.clone() for tensor in state]
    warm_up, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step()
    torch.cuda.current_stream().wait_stream(warm_up)
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    with torch.cuda.graph(graph):  # which records, and runs nothing
        step()
    return graph.replay
