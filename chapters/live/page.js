"use strict";
// The page: it asks for passes, and draws what comes back.

const $ = id => document.getElementById(id);
const tokenizer = new Encoding(WEIGHTS.ranks, WEIGHTS.end_of_text);
const { n_ctx, n_layer, n_head } = WEIGHTS.config;
const STORY =
  "Halek lived in Tolben, where people buy copper bells. On a sunny evening late in May, he and his friend Halina packed " +
  'for a long walk. "The secret word is anvil," whispered Halek. "Without it the gate stays shut." A goat blocked the narrow ' +
  "bridge and would not move. Halina offered it an apple, and then her hat, and at last it let them by. The keeper would not move until Halina said";
const PROMPTS = [
  "Halek lived in",
  "The month in which",
  "One morning",
  "How do you fold a paper boat?",
  "Question: What is the name of the wood nearest to Wexcombe?\nAnswer:",
  STORY,
];
const WINDOWS = { window: "window", sinks: "sinks and a window" };
const BITS = { "bits:8": "8 bits", "bits:4": "4 bits", "bits:2": "2 bits" };

const grouped = number => Math.round(number).toLocaleString("en-US");
const milliseconds = ms => (ms < 10 ? ms.toFixed(1) : grouped(ms));
const counted = (n, thing) => `${grouped(n)} ${thing}${n === 1 ? "" : "s"}`;
const sum = numbers => numbers.reduce((total, number) => total + number, 0);
const shown = token => token.replace(/\n/g, "↵");

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// A list of figures, each with its name.
function figures(id, rows) {
  $(id).replaceChildren(
    ...Object.entries(rows).map(([name, value]) => {
      const box = element("div");
      box.append(element("dt", name), element("dd", value));
      return box;
    }),
  );
}

// Draw lines of points [x, y]; `main` is the solid one. marks: the x of vertical lines, with their
// words.
function chart(svg, title, unit, lines, marks = []) {
  const all = lines.flatMap(({ points }) => points);
  const width = Math.max(300, svg.clientWidth);
  const left = 56;
  const right = width - 12;
  const top = 34;
  const bottom = 190;
  svg.setAttribute("viewBox", `0 0 ${width} 220`);
  const [from, to] = [
    Math.min(...all.map(([x]) => x), ...(all.length ? [] : [0])),
    Math.max(1, ...all.map(([x]) => x)),
  ];
  const most = Math.max(1e-9, ...all.map(([, y]) => y));
  const x = value => left + ((right - left) * (value - from)) / Math.max(1, to - from);
  const y = value => bottom - ((bottom - top) * value) / most;
  const text = (x, y, words, anchor = "start", more = "") =>
    `<text x="${x}" y="${y}" text-anchor="${anchor}" ${more}>${words}</text>`;
  let drawn =
    `<path class="axis" d="M${left} ${top}V${bottom}H${right}"/>` +
    text(left, 16, title) +
    text(left - 6, bottom + 4, "0", "end");
  if (all.length)
    drawn +=
      text(left - 6, top + 6, most >= 10 ? grouped(most) : most.toPrecision(2), "end") +
      text(left, bottom + 20, grouped(from)) +
      text(right, bottom + 20, `${grouped(to)} ${unit}`, "end");
  for (const [at, words] of marks)
    drawn +=
      `<line class="mark" x1="${x(at)}" x2="${x(at)}" y1="${top}" y2="${bottom}"/>` +
      (x(at) > width - 150
        ? text(x(at) - 4, top + 8, words, "end")
        : text(x(at) + 4, top + 8, words));
  for (const { name, points, main } of lines.filter(({ points }) => points.length)) {
    const path = points
      .map(([px, py], i) => `${i ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`)
      .join("");
    const [last_x] = points.at(-1);
    const near_end = points.filter(([px]) => x(px) > x(last_x) - 150);
    const highest = Math.max(...near_end.map(([, py]) => py));
    drawn +=
      `<path class="${main ? "main" : ""}" d="${path}"/>` +
      text(
        Math.min(right, Math.max(left + 110, x(last_x))),
        Math.max(top - 4, y(highest) - 8),
        name,
        "end",
        main ? 'font-weight="bold"' : "",
      );
  }
  svg.innerHTML = drawn;
}

// Only the page's own words and numbers are ever drawn as HTML; what was typed and written is set
// as text.

