"use strict";
// GPT-2 in plain JavaScript, with and without a KV cache: the classes of gpt_kv_cache.py, under the same names, then
// the sliding window of gpt_bounded_cache.py, the rounding of compress.py, and the tokenizer.
//
// It computes one text at a time. A vector is a Float32Array; (T, C) is an array of T vectors, one for each token.
// Shapes: T tokens fed, S tokens attended to, H heads, D head size, C width (n_embd), V vocabulary.

class Conv1D {  // a linear layer, x @ W + b; W is stored (in, out), as in GPT-2's public weights
  constructor(weight, bias) {
    this.weight = weight;  // (n_in, n_out), row after row
    this.bias = bias;  // (n_out)
    this.multiplications = 0;
  }

  forward(x) {  // (T, n_in) -> (T, n_out)
    this.multiplications += x.length * this.weight.length;
    return x.map(row => this.times(row));
  }

  times(x) {  // (n_in) -> (n_out); four inputs at a time, which halves the reads and writes of y
    const { weight, bias } = this, n_out = bias.length, y = Float32Array.from(bias);
    for (let i = 0; i < x.length; i += 4) {
      const x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
      const row0 = i * n_out, row1 = row0 + n_out, row2 = row1 + n_out, row3 = row2 + n_out;
      for (let j = 0; j < n_out; j++)
        y[j] += x0 * weight[row0 + j] + x1 * weight[row1 + j] + x2 * weight[row2 + j] + x3 * weight[row3 + j];
    }
    return y;
  }
}

class LayerNorm {
  constructor(weight, bias) {
    this.weight = weight;  // (C)
    this.bias = bias;  // (C)
  }

  forward(x) {  // (T, C) -> (T, C)
    return x.map(row => {
      const C = row.length, mean = row.reduce((sum, number) => sum + number, 0) / C;
      const variance = row.reduce((sum, number) => sum + (number - mean) ** 2, 0) / C;
      const scale = 1 / Math.sqrt(variance + 1e-5);
      return row.map((number, i) => (number - mean) * scale * this.weight[i] + this.bias[i]);
    });
  }
}

class KVCache {  // keys, values and positions of the tokens that a model has read; it grows with every token
  constructor() {
    this.layers = [];  // each layer's keys and values, {k: (S, C), v: (S, C)}
    this.pos = [];  // (S), the positions of the tokens that count as read
    this.keys = [];  // (S), the positions of the keys that append() returned last: for the pictures
  }

  positions(T) {  // the positions (T) at which the next T tokens are read
    return Array.from({ length: T }, (_, t) => this.length + t);
  }

  // Add a layer's keys and values (T, C) of the tokens at positions pos (T). Return all of its keys and values (S, C),
  // and a mask (T, S) of the keys that each query sees; null if none is needed.
  append(layer, k, v, pos) {
    let mask = null;
    this.keys = [...this.pos, ...pos];
    if (this.length === 0) {
      this.layers.length = layer;  // what a failed pass left
    } else {
      const held = this.layers[layer];  // what a failed pass left lies past length
      k = [...held.k.slice(0, this.length), ...k];
      v = [...held.v.slice(0, this.length), ...v];
      if (pos.length > 1) mask = pos.map(query => this.keys.map(key => key <= query));
    }
    this.layers[layer] = { k, v };
    return [k, v, mask];
  }

  commit(pos) {  // count the tokens at positions pos (T) as read: what was appended for them now counts
    this.pos = [...this.pos, ...pos];
  }

  truncate(n) {  // keep the first n tokens
    if (!(n >= 0 && n <= this.length)) throw new RangeError(`can't keep ${n} tokens of ${this.length}`);
    this.layers = n === 0 ? [] : this.layers.map(({ k, v }) => ({ k: k.slice(0, n), v: v.slice(0, n) }));
    this.pos = this.pos.slice(0, n);
  }

