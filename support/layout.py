"""The order in which a model's weights lie in memory."""

from torch import nn


def order_for_decoding(model: nn.Module) -> nn.Module:
    """Lay the token embedding (V, C) out column by column, and return the model: x @ wte.T, the largest product of
    one-token decoding, then reads it in the order a CPU is fastest at."""
    embedding = model.wte.weight
    embedding.data = embedding.data.t().contiguous().t()
    return model