function complain(id, error) {
  $(id).textContent = error.message;
  $(id).classList.add("error");
}

function say(id, words) {
  $(id).textContent = words;
  $(id).classList.remove("error");
}

// The number in a field. Throws an Error with what was given and what is allowed.
function whole(id) {
  const given = $(id).value.trim();
  const [least, most] = [Number($(id).min), Number($(id).max)];
  const number = Number(given);
  if (given === "" || !Number.isInteger(number) || number < least || number > most) {
    const name = $(id).closest("label").firstChild.textContent.trim();
    throw new Error(
      `${name}: ${given === "" ? "nothing" : given} was given; whole numbers from ${least} to ${grouped(most)} are allowed.`,
    );
  }
  return number;
}

// The prompt's tokens. Throws an Error if there is none, or no room for count more.
function prompt_ids(count = 1) {
  const ids = tokenizer.encode($("prompt").value);
  if (ids.length === 0) throw new Error("The prompt is empty: type at least one character.");
  if (ids.length + count > n_ctx)
    throw new Error(
      `A prompt of ${counted(ids.length, "token")} and ${grouped(count)} new: the context holds ${grouped(n_ctx)}.`,
    );
  return ids;
}

// What is chosen in a part's fields.
function cache_choice(part) {
  const kind = $(`${part}-kind`).value;
  return {
    kind,
    window: kind in WINDOWS ? whole(`${part}-window`) : 1,
    sinks: kind === "sinks" ? whole(`${part}-sinks`) : 0,
  };
}

// Only the fields that the kind of cache has.
function show_fields(part) {
  const section = $(`${part}-kind`).closest("section");
  const kind = $(`${part}-kind`).value;
  section.querySelector(".window").hidden = !(kind in WINDOWS);
  section.querySelector(".sinks").hidden = kind !== "sinks";
}

const waiting_draws = new Map();

// Draw at the screen's next frame, however often it is asked for until then.
function soon(name, draw) {
  if (waiting_draws.size === 0) requestAnimationFrame(draw_now);
  waiting_draws.set(name, draw);
}

function draw_now() {
  const draws = [...waiting_draws.values()];
  waiting_draws.clear();
  for (const draw of draws) draw();
}

let slow;
let quick; // two machines: writing without a cache must not hold up the rest

// --- 1. Write with and without a cache ---

const writing = {}; // by side: the passes so far, or nothing
let write_number = 0;

async function write() {
  if ($("write").disabled) return;
  try {
    const count = whole("count");
    const ids = prompt_ids(count);
    const number = ++write_number;
    say("written", "");
    writing_now("write", "stop", true);
    await Promise.all([
      write_side("none", slow, ids, count, number),
      write_side("full", quick, ids, count, number),
    ]);
    conclude(ids, number === write_number ? "" : "Stopped. ");
  } catch (error) {
    complain("written", error);
  }
  writing_now("write", "stop", false);
}

// Change which of two buttons can be pressed, and let the focus follow.
function writing_now(write, stop, on) {
  const focused = [$(write), $(stop)].includes(document.activeElement);
  $(write).disabled = on;
  $(stop).disabled = !on;
  if (focused) $(on ? stop : write).focus();
}