  get length() {
    return this.pos.length;
  }

  get nbytes() {  // 2 * L * S * C * 4
    return this.layers.reduce((sum, { k }) => sum + 2 * this.length * k[0].byteLength, 0);
  }
}

class SlidingWindowCache extends KVCache {  // the last `window` tokens and the first `sinks`, in slots allocated once
  constructor(window, sinks = 0) {
    super();
    if (!(window >= 1 && sinks >= 0)) throw new RangeError(`window ${window}, sinks ${sinks}: must be at least 1 and 0`);
    this.window = window;
    this.sinks = sinks;
    this.n_slots = sinks + window + 1;  // one is spare: a pass that fails destroys nothing
    this.n_read = 0;
    this.pending = [];  // each layer's keys and values of a chunk, to write when the pass is committed; null: written
  }

  held(n) {  // the position of the token in each slot, once n tokens have been read
    const last = n - 1, size = this.window + 1;
    return Array.from({ length: Math.min(n, this.n_slots) }, (_, slot) =>
      slot < this.sinks ? slot : last - (((last - slot) % size) + size) % size);
  }

  visible(key, query) {  // whether a query sees a key, by their positions
    return key <= query && (key > query - this.window || key < this.sinks);
  }

  append(layer, k, v, pos) {
    const n = this.length, T = pos.length;
    if (n === 0) {
      this.layers.length = layer;  // what a failed pass left
      const empty = () => Array.from({ length: this.n_slots }, () => new Float32Array(k[0].length));
      this.layers.push({ k: empty(), v: empty() });
    }
    const ring = this.layers[layer];
    const in_place = T === 1 || n + T <= this.n_slots;
    this.pending.length = layer;
    this.pending.push(in_place ? null : { k, v });
    if (in_place) {  // to the spare slot, or to empty ones
      const first = n < this.n_slots ? n : this.sinks + (n - this.sinks) % (this.window + 1);
      for (let t = 0; t < T; t++) {
        ring.k[first + t] = k[t];
        ring.v[first + t] = v[t];
      }
      [k, v] = [ring.k.slice(0, n + T), ring.v.slice(0, n + T)];
      this.keys = this.held(n + T);
    } else {  // read before writing: the first new token sees what the last one evicts
      const slots = [...this.pos.keys()].filter(slot => this.visible(this.pos[slot], n));
      k = [...slots.map(slot => ring.k[slot]), ...k];
      v = [...slots.map(slot => ring.v[slot]), ...v];
      this.keys = [...slots.map(slot => this.pos[slot]), ...pos];
    }
    return [k, v, pos.map(query => this.keys.map(key => this.visible(key, query)))];
  }

  commit(pos) {  // count the tokens at positions pos (T) as read, and write those of a chunk to slots
    const n = this.length, held = this.held(n + pos.length);
    for (const [layer, ring] of this.layers.entries())
      if (this.pending[layer])
        for (const [slot, position] of held.entries())
          if (position >= n) {
            ring.k[slot] = this.pending[layer].k[position - n];
            ring.v[slot] = this.pending[layer].v[position - n];
          }
    [this.n_read, this.pos, this.pending] = [n + pos.length, held, []];
  }

  truncate(n) {  // keep the first n tokens: only all or none, once some were evicted
    const evicted = Math.max(0, this.length - this.sinks - this.window);
    if (!(n >= 0 && n <= this.length) || (evicted > 0 && n > 0 && n < this.length))
      throw new RangeError(`can't keep ${n} tokens of ${this.length}, ${evicted} evicted`);
    [this.n_read, this.pos] = [n, this.pos.slice(0, n)];
    if (n === 0) this.layers = [];
  }

  get length() {
    return this.n_read;
  }

  get nbytes() {  // 2 * L * (sinks + window + 1) * C * 4
    return this.layers.reduce((sum, { k }) => sum + 2 * this.n_slots * k[0].byteLength, 0);
  }
}

