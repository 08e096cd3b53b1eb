"use strict";
// Caches that hold less: the sliding window of gpt_bounded_cache.py, and the rounding of
// compress.py.
//
// Shapes as in gpt.js; G tokens of a group.

// The last `window` tokens and the first `sinks`, in slots allocated once.
class SlidingWindowCache extends KVCache {
  constructor(window, sinks = 0) {
    super();
    if (!(window >= 1 && sinks >= 0))
      throw new RangeError(`window ${window}, sinks ${sinks}: must be at least 1 and 0`);
    this.window = window;
    this.sinks = sinks;
    this.n_slots = sinks + window + 1; // one is spare: a pass that fails destroys nothing
    this.n_read = 0;
    this.pending = []; // each layer's keys and values of a chunk, to write when the pass is committed; null: written
  }

  // The position of the token in each slot, once n tokens have been read.
  held(n) {
    const last = n - 1;
    const size = this.window + 1;
    return Array.from({ length: Math.min(n, this.n_slots) }, (_, slot) =>
      slot < this.sinks ? slot : last - ((((last - slot) % size) + size) % size),
    );
  }

  // Whether a query sees a key, by their positions.
  visible(key, query) {
    return key <= query && (key > query - this.window || key < this.sinks);
  }

  append(layer, k, v, pos) {
    const n = this.length;
    const T = pos.length;
    if (n === 0) {
      this.layers.length = layer; // what a failed pass left
      const empty = () => Array.from({ length: this.n_slots }, () => new Float32Array(k[0].length));
      this.layers.push({ k: empty(), v: empty() });
    }
    const ring = this.layers[layer];
    const in_place = T === 1 || n + T <= this.n_slots;
    this.pending.length = layer;
    this.pending.push(in_place ? null : { k, v });
    if (in_place) {
      // to the spare slot, or to empty ones
      const first = n < this.n_slots ? n : this.sinks + ((n - this.sinks) % (this.window + 1));
      for (let t = 0; t < T; t++) {
        ring.k[first + t] = k[t];
        ring.v[first + t] = v[t];
      }
      [k, v] = [ring.k.slice(0, n + T), ring.v.slice(0, n + T)];
      this.keys = this.held(n + T);
    } else {
      // read before writing: the first new token sees what the last one evicts
      const slots = [...this.pos.keys()].filter(slot => this.visible(this.pos[slot], n));
      k = [...slots.map(slot => ring.k[slot]), ...k];
      v = [...slots.map(slot => ring.v[slot]), ...v];
      this.keys = [...slots.map(slot => this.pos[slot]), ...pos];
    }
    return [k, v, pos.map(query => this.keys.map(key => this.visible(key, query)))];
  }

  // Count the tokens at positions pos (T) as read, and write those of a chunk to slots.
  commit(pos) {
    const n = this.length;
    const held = this.held(n + pos.length);
    for (const [layer, ring] of this.layers.entries())
      if (this.pending[layer])
        for (const [slot, position] of held.entries())
          if (position >= n) {
            ring.k[slot] = this.pending[layer].k[position - n];
            ring.v[slot] = this.pending[layer].v[position - n];
          }
    [this.n_read, this.pos, this.pending] = [n + pos.length, held, []];
  }

  // Keep the first n tokens: only all or none, once some were evicted.
  truncate(n) {
    const evicted = Math.max(0, this.length - this.sinks - this.window);
    if (!(n >= 0 && n <= this.length) || (evicted > 0 && n > 0 && n < this.length))
      throw new RangeError(`can't keep ${n} tokens of ${this.length}, ${evicted} evicted`);
    [this.n_read, this.pos] = [n, this.pos.slice(0, n)];
    if (n === 0) this.layers = [];
  }

  get length() {
    return this.n_read;
  }

  // Bytes of all slots: 2 * L * (sinks + window + 1) * C * 4.
  get nbytes() {
    return this.layers.reduce((sum, { k }) => sum + 2 * this.n_slots * k[0].byteLength, 0);
  }
}

// A cache that rounds keys and values to 8, 4 or 2 bits, in groups of `group` tokens, once at least
// `residual` later tokens follow the group. A number x becomes the code round((x - zero) / scale):
// in a group of keys each channel has its own scale and zero, and so has each head of a token's
// values. The model reads code * scale + zero.
class QuantizedCache extends KVCache {
  constructor(bits, H, group = 32, residual = 32) {
    super();
    if (![2, 4, 8].includes(bits)) throw new RangeError(`bits must be one of 2, 4, 8, got ${bits}`);
    [this.bits, this.H, this.group, this.residual] = [bits, H, group, residual];
    this.pending = []; // each layer's keys and values (T, C) of this pass
  }

