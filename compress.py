"""Smaller caches for any GPT or Llama here: one holds fewer bits a number, one fewer tokens.

`python3 compress.py` reads texts with each cache and prints what it costs and how far the
predictions are from full attention's, in seconds; `write` continues a prompt with one of them. Both
take any GPT or Llama, such as `--model smollm2`. Of a model with layers of different kinds (lecture
5), they compress those that keep every token; windows and states stay as they are. (Small norms:
only full layers, since a latent has no keys.)

    QuantizedCache   rounds keys and values to 8, 4 or 2 bits, as KIVI does
    SmallNormCache   keeps the older tokens whose keys are shortest, as Devoto et al. do

Both compress when a pass is committed, so a pass reads its own tokens uncompressed: a failed pass
changes nothing, and a prompt that is read in one pass is read exactly. If the same prompt is read
token by token, each token attends to compressed ones. That is the only reason why the cache then
holds other values.

Why not the most attended tokens? H2O and SnapKV keep the tokens that received most attention so far.
append() gets keys and values, and attention weights exist only after it, inside a fused kernel that
never writes them out. A model would have to compute the softmax itself, with (T, S) weights in every
head and layer, and hand them back to the cache: another attention, slower on long prompts, and no
longer a cache that any model takes. SnapKV limits that to the last few queries of a prompt. The
norm of a key, in contrast, is known as soon as the key is.

Shapes: B batch, T tokens fed, S tokens held, H key-value heads, D head size, G tokens of a group,
N groups.

Source: Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"; Devoto et
al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression".
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tiktoken
import torch
from torch import Tensor, nn
from tqdm import tqdm

from gpt_bounded_cache import PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import KVCache, generate
from support.files import read_text
from support.geometry import KEEPS_EVERY_TOKEN, check_kinds, layer_kinds
from support.prefix import common_prefix_length
from support.printing import end_tokens_of, stream
from support.statistics import kl
from support.tables import table

BIT_WIDTHS = (2, 4, 8, 32)  # 32: no rounding
SHOWN_TOKENS = 8  # before the place where two texts part
LayerState = tuple[Tensor, ...]  # what a layer holds, each (..., B, H, tokens or groups, ...)


class CompressedCache(KVCache):
    """A cache that holds the tokens of earlier passes in a compressed form. A subclass defines the
    form: compress() adds the tokens of a pass to it, and parts() returns the keys and values to
    attend to.

    layers: for each layer, a named tuple of tensors in that form.
    pos: the positions of all tokens read; len() counts them all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Tensor] = []  # each layer's keys and values of this pass (2, B, H, T, D)

    def compress(self, layer: int, held: LayerState | None, new_kv: Tensor) -> LayerState:
        """Return a layer's new state after adding keys and values (2, B, H, T, D) to `held`, its
        state so far; held is None for the first ones."""
        raise NotImplementedError

    def parts(self, held: LayerState) -> list[Tensor]:
        """Return the keys and values that a query attends to, as a list of parts
        (2, B, H, S_i, D)."""
        raise NotImplementedError

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the held keys and values followed by those of the tokens at positions pos (T,),
        each (B, H, S + T, D), and a mask (T, S + T): a query sees all held tokens, and new ones up
        to its own position. Raises ValueError if the cache has another batch size, geometry, device
        or dtype."""
        new_kv = torch.stack([k, v])  # (2, B, H, T, D)
        parts = self.parts(self.layers[layer]) if len(self) > 0 else []
        if parts:
            self.check(parts[-1], new_kv)
        del self.pending[layer:]  # what a failed pass left
        self.pending.append(new_kv)
        if not parts:
            return k, v, None
        kv = torch.cat([*parts, new_kv], dim=3)
        if len(pos) == 1:
            return kv[0], kv[1], None
        T, S = len(pos), kv.size(3) - len(pos)
        mask = torch.ones(T, S + T, dtype=torch.bool, device=kv.device).tril(S)
        return kv[0], kv[1], mask

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos (T,) as read, and compress what has become old."""
        layers = []
        for layer, new_kv in enumerate(self.pending):
            held = self.layers[layer] if len(self) > 0 else None
            layers.append(self.compress(layer, held, new_kv.detach()))
        self.layers, self.pending = layers, []
        super().commit(pos)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> CompressedCache:
        """Return a copy that shares no memory, on another device or in another dtype if given."""
        other = copy.copy(self)
        other.layers = []
        for held in self.layers:
            copied = []
            for x in held:
                new_dtype = dtype if x.is_floating_point() else x.dtype  # codes stay integers
                copied.append(x.to(device, new_dtype, copy=True))
            other.layers.append(type(held)(*copied))
        other.pos = self.pos.to(device, copy=True)
        other.pending = []
        return other

    clone = to  # clone() is to() without arguments

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held between passes."""
        return sum(x.nbytes for held in self.layers for x in held)

    def snapshot(self) -> dict[str, object]:
        """Return the number of slots in the first layer. The snapshot doesn't say which token is in
        a slot: heads may hold different tokens."""
        size = 0
        if len(self) > 0:
            size = sum(part.size(3) for part in self.parts(self.layers[0]))
        return {"slots": [], "size": size}


class RoundedTokens(NamedTuple):
    """What a layer of a QuantizedCache holds: N groups of G rounded tokens, and the latest tokens
    unrounded."""

    key_codes: Tensor  # (B, H, N, G, bytes)
    key_scale: Tensor  # (B, H, N, 1, D)
    key_zero: Tensor  # (B, H, N, 1, D)
    value_codes: Tensor  # (B, H, N, G, bytes)
    value_scale: Tensor  # (B, H, N, G, 1)
    value_zero: Tensor  # (B, H, N, G, 1)
    exact: Tensor  # (2, B, H, S, D), keys and values of the latest tokens


class QuantizedCache(CompressedCache):
    """A cache that rounds keys and values to a few bits, except those of the latest tokens.

    Tokens are rounded in groups of `group`, once at least `residual` later tokens follow the group.
    Keys are rounded per channel (a channel's values within the group share a scale), since a few
    channels are large in all tokens; values are rounded per token and head. A number x becomes the
    code round((x - zero) / scale), from 0 to 2^bits - 1, where zero is the smallest of the numbers
    that share it; 8 / bits codes are packed into a byte. The model reads code * scale + zero, which
    is computed anew for every pass; inference engines fuse this step into their attention.
    truncate() into a rounded group leaves its tokens rounded.

    value_bits: of values, if they have other bits than keys. Raises ValueError if bits aren't 2, 4,
    8 or 32 (no rounding), or a size is out of range; at the first pass, if a head's size isn't a
    multiple of 8 / bits, or a group or a head is so small that rounding would take more memory.

    Source: Liu et al. 2024, section 3 (there, the channels of a token are in groups of 32; here, a
    group is a whole head).
    """

    def __init__(
        self, bits: int, group: int = 32, residual: int = 32, value_bits: int | None = None
    ) -> None:
        super().__init__()
        self.key_bits, self.value_bits = bits, bits if value_bits is None else value_bits
        for width in (self.key_bits, self.value_bits):
            if width not in BIT_WIDTHS:
                raise ValueError(
                    f"bits must be one of {', '.join(map(str, BIT_WIDTHS))}, got {width}"
                )
        if group < 1 or residual < 0:
            raise ValueError(f"group {group}, residual {residual}: must be at least 1 and 0")
        self.group, self.residual = group, residual

    def compress(self, layer: int, held: RoundedTokens | None, new_kv: Tensor) -> RoundedTokens:
        """Return the layer's new state; groups that at least `residual` tokens now follow are
        rounded."""
        exact = new_kv
        if held is not None:
            exact = torch.cat([held.exact, new_kv], dim=3)
        groups = max(0, exact.size(3) - self.residual) // self.group
        if groups == 0 and held is not None:
            return held._replace(exact=exact)
        n_rounded = groups * self.group
        keys, values = exact[..., :n_rounded, :].unflatten(3, (groups, self.group))
        rounded = [
            *quantize(keys, self.key_bits, dim=-2),
            *quantize(values, self.value_bits, dim=-1),
        ]
        if held is not None:
            *earlier, _ = held
            rounded = [torch.cat(pair, dim=2) for pair in zip(earlier, rounded, strict=True)]
        return RoundedTokens(*rounded, exact[..., n_rounded:, :].clone())

    def parts(self, held: RoundedTokens) -> list[Tensor]:
        """Return the rounded tokens' keys and values, then the exact ones'."""
        keys = dequantize(held.key_codes, held.key_scale, held.key_zero, self.key_bits)
        values = dequantize(held.value_codes, held.value_scale, held.value_zero, self.value_bits)
        rounded = torch.stack([keys, values]).flatten(3, 4)  # (2, B, H, N * G, D)
        return [rounded, held.exact]

    def truncate(self, n: int) -> None:
        """Keep the first n tokens. Raises ValueError if there are fewer."""
        if not 0 <= n <= len(self):
            raise ValueError(f"can't keep {n} tokens of {len(self)}")
        layers = []
        for held in self.layers if n > 0 else []:
            *rounded, _ = held
            groups = min(held.key_codes.size(2), n // self.group)
            kept = [x[:, :, :groups].clone() for x in rounded]
            exact = torch.cat(self.parts(held), dim=3)[..., groups * self.group : n, :]
            layers.append(RoundedTokens(*kept, exact.clone()))
        self.layers, self.pos = layers, self.pos[:n].clone()


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes (..., D * bits / 8) of numbers x (..., D), packed into bytes, and the scale
    and the zero that the numbers along dim share. With 32 bits the codes are x itself. Raises
    ValueError if D isn't a multiple of 8 / bits, or so few numbers share a scale that the three
    take no less memory than x."""
    if bits == 32:
        return x.clone(), x.new_empty(x[..., :0].shape), x.new_empty(x[..., :0].shape)
    D, codes_per_byte, sharing = x.size(-1), 8 // bits, x.size(dim)
    if D % codes_per_byte:
        raise ValueError(
            f"{bits} bits need a head size that is a multiple of {codes_per_byte}, got {D}"
        )
    bytes_each = bits / 8 + 2 * x.itemsize / sharing
    if bytes_each >= x.itemsize:
        raise ValueError(
            f"{bits} bits, and a scale and a zero for every {sharing} numbers, are "
            f"{bytes_each:g} bytes a number, which must be fewer than {x.itemsize}"
        )
    zero = x.amin(dim, keepdim=True)
    # Halves, since the span of float32 numbers may be twice the largest of them.
    half_x, half_zero = wide(x) / 2, wide(zero) / 2
    half_span = half_x.amax(dim, keepdim=True) - half_zero
    scale = (half_span / ((2**bits - 1) / 2)).to(x.dtype)
    half_step = wide(scale) / 2
    half_step = torch.where(half_step == 0, 1, half_step)  # equal numbers have scale 0
    codes = ((half_x - half_zero) / half_step).round().clamp(0, 2**bits - 1).to(torch.uint8)
    codes = codes.unflatten(-1, (-1, codes_per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)
    return (codes << shifts).sum(-1, dtype=torch.uint8), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the numbers (..., D) that codes (..., D * bits / 8) stand for."""
    if bits == 32:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    codes = (codes[..., None] >> shifts) & (2**bits - 1)
    numbers = 2 * (codes.flatten(-2) * (wide(scale) / 2) + wide(zero) / 2)
    largest = torch.finfo(scale.dtype).max  # a rounded scale may lead beyond the dtype's range
    return numbers.clamp(-largest, largest).to(scale.dtype)


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype if that is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class KeptTokens(NamedTuple):
    """What a layer of a SmallNormCache holds."""

    kv: Tensor  # (2, B, H, S, D), oldest first


class SmallNormCache(CompressedCache):
    """A cache of the last `recent` tokens, and of the `keep` older tokens whose keys have the
    smallest norm.

    Each head chooses its own tokens. Norms that agree in their first 12 significant bits are a tie,
    and the later token stays: equal tokens have keys of equal norm, except for the rounding of
    their rotation. Evicted tokens are gone.

    If the keys are the same, the same tokens stay, however a text is divided into passes. In the
    first layer that evicts, a model's float32 keys are the same up to rounding, which matters only
    where a norm lies at the edge of a tie. The keys of later layers are computed from the tokens
    still held by earlier ones. So these keys, and the tokens that stay, depend on how a text was
    divided.

    skip: the number of first layers that evict nothing (two in the source). Raises ValueError if a
    number is out of range.

    Source: Devoto et al. 2024, section 3. It compresses prompts; keeping recent tokens is our
    addition, which decoding needs.
    """

    def __init__(self, keep: int, recent: int = 32, skip: int = 0) -> None:
        super().__init__()
        if keep < 0 or recent < 1 or skip < 0:
            raise ValueError(
                f"keep {keep}, recent {recent}, skip {skip}: must be at least 0, 1 and 0"
            )
        self.keep, self.recent, self.skip = keep, recent, skip

    def compress(self, layer: int, held: KeptTokens | None, new_kv: Tensor) -> KeptTokens:
        """Return the keys and values that stay."""
        kv = new_kv
        if held is not None:
            kv = torch.cat([held.kv, new_kv], dim=3)
        n_old = kv.size(3) - self.recent
        if layer < self.skip or n_old <= self.keep:
            return KeptTokens(kv)
        latest_first = self.ranks(kv[0, :, :, :n_old]).flip(-1).argsort(dim=-1, stable=True)
        latest_first = latest_first[..., : self.keep]
        kept_indices = (n_old - 1 - latest_first).sort().values  # (B, H, keep)
        kept_indices = kept_indices[None, ..., None].expand(2, -1, -1, -1, kv.size(4))
        kept = kv[..., :n_old, :].gather(3, kept_indices)
        return KeptTokens(torch.cat([kept, kv[..., n_old:, :]], dim=3))

    def ranks(self, keys: Tensor) -> Tensor:
        """Return a number (B, H, S) for each of the keys (B, H, S, D) that may be evicted, oldest
        first: those with the smallest ones stay."""
        norm = keys.float().norm(dim=-1)
        coarse_norm = norm.view(torch.int32) >> 12  # its exponent and the first 12 significant bits
        return coarse_norm

    def parts(self, held: KeptTokens) -> list[Tensor]:
        """Return the keys and values that stayed."""
        return [held.kv]

    def truncate(self, n: int) -> None:
        """Keep the first n tokens. Raises ValueError if there are fewer. Once tokens have been
        evicted, only all or none can be kept: other n raise ValueError, too."""
        evicted = max(0, len(self) - self.keep - self.recent)
        if not 0 <= n <= len(self) or (evicted and 0 < n < len(self)):
            raise ValueError(f"can't keep {n} tokens of {len(self)}, {evicted} evicted")
        kept = self.layers if n > 0 else []
        self.layers = [KeptTokens(held.kv[..., :n, :].clone()) for held in kept]
        self.pos = self.pos[:n].clone()


# --- A comparison in seconds ------------------------------------------------------------------------


class CacheKind(NamedTuple):
    """A kind of cache: its displayed name, a function that makes one for a text of n tokens,
    whether it is exact (if not, it approximates full attention), and the layers that it takes, if a
    model has layers of different kinds."""

    name: str
    new_cache: Callable[[int], KVCache]
    exact: bool = False
    takes: tuple[str, ...] = KEEPS_EVERY_TOKEN


def small_norm_cache(n_tokens: int, divisor: int) -> SmallNormCache:
    """Return a cache that keeps 1 / divisor of n tokens, the latest among them."""
    recent = min(32, n_tokens // 8)
    return SmallNormCache(n_tokens // divisor - recent, recent)


# Every kind of cache, by its short name. A kind that is added here gets equivalence tests, a line
# in the table below, and a row and a point in the study's table and figure. A window has a spare
# slot.
CACHES = {
    "full": CacheKind("full", lambda n: KVCache(), exact=True),
    "preallocated": CacheKind("full, preallocated", PreallocatedCache, exact=True),
    "bits:8": CacheKind("8 bits", lambda n: QuantizedCache(8)),
    "bits:4": CacheKind("4 bits", lambda n: QuantizedCache(4)),
    "bits:2": CacheKind("2 bits", lambda n: QuantizedCache(2)),
    "bits:4+2": CacheKind("keys 4 bits, values 2", lambda n: QuantizedCache(4, value_bits=2)),
    "window:half": CacheKind("window of a half", lambda n: SlidingWindowCache(n // 2 - 1)),
    "window:quarter": CacheKind("window of a quarter", lambda n: SlidingWindowCache(n // 4 - 1)),
    "sinks:quarter": CacheKind(
        "4 sinks, a quarter in all", lambda n: SlidingWindowCache(n // 4 - 5, sinks=4)
    ),
    # Only full layers: a latent has no keys.
    "norm:half": CacheKind("small norm, a half", lambda n: small_norm_cache(n, 2), takes=("full",)),
    "norm:quarter": CacheKind(
        "small norm, a quarter", lambda n: small_norm_cache(n, 4), takes=("full",)
    ),
}


def layers_taken(way: str, model: nn.Module) -> list[int]:
    """Return the layers of a model that have a cache of a kind in CACHES."""
    kinds = layer_kinds(model.config) or ("full",) * model.config.n_layer
    return [layer for layer, kind in enumerate(kinds) if kind in CACHES[way].takes]


def layers_note(way: str, model: nn.Module) -> str:
    """Return which layers these are; "" if they are all."""
    taken = [*map(str, layers_taken(way, model))]
    if len(taken) == model.config.n_layer:
        return ""
    return f" (layer{'s' * (len(taken) > 1)} {', '.join(taken)})"


def cache_for(way: str, model: nn.Module, n_tokens: int) -> KVCache:
    """Return a cache of a kind in CACHES for a text of n tokens. If a model has layers of different
    kinds, those that keep every token have such a cache each, and the others their own. Raises
    ValueError if there is none to take."""
    kind, taken = CACHES[way], layers_taken(way, model)
    if not layer_kinds(model.config):
        return kind.new_cache(n_tokens)
    if not taken:
        limits = f"the cache {way} serves only {' and '.join(kind.takes)} layers"
        check_kinds(model.config, limits, kind.takes)
    cache = model.new_cache()
    for layer in taken:
        cache.layers[layer] = kind.new_cache(n_tokens)
    return cache


@torch.no_grad()
def read_in_pieces(
    model: nn.Module,
    cache: KVCache,
    ids: Tensor,
    piece_length: int = 1,
    progress: tqdm | None = None,
) -> tuple[Tensor, list[float]]:
    """Read ids (B, T) in passes of piece_length tokens; return the logits (B, T, V) and the
    milliseconds of each pass. progress: a bar that advances with every pass."""
    logits, milliseconds = [], []
    for tokens in ids.split(piece_length, dim=1):
        started = time.perf_counter()
        logits.append(model(tokens, cache))
        milliseconds.append(1000 * (time.perf_counter() - started))
        if progress is not None:
            progress.update()
    return torch.cat(logits, dim=1), milliseconds


def own_and_half_bytes(cache: KVCache) -> tuple[int, int]:
    """Return the bytes of a cache as it is, and of a copy in half precision."""
    return cache.nbytes, cache.to(dtype=torch.bfloat16).nbytes


def comparison_table(
    caches: Sequence[tuple[str, nn.Module, Callable[[int], KVCache]]], ids: Tensor
) -> str:
    """Return a table of what reading ids (B, T) costs with each cache, and of how far its
    predictions in the second half are from those of the first cache, which must be full attention.
    The first half is read in one pass, as a prompt is, and the second token by token.

    caches: for each, a name, a model, and a function that makes the cache for T tokens. Raises
    ValueError if a cache can't serve its model, before the texts are read, or logits aren't finite.
    """
    B, T = ids.shape
    prompt, rest = ids.split([T // 2, T - T // 2], dim=1)
    rows, exact_logits = [], None
    for _, model, new_cache in caches:  # one that can't serve its model says so at a first token
        read_in_pieces(model, new_cache(T), ids[:, :1])
    # A warm-up: else the first cache pays for allocating memory, and takes twice the time.
    _, model, new_cache = caches[0]
    read_in_pieces(model, new_cache(T), ids, max(1, T // 4))
    with tqdm(total=len(caches) * rest.size(1), unit=" tokens", leave=False, delay=2) as bar:
        for name, model, new_cache in caches:
            cache = new_cache(T)
            read_in_pieces(model, cache, prompt, prompt.size(1))
            logits, milliseconds = read_in_pieces(model, cache, rest, progress=bar)
            if not logits.isfinite().all():
                raise ValueError(f"logits aren't finite: activations overflow (in {logits.dtype})")
            if exact_logits is None:
                exact_logits = logits
            divergence = kl(exact_logits, logits).mean()
            agreement = (exact_logits.argmax(-1) == logits.argmax(-1)).float().mean()
            sizes = [f"{nbytes / B / T:,.0f}" for nbytes in own_and_half_bytes(cache)]
            figures = [f"{divergence:.4f}", f"{agreement:.1%}"]
            rows.append([name, *sizes, *figures, f"{statistics.median(milliseconds):.2f}"])
    header = ["cache", "bytes a token", "in half precision"]
    header += ["KL to full, nats", "same next token", "ms a token"]
    return table(header, rows)


def text_rows(args: argparse.Namespace, tokenizer: tiktoken.Encoding) -> list[list[int]]:
    """Return the texts to read, of args.tokens tokens each: the beginning of the file args.text, or
    texts that the model wasn't trained on. Raises ValueError if there are none of that length."""
    from pocket.evaluation import unseen_texts

    if args.text is not None:
        ids = tokenizer.encode(read_text(Path(args.text)), disallowed_special=())
        if len(ids) < args.tokens:
            raise ValueError(f"{args.text} has {len(ids)} tokens, and --tokens is {args.tokens}")
        return [ids[: args.tokens]]
    count = 2 if args.model.startswith("pocket") else 1  # within a minute
    rows = unseen_texts(args.model, tokenizer, count, args.tokens)
    if not rows:
        raise ValueError(
            f"no text in data/real has {args.tokens} tokens: give --text FILE, or fewer --tokens"
        )
    return rows


def demo(model: nn.Module, rows: list[list[int]], where: str, study: str) -> None:
    """Print a table of what all caches cost and lose on texts of equal length. where: what they
    are; study: the command that measures more."""
    ids = torch.tensor(rows, device=model.wte.weight.device)
    cache_for("bits:4", model, ids.size(1))  # refuses a model if no layer keeps every token
    ways = [way for way in CACHES if layers_taken(way, model)]
    caches = [
        (CACHES[way].name + layers_note(way, model), model, partial(cache_for, way, model))
        for way in ways
    ]
    print(f"""\
{where}, {len(rows)} x {ids.size(1)} tokens: the first half is read in one pass, the rest token by token.

{comparison_table(caches, ids)}

Caches that keep all that the model's own cache keeps are exact. Rounding approximates every
old token; windows, sinks and small norms forget whole ones. KL is of the second half.
Half precision halves every number but the codes, so rounding gains less there.
The full study, with what each remembers: {study}""")
    if any(layers_note(way, model) for way in ways):
        print("Where a row names layers, the others keep their own caches.")


def write(
    model: nn.Module, tokenizer: tiktoken.Encoding, ids: Tensor, args: argparse.Namespace
) -> None:
    """Continue ids (1, T) with one cache and print the text; then say where full attention's text
    differs."""
    n_tokens = ids.size(1) + args.max_new_tokens
    texts, bytes_a_token = {}, {}
    for way in dict.fromkeys([args.cache, "full"]):
        cache = cache_for(way, model, n_tokens)
        generator = torch.Generator(args.device).manual_seed(args.seed)
        tokens = generate(
            model,
            ids,
            args.max_new_tokens,
            cache=cache,
            temperature=args.temperature,
            top_k=args.top_k,
            stop_ids=end_tokens_of(tokenizer),
            generator=generator,
        )
        if way == args.cache:
            print(f"\n{args.prompt}", end="", flush=True)
            texts[way], _ = stream(tokens, tokenizer, cache)
        else:
            texts[way] = [int(token) for token in tokens]
        # The last new token isn't read.
        n_read = ids.size(1) + len(texts[way]) - 1
        bytes_a_token[way] = [nbytes / n_read for nbytes in own_and_half_bytes(cache)]
    written, exact = texts[args.cache], texts["full"]
    yardstick = "the model's own cache" if layer_kinds(model.config) else "full attention"
    if note := layers_note(args.cache, model):
        print(f"[{CACHES[args.cache].name}{note}; other layers keep their own]")
    if CACHES[args.cache].exact:
        print(f"[exact: the text of {yardstick}]")
        return
    same = common_prefix_length(written, exact)
    held, held_in_half = bytes_a_token[args.cache]
    full, full_in_half = bytes_a_token["full"]
    print(f"[approximate, in {held:,.0f} bytes a token; {yardstick} has {full:,.0f}")
    print(f" (in half precision {held_in_half:,.0f} and {full_in_half:,.0f})]")
    if held >= full:
        print("[so short a text is kept whole: nothing has been rounded or dropped yet]")
    elif written == exact:
        print(f"[here {yardstick} writes the same {same} tokens]")
    if written != exact:
        last_words = repr(tokenizer.decode(exact[max(0, same - SHOWN_TOKENS) : same]))
        where = f"after {same} tokens, the last {last_words}" if same else "from the first token on"
        print(f"[{yardstick} goes on differently {where}:]\n{tokenizer.decode(exact[same:])}")


def main(argv: list[str] | None = None) -> None:
    from formats.chat import encode_given_prompt
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from support.cli import (
        WRITING,
        ByModel,
        CommandLine,
        study_command,
        whole_number,
    )

    cli = CommandLine(__doc__, "python3 %(prog)s write --cache bits:4 --prompt 'Notes:'")
    comparison, one_way = cli.add_actions(
        "demo", demo="all caches, compared", write="continue a prompt with one cache"
    )
    comparison.add_model_options(NAMES)
    comparison.add_argument(
        "--tokens",
        type=whole_number(128),
        default=ByModel(288, 224),
        metavar="N",
        help="tokens of each text",
    )
    comparison.add_argument(
        "--text",
        metavar="FILE",
        help="a text of your own; default: held-out ones of the pocket world, or those in data/real",
    )
    one_way.add_model_options(NAMES, *WRITING, "--chat", "--system")
    one_way.add_argument("--cache", default="bits:4", choices=[*CACHES], help="the cache")
    with cli.parse(argv) as args:
        model = load_model(args.model, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        if args.action == "write":
            ids = torch.tensor([encode_given_prompt(args, tokenizer)], device=args.device)
            return write(model, tokenizer, ids, args)
        if args.tokens > model.context:
            raise ValueError(
                f"--tokens {args.tokens}: the context of {args.model} holds {model.context}"
            )
        where = "From data/real"
        if args.text is not None:
            where = f"From {args.text}"
        elif args.model.startswith("pocket"):
            where = "Held-out texts of the pocket world"
        demo(model, text_rows(args, tokenizer), where, study_command("compression", args.model))


if __name__ == "__main__":
    main()