async function write_side(side, machine, ids, count, number) {
  const passes = (writing[side] = []);
  const show = () => {
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
  const texts = tokenizer.texts([...ids, ...passes.map(({ token }) => token)]);
  const text = $(`text-${side}`);
  const last = passes.at(-1);
  text.replaceChildren(
    element("span", texts.slice(0, ids.length).join(""), "prompt"),
    texts.slice(ids.length).join(""),
  );
  text.scrollTop = text.scrollHeight;
  figures(
    `figures-${side}`,
    last === undefined
      ? {}
      : {
          "tokens written": grouped(passes.length),
          "ms, this token": milliseconds(last.ms),
          "tokens computed": `${grouped(last.end - last.first)} of ${grouped(last.end)}`,
          multiplications: grouped(last.multiplications),
          "multiplications so far": grouped(sum(passes.map(pass => pass.multiplications))),
          "bytes of cache": grouped(last.bytes),
        },
  );
}

function draw_times() {
  const line = side => (writing[side] || []).slice(1).map(({ end, ms }) => [end, ms]); // the first pass reads the prompt
  chart($("times"), "milliseconds a token", "tokens of text", [
    { name: "without a cache", points: line("none") },
    { name: "with a KV cache", points: line("full"), main: true },
  ]);
}

// Say how the two sides compare, over the tokens that both have written.
function conclude(ids, before) {
  draw_now();
  const n = Math.min(writing.full.length, writing.none.length);
  const [none, full] = [writing.none.slice(0, n), writing.full.slice(0, n)];
  const seconds = passes => sum(passes.map(({ ms }) => ms)) / 1000;
  const ratio = seconds(none) / seconds(full);
  const same = full.every(({ token }, i) => token === none[i].token);
  if (n === 0) return say("written", before);
  say(
    "written",
    `${before}${counted(n, "token")} after ${grouped(ids.length)}: ` +
      `${seconds(none).toFixed(1)} s without a cache, ${seconds(full).toFixed(1)} s with one, ` +
      `${ratio.toFixed(ratio < 10 ? 1 : 0)} times as fast. The same text: ${same ? "yes" : "no"}.`,
  );
}

// --- 2. Look into a pass ---

const SHOWN_PROMPT = 200;
const SHOWN_TOKENS = 240; // what this part shows at most
let look = { passes: [], at: -1, ids: [] };
let playing = null;

async function look_again() {
  play(false);
  const current = (look = { passes: [], at: -1, ids: [] });
  show_look();
  try {
    const ids = prompt_ids();
    const cache = cache_choice("look");
    const chunk = Number($("chunk").value) || Infinity;
    if (ids.length > SHOWN_PROMPT)
      throw new Error(
        `The prompt has ${grouped(ids.length)} tokens: this part shows at most ${SHOWN_PROMPT}.`,
      );
    await quick.ask("begin", "look", ids, cache, { chunk, watched: true });
    if (current !== look) return; // begun again meanwhile
    look.ids = ids;
    say("looked", "Nothing has been read yet.");
  } catch (error) {
    complain("looked", error);
  }
  show_look();
}

async function look_next() {
  if (look.at === look.passes.length - 1) return look_ask("pass");
  look.at++;
  show_look();
}

// Another pass, or one that fails.
async function look_ask(method) {
  const current = look;
  if (current.busy) return;
  current.busy = true;
  try {
    const pass = await quick.ask(method, "look");
    if (current !== look) return;
    pass.text = [...look.ids]; // as it was read
    if (pass.token !== undefined) look.ids.push(pass.token);
    look.passes.push(pass);
    look.at = look.passes.length - 1;
    show_look();
  } catch (error) {
    complain("looked", error);
  } finally {
    current.busy = false;
  }
}

function look_at(at) {
  play(false);
  look.at = Math.max(0, at);
  show_look();
}

function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(look_next, 700) : null;
  $("play").textContent = on ? "Pause" : "Play";
}

function show_look() {
  const pass = look.passes[look.at];
  const last = look.at === look.passes.length - 1;
  const full = last && look.ids.length >= SHOWN_TOKENS;
  if (full) play(false);
  [$("passes").max, $("passes").value] = [
    Math.max(0, look.passes.length - 1),
    Math.max(0, look.at),
  ];
  $("passes").disabled = look.passes.length < 2;
  const focused = document.activeElement;
  $("back").disabled = look.at < 1;
  $("next").disabled = $("play").disabled = look.ids.length === 0 || full;
  $("fail").disabled = $("look-kind").value !== "full" || !last || look.ids.length === 0 || full;
  if (focused.disabled) ($("next").disabled ? $("again") : $("next")).focus(); // keys go on working
  $("slots-panel").hidden = !pass || !pass.slots;
  $("layers-panel").hidden = !pass || !pass.entries;
  const text = pass ? pass.text : look.ids;
  const texts = tokenizer.texts(pass && pass.token !== undefined ? [...text, pass.token] : text);
  $("strongest").hidden = !pass || pass.failed;
  if (pass && !pass.failed) show_pass(pass, texts);
  else {
    const failed = t => pass && t >= pass.first && t < pass.end;
    const read = t => pass && t < pass.first;
    figures("figures-look", {});
    $("cells").replaceChildren(
      ...texts.map((token, t) => {
        const label = read(t) ? "held" : failed(t) ? "not counted" : "unread";
        return cell(
          read(t) ? "held" : "unread",
          label,
          token,
          0,
          `token ${t}, ${JSON.stringify(token)}: ${label}`,
        );
      }),
    );
    draw_mask([], [], null, []);
    if (pass)
      say(
        "looked",
        `Pass ${look.at + 1}, over ${range(pass)}, failed in layer 3. The cache still counts ${grouped(pass.entries.counted)}.`,
      );
  }
  if (full)
    say("looked", `${$("looked").textContent} This part shows at most ${SHOWN_TOKENS} tokens.`);
  if (pass && pass.entries) draw_layers(pass.entries);
  if (pass && pass.slots) draw_slots(pass, texts);
}