  // A pass reads its own tokens unrounded.
  append(layer, k, v, pos) {
    const held = this.length ? this.layers[layer] : { groups: [], k: [], v: [] };
    this.pending.length = layer; // what a failed pass left
    this.pending.push({ k, v });
    this.keys = [...this.pos, ...pos];
    k = [...held.groups.flatMap(({ keys }) => this.dequantize(keys)), ...held.k, ...k];
    v = [...held.groups.flatMap(({ values }) => this.dequantize(values)), ...held.v, ...v];
    return [k, v, pos.length > 1 ? pos.map(query => this.keys.map(key => key <= query)) : null];
  }

  // Count the tokens at positions pos (T) as read, and round what has become old.
  commit(pos) {
    const layers = this.length
      ? this.layers
      : this.pending.map(() => ({ groups: [], k: [], v: [] }));
    this.layers = layers.map((held, layer) => {
      const k = [...held.k, ...this.pending[layer].k];
      const v = [...held.v, ...this.pending[layer].v];
      const groups = [...held.groups];
      while (k.length >= this.group + this.residual) {
        const keys = this.quantize(k.splice(0, this.group), true);
        groups.push({ keys, values: this.quantize(v.splice(0, this.group), false) });
      }
      return { groups, k, v };
    });
    this.pending = [];
    super.commit(pos);
  }

  // Return numbers x (G, C) as codes, 8 / bits in a byte, with the scale and zero of each channel
  // (C), or of each token and head (G * H). Sums are rounded to float32 after every step, and
  // halves to even, as PyTorch does.
  quantize(x, by_channel) {
    const C = x[0].length;
    const D = C / this.H;
    const most = 2 ** this.bits - 1;
    const n = by_channel ? C : x.length * this.H;
    const shared = (t, c) => (by_channel ? c : t * this.H + Math.floor(c / D)); // the index of a number's scale and zero
    const zero = new Float32Array(n).fill(Infinity);
    const high = new Float32Array(n).fill(-Infinity);
    x.forEach((row, t) =>
      row.forEach((number, c) => {
        zero[shared(t, c)] = Math.min(zero[shared(t, c)], number);
        high[shared(t, c)] = Math.max(high[shared(t, c)], number);
      }),
    );
    const scale = zero.map((low, i) => Math.fround(high[i] - low) / most);
    const codes = x.map((row, t) => {
      const bytes = new Uint8Array((C * this.bits) / 8);
      row.forEach((number, c) => {
        const steps = Math.fround(
          Math.fround(number - zero[shared(t, c)]) / (scale[shared(t, c)] || 1),
        );
        const even = 2 * Math.round(steps / 2);
        const code = Math.abs(steps - even) === 0.5 ? even : Math.round(steps);
        bytes[Math.floor((c * this.bits) / 8)] |= Math.min(code, most) << ((c * this.bits) % 8);
      });
      return bytes;
    });
    return { codes, scale, zero, shared };
  }

  // The numbers (G, C) that codes stand for.
  dequantize({ codes, scale, zero, shared }) {
    const { bits } = this;
    const C = (codes[0].length * 8) / bits;
    return codes.map((bytes, t) =>
      Float32Array.from({ length: C }, (_, c) => {
        const code = (bytes[Math.floor((c * bits) / 8)] >> ((c * bits) % 8)) & (2 ** bits - 1);
        return Math.fround(code * scale[shared(t, c)]) + zero[shared(t, c)];
      }),
    );
  }

  // Keep the first n tokens; a part of a rounded group stays as it was rounded.
  truncate(n) {
    if (!(n >= 0 && n <= this.length))
      throw new RangeError(`can't keep ${n} tokens of ${this.length}`);
    this.layers =
      n === 0
        ? []
        : this.layers.map(held => {
            const whole = Math.min(held.groups.length, Math.floor(n / this.group));
            const left = n - whole * this.group;
            const rest = held.groups.slice(whole);
            const k = [...rest.flatMap(({ keys }) => this.dequantize(keys)), ...held.k].slice(
              0,
              left,
            );
            const v = [...rest.flatMap(({ values }) => this.dequantize(values)), ...held.v].slice(
              0,
              left,
            );
            return { groups: held.groups.slice(0, whole), k, v };
          });
    this.pos = this.pos.slice(0, n);
  }

  // Codes, scales and zeros, and the latest tokens as they are.
  get nbytes() {
    const rounded = ({ codes, scale, zero }) => [...codes, scale, zero];
    const held = this.layers.flatMap(({ groups, k, v }) => [
      ...k,
      ...v,
      ...groups.flatMap(({ keys, values }) => [...rounded(keys), ...rounded(values)]),
    ]);
    return held.reduce((sum, numbers) => sum + numbers.byteLength, 0);
  }
}
