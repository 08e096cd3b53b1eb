"""A StaticCache of transformers 5.24 that records the past reads slots that were never written.

    python3 borrow/static_cache_with_states.py

`Cache.activate_past_recording()` makes layers of convolutions and linear attention not compileable, and so the cache.
`create_causal_mask()` takes `cache.is_compileable` for "some slots may be empty": it now leaves the mask of a single
token away, and SDPA attends to all `max_cache_len` slots. Chunks, eager attention and DynamicCache are right.
"""

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, StaticCache

config = Lfm2Config(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    layer_types=["conv", "full_attention"],
)
torch.manual_seed(0)
model = Lfm2ForCausalLM(config).eval()
ids = torch.randint(61, (1, 9))

with torch.no_grad():
    expected = model(ids, use_cache=False).logits[:, -1]
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        for records in (False, True):
            cache = StaticCache(config=config, max_cache_len=32)
            if records:
                cache.activate_past_recording()
            model(ids[:, :-1], cache=cache)
            got = model(ids[:, -1:], cache=cache).logits[:, -1]
            apart = (got - expected).abs().max() / expected.abs().max()
            print(f"{attention:5}  past recorded: {records!s:5}  difference {apart:.1e}")
