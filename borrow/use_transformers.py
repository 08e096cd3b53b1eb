"""In transformers' generate: any cache here, for a model as it is loaded."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from borrow.transformers_cache import TransformersCache, argument_of
from compress import CACHES
from gpt_kv_cache import KVCache


def write(model: PreTrainedModel, ids: Tensor, n: int, cache: KVCache) -> Tensor:
    """Return ids (B, T) and n tokens after them (B, T + n)."""
    options = {argument_of(model): TransformersCache(cache, model)}
    return model.generate(ids, max_new_tokens=n, do_sample=False, **options)


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, eos_token_id=None)).eval()
    prompt = torch.randint(50, (1, 100))
    for name, kind in CACHES.items():
        cache = kind.new_cache(120)
        print(
            f"{name:15} {write(model, prompt, 20, cache)[0, 100:110].tolist()} {cache.nbytes:,} bytes"
        )