// A cache that rounds keys and values to 8, 4 or 2 bits, in groups of `group` tokens, once at least `residual` later
// tokens follow the group. A number x becomes the code round((x - zero) / scale): in a group of keys each channel has
// its own scale and zero, and so has each head of a token's values. The model reads code * scale + zero.
class QuantizedCache extends KVCache {
  constructor(bits, H, group = 32, residual = 32) {
    super();
    if (![2, 4, 8].includes(bits)) throw new RangeError(`bits must be one of 2, 4, 8, got ${bits}`);
    [this.bits, this.H, this.group, this.residual] = [bits, H, group, residual];
    this.pending = [];  // each layer's keys and values (T, C) of this pass
  }

  append(layer, k, v, pos) {  // a pass reads its own tokens unrounded
    const held = this.length ? this.layers[layer] : { groups: [], k: [], v: [] };
    this.pending.length = layer;  // what a failed pass left
    this.pending.push({ k, v });
    this.keys = [...this.pos, ...pos];
    k = [...held.groups.flatMap(({ keys }) => this.dequantize(keys)), ...held.k, ...k];
    v = [...held.groups.flatMap(({ values }) => this.dequantize(values)), ...held.v, ...v];
    return [k, v, pos.length > 1 ? pos.map(query => this.keys.map(key => key <= query)) : null];
  }

  commit(pos) {  // count the tokens at positions pos (T) as read, and round what has become old
    const layers = this.length ? this.layers : this.pending.map(() => ({ groups: [], k: [], v: [] }));
    this.layers = layers.map((held, layer) => {
      const k = [...held.k, ...this.pending[layer].k], v = [...held.v, ...this.pending[layer].v], groups = [...held.groups];
      while (k.length >= this.group + this.residual) {
        const keys = this.quantize(k.splice(0, this.group), true);
        groups.push({ keys, values: this.quantize(v.splice(0, this.group), false) });
      }
      return { groups, k, v };
    });
    this.pending = [];
    super.commit(pos);
  }

  // Return numbers x (G, C) as codes, 8 / bits in a byte, with the scale and zero of each channel (C), or of each token
  // and head (G * H). Sums are rounded to float32 after every step, and halves to even, as PyTorch does.
  quantize(x, by_channel) {
    const C = x[0].length, D = C / this.H, most = 2 ** this.bits - 1, n = by_channel ? C : x.length * this.H;
    const shared = (t, c) => by_channel ? c : t * this.H + Math.floor(c / D);  // the index of a number's scale and zero
    const zero = new Float32Array(n).fill(Infinity), high = new Float32Array(n).fill(-Infinity);
    x.forEach((row, t) => row.forEach((number, c) => {
      zero[shared(t, c)] = Math.min(zero[shared(t, c)], number);
      high[shared(t, c)] = Math.max(high[shared(t, c)], number);
    }));
    const scale = zero.map((low, i) => Math.fround(high[i] - low) / most);
    const codes = x.map((row, t) => {
      const bytes = new Uint8Array(C * this.bits / 8);
      row.forEach((number, c) => {
        const steps = Math.fround(Math.fround(number - zero[shared(t, c)]) / (scale[shared(t, c)] || 1));
        const even = 2 * Math.round(steps / 2), code = Math.abs(steps - even) === 0.5 ? even : Math.round(steps);
        bytes[Math.floor(c * this.bits / 8)] |= Math.min(code, most) << (c * this.bits % 8);
      });
      return bytes;
    });
    return { codes, scale, zero, shared };
  }

  dequantize({ codes, scale, zero, shared }) {  // the numbers (G, C) that codes stand for
    const { bits } = this, C = codes[0].length * 8 / bits;
    return codes.map((bytes, t) => Float32Array.from({ length: C }, (_, c) => {
      const code = (bytes[Math.floor(c * bits / 8)] >> (c * bits % 8)) & (2 ** bits - 1);
      return Math.fround(code * scale[shared(t, c)]) + zero[shared(t, c)];
    }));
  }

