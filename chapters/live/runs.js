"use strict";
// The texts that the page writes: one pass of the model for each question asked, in a worker.

// The texts that are being written: of each its tokens, its cache, and how many tokens a pass may
// read.
class Runs {
  load(weights) {
    this.model = load_model(weights);
    this.runs = {};
    this.held = { ids: [], cache: new KVCache() }; // of reread()
  }

  new_cache({ kind, window, sinks }) {
    const makers = {
      none: () => null,
      full: () => new KVCache(),
      window: () => new SlidingWindowCache(window),
      sinks: () => new SlidingWindowCache(window, sinks),
      bits: bits => new QuantizedCache(bits, this.model.config.n_head),
    };
    const [name, bits] = kind.split(":");
    return makers[name](Number(bits));
  }

  // chunk: the most tokens of one pass; compared: also measure how far each prediction is from a
  // full cache's; watched: also return what each pass attended to.
  begin(name, ids, cache, { chunk = Infinity, compared = false, watched = false } = {}) {
    this.runs[name] = {
      ids: [...ids],
      cache: this.new_cache(cache),
      chunk,
      exact: compared ? new KVCache() : null,
      watched,
    };
  }

  // Go on with another cache, which reads the text so far in its first pass.
  change(name, cache) {
    this.runs[name].cache = this.new_cache(cache);
  }

  // Read tokens that haven't been read; at the end of the text, write one. Return what happened.
  pass(name) {
    const { model } = this;
    const { ids, cache, exact, watched } = this.runs[name];
    const { first, end } = this.next(name);
    const before = model.multiplications;
    const started = performance.now();
    const [logits] = model.forward(ids.slice(first, end), cache, true); // (V)
    const done = {
      first,
      end,
      ms: performance.now() - started,
      multiplications: model.multiplications - before,
    };
    done.bytes = cache === null ? 0 : cache.nbytes;
    if (watched) Object.assign(done, this.seen(cache, end));
    if (end === ids.length) {
      done.token = argmax(logits);
      if (exact !== null) {
        const [exact_logits] = model.forward(ids.slice(exact.length), exact, true);
        Object.assign(done, { kl: kl(exact_logits, logits), exact_token: argmax(exact_logits) });
      }
      ids.push(done.token);
    }
    return done;
  }

  // The tokens that the next pass reads, from first to end.
  next(name) {
    const { ids, cache, chunk } = this.runs[name];
    return cache === null
      ? { first: 0, end: ids.length }
      : { first: cache.length, end: Math.min(ids.length, cache.length + chunk) };
  }

  // What the last pass, which ended at a token, attended to, and what the cache holds after it.
  seen(cache, end) {
    const { attn } = this.model.h[0];
    const attention = this.model.h.map(block => block.attn.shares);
    const pass = {
      keys: cache === null ? Array.from({ length: end }, (_, t) => t) : cache.keys,
      mask: attn.mask,
      attention,
    };
    if (cache instanceof SlidingWindowCache)
      pass.slots = {
        held: cache.pos,
        count: cache.n_slots,
        sinks: cache.sinks,
        evicted: cache.pos.filter(key => !cache.visible(key, end - 1)),
      };
    else if (cache !== null) pass.entries = this.entries(cache);
    return pass;
  }

  // How many tokens each layer of a growing cache holds, and how many count.
  entries(cache) {
    return {
      layers: this.model.h.map((_, layer) =>
        cache.layers[layer] ? cache.layers[layer].k.length : 0,
      ),
      counted: cache.length,
    };
  }

  // Begin a pass of a growing cache that fails in layer 3. Return what is left of it.
  fail(name) {
    const { model } = this;
    const { ids, cache } = this.runs[name];
    const { first, end } = this.next(name);
    const block = model.h[3];
    block.forward = () => {
      throw new Error("layer 3 fails");
    };
    try {
      model.forward(ids.slice(first, end), cache, true);
    } catch (error) {
      if (error.message !== "layer 3 fails") throw error;
    } finally {
      delete block.forward; // the class's own is there again
    }
    return { failed: true, first, end, entries: this.entries(cache) };
  }

  // Read a changed text: what the cache holds of its beginning stays. Compare with reading all of
  // it.
  reread(ids) {
    const { cache } = this.held;
    const kept = Math.min(common_prefix_length(this.held.ids, ids), ids.length - 1);
    const timed = cache => {
      const started = performance.now();
      const [logits] = this.model.forward(ids.slice(cache.length), cache, true);
      return { ms: performance.now() - started, token: argmax(logits) };
    };
    cache.truncate(kept);
    const warm = timed(cache);
    const cold = timed(new KVCache());
    this.held.ids = ids;
    return { kept, warm, cold };
  }
}

// How many first tokens two texts share.
function common_prefix_length(a, b) {
  let n = 0;
  while (n < Math.min(a.length, b.length) && a[n] === b[n]) n++;
  return n;
}

// Runs in a worker, so that the page never waits; where there can't be one, in the page, a pass at
// a time.
class Machine {
  constructor() {
    this.count = 0;
    this.waiting = new Map();
    const parts = [
      Conv1D,
      LayerNorm,
      KVCache,
      SlidingWindowCache,
      QuantizedCache,
      Attention,
      MLP,
      Block,
      GPT,
      add,
      argmax,
      gelu,
      dot,
      softmax,
      kl,
      load_model,
      half,
      common_prefix_length,
      Runs,
    ];
    const answer = `const runs = new Runs();
      onmessage = ({ data: { id, method, words } }) => {
        try {
          postMessage({ id, answer: runs[method](...words) });
        } catch (error) {
          postMessage({ id, error: error.message });
        }
      };`;
    const source = ['"use strict";', ...parts.map(String), answer].join("\n"); // a page on a disk can't load a worker's file
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    try {
      this.worker = new Worker(url);
    } catch {
      return this.work_here();
    }
    this.worker.onmessage = ({ data: { id, answer, error } }) => {
      const { resolve, reject } = this.waiting.get(id);
      this.waiting.delete(id);
      if (error === undefined) resolve(answer);
      else reject(new Error(error));
    };
    this.worker.onerror = () => this.work_here(); // it didn't start
  }

  // A promise of what a method of Runs returns.
  ask(method, ...words) {
    return new Promise((resolve, reject) => {
      const id = ++this.count;
      this.waiting.set(id, { resolve, reject, method, words });
      if (this.worker) this.worker.postMessage({ id, method, words });
      else this.answer_soon(id);
    });
  }

  work_here() {
    this.worker = null;
    this.runs = new Runs();
    for (const id of this.waiting.keys()) this.answer_soon(id);
  }

  answer_soon(id) {
    const { resolve, reject, method, words } = this.waiting.get(id);
    this.waiting.delete(id);
    setTimeout(() => {
      try {
        resolve(this.runs[method](...words));
      } catch (error) {
        reject(error);
      }
    });
  }
}
