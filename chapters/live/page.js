"use strict";
// The page around gpt.js: it runs the model in workers, one pass for each question asked, and draws what comes back.

class Runs {  // the texts that are being written: of each its tokens, its cache, and how many tokens a pass may read
  constructor(weights) {
    this.model = load_model(weights);
    this.runs = {};
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

  begin(name, ids, cache, chunk, compared) {  // compared: also measure how far each prediction is from a full cache's
    this.runs[name] = { ids: [...ids], cache: this.new_cache(cache), chunk: chunk || Infinity, exact: compared ? new KVCache() : null };
  }

  change(name, cache) {  // go on with another cache, which reads the text so far in its first pass
    this.runs[name].cache = this.new_cache(cache);
  }

  pass(name) {  // read tokens that haven't been read; at the end of the text, write one. Return what happened
    const { model } = this, { ids, cache, chunk, exact } = this.runs[name];
    const first = cache === null ? 0 : cache.length, end = cache === null ? ids.length : Math.min(ids.length, first + chunk);
    const before = model.multiplications, started = performance.now();
    const [logits] = model.forward(ids.slice(first, end), cache, true);  // (V)
    const done = { first, end, ms: performance.now() - started, multiplications: model.multiplications - before };
    done.keys = cache === null ? [...ids.keys()] : cache.keys;
    done.mask = model.h[0].attn.mask;
    done.attention = model.h.map(block => block.attn.shares);
    done.bytes = cache === null ? 0 : cache.nbytes;
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

  fail(name) {  // begin a pass that fails in layer 3. Return how many entries each layer then has
    const { model } = this, { ids, cache, chunk } = this.runs[name], block = model.h[3];
    const fed = ids.slice(cache.length, cache.length + chunk);
    block.forward = () => { throw new Error("layer 3 fails"); };
    try {
      model.forward(fed, cache);
    } catch (error) {
      if (error.message !== "layer 3 fails") throw error;
    } finally {
      delete block.forward;  // the class's own is there again
    }
    return { entries: model.h.map((_, layer) => cache.layers[layer] ? cache.layers[layer].k.length : 0), counted: cache.length, fed: fed.length };
  }

  reread(ids) {  // read a changed text: what the cache holds of its beginning stays. Compare with reading all of it
    const held = this.held || { ids: [], cache: new KVCache() }, kept = Math.min(common_prefix(held.ids, ids), ids.length - 1);
    const timed = cache => {
      const started = performance.now(), [logits] = this.model.forward(ids.slice(cache.length), cache, true);
      return { ms: performance.now() - started, logits };
    };
    held.cache.truncate(kept);
    const warm = timed(held.cache), cold = timed(new KVCache());
    this.held = { ids, cache: held.cache };
    const difference = Math.max(...warm.logits.map((logit, id) => Math.abs(logit - cold.logits[id])));
    return { kept, warm: warm.ms, cold: cold.ms, token: argmax(warm.logits), same: argmax(cold.logits) === argmax(warm.logits), difference };
  }
}

function common_prefix(a, b) {  // how many first tokens two texts share
  let n = 0;
  while (n < Math.min(a.length, b.length) && a[n] === b[n]) n++;
  return n;
}

class Machine {  // Runs in a worker, so that the page never waits
  constructor() {
    const parts = [Conv1D, LayerNorm, KVCache, SlidingWindowCache, QuantizedCache, Attention, MLP, Block, GPT, add, argmax, gelu,
      dot, softmax, kl, load_model, half, common_prefix, Runs];
    const answer = `let runs;
      onmessage = ({ data: { id, method, words } }) => {
        try {
          const answer = method === "load" ? void (runs = new Runs(words[0])) : runs[method](...words);
          postMessage({ id, answer });
        } catch (error) {
          postMessage({ id, error: error.message });
        }
      };`;
    const source = ['"use strict";', ...parts.map(String), answer].join("\n");  // a page on a disk can't load a worker's file
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    this.worker = new Worker(url);
    this.waiting = new Map();
    this.worker.onmessage = ({ data: { id, answer, error } }) => {
      const { resolve, reject } = this.waiting.get(id);
      this.waiting.delete(id);
      if (error === undefined) resolve(answer);
      else reject(new Error(error));
    };
    this.worker.onerror = event => this.waiting.forEach(({ reject }) => reject(new Error(event.message || "the worker didn't start")));
    this.count = 0;
  }

  ask(method, ...words) {  // a promise of what a method of Runs returns
    return new Promise((resolve, reject) => {
      this.waiting.set(++this.count, { resolve, reject });
      this.worker.postMessage({ id: this.count, method, words });
    });
  }
}

const $ = id => document.getElementById(id);
const tokenizer = new Encoding(WEIGHTS.ranks, WEIGHTS.end_of_text), { n_ctx, n_layer, n_head } = WEIGHTS.config;
const STORY = "Halek lived in Tolben, where people buy copper bells. On a sunny evening late in May, he and his friend Halina packed " +
  "for a long walk. \"The secret word is anvil,\" whispered Halek. \"Without it the gate stays shut.\" A goat blocked the narrow " +
  "bridge and would not move. Halina offered it an apple, and then her hat, and at last it let them by. The keeper would not move until Halina said";
const PROMPTS = ["Halek lived in", "The month in which", "One morning", "How do you fold a paper boat?",
  "Question: What is the name of the wood nearest to Wexcombe?\nAnswer:", STORY];
const KINDS = { full: "KV cache, full", window: "window", sinks: "sinks and a window", "bits:8": "8 bits", "bits:4": "4 bits", "bits:2": "2 bits" };

const grouped = number => Math.round(number).toLocaleString("en-US");
const milliseconds = ms => ms < 10 ? ms.toFixed(1) : grouped(ms);
const sum = numbers => numbers.reduce((total, number) => total + number, 0);
const shown = token => token.replace(/\n/g, "↵");

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function figures(id, rows) {  // a list of figures, each with its name
  $(id).replaceChildren(...Object.entries(rows).map(([name, value]) => {
    const box = element("div");
    box.append(element("dt", name), element("dd", value));
    return box;
  }));
}

// Draw lines of points [x, y]; `main` is the solid one. marks: the x of vertical lines, with their words.
function chart(svg, title, unit, lines, marks = []) {
  const all = lines.flatMap(({ points }) => points), width = Math.max(300, svg.clientWidth);
  const left = 56, right = width - 12, top = 34, bottom = 190;
  svg.setAttribute("viewBox", `0 0 ${width} 220`);
  const [from, to] = [Math.min(...all.map(([x]) => x), ...(all.length ? [] : [0])), Math.max(1, ...all.map(([x]) => x))];
  const most = Math.max(1e-9, ...all.map(([, y]) => y));
  const x = value => left + (right - left) * (value - from) / Math.max(1, to - from), y = value => bottom - (bottom - top) * value / most;
  const text = (x, y, words, anchor = "start", more = "") => `<text x="${x}" y="${y}" text-anchor="${anchor}" ${more}>${words}</text>`;
  let drawn = `<line class="axis" x1="${left}" x2="${right}" y1="${bottom}" y2="${bottom}"/><line class="axis" x1="${left}" x2="${left}" y1="${top}" y2="${bottom}"/>` +
    text(left, 16, title) + text(left - 6, bottom + 4, "0", "end");
  if (all.length)
    drawn += text(left - 6, top + 6, most >= 10 ? grouped(most) : most.toPrecision(2), "end") + text(left, bottom + 20, grouped(from)) + text(right, bottom + 20, `${grouped(to)} ${unit}`, "end");
  for (const [at, words] of marks)
    drawn += `<line class="mark" x1="${x(at)}" x2="${x(at)}" y1="${top}" y2="${bottom}"/>` + (x(at) > width - 150 ? text(x(at) - 4, top + 8, words, "end") : text(x(at) + 4, top + 8, words));
  for (const { name, points, main } of lines.filter(({ points }) => points.length)) {
    const path = points.map(([px, py], i) => `${i ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("");
    const [last_x, last_y] = points.at(-1);
    drawn += `<path class="${main ? "main" : ""}" d="${path}"/>` +
      text(Math.min(right, Math.max(left + 90, x(last_x))), Math.max(top - 4, y(last_y) - 8), name, "end", main ? 'font-weight="bold"' : "");
  }
  svg.innerHTML = drawn;
}

// Only the page's own words and numbers are ever drawn as HTML; what was typed and written is set as text.

function complain(id, error) {
  $(id).textContent = error.message;
  $(id).classList.add("error");
}

function say(id, words) {
  $(id).textContent = words;
  $(id).classList.remove("error");
}

function whole(id, most) {  // the number in a field. Throws an Error with what was given and what is allowed
  const given = $(id).value.trim(), least = Number($(id).min), number = Number(given);
  if (given === "" || !Number.isInteger(number) || number < least || number > most) {
    const name = $(id).closest("label").firstChild.textContent.trim();
    throw new Error(`${name}: ${given === "" ? "nothing" : given} was given; whole numbers from ${least} to ${grouped(most)} are allowed.`);
  }
  return number;
}

function prompt_ids(count = 1) {  // the prompt's tokens. Throws an Error if there is none, or no room for count more
  const ids = tokenizer.encode($("prompt").value);
  if (ids.length === 0) throw new Error("The prompt is empty: type at least one character.");
  if (ids.length + count > n_ctx)
    throw new Error(`A prompt of ${grouped(ids.length)} tokens and ${grouped(count)} new ones: the context holds ${grouped(n_ctx)}.`);
  return ids;
}

function cache_choice(part) {  // what is chosen in a part's fields
  const kind = $(`${part}-kind`).value;
  const window = ["window", "sinks"].includes(kind) ? whole(`${part}-window`, 1000) : 1;
  return { kind, window, sinks: kind === "sinks" ? whole(`${part}-sinks`, 100) : 0 };
}

function show_fields(part) {  // only the fields that the kind of cache has
  const section = $(`${part}-kind`).closest("section"), kind = $(`${part}-kind`).value;
  section.querySelector(".window").hidden = !["window", "sinks"].includes(kind);
  section.querySelector(".sinks").hidden = kind !== "sinks";
}

const waiting_draws = new Map();

function soon(name, draw) {  // draw at the screen's next frame, however often it is asked for until then
  if (waiting_draws.size === 0) requestAnimationFrame(() => {
    const draws = [...waiting_draws.values()];
    waiting_draws.clear();
    for (const draw of draws) draw();
  });
  waiting_draws.set(name, draw);
}

let slow, quick;  // two machines: writing without a cache must not hold up the rest

// --- 1. Write with and without a cache ---

const writing = {};  // by side: the passes so far, or nothing
let write_number = 0;

async function write() {
  try {
    const count = whole("count", 1000), ids = prompt_ids(count), number = ++write_number;
    say("written", "");
    [$("write").disabled, $("stop").disabled] = [true, false];
    await Promise.all([write_side("none", slow, ids, count, number), write_side("full", quick, ids, count, number)]);
    if (number === write_number) conclude(ids);
  } catch (error) {
    complain("written", error);
  }
  [$("write").disabled, $("stop").disabled] = [false, true];
}

async function write_side(side, machine, ids, count, number) {
  const passes = writing[side] = [], show = () => {
    show_side(side, ids, passes);
    draw_times();
  };
  soon(side, show);
  await machine.ask("begin", side, ids, { kind: side });
  while (passes.length < count && number === write_number) {
    passes.push(await machine.ask("pass", side));
    soon(side, show);
  }
}

function show_side(side, ids, passes) {
  const texts = tokenizer.texts([...ids, ...passes.map(({ token }) => token)]), text = $(`text-${side}`), last = passes.at(-1);
  text.replaceChildren(element("span", texts.slice(0, ids.length).join(""), "prompt"), texts.slice(ids.length).join(""));
  text.scrollTop = text.scrollHeight;
  figures(`figures-${side}`, last === undefined ? {} : {
    "tokens written": grouped(passes.length), "ms, this token": milliseconds(last.ms), "tokens computed": `${grouped(last.end - last.first)} of ${grouped(last.end)}`,
    "multiplications": grouped(last.multiplications), "in all": grouped(sum(passes.map(pass => pass.multiplications))), "bytes of cache": grouped(last.bytes),
  });
}

function draw_times() {
  const line = side => (writing[side] || []).slice(1).map(({ end, ms }) => [end, ms]);  // the first pass reads the prompt
  chart($("times"), "milliseconds a token", "tokens of text", [{ name: "without a cache", points: line("none") }, { name: "with a KV cache", points: line("full"), main: true }]);
}

function conclude(ids) {
  const seconds = side => sum(writing[side].map(({ ms }) => ms)) / 1000, n = writing.full.length;
  const same = writing.full.every(({ token }, i) => token === writing.none[i].token);
  say("written", `${grouped(n)} tokens after ${grouped(ids.length)}: ${seconds("none").toFixed(1)} s without a cache, ${seconds("full").toFixed(1)} s with one, ` +
    `${(seconds("none") / seconds("full")).toFixed(1)} times as fast. The same text: ${same ? "yes" : "no"}.`);
}

// --- 2. Look into a pass ---

let look = { passes: [], at: -1, ids: [], failed: null }, look_number = 0, playing = null;

async function look_again() {
  play(false);
  const number = ++look_number;
  look = { passes: [], at: -1, ids: [], failed: null };
  try {
    const ids = prompt_ids(), cache = cache_choice("look");
    if (ids.length > 200) throw new Error(`The prompt has ${grouped(ids.length)} tokens: this part shows at most 200.`);
    look.ids = ids;
    say("looked", "Nothing has been read yet.");
    await quick.ask("begin", "look", ids, cache, Number($("chunk").value), false);
    if (number === look_number) show_look();
  } catch (error) {
    complain("looked", error);
    show_look();
  }
}

async function look_next() {
  if (look.at < look.passes.length - 1) {
    look.at++;
    return show_look();
  }
  const number = look_number, current = look, length = current.ids.length;
  if (current.busy || length === 0 || length >= 240) return play(false);
  current.busy = true;
  const pass = await quick.ask("pass", "look");
  current.busy = false;
  if (number !== look_number) return;  // started again meanwhile
  pass.text = [...current.ids];  // as it was read
  if (pass.token !== undefined) current.ids.push(pass.token);
  current.passes.push(pass);
  [current.at, current.failed] = [current.passes.length - 1, null];
  show_look();
}

async function look_fail() {
  play(false);
  const current = look, failed = await quick.ask("fail", "look");
  if (current !== look) return;
  [look.failed, look.at] = [failed, look.passes.length - 1];
  show_look();
}

function look_back() {
  play(false);
  [look.at, look.failed] = [Math.max(0, look.at - 1), null];
  show_look();
}

function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(look_next, 700) : null;
  $("play").textContent = on ? "Pause" : "Play";
}

function show_look() {
  const pass = look.passes[look.at], last = look.at === look.passes.length - 1, kind = $("look-kind").value;
  [$("passes").max, $("passes").value] = [Math.max(0, look.passes.length - 1), Math.max(0, look.at)];
  $("passes").disabled = look.passes.length < 2;
  $("back").disabled = look.at < 1;
  $("next").disabled = $("play").disabled = look.ids.length === 0;
  $("fail").disabled = kind !== "full" || !last || look.ids.length === 0;
  $("layers-panel").hidden = kind !== "full";
  const text = pass ? pass.text : look.ids, texts = tokenizer.texts([...text, ...(pass && pass.token !== undefined ? [pass.token] : [])]);
  if (!pass) {
    figures("figures-look", {});
    $("cells").replaceChildren(...texts.map(token => cell("unread", "unread", token, 0)));
    $("most").textContent = "0%";
    draw_mask(null, texts);
  } else {
    const seen = new Set(pass.keys.filter((_, s) => pass.mask === null || pass.mask.some(row => row[s]))), n_new = pass.end - pass.first;
    const heads = pass.attention[$("layer").value].filter((_, head) => [String(head), "mean"].includes($("head").value));
    const shares = new Map(pass.keys.map((key, s) => [key, sum(heads.map(head => head[s])) / heads.length])), most = Math.max(...shares.values());
    figures("figures-look", {
      "keys computed, a layer": grouped(n_new), "keys read of earlier tokens": grouped(seen.size - n_new), "multiplications": grouped(pass.multiplications),
      "bytes of cache after it": grouped(pass.bytes), "ms": milliseconds(pass.ms),
    });
    const written = pass.token === undefined ? "It writes nothing: the prompt isn't at its end." : `It writes ${JSON.stringify(texts.at(-1))}.`;
    say("looked", `Pass ${look.at + 1}: reads ${n_new === 1 ? "token" : "tokens"} ${pass.first}${n_new > 1 ? ` to ${pass.end - 1}` : ""}. ${written}`);
    $("cells").replaceChildren(...texts.map((token, t) => {
      const share = shares.get(t) || 0;
      const state = t >= text.length ? "written" : t >= pass.end ? "unread" : t >= pass.first ? "new" : seen.has(t) ? "held" : "gone";
      return cell(state, state === "new" ? "computed" : state, token, share / most, `token ${t}, ${JSON.stringify(token)}: ${state === "new" ? "computed now" : state}` +
        (share ? `, attention ${(100 * share).toFixed(1)}%` : ""));
    }));
    $("most").textContent = `${(100 * most).toFixed(1)}%`;
    draw_mask(pass, texts);
  }
  if (look.failed) {
    const { entries, counted, fed } = look.failed;
    say("looked", `A pass over ${fed} ${fed === 1 ? "token" : "tokens"} failed in layer 3. The cache still counts ${counted}: the next pass writes over the rest.`);
    draw_layers(entries, counted);
  } else {
    draw_layers(new Array(n_layer).fill(pass ? pass.end : 0), pass ? pass.end : 0);
  }
}

function cell(state, label, token, shade, title = "") {
  const box = element("div", "", `cell ${state}${shade > 0.55 ? " dark" : ""}`), word = element("b", shown(token));
  word.style.setProperty("--share", shade);
  box.append(element("small", label), word);
  box.setAttribute("role", "listitem");
  box.title = title;
  if (title) box.setAttribute("aria-label", title);
  return box;
}

function draw_mask(pass, texts) {
  const svg = $("mask"), T = pass ? pass.end - pass.first : 0, S = pass ? pass.keys.length : 0, size = 16, left = 84, top = 84;
  svg.style.maxWidth = `${left + size * Math.max(12, S) + 10}px`;
  if (T * S === 0 || T * S > 6000) {
    svg.setAttribute("viewBox", "0 0 400 30");
    svg.replaceChildren();
    svg.setAttribute("aria-label", T * S === 0 ? "No pass yet" : `${T} queries and ${S} keys: too many to draw`);
    if (T * S > 0) svg.innerHTML = `<text x="0" y="20">${T} queries and ${S} keys: too many to draw</text>`;
    return;
  }
  svg.setAttribute("viewBox", `0 0 ${left + size * Math.max(12, S) + 10} ${top + size * T + 6}`);
  const sees = (t, s) => pass.mask === null ? pass.keys[s] <= pass.first + t : pass.mask[t][s];
  let drawn = "";
  for (let t = 0; t < T; t++)
    for (let s = 0; s < S; s++)
      drawn += `<rect x="${left + size * s}" y="${top + size * t}" width="${size - 1}" height="${size - 1}" class="${sees(t, s) ? "sees" : ""}"/>`;
  for (let t = 0; t < T; t++) drawn += `<text x="${left - 6}" y="${top + size * t + 12}" text-anchor="end"></text>`;
  for (let s = 0; s < S; s++) drawn += `<text transform="translate(${left + size * s + 12} ${top - 6}) rotate(-60)"></text>`;
  svg.innerHTML = drawn;
  const short = token => shown(token).trim().slice(0, 9), labels = svg.querySelectorAll("text");
  for (let t = 0; t < T; t++) labels[t].textContent = short(texts[pass.first + t]);
  for (let s = 0; s < S; s++) labels[T + s].textContent = short(texts[pass.keys[s]]);
  const counts = Array.from({ length: T }, (_, t) => pass.keys.filter((_, s) => sees(t, s)).length);
  svg.setAttribute("aria-label", `${T} queries, ${S} keys; the first query sees ${counts[0]}, the last ${counts[T - 1]}`);
}

function draw_layers(entries, counted) {
  const most = Math.max(1, ...entries);
  $("layers").replaceChildren(...entries.map((n, layer) => {
    const row = element("div"), bar = element("i"), rest = element("b");
    bar.style.width = `${100 * n / most}%`;
    rest.style.width = `${100 * Math.max(0, n - counted) / Math.max(1, n)}%`;
    bar.append(rest);
    row.append(element("span", `layer ${layer}`), bar, element("span", `${n}, counted ${counted}`));
    return row;
  }));
}

// --- 3. A smaller cache ---

let small = null;

async function write_small() {
  try {
    const count = whole("small-count", 1000), ids = prompt_ids(count), cache = cache_choice("small");
    const current = small = { ids, exact: [], passes: [], changes: [] };
    say("departed", "");
    [$("small-write").disabled, $("small-stop").disabled] = [true, false];
    await quick.ask("begin", "exact", ids, { kind: "full" });
    await quick.ask("begin", "small", ids, cache, 0, true);
    while (current === small && current.passes.length < count) {
      current.exact.push(await quick.ask("pass", "exact"));
      current.passes.push(await quick.ask("pass", "small"));
      soon("small", show_small);
    }
    if (current === small) say("departed", verdict());
  } catch (error) {
    complain("departed", error);
  }
  [$("small-write").disabled, $("small-stop").disabled] = [false, true];
}

async function change_small() {
  show_fields("small");
  if ($("small-write").disabled && small !== null) {
    try {
      const cache = cache_choice("small");
      await quick.ask("change", "small", cache);
      small.changes.push([small.passes.length, KINDS[cache.kind]]);
      say("departed", "");
    } catch (error) {
      complain("departed", error);
    }
  }
}

function departure() {  // the index of the first written token that differs from the full cache's text, or -1
  return small.passes.findIndex(({ token }, i) => token !== small.exact[i].token);
}

function show_small() {
  if (small.passes.length === 0) return;
  const { ids, exact, passes, changes } = small, apart = departure();
  const texts = run => tokenizer.texts([...ids, ...run.map(({ token }) => token)]).slice(ids.length);
  const spans = (run, other) => texts(run).flatMap((token, i) => {
    const span = element("span", token, [i === apart ? "apart" : "", other && passes[i].token !== passes[i].exact_token ? "differs" : ""].join(" ").trim());
    const change = other && changes.find(([at]) => at === i);
    return change ? [element("span", `[${change[1]}]`, "changed"), span] : [span];
  });
  for (const [name, run, other] of [["exact", exact, false], ["small", passes, true]]) {
    $(`text-${name}`).replaceChildren(element("span", tokenizer.texts(ids).join(""), "prompt"), ...spans(run, other));
    $(`text-${name}`).scrollTop = $(`text-${name}`).scrollHeight;
  }
  const last = passes.at(-1), mean = sum(passes.map(({ kl }) => kl)) / passes.length;
  figures("figures-exact", { "tokens written": grouped(exact.length), "bytes of cache": grouped(exact.at(-1).bytes), "ms, this token": milliseconds(exact.at(-1).ms) });
  figures("figures-small", {
    "tokens written": grouped(passes.length), "bytes of cache": grouped(last.bytes), "ms, this token": milliseconds(last.ms), "KL now, nats": last.kl.toFixed(4), "mean KL": mean.toFixed(4),
  });
  draw_divergence();
}

function draw_divergence() {
  const passes = small ? small.passes : [], apart = small ? departure() : -1;
  chart($("divergence"), "KL to a full cache, nats", "tokens of text", [{ name: "this cache", points: passes.map(({ end, kl }) => [end, kl]), main: true }],
    apart < 0 ? [] : [[passes[apart].end, "the texts part"]]);
}

function verdict() {
  const apart = departure(), bytes = `${grouped(small.passes.at(-1).bytes)} instead of ${grouped(small.exact.at(-1).bytes)} bytes`;
  const others = small.passes.filter(({ token, exact_token }) => token !== exact_token).length;
  return apart < 0 ? `The same text, in ${bytes}.` :
    `The texts part after ${grouped(apart)} new tokens. A full cache with the same text would have chosen another token at ${grouped(others)} of ${grouped(small.passes.length)} steps. ${bytes[0].toUpperCase() + bytes.slice(1)}.`;
}

// --- 4. Change the text in the middle ---

let held_ids = [], held_text = "";

function show_prefix() {
  const ids = tokenizer.encode($("edited").value), same = common_prefix(held_ids, ids), kept = Math.max(0, Math.min(same, ids.length - 1));
  const texts = tokenizer.texts(ids);
  $("reread").disabled = !quick || ids.length === 0 || ids.length > n_ctx;
  $("restore").disabled = $("edited").value === held_text;
  $("prefix-cells").replaceChildren(...texts.map((token, t) => cell(t < kept ? "held" : "new", t < kept ? "valid" : "to read", token, 0, `token ${t}, ${JSON.stringify(token)}: ${t < kept ? "valid" : "to read"}`)));
  if (ids.length === 0) return say("prefix", "No text: nothing can be read.");
  if (ids.length > n_ctx) return complain("prefix", new Error(`${grouped(ids.length)} tokens: the context holds ${grouped(n_ctx)}.`));
  const again = held_ids.slice(kept).length, why = same >= ids.length ? " The last token is read again, since the prediction comes from it." : "";
  say("prefix", held_ids.length === 0 ? `${grouped(ids.length)} tokens: none has been read yet.` :
    `Of the ${grouped(held_ids.length)} tokens in the cache, the first ${grouped(kept)} stay valid, and ${grouped(again)} go. To read: ${grouped(ids.length - kept)}.${why}`);
}

async function reread() {
  try {
    const text = $("edited").value, ids = tokenizer.encode(text), { kept, warm, cold, token, same } = await quick.ask("reread", ids);
    [held_ids, held_text] = [ids, text];
    if ($("edited").value !== text) return show_prefix();
    show_prefix();
    const next = JSON.stringify(tokenizer.texts([...ids, token]).at(-1));
    if (kept === 0) return say("prefix", `Read all ${grouped(ids.length)} tokens in ${milliseconds(warm)} ms. Now change a word.`);
    say("prefix", `Kept ${grouped(kept)} tokens and read ${grouped(ids.length - kept)} in ${milliseconds(warm)} ms; reading all ${grouped(ids.length)} takes ${milliseconds(cold)} ms. ` +
      `Next: ${next}, ${same ? "the same" : "not the same"} either way.`);
  } catch (error) {
    complain("prefix", error);
  }
}

// --- The page ---

function options(id, pairs, chosen) {
  $(id).replaceChildren(...pairs.map(([value, words]) => new Option(words, value, false, value === chosen)));
}

function stop() {
  write_number++;
  say("written", "Stopped.");
}

function prepare() {
  options("prompts", PROMPTS.map((text, i) => [String(i), text.length > 44 ? `${text.slice(0, 40).replace(/\n/g, " ")} …` : text]), "0");
  options("look-kind", [["none", "no cache"], ...Object.entries(KINDS)], "full");
  options("small-kind", Object.entries(KINDS), "window");
  options("layer", Array.from({ length: n_layer }, (_, layer) => [String(layer), `layer ${layer}`]), String(n_layer - 1));
  options("head", [["mean", "all heads, the mean"], ...Array.from({ length: n_head }, (_, head) => [String(head), `head ${head}`])], "mean");
  $("prompt").value = PROMPTS[0];
  $("edited").value = STORY;
  $("prompts").onchange = () => {
    $("prompt").value = PROMPTS[$("prompts").value];
    look_again();
  };
  $("prompt").onchange = look_again;
  $("write").onclick = write;
  $("stop").onclick = stop;
  for (const id of ["look-kind", "look-window", "look-sinks", "chunk"]) $(id).onchange = () => {
    show_fields("look");
    look_again();
  };
  $("layer").onchange = $("head").onchange = show_look;
  $("again").onclick = look_again;
  $("back").onclick = look_back;
  $("next").onclick = () => {
    play(false);
    look_next();
  };
  $("play").onclick = () => play(!playing);
  $("fail").onclick = look_fail;
  $("passes").oninput = () => {
    play(false);
    [look.at, look.failed] = [Number($("passes").value), null];
    show_look();
  };
  $("cells").closest("section").onkeydown = event => {
    const button = { ArrowLeft: "back", ArrowRight: "next" }[event.key];
    if (button === undefined || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    event.preventDefault();
    $(button).click();
  };
  for (const id of ["small-kind", "small-window", "small-sinks"]) $(id).onchange = change_small;
  $("small-write").onclick = write_small;
  $("small-stop").onclick = () => {
    say("departed", small.passes.length ? verdict() : "");
    small = { ...small };  // another one: the loop ends
  };
  $("edited").oninput = show_prefix;
  $("reread").onclick = reread;
  $("restore").onclick = () => {
    $("edited").value = held_text;
    show_prefix();
  };
  show_fields("look");
  show_fields("small");
  window.onresize = () => {
    soon("times", draw_times);
    soon("divergence", draw_divergence);
  };
  window.onresize();
  $("site").hidden = !location.protocol.startsWith("http");
}

async function load() {
  try {
    const started = performance.now();
    [slow, quick] = [new Machine(), new Machine()];
    await Promise.all([slow.ask("load", WEIGHTS), quick.ask("load", WEIGHTS)]);
    say("loading", `Ready: loaded in ${grouped(performance.now() - started)} ms.`);
    for (const id of ["write", "again", "small-write"]) $(id).disabled = false;
    await look_again();
    await look_next();
    await reread();
    if (location.hash === "#begin") write();  // index.html#begin writes at once
  } catch (error) {
    complain("loading", error);
  }
}

prepare();
load();