  truncate(n) {  // keep the first n tokens; a part of a rounded group stays as it was rounded
    if (!(n >= 0 && n <= this.length)) throw new RangeError(`can't keep ${n} tokens of ${this.length}`);
    this.layers = n === 0 ? [] : this.layers.map(held => {
      const whole = Math.min(held.groups.length, Math.floor(n / this.group)), left = n - whole * this.group;
      const rest = held.groups.slice(whole);
      const k = [...rest.flatMap(({ keys }) => this.dequantize(keys)), ...held.k].slice(0, left);
      const v = [...rest.flatMap(({ values }) => this.dequantize(values)), ...held.v].slice(0, left);
      return { groups: held.groups.slice(0, whole), k, v };
    });
    this.pos = this.pos.slice(0, n);
  }

  get nbytes() {  // codes, scales and zeros, and the latest tokens as they are
    const bytes = rows => rows.reduce((sum, row) => sum + row.byteLength, 0);
    return this.layers.reduce((sum, { groups, k, v }) => groups.reduce((sum, { keys, values }) => sum +
      bytes([...keys.codes, keys.scale, keys.zero, ...values.codes, values.scale, values.zero]), sum + bytes(k) + bytes(v)), 0);
  }
}

class Attention {
  constructor(n_head, c_attn, c_proj) {
    this.n_head = n_head;
    this.c_attn = c_attn;
    this.c_proj = c_proj;
    this.multiplications = 0;
    this.shares = [];  // (H, S), the attention of the last query, and the mask: for the pictures
    this.mask = null;
  }

  project(x) {  // the queries, keys and values of x (T, C): (T, C) each, a head's numbers side by side
    const qkv = this.c_attn.forward(x), C = x[0].length;  // (T, 3C)
    return [0, 1, 2].map(part => qkv.map(row => row.slice(part * C, (part + 1) * C)));
  }

  forward(q, k, v, mask) {  // (T, C): each query's attention-weighted average of the values it may see
    const T = q.length, S = k.length;
    this.mask = mask;
    const y = q.map((query, t) => {
      const sees = s => mask ? mask[t][s] : s <= t + S - T;  // without a mask: causal
      return this.attend(query, k, v, [...k.keys()].filter(sees));
    });
    return this.c_proj.forward(y);  // (T, C)
  }

  attend(query, k, v, seen) {  // (C): what one query reads of the keys and values whose indices are seen
    const C = query.length, D = C / this.n_head, y = new Float32Array(C);
    this.shares = [];
    for (let first = 0; first < C; first += D) {  // a head's numbers are first to first + D - 1
      const scores = new Float64Array(seen.length), shares = new Float32Array(k.length);
      for (let n = 0; n < seen.length; n++)
        scores[n] = dot(query, k[seen[n]], first, first + D) / Math.sqrt(D);
      const weights = softmax(scores);
      for (let n = 0; n < seen.length; n++) {
        const value = v[seen[n]], weight = weights[n];
        for (let i = first; i < first + D; i++) y[i] += weight * value[i];
        shares[seen[n]] = weight;
      }
      this.shares.push(shares);
    }
    this.multiplications += 2 * seen.length * C;
    return y;
  }
}

class MLP {  // the part of a block that treats each token alone: widen, apply a nonlinearity, narrow
  constructor(c_fc, c_proj) {
    this.c_fc = c_fc;
    this.c_proj = c_proj;
  }

  forward(x) {
    x = this.c_fc.forward(x).map(row => row.map(gelu));  // (T, 4C)
    return this.c_proj.forward(x);  // (T, C)
  }
}

class Block {  // attention, then MLP, each added to the residual stream
  constructor(ln_1, attn, ln_2, mlp) {
    Object.assign(this, { ln_1, attn, ln_2, mlp });
  }