function range({ first, end }) {
  return end - first === 1 ? `token ${first}` : `tokens ${first} to ${end - 1}`;
}

function show_pass(pass, texts) {
  const { first, end, mask } = pass;
  const order = [...pass.keys.keys()].sort((a, b) => pass.keys[a] - pass.keys[b]); // a ring's keys are in its slots' order
  const keys = order.map(s => pass.keys[s]);
  const queries = Array.from({ length: end - first }, (_, t) => first + t);
  const sees = (t, s) => (mask === null ? keys[s] <= queries[t] : mask[t][order[s]]);
  const seen = new Set(keys.filter((_, s) => queries.some((_, t) => sees(t, s))));
  const shares = attention_shares(pass);
  const most = Math.max(...shares.values());
  figures("figures-look", {
    "keys computed per layer": grouped(queries.length),
    "earlier keys read": grouped(seen.size - queries.length),
    multiplications: grouped(pass.multiplications),
    "bytes of cache after it": grouped(pass.bytes),
    ms: milliseconds(pass.ms),
  });
  say(
    "looked",
    `Pass ${look.at + 1} reads ${range(pass)}. ` +
      (pass.token === undefined
        ? "There is more of the prompt to read."
        : `It writes ${JSON.stringify(texts.at(-1))}.`),
  );
  $("cells").replaceChildren(
    ...texts.map((token, t) => {
      const share = shares.get(t) || 0;
      const state =
        t >= pass.text.length
          ? "written"
          : t >= end
            ? "unread"
            : t >= first
              ? "new"
              : seen.has(t)
                ? "held"
                : "gone";
      const label = state === "new" ? "computed" : state;
      const attention = share ? `, attention ${(100 * share).toFixed(1)}%` : "";
      return cell(
        state,
        label,
        token,
        share / most,
        `token ${t}, ${JSON.stringify(token)}: ${label}${attention}`,
      );
    }),
  );
  $("most").textContent = `${(100 * most).toFixed(1)}%`;
  draw_mask(queries, keys, sees, texts);
}

function cell(state, label, token, share, title) {
  const box = element("div", "", `cell ${state}`);
  const word = element("b", shown(token));
  word.style.setProperty("--share", share);
  box.append(element("small", label), word);
  box.setAttribute("role", "listitem");
  box.setAttribute("aria-label", title);
  box.title = title;
  return box;
}

function draw_mask(queries, keys, sees, texts) {
  const svg = $("mask");
  const [T, S] = [queries.length, keys.length];
  $("mask-panel").hidden = T === 0; // before the first pass, and after one that failed
  const labelled = S <= 48;
  const size = S <= 16 ? 24 : labelled ? 16 : 6;
  const left = labelled ? 84 : 2;
  const top = left;
  const width = left + size * Math.max(12, S) + 10;
  svg.setAttribute("viewBox", `0 0 ${width} ${Math.max(20, top + size * T + 6)}`);
  svg.style.maxWidth = `${width}px`;
  let all = "";
  let seen = "";
  for (let t = 0; t < T; t++)
    for (let s = 0; s < S; s++) {
      const box = `M${left + size * s} ${top + size * t}h${size - 1}v${size - 1}h${1 - size}z`;
      all += box;
      if (sees(t, s)) seen += box;
    }
  svg.innerHTML = `<path class="box" d="${all}"/><path class="sees" d="${seen}"/>`;
  const label = (token, place) => {
    const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
    text.textContent = shown(texts[token]).trim().slice(0, 9);
    for (const [name, value] of Object.entries(place)) text.setAttribute(name, value);
    svg.append(text);
  };
  if (labelled) {
    queries.forEach((token, t) =>
      label(token, { x: left - 6, y: top + size * (t + 0.75), "text-anchor": "end" }),
    );
    keys.forEach((token, s) =>
      label(token, { transform: `translate(${left + size * (s + 0.75)} ${top - 6}) rotate(-60)` }),
    );
  }
  const count = t => keys.filter((_, s) => sees(t, s)).length;
  svg.setAttribute(
    "aria-label",
    T === 0
      ? "No mask"
      : `Queries: ${T}. Keys: ${S}. The first query sees ${count(0)}, the last ${count(T - 1)}.`,
  );
}

