"use strict";
// The tokenizer, and the model whose weights are in weights.js.

// Byte-level BPE, as tiktoken has it; ranks: a line for each token, base64 of its bytes and its
// rank.
class Encoding {
  constructor(ranks, end_of_text) {
    this.tokens = ranks
      .trim()
      .split("\n")
      .map(line => atob(line.split(" ")[0])); // bytes, as characters 0 to 255
    this.rank = new Map(this.tokens.map((bytes, id) => [bytes, id]));
    this.tokens[end_of_text] = "<|endoftext|>";
    this.end_of_text = end_of_text;
  }

  // The ids of a text.
  encode(text) {
    const words =
      /<\|endoftext\|>|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
    const ids = [];
    for (const [word] of text.toWellFormed
      ? text.toWellFormed().matchAll(words)
      : text.matchAll(words))
      ids.push(...(word === "<|endoftext|>" ? [this.end_of_text] : this.merge(word)));
    return ids;
  }

  // Join the two neighbours that make the token of the lowest rank, until no two make one.
  merge(word) {
    const parts = Array.from(new TextEncoder().encode(word), byte => String.fromCharCode(byte));
    for (;;) {
      let best = Infinity;
      let at = 0;
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
    const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
    return ids.map(id =>
      utf8.decode(
        Uint8Array.from(this.tokens[id], byte => byte.charCodeAt(0)),
        { stream: true },
      ),
    );
  }
}

// Return the model whose weights are in weights.js: matrices of the blocks in 8 bits, a scale and a
// lowest number for each output; the other tensors in half precision.
function load_model({ config, tensors, data }) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  const arrays = {};
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  let at = 0;
  const take = (Kind, count) => {
    const first = at;
    at += count * Kind.BYTES_PER_ELEMENT;
    return new Kind(bytes.buffer.slice(first, at));
  };
  for (const [name, size, n_out] of tensors) {
    const numbers = (arrays[name] = new Float32Array(size));
    if (n_out === 0) {
      take(Uint16Array, size).forEach((bits, i) => (numbers[i] = half(bits)));
    } else {
      const low = take(Float32Array, n_out);
      const scale = take(Float32Array, n_out);
      const codes = take(Uint8Array, size);
      for (let i = 0, j = 0; i < size; i++, j = (j + 1) % n_out)
        numbers[i] = Math.fround(codes[i] * scale[j]) + low[j];
    }
  }
  return new GPT(config, arrays);
}

// The number that 16 bits of half precision mean.
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25));
}