  forward(x, pos, cache, layer) {
    let [q, k, v] = this.attn.project(this.ln_1.forward(x)), mask = null;  // (T, C) each
    if (cache !== null) [k, v, mask] = cache.append(layer, k, v, pos);  // (S, C) twice, (T, S) or null
    x = add(x, this.attn.forward(q, k, v, mask));
    return add(x, this.mlp.forward(this.ln_2.forward(x)));  // (T, C)
  }
}

class GPT {
  constructor(config, tensors) {  // tensors: a Float32Array for each of GPT-2's public names
    const linear = name => new Conv1D(tensors[`${name}.weight`], tensors[`${name}.bias`]);
    const norm = name => new LayerNorm(tensors[`${name}.weight`], tensors[`${name}.bias`]);
    const rows = name => Array.from({ length: tensors[name].length / config.n_embd }, (_, i) =>
      tensors[name].subarray(i * config.n_embd, (i + 1) * config.n_embd));
    this.config = config;
    this.wte = rows("wte.weight");  // (V, C); the output head is the same, transposed
    this.wpe = rows("wpe.weight");  // (n_ctx, C)
    this.h = Array.from({ length: config.n_layer }, (_, layer) => new Block(
      norm(`h.${layer}.ln_1`),
      new Attention(config.n_head, linear(`h.${layer}.attn.c_attn`), linear(`h.${layer}.attn.c_proj`)),
      norm(`h.${layer}.ln_2`),
      new MLP(linear(`h.${layer}.mlp.c_fc`), linear(`h.${layer}.mlp.c_proj`))));
    this.ln_f = norm("ln_f");
    this.head_multiplications = 0;
  }

  // Return the logits (T, V) of ids (T), which follow the cached text; with last_only, the last token's (1, V).
  forward(ids, cache = null, last_only = false) {
    const n_read = cache === null ? 0 : cache.length, T = ids.length;
    if (T < 1 || n_read + T > this.config.n_ctx)
      throw new RangeError(`${T} tokens after ${n_read}: must be at least 1 and end within n_ctx = ${this.config.n_ctx}`);
    const pos = cache === null ? [...ids.keys()] : cache.positions(T);  // (T)
    let x = ids.map((id, t) => this.wte[id].map((number, i) => number + this.wpe[pos[t]][i]));  // (T, C)
    this.h.forEach((block, layer) => {
      x = block.forward(x, pos, cache, layer);
    });
    const logits = this.head(last_only ? x.slice(-1) : x);
    if (cache !== null) cache.commit(pos);  // last of all: a failure above leaves the cache as it was
    return logits;
  }

  head(x) {  // the logits (T, V) of the last block's output (T, C)
    this.head_multiplications += x.length * this.wte.length * this.config.n_embd;
    return this.ln_f.forward(x).map(row => Float32Array.from(this.wte, token => dot(row, token, 0, row.length)));
  }

  get multiplications() {  // those of all passes so far
    return this.h.reduce((sum, { attn, mlp }) =>
      [attn, attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj].reduce((sum, part) => sum + part.multiplications, sum),
      this.head_multiplications);
  }
}

// Yield up to max_new_tokens tokens after ids, each as soon as it is known. What the cache holds of ids isn't read again.
function* generate(model, ids, max_new_tokens, cache = new KVCache()) {
  for (ids = [...ids]; max_new_tokens > 0; max_new_tokens--) {
    const unread = ids.slice(cache === null ? 0 : cache.length);  // cache null: the whole text, at every step
    const [logits] = model.forward(unread, cache, true);  // (V)
    ids.push(argmax(logits));
    yield ids.at(-1);
  }
}

function add(x, y) {  // (T, C) twice -> (T, C)
  return x.map((row, t) => row.map((number, i) => number + y[t][i]));
}

function argmax(logits) {  // the best token of (V)
  return logits.indexOf(logits.reduce((best, logit) => Math.max(best, logit), -Infinity));
}

