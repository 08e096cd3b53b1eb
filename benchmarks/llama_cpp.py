"""llama.cpp beside lecture 4: the same weights as a GGUF file, read and decoded by llama-cpp-python."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NO_TEXT = {"tokenizer.ggml.model": "no_vocab"}  # a file without a tokenizer: ids in, ids out


def permuted(rows: np.ndarray, n_head: int) -> np.ndarray:
    """Return the rows of q or k as llama.cpp rotates them: neighbours are a pair."""
    halves = rows.reshape(n_head, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: Any, kind: Any = None, **keys: Any) -> None:
    """Write a model of transformers as a GGUF file. kind: how matrices are stored, a gguf.GGMLQuantizationType; keys:
    more of them, or other values, None to leave one out."""
    import gguf

    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    geometry = {
        f"{arch}.vocab_size": config.vocab_size,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": getattr(config, "head_dim", None),
        f"{arch}.attention.value_length": getattr(config, "head_dim", None),
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, content in (geometry | keys).items():
        if content is not None and content != []:
            content_type = gguf.GGUFValueType.get_type(content)
            if type(content) is int:
                content_type = gguf.GGUFValueType.UINT32
            writer.add_key_value(key, content, content_type)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers, part = tensor.numpy(), name.split(".")[-2]
        if arch == "llama" and part in heads:
            numbers = permuted(numbers, heads[part])
        gguf_name = names.get_name(name, (".weight", ".bias"))
        if kind is not None and numbers.ndim == 2:
            writer.add_tensor(gguf_name, gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, numbers)
    if config.rope_parameters["rope_type"] == "llama3":
        speed = model.model.rotary_emb.inv_freq
        usual = config.rope_parameters["rope_theta"] ** (
            -torch.arange(0, config.head_dim, 2) / config.head_dim
        )
        writer.add_tensor("rope_freqs.weight", (usual / speed).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp with weights in float32 and a cache in float32; or, as its users have them, weights in float16 or in
    8 bits (Q8_0), and its default cache, in float16. The bytes of its cache are by formula."""

    def __init__(self, setup: Any, kind: str = "F32") -> None:
        """setup: of the contenders; kind: of the weights, F32, F16 or Q8_0."""
        setup.check_cpu()
        import gguf
        import llama_cpp
        from transformers import AutoModelForCausalLM

        self.library = llama_cpp
        model = AutoModelForCausalLM.from_pretrained(setup.folder, dtype=torch.float32)
        self.config = model.config
        self.written = tempfile.TemporaryDirectory()  # the file is mapped while it decodes
        file = Path(self.written.name) / "model.gguf"
        write_gguf(file, model, gguf.GGMLQuantizationType[kind], **NO_TEXT)
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(bytes(file), options)
        if not self.model:
            raise ValueError("llama.cpp can't read the file")
        self.is_float32 = kind == "F32"
        self.context = None

    def start(self, ids: Tensor) -> Iterator[Tensor]:
        """Return the greedy tokens (B, 1) after ids (B, T), one after another, with a new cache. Raises ValueError if
        there is no memory for it."""
        library = self.library
        if self.context:
            library.llama_free(self.context)
        options = library.llama_context_default_params()
        options.n_ctx = len(ids) * self.config.max_position_embeddings
        options.n_seq_max = len(ids)
        options.n_batch = ids.numel()
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        if self.is_float32:
            options.type_k = options.type_v = library.GGML_TYPE_F32
        self.context = library.llama_init_from_model(self.model, options)
        if not self.context:
            raise ValueError("llama.cpp can't make a context")
        return self.tokens(ids)

    def tokens(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the greedy tokens (B, 1) after ids (B, T), without end."""
        config, n_read = self.config, 0
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        while True:
            logits = self.decode(ids, n_read)
            n_read += ids.size(1)
            self.nbytes = len(ids) * n_read * numbers * (4 if self.is_float32 else 2)
            ids = torch.from_numpy(logits.argmax(-1, keepdims=True))
            yield ids

    def decode(self, ids: Tensor, start: int) -> np.ndarray:
        """Return the logits (B, V) of the last column of ids (B, T), of texts that begin with `start` tokens."""
        library, (B, T) = self.library, ids.shape
        batch = library.llama_batch_init(B * T, 0, 1)
        batch.n_tokens = B * T
        for i, token in enumerate(ids.flatten().tolist()):
            row, column = divmod(i, T)
            batch.token[i], batch.pos[i] = token, start + column
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = column == T - 1
        status = library.llama_decode(self.context, batch)
        library.llama_batch_free(batch)
        if status:
            raise ValueError(f"llama.cpp can't decode {B} x {T} tokens: it returns {status}")
        last = [library.llama_get_logits_ith(self.context, i) for i in range(T - 1, B * T, T)]
        return np.stack([np.ctypeslib.as_array(row, (self.config.vocab_size,)) for row in last])
