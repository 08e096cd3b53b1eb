"""Speed of llama_kv_cache.py beside transformers' Llama, at SmolLM2-135M's geometry with random weights."""

from __future__ import annotations

import sys

from benchmarks.__main__ import SMOLLM, main

if __name__ == "__main__":
    main(["--model", SMOLLM, *sys.argv[1:]])