function gelu(x) {  // GPT-2's approximation
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

// Return the scalar product of two vectors' numbers from first to end; four sums at a time wait less for one another.
function dot(x, y, first, end) {
  let sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
  for (let i = first; i < end; i += 4) {
    sum0 += x[i] * y[i];
    sum1 += x[i + 1] * y[i + 1];
    sum2 += x[i + 2] * y[i + 2];
    sum3 += x[i + 3] * y[i + 3];
  }
  return sum0 + sum1 + sum2 + sum3;
}

function softmax(scores) {
  let largest = -Infinity, sum = 0;
  const shares = new Float64Array(scores.length);
  for (const score of scores) largest = Math.max(largest, score);
  for (let i = 0; i < scores.length; i++) sum += shares[i] = Math.exp(scores[i] - largest);
  for (let i = 0; i < scores.length; i++) shares[i] /= sum;
  return shares;
}

// Return KL(p || q) in nats, of the predictions that two rows of logits (V) make.
function kl(p_logits, q_logits) {
  const p = softmax(p_logits), q = softmax(q_logits);
  return p.reduce((sum, share, id) => share > 0 ? sum + share * Math.log(share / q[id]) : sum, 0);
}

class Encoding {  // byte-level BPE, as tiktoken has it; ranks: a line for each token, base64 of its bytes and its rank
  constructor(ranks, end_of_text) {
    this.tokens = ranks.trim().split("\n").map(line => atob(line.split(" ")[0]));  // bytes, as characters 0 to 255
    this.rank = new Map(this.tokens.map((bytes, id) => [bytes, id]));
    this.tokens[end_of_text] = "<|endoftext|>";
    this.end_of_text = end_of_text;
  }

  encode(text) {  // the ids of a text
    const words = /<\|endoftext\|>|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
    const ids = [];
    for (const [word] of text.toWellFormed ? text.toWellFormed().matchAll(words) : text.matchAll(words))
      ids.push(...(word === "<|endoftext|>" ? [this.end_of_text] : this.merge(word)));
    return ids;
  }

  merge(word) {  // join the two neighbours that make the token of the lowest rank, until no two make one
    const parts = Array.from(new TextEncoder().encode(word), byte => String.fromCharCode(byte));
    for (;;) {
      let best = Infinity, at = 0;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.rank.get(parts[i] + parts[i + 1]);
        if (rank < best) [best, at] = [rank, i];
      }
      if (best === Infinity) return parts.map(part => this.rank.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  // The text of each token; a character that spans several tokens is shown with the last of them.
  texts(ids) {
    const utf8 = new TextDecoder();
    return ids.map(id => utf8.decode(Uint8Array.from(this.tokens[id], byte => byte.charCodeAt(0)), { stream: true }));
  }
}

// Return the model whose weights are in weights.js: matrices of the blocks in 8 bits, a scale and a lowest number for
// each output; the other tensors in half precision.
function load_model({ config, tensors, data }) {
  const text = atob(data), bytes = new Uint8Array(text.length), arrays = {};
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  let at = 0;
  const take = (Kind, count) => new Kind(bytes.buffer.slice(at, at += count * Kind.BYTES_PER_ELEMENT));
  for (const [name, size, n_out] of tensors) {
    const numbers = arrays[name] = new Float32Array(size);
    if (n_out === 0) {
      take(Uint16Array, size).forEach((bits, i) => numbers[i] = half(bits));
    } else {
      const low = take(Float32Array, n_out), scale = take(Float32Array, n_out), codes = take(Uint8Array, size);
      for (let i = 0, j = 0; i < size; i++, j = (j + 1) % n_out) numbers[i] = Math.fround(codes[i] * scale[j]) + low[j];
    }
  }
  return new GPT(config, arrays);
}

function half(bits) {  // the number that 16 bits of half precision mean
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25));
}
