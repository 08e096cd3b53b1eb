"use strict";
// GPT-2 in plain JavaScript, with and without a KV cache: the classes of gpt_kv_cache.py, under the
// same names.
//
// It computes one text at a time. A vector is a Float32Array; (T, C) is an array of T vectors, one
// for each token. Shapes: T tokens fed, S tokens attended to, H heads, D head size, C width
// (n_embd), V vocabulary.

// A linear layer, x @ W + b; W is stored (in, out), as in GPT-2's public weights.
class Conv1D {
  constructor(weight, bias) {
    this.weight = weight; // (n_in, n_out), row after row
    this.bias = bias; // (n_out)
    this.multiplications = 0;
  }

  // (T, n_in) -> (T, n_out)
  forward(x) {
    this.multiplications += x.length * this.weight.length;
    return x.map(row => this.times(row));
  }

  // (n_in) -> (n_out); four inputs at a time, which halves the reads and writes of y.
  times(x) {
    const { weight, bias } = this;
    const n_out = bias.length;
    const y = Float32Array.from(bias);
    for (let i = 0; i < x.length; i += 4) {
      const x0 = x[i];
      const x1 = x[i + 1];
      const x2 = x[i + 2];
      const x3 = x[i + 3];
      const row0 = i * n_out;
      const row1 = row0 + n_out;
      const row2 = row1 + n_out;
      const row3 = row2 + n_out;
      for (let j = 0; j < n_out; j++)
        y[j] +=
          x0 * weight[row0 + j] +
          x1 * weight[row1 + j] +
          x2 * weight[row2 + j] +
          x3 * weight[row3 + j];
    }
    return y;
  }
}

class LayerNorm {
  constructor(weight, bias) {
    this.weight = weight; // (C)
    this.bias = bias; // (C)
  }

  // (T, C) -> (T, C)
  forward(x) {
    return x.map(row => {
      const C = row.length;
      const mean = row.reduce((sum, number) => sum + number, 0) / C;
      const variance = row.reduce((sum, number) => sum + (number - mean) ** 2, 0) / C;
      const scale = 1 / Math.sqrt(variance + 1e-5);
      return row.map((number, i) => (number - mean) * scale * this.weight[i] + this.bias[i]);
    });
  }
}

// Keys, values and positions of the tokens that a model has read; it grows with every token.
class KVCache {
  constructor() {
    this.layers = []; // each layer's keys and values, {k: (S, C), v: (S, C)}
    this.pos = []; // (S), the positions of the tokens that count as read
    this.keys = []; // (S), the positions of the keys that append() returned last: for the pictures
  }

  // The positions (T) at which the next T tokens are read.
  positions(T) {
    return Array.from({ length: T }, (_, t) => this.length + t);
  }

  // Add a layer's keys and values (T, C) of the tokens at positions pos (T). Return all of its keys
  // and values (S, C), and a mask (T, S) of the keys that each query sees; null if none is needed.
  append(layer, k, v, pos) {
    let mask = null;
    this.keys = [...this.pos, ...pos];
    if (this.length === 0) {
      this.layers.length = layer; // what a failed pass left
    } else {
      const held = this.layers[layer]; // what a failed pass left lies past length
      k = [...held.k.slice(0, this.length), ...k];
      v = [...held.v.slice(0, this.length), ...v];
      if (pos.length > 1) mask = pos.map(query => this.keys.map(key => key <= query));
    }
    this.layers[layer] = { k, v };
    return [k, v, mask];
  }

  // Count the tokens at positions pos (T) as read: what was appended for them now counts.
  commit(pos) {
    this.pos = [...this.pos, ...pos];
  }

  // Keep the first n tokens.
  truncate(n) {
    if (!(n >= 0 && n <= this.length))
      throw new RangeError(`can't keep ${n} tokens of ${this.length}`);
    this.layers =
      n === 0 ? [] : this.layers.map(({ k, v }) => ({ k: k.slice(0, n), v: v.slice(0, n) }));
    this.pos = this.pos.slice(0, n);
  }

  get length() {
    return this.pos.length;
  }