function draw_slots(pass, texts) {
  const { held, count, sinks, evicted } = pass.slots;
  const shares = attention_shares(pass);
  const most = Math.max(...shares.values());
  const box = slot => {
    const key = held[slot];
    const name = `slot ${slot}${slot < sinks ? ", sink" : ""}`;
    if (key === undefined) return cell("unread", name, " ", 0, `${name}: empty`);
    const [state, more] = evicted.includes(key) ? ["gone", ", evicted"] : ["held", ""];
    return cell(
      state,
      name,
      texts[key],
      (shares.get(key) || 0) / most,
      `${name}: token ${key}, ${JSON.stringify(texts[key])}${more}`,
    );
  };
  $("slots").replaceChildren(...Array.from({ length: count }, (_, slot) => box(slot)));
}

// By token: the share of attention in the chosen layer and head, or the mean of its heads.
function attention_shares(pass) {
  const chosen = $("head").value;
  const heads = pass.attention[$("layer").value].filter(
    (_, head) => chosen === "mean" || chosen === String(head),
  );
  return new Map(pass.keys.map((key, s) => [key, sum(heads.map(head => head[s])) / heads.length]));
}

function draw_layers({ layers, counted }) {
  const most = Math.max(1, ...layers);
  $("layers").replaceChildren(
    ...layers.map((n, layer) => {
      const row = element("div");
      const bar = element("i");
      const rest = element("b");
      bar.style.width = `${(100 * n) / most}%`;
      rest.style.width = `${(100 * Math.max(0, n - counted)) / Math.max(1, n)}%`;
      bar.append(rest);
      row.append(
        element("span", `layer ${layer}`),
        bar,
        element("span", `${n}, counted ${counted}`),
      );
      return row;
    }),
  );
}

// --- 3. A smaller cache ---

let small = null;

async function write_small() {
  if ($("small-write").disabled) return;
  const start = () => {
    const count = whole("small-count");
    return {
      count,
      ids: prompt_ids(count),
      cache: cache_choice("small"),
      exact: [],
      passes: [],
      changes: [],
      stopped: false,
    };
  };
  try {
    const current = (small = start());
    say("departed", "");
    writing_now("small-write", "small-stop", true);
    await quick.ask("begin", "exact", small.ids, { kind: "full" });
    await quick.ask("begin", "small", small.ids, small.cache, { compared: true });
    while (!current.stopped && current.passes.length < current.count) {
      const [exact, pass] = [await quick.ask("pass", "exact"), await quick.ask("pass", "small")];
      current.exact.push(exact);
      current.passes.push(pass);
      soon("small", show_small);
    }
    say("departed", verdict());
  } catch (error) {
    complain("departed", error);
  }
  writing_now("small-write", "small-stop", false);
}

async function change_small() {
  show_fields("small");
  if (!$("small-write").disabled || small === null) return;
  try {
    const cache = cache_choice("small");
    const at = small.passes.length;
    await quick.ask("change", "small", cache);
    const words = `${name_of(cache.kind)}${cache.kind in WINDOWS ? ` of ${cache.window}` : ""}`;
    small.changes = [...small.changes.filter(change => change.at !== at), { at, words }];
    say("departed", "");
  } catch (error) {
    complain("departed", new Error(`${error.message} The cache hasn't been changed.`));
  }
}

function name_of(kind) {
  return { full: "full cache", ...WINDOWS, ...BITS }[kind];
}

// The index of the first written token that differs from the full cache's text, or -1.
function departure() {
  return small.passes.findIndex(({ token }, i) => token !== small.exact[i].token);
}