  // Bytes of all keys and values: 2 * L * S * C * 4.
  get nbytes() {
    return this.layers.reduce((sum, { k }) => sum + 2 * this.length * k[0].byteLength, 0);
  }
}

class Attention {
  constructor(n_head, c_attn, c_proj) {
    this.n_head = n_head;
    this.c_attn = c_attn;
    this.c_proj = c_proj;
    this.multiplications = 0;
    this.shares = []; // (H, S), the attention of the last query, and the mask: for the pictures
    this.mask = null;
  }

  // The queries, keys and values of x (T, C): (T, C) each, a head's numbers side by side.
  project(x) {
    const qkv = this.c_attn.forward(x); // (T, 3C)
    const C = x[0].length;
    return [0, 1, 2].map(part => qkv.map(row => row.slice(part * C, (part + 1) * C)));
  }

  // (T, C): each query's attention-weighted average of the values it may see.
  forward(q, k, v, mask) {
    const T = q.length;
    const S = k.length;
    this.mask = mask;
    const y = q.map((query, t) => {
      const sees = s => (mask ? mask[t][s] : s <= t + S - T); // without a mask: causal
      return this.attend(query, k, v, [...k.keys()].filter(sees));
    });
    return this.c_proj.forward(y); // (T, C)
  }

  // (C): what one query reads of the keys and values whose indices are seen.
  attend(query, k, v, seen) {
    const C = query.length;
    const D = C / this.n_head;
    const y = new Float32Array(C);
    this.shares = [];
    // a head's numbers stand from first to first + D - 1
    for (let first = 0; first < C; first += D) {
      const scores = new Float64Array(seen.length);
      const shares = new Float32Array(k.length);
      for (let n = 0; n < seen.length; n++)
        scores[n] = dot(query, k[seen[n]], first, first + D) / Math.sqrt(D);
      const weights = softmax(scores);
      for (let n = 0; n < seen.length; n++) {
        const value = v[seen[n]];
        const weight = weights[n];
        for (let i = first; i < first + D; i++) y[i] += weight * value[i];
        shares[seen[n]] = weight;
      }
      this.shares.push(shares);
    }
    this.multiplications += 2 * seen.length * C;
    return y;
  }
}

// The part of a block that treats each token alone: widen, apply a nonlinearity, narrow.
class MLP {
  constructor(c_fc, c_proj) {
    this.c_fc = c_fc;
    this.c_proj = c_proj;
  }

  forward(x) {
    x = this.c_fc.forward(x).map(row => row.map(gelu)); // (T, 4C)
    return this.c_proj.forward(x); // (T, C)
  }
}

// Attention, then MLP, each added to the residual stream.
class Block {
  constructor(ln_1, attn, ln_2, mlp) {
    Object.assign(this, { ln_1, attn, ln_2, mlp });
  }

  forward(x, pos, cache, layer) {
    let mask = null;
    let [q, k, v] = this.attn.project(this.ln_1.forward(x)); // (T, C) each
    // (S, C) twice, (T, S) or null
    if (cache !== null) [k, v, mask] = cache.append(layer, k, v, pos);
    x = add(x, this.attn.forward(q, k, v, mask));
    return add(x, this.mlp.forward(this.ln_2.forward(x))); // (T, C)
  }
}

class GPT {
  // tensors: a Float32Array for each of GPT-2's public names.
  constructor(config, tensors) {
    const linear = name => new Conv1D(tensors[`${name}.weight`], tensors[`${name}.bias`]);
    const norm = name => new LayerNorm(tensors[`${name}.weight`], tensors[`${name}.bias`]);
    const rows = name =>
      Array.from({ length: tensors[name].length / config.n_embd }, (_, i) =>
        tensors[name].subarray(i * config.n_embd, (i + 1) * config.n_embd),
      );
    this.config = config;
    this.wte = rows("wte.weight"); // (V, C); the output head is the same, transposed
    this.wpe = rows("wpe.weight"); // (n_ctx, C)
    this.h = Array.from(
      { length: config.n_layer },
      (_, layer) =>
        new Block(
          norm(`h.${layer}.ln_1`),
          new Attention(
            config.n_head,
            linear(`h.${layer}.attn.c_attn`),
            linear(`h.${layer}.attn.c_proj`),
          ),
          norm(`h.${layer}.ln_2`),
          new MLP(linear(`h.${layer}.mlp.c_fc`), linear(`h.${layer}.mlp.c_proj`)),
        ),
    );
    this.ln_f = norm("ln_f");
    this.head_multiplications = 0;
  }