function show_small() {
  if (small.passes.length === 0) return;
  const { ids, exact, passes, changes } = small;
  const apart = departure();
  const texts = run =>
    tokenizer.texts([...ids, ...run.map(({ token }) => token)]).slice(ids.length);
  const spans = (run, other) =>
    texts(run).flatMap((token, i) => {
      const differs = other && passes[i].token !== passes[i].exact_token;
      const span = element("span", token);
      span.classList.toggle("apart", i === apart);
      span.classList.toggle("differs", differs);
      if (token.startsWith("\n")) span.dataset.line = "↵"; // else nothing of it is seen
      const change = other && changes.find(({ at }) => at === i);
      return change ? [element("span", `[${change.words}]`, "changed"), span] : [span];
    });
  for (const [name, run, other] of [
    ["exact", exact, false],
    ["small", passes, true],
  ]) {
    $(`text-${name}`).replaceChildren(
      element("span", tokenizer.texts(ids).join(""), "prompt"),
      ...spans(run, other),
    );
    $(`text-${name}`).scrollTop = $(`text-${name}`).scrollHeight;
  }
  const last = passes.at(-1);
  const mean = sum(passes.map(({ kl }) => kl)) / passes.length;
  figures("figures-exact", {
    "tokens written": grouped(exact.length),
    "bytes of cache": grouped(exact.at(-1).bytes),
    "ms, this token": milliseconds(exact.at(-1).ms),
  });
  figures("figures-small", {
    "tokens written": grouped(passes.length),
    "bytes of cache": grouped(last.bytes),
    "ms, this token": milliseconds(last.ms),
    "KL now, nats": last.kl.toFixed(4),
    "mean KL": mean.toFixed(4),
  });
  draw_divergence();
}

function draw_divergence() {
  const passes = small ? small.passes : [];
  const apart = small ? departure() : -1;
  chart(
    $("divergence"),
    "KL to a full cache, nats",
    "tokens of text",
    [{ name: "this cache", points: passes.map(({ end, kl }) => [end, kl]), main: true }],
    apart < 0 ? [] : [[passes[apart].end, "the texts diverge"]],
  );
}

function verdict() {
  draw_now();
  const { passes, exact } = small;
  const apart = departure();
  if (passes.length === 0) return "Stopped.";
  const bytes = `Bytes of cache: ${grouped(passes.at(-1).bytes)}, full: ${grouped(exact.at(-1).bytes)}.`;
  const others = passes.filter(({ token, exact_token }) => token !== exact_token).length;
  return apart < 0
    ? `The same ${counted(passes.length, "token")}. ${bytes}`
    : `The texts diverge after ${counted(apart, "new token")}. ` +
        `At ${grouped(others)} of ${counted(passes.length, "step")} a full cache would have chosen another token after the same text. ${bytes}`;
}

// --- 4. Change the text in the middle ---

let held_ids = [];
let held_text = "";
let rereading = false;
let stayed = 0; // tokens that the last reading didn't read; all of them once the text was changed

function show_prefix() {
  const ids = tokenizer.encode($("edited").value);
  const same = common_prefix_length(held_ids, ids);
  const unchanged = same === ids.length && same === held_ids.length;
  const kept = unchanged ? same : Math.max(0, Math.min(same, ids.length - 1));
  $("reread").disabled = !quick || ids.length === 0 || ids.length > n_ctx || rereading;
  $("restore").disabled = $("edited").value === held_text;
  $("prefix-cells").replaceChildren(
    ...tokenizer.texts(ids).map((token, t) => {
      const valid = t < (unchanged ? stayed : kept);
      const label = valid ? "valid" : !unchanged ? "to read" : stayed > 0 ? "read again" : "read";
      return cell(
        valid ? "held" : "new",
        label,
        token,
        0,
        `token ${t}, ${JSON.stringify(token)}: ${label}`,
      );
    }),
  );
  if (ids.length === 0) return say("prefix", "No text: nothing can be read.");
  if (ids.length > n_ctx)
    return complain(
      "prefix",
      new Error(`${grouped(ids.length)} tokens: the context holds ${grouped(n_ctx)}.`),
    );
  if (unchanged) return say("prefix", `The cache holds all ${grouped(ids.length)} tokens.`);
  const why =
    same >= ids.length ? " The last token is read again, since the prediction comes from it." : "";
  say(
    "prefix",
    `Of the ${counted(held_ids.length, "token")} in the cache, ${grouped(kept)} stay${kept === 1 ? "s" : ""} valid and ${grouped(held_ids.length - kept)} don't. To read: ${grouped(ids.length - kept)}.${why}`,
  );
}

async function reread() {
  rereading = true;
  say("prefix", "Reading …");
  $("reread").disabled = true;
  try {
    const text = $("edited").value;
    const ids = tokenizer.encode(text);
    const { kept, warm, cold } = await quick.ask("reread", ids);
    [held_ids, held_text, rereading, stayed] = [ids, text, false, kept];
    show_prefix();
    if ($("edited").value !== text) return; // changed again meanwhile
    const next = `Next: ${JSON.stringify(tokenizer.texts([...ids, warm.token]).at(-1))}`;
    const read = counted(ids.length - kept, "token");
    say(
      "prefix",
      kept === 0
        ? `Read all ${counted(ids.length, "token")} in ${milliseconds(warm.ms)} ms. ${next}. Now change a word.`
        : `Kept ${grouped(kept)} and read ${read} in ${milliseconds(warm.ms)} ms; reading all ${grouped(ids.length)} takes ${milliseconds(cold.ms)} ms. ` +
            `${next}, ${warm.token === cold.token ? "the same" : "not the same"} either way.`,
    );
  } catch (error) {
    rereading = false;
    show_prefix();
    complain("prefix", error);
  }
}

// --- The page ---

function options(id, pairs, chosen) {
  $(id).replaceChildren(
    ...pairs.map(([value, words]) => new Option(words, value, false, value === chosen)),
  );
}

function stop() {
  write_number++; // the loops end
}

function prepare() {
  options(
    "prompts",
    PROMPTS.map((text, i) => [
      String(i),
      text.length > 44 ? `${text.slice(0, 40).replace(/\n/g, " ")} …` : text,
    ]),
    "0",
  );
  options("look-kind", Object.entries({ none: "no cache", full: "KV cache", ...WINDOWS }), "full");
  options("small-kind", Object.entries({ full: "full cache", ...WINDOWS, ...BITS }), "window");
  options(
    "layer",
    Array.from({ length: n_layer }, (_, layer) => [String(layer), `layer ${layer}`]),
    String(n_layer - 1),
  );
  options(
    "head",
    [
      ["mean", "mean of all"],
      ...Array.from({ length: n_head }, (_, head) => [String(head), `head ${head}`]),
    ],
    "mean",
  );
  $("prompt").value = PROMPTS[0];
  $("edited").value = STORY;
  $("prompts").onchange = () => {
    $("prompt").value = PROMPTS[$("prompts").value];
    look_again();
  };
  let typed;
  $("prompt").oninput = () => {
    clearTimeout(typed);
    typed = setTimeout(look_again, 300);
  };
  $("write").onclick = write;
  $("stop").onclick = stop;
  for (const id of ["look-kind", "look-window", "look-sinks", "chunk"])
    $(id).onchange = () => {
      show_fields("look");
      $("chunk").disabled = $("look-kind").value === "none"; // then each pass reads the whole text
      look_again();
    };
  $("layer").onchange = $("head").onchange = show_look;
  $("again").onclick = look_again;
  $("back").onclick = () => look_at(look.at - 1);
  $("next").onclick = () => {
    play(false);
    look_next();
  };
  $("play").onclick = () => play(!playing);
  $("fail").onclick = () => {
    play(false);
    look_ask("fail");
  };
  $("passes").oninput = () => look_at(Number($("passes").value));
  $("cells").closest("section").onkeydown = event => {
    const button = { ArrowLeft: "back", ArrowRight: "next" }[event.key];
    if (
      button === undefined ||
      ["INPUT", "SELECT"].includes(event.target.tagName) ||
      event.altKey ||
      event.ctrlKey ||
      event.metaKey
    )
      return;
    event.preventDefault();
    $(button).click();
  };
  for (const id of ["small-kind", "small-window", "small-sinks"]) $(id).onchange = change_small;
  $("small-write").onclick = write_small;
  for (const [field, start] of [
    ["count", write],
    ["small-count", write_small],
  ])
    $(field).onkeydown = event => {
      if (event.key === "Enter") start();
    };
  $("small-stop").onclick = () => {
    small.stopped = true;
  };
  $("edited").oninput = () => {
    stayed = Infinity;
    show_prefix();
  };
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
    [slow, quick] = [new Machine(), new Machine()];
    await Promise.all([slow.ask("load", WEIGHTS), quick.ask("load", WEIGHTS)]);
    say("loading", "");
    for (const id of ["write", "again", "small-write", "reread"]) $(id).disabled = false;
    await look_again();
    await look_next();
    await write(); // nobody has to press a button to see the difference
    await reread();
  } catch (error) {
    complain("loading", error);
  }
}

prepare();
load();