  // Return the logits (T, V) of ids (T), which follow the cached text; with last_only, the last
  // token's (1, V).
  forward(ids, cache = null, last_only = false) {
    const n_read = cache === null ? 0 : cache.length;
    const T = ids.length;
    if (T < 1 || n_read + T > this.config.n_ctx)
      throw new RangeError(
        `${T} tokens after ${n_read}: must be at least 1 and end within n_ctx = ${this.config.n_ctx}`,
      );
    const pos = cache === null ? [...ids.keys()] : cache.positions(T); // (T)
    let x = ids.map((id, t) => this.wte[id].map((number, i) => number + this.wpe[pos[t]][i])); // (T, C)
    this.h.forEach((block, layer) => {
      x = block.forward(x, pos, cache, layer);
    });
    const logits = this.head(last_only ? x.slice(-1) : x);
    if (cache !== null) cache.commit(pos); // last of all: a failure above leaves the cache as it was
    return logits;
  }

  // The logits (T, V) of the last block's output (T, C).
  head(x) {
    this.head_multiplications += x.length * this.wte.length * this.config.n_embd;
    return this.ln_f
      .forward(x)
      .map(row => Float32Array.from(this.wte, token => dot(row, token, 0, row.length)));
  }

  // The multiplications of all passes so far, in matrix products and attention.
  get multiplications() {
    return this.h.reduce(
      (sum, { attn, mlp }) =>
        [attn, attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj].reduce(
          (sum, part) => sum + part.multiplications,
          sum,
        ),
      this.head_multiplications,
    );
  }
}

// Yield up to max_new_tokens tokens after ids, each as soon as it is known. What the cache holds of
// ids isn't read again. With null for a cache, the whole text is read at every step. (The page
// itself asks for one pass at a time: see Runs.)
function* generate(model, ids, max_new_tokens, cache = new KVCache()) {
  for (ids = [...ids]; max_new_tokens > 0; max_new_tokens--) {
    const unread = ids.slice(cache === null ? 0 : cache.length);
    const [logits] = model.forward(unread, cache, true); // (V)
    ids.push(argmax(logits));
    yield ids.at(-1);
  }
}

// The sum of two texts' vectors (T, C).
function add(x, y) {
  return x.map((row, t) => row.map((number, i) => number + y[t][i]));
}

// The best token by logits (V).
function argmax(logits) {
  return logits.indexOf(logits.reduce((best, logit) => Math.max(best, logit), -Infinity));
}

// GPT-2's approximation.
function gelu(x) {
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

// Return the scalar product of two vectors' numbers from first to end; four sums at a time wait
// less for one another.
function dot(x, y, first, end) {
  let sum0 = 0;
  let sum1 = 0;
  let sum2 = 0;
  let sum3 = 0;
  for (let i = first; i < end; i += 4) {
    sum0 += x[i] * y[i];
    sum1 += x[i + 1] * y[i + 1];
    sum2 += x[i + 2] * y[i + 2];
    sum3 += x[i + 3] * y[i + 3];
  }
  return sum0 + sum1 + sum2 + sum3;
}

function softmax(scores) {
  let largest = -Infinity;
  let sum = 0;
  const shares = new Float64Array(scores.length);
  for (const score of scores) largest = Math.max(largest, score);
  for (let i = 0; i < scores.length; i++) {
    shares[i] = Math.exp(scores[i] - largest);
    sum += shares[i];
  }
  for (let i = 0; i < scores.length; i++) shares[i] /= sum;
  return shares;
}

// Return KL(p || q) in nats, of the predictions that two rows of logits (V) make.
function kl(p_logits, q_logits) {
  const p = softmax(p_logits);
  const q = softmax(q_logits);
  return p.reduce((sum, share, id) => (share > 0 ? sum + share * Math.log(share / q[id]) : sum), 0);
}
