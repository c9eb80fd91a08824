"use strict";
/* The dashboard: listens to /api/events, draws what it hears, and sends what the controls ask for.

     /api/events ── status, pools, decision, problem ──> history (3 minutes) ──> tables and plots, once a second
     controls ── POST, with the key ──> a sentence: done, or why not

   Rows and cards are made once and then changed in place, so that focus, open forms and half-typed words stay. Everything that
   comes from elsewhere is put in as text, never as HTML. The key lives in this tab alone. */

const WINDOW_S = 180;
const KEPT_DECISIONS = 200;
const RETRY_MS = [1000, 2000, 4000, 8000];
const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");

const state = { status: null, pools: [], paused: false, plots: true, plotted: 0 };

/* ---- words for figures ---- */

function bytes(count) {
  if (count === null || count === undefined) return "none";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${at === 0 || count >= 100 ? Math.round(count) : count.toFixed(1).replace(/\.0$/, "")} ${units[at]}`;
}

function seconds(count) {
  if (count === null || count === undefined) return "–";
  if (count < 60) return `${Math.floor(count)} s`;
  if (count < 3600) return `${Math.floor(count / 60)} min`;
  if (count < 172800) return `${Math.floor(count / 3600)} h`;
  return `${Math.floor(count / 86400)} d`;
}

function millis(count) {
  if (count === null || count === undefined) return "–";
  if (count >= 10000) return `${(count / 1000).toFixed(1)} s`;
  return `${count >= 100 ? Math.round(count) : count.toFixed(1)} ms`;
}

const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;
const rate = (count) => (count === null || count === undefined ? "–" : count.toFixed(count < 10 ? 2 : 0));
const pair = (word, both) => `${word(both?.p50)} / ${word(both?.p99)}`;

/* ---- elements ---- */

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** Changes text only where it differs, so that nothing is announced or drawn for nothing. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const fromTemplate = (id) => $(id).content.firstElementChild.cloneNode(true);

/** One element for each name, in their order: made once, kept while the name is there. */
class Keyed {
  constructor(parent, create) {
    Object.assign(this, { parent, create, kept: new Map() });
  }
  show(names) {
    this.parent.querySelectorAll(":scope > .empty").forEach((empty) => { empty.hidden = names.length > 0; });
    for (const [name, kept] of this.kept) {
      if (!names.includes(name)) { kept.element.remove(); this.kept.delete(name); }
    }
    let before = null;
    return names.map((name) => {
      if (!this.kept.has(name)) this.kept.set(name, this.create(name));
      const kept = this.kept.get(name);
      const place = before ? before.nextElementSibling : this.parent.querySelector(":scope > :not(.empty)");
      if (place !== kept.element) this.parent.insertBefore(kept.element, place);
      before = kept.element;
      return kept;
    });
  }
}

/** A small table of names and values that is changed in place. */
class Figures {
  constructor(body) {
    this.rows = new Keyed(body, (name) => {
      const [key, value] = [make("span"), make("td", { className: "number" })];
      key.setAttribute("aria-hidden", "true");
      const head = make("th", { scope: "row" }, key, make("span", { textContent: name }));
      return { element: make("tr", {}, head, value), key, value };
    });
  }
  show(rows) {
    const shown = this.rows.show(rows.map((row) => row.name));
    shown.forEach((kept, at) => {
      kept.key.className = rows[at].key ? `key ${rows[at].key}` : "";
      say(kept.value, rows[at].value);
    });
  }
}

/* ---- history and plots ---- */

/** Samples of the last minutes under one name: {at, ...figures}. */
class History {
  constructor() { this.samples = new Map(); }
  add(name, sample) {
    if (!this.samples.has(name)) this.samples.set(name, []);
    const samples = this.samples.get(name);
    samples.push(sample);
    while (samples[0].at < sample.at - WINDOW_S - 2) samples.shift();
  }
  of(name) { return this.samples.get(name) ?? []; }
  keep(names) {
    for (const name of this.samples.keys()) if (!names.includes(name)) this.samples.delete(name);
  }
}

const WIDTH = 600, HEIGHT = 100;

/** Areas one upon the other, and lines. What it shows is also in the table beside it; its label says the latest in words. */
class Plot {
  constructor(title, word) {
    this.element = fromTemplate("figure");
    this.svg = this.element.querySelector("svg");
    this.most = this.element.querySelector(".most");
    this.word = word;
    this.title = title;
    this.element.querySelector(".title").textContent = title;
    for (const y of [25, 50, 75]) this.shape("line", "grid-line", { x1: 0, x2: WIDTH, y1: y, y2: y });
    this.shapes = new Map();
  }
  shape(kind, className, attributes) {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", kind);
    shape.setAttribute("class", className);
    for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
    this.svg.append(shape);
    return shape;
  }
  /** `areas` and `lines`: [{name, className, samples: [[at, value], ...]}], areas from below. */
  draw(now, areas, lines, summary) {
    if (!state.plots) return;
    const stacked = stack(areas);
    const highest = Math.max(...[...stacked, ...lines].flatMap((series) => series.samples.map((sample) => sample[sample.length - 1])), 0);
    const top = highest > 0 ? highest * 1.08 : 1;
    const x = (at) => Math.max(0, Math.min(WIDTH, WIDTH * (1 - (now - at) / WINDOW_S))).toFixed(1);
    const y = (value) => (HEIGHT * (1 - value / top)).toFixed(2);
    const wanted = new Map();
    for (const { name, className, samples } of stacked) {
      const upper = samples.map(([at, , high]) => `${x(at)},${y(high)}`);
      const lower = samples.map(([at, low]) => `${x(at)},${y(low)}`).reverse();
      wanted.set(name, ["polygon", className, samples.length > 1 ? [...upper, ...lower].join(" ") : ""]);
    }
    for (const { name, className, samples } of lines) {
      const points = samples.filter(([, value]) => value !== null).map(([at, value]) => `${x(at)},${y(value)}`);
      wanted.set(name, ["polyline", className, points.length > 1 ? points.join(" ") : ""]);
    }
    for (const [name, shape] of this.shapes) if (!wanted.has(name)) { shape.remove(); this.shapes.delete(name); }
    for (const [name, [kind, className, points]] of wanted) {
      if (!this.shapes.has(name)) this.shapes.set(name, this.shape(kind, className, {}));
      const shape = this.shapes.get(name);
      shape.setAttribute("class", className);
      shape.setAttribute("points", points);
    }
    say(this.most, highest > 0 ? `highest ${this.word(highest)}` : "");
    this.svg.setAttribute("aria-label", `${this.title}, last 3 minutes. ${summary}`);
  }
}

/** Areas with [at, value] become areas with [at, low, high], one upon the other; a sample that one lacks counts as 0. */
function stack(areas) {
  const times = [...new Set(areas.flatMap((area) => area.samples.map(([at]) => at)))].sort((a, b) => a - b);
  const low = new Map(times.map((at) => [at, 0]));
  return areas.map((area) => {
    const own = new Map(area.samples);
    const samples = times.map((at) => {
      const from = low.get(at);
      low.set(at, from + (own.get(at) ?? 0));
      return [at, from, low.get(at)];
    });
    return { ...area, samples };
  });
}

const pools = new History(), models = new History(), devices = new History();
const seriesOf = (history, name, figure) => history.of(name).map((sample) => [sample.at, figure(sample)]);
const colour = (at) => `c${at % 8}`;

/* ---- devices ---- */

const deviceCards = new Keyed($("devices"), (name) => {
  const element = fromTemplate("device");
  element.querySelector("h3").textContent = name;
  element.querySelector("caption").textContent = `Memory of ${name}`;
  const plot = new Plot("Held by pools", bytes);
  element.querySelector(".plot").append(plot.element);
  return { element, plot, figures: new Figures(element.querySelector("tbody")) };
});

function drawDevices(now) {
  const all = state.status?.devices ?? [];
  deviceCards.show(all.map((device) => device.name)).forEach((card, at) => {
    const device = all[at];
    const own = state.pools.filter((pool) => pool.device === device.name);
    const areas = own.flatMap((pool) => [
      { name: `${pool.id} in use`, className: `area ${poolColour(pool)}`, samples: seriesOf(pools, pool.id, (sample) => sample.in_use_bytes) },
      { name: `${pool.id} reserve`, className: `area reserve ${poolColour(pool)}`, samples: seriesOf(pools, pool.id, (sample) => sample.reserve_bytes) },
    ]);
    const budget = device.budget_bytes ? [{ name: "budget", className: "limit", samples: seriesOf(devices, device.name, (sample) => sample.budget_bytes) }] : [];
    const held = own.map((pool) => `${pool.id} ${bytes(pool.in_use_bytes + pool.reserve_bytes)}`);
    card.plot.draw(now, areas, budget, `${bytes(device.pools_bytes)} held by pools${held.length ? `: ${held.join(", ")}` : ""}.`);
    const others = Math.max(0, device.used_bytes - device.pools_bytes);
    card.figures.show([
      ...own.map((pool) => ({ name: pool.id, key: poolColour(pool), value: bytes(pool.in_use_bytes + pool.reserve_bytes) })),
      ...(device.budget_bytes ? [{ name: "Budget of all pools", key: "line", value: bytes(device.budget_bytes) }] : []),
      { name: "All pools", value: bytes(device.pools_bytes) },
      { name: "Others", value: bytes(others) },
      { name: "Free", value: bytes(Math.max(0, device.total_bytes - device.used_bytes)) },
      { name: "Total", value: bytes(device.total_bytes) },
    ]);
  });
}

/* ---- pools ---- */

/** A pool has the colour of its model; those of others follow behind. */
function poolColour(pool) {
  const all = state.status?.models ?? [];
  const own = all.findIndex((model) => model.name === pool.model);
  const strangers = state.pools.filter((other) => !all.some((model) => model.name === other.model));
  return colour(own >= 0 ? own : all.length + strangers.findIndex((other) => other.id === pool.id));
}

const poolCards = new Keyed($("pools"), (id) => {
  const name = state.pools.find((pool) => pool.id === id).name;
  const element = fromTemplate("pool");
  element.querySelector("h3").textContent = id;
  element.querySelector("caption").textContent = `Memory of pool ${id}`;
  element.querySelector("summary").textContent = "Change limit or share";
  element.querySelector("summary").setAttribute("aria-label", `Change limit or share of ${id}`);
  const plot = new Plot("In use and reserve", bytes);
  element.querySelector(".plot").append(plot.element);
  const path = `api/pools/${encodeURIComponent(name)}`;
  onSubmit(element.querySelector(".limit"), (form) => {
    const size = form.elements.size.value.trim();
    return change(`${path}/limit`, { size }, `The limit of ${name}`, `is now ${size}`);
  });
  onSubmit(element.querySelector(".share"), (form) => {
    const body = {};
    const [weight, floor] = [form.elements.weight.value.trim(), form.elements.floor.value.trim()];
    if (weight) body.weight = Number(weight);
    if (floor) body.floor = floor;
    if (!weight && !floor) {
      problem("Give a weight, a floor or both.");
      return false;
    }
    return change(`${path}/share`, body, `The share of ${name}`, "is changed");
  });
  return { element, plot, owner: element.querySelector(".owner"), figures: new Figures(element.querySelector("tbody")) };
});

function drawPools(now) {
  const budgets = new Map((state.status?.devices ?? []).map((device) => [device.name, device.budget_bytes]));
  poolCards.show(state.pools.map((pool) => pool.id)).forEach((card, at) => {
    const pool = state.pools[at];
    const tint = poolColour(pool);
    const share = budgets.get(pool.device) ? pool.share * budgets.get(pool.device) : null;
    const series = (figure) => seriesOf(pools, pool.id, figure);
    const areas = [
      { name: "in use", className: `area ${tint}`, samples: series((sample) => sample.in_use_bytes) },
      { name: "reserve", className: `area reserve ${tint}`, samples: series((sample) => sample.reserve_bytes) },
    ];
    if (pools.of(pool.id).some((sample) => sample.demand_bytes > 0)) {
      areas.push({ name: "demand", className: "demand", samples: series((sample) => sample.demand_bytes) });
    }
    const lines = [];
    if (pool.limit_bytes !== null) lines.push({ name: "limit", className: "limit", samples: series((sample) => sample.limit_bytes) });
    if (share !== null) lines.push({ name: "share", className: "share", samples: series((sample) => sample.share_bytes) });
    const word = `${bytes(pool.in_use_bytes)} in use, ${bytes(pool.reserve_bytes)} in reserve, limit ${bytes(pool.limit_bytes)}.`;
    card.plot.draw(now, areas, lines, word);
    const owner = [pool.model && `model ${pool.model}`, `on ${pool.device}`, pool.pid && `process ${pool.pid}`];
    say(card.owner, owner.filter(Boolean).join(" · "));
    card.figures.show([
      { name: "In use", key: tint, value: bytes(pool.in_use_bytes) },
      { name: "Reserve", key: `reserve ${tint}`, value: bytes(pool.reserve_bytes) },
      { name: "Demand", key: "demand", value: bytes(pool.demand_bytes) },
      { name: "Limit", key: "line", value: bytes(pool.limit_bytes) },
      { name: "Fair share", key: "line share", value: share === null ? percent(pool.share) : `${bytes(share)} (${percent(pool.share)})` },
      { name: "Weight, floor", value: `${pool.weight}, ${bytes(pool.floor_bytes)}` },
    ]);
  });
}

/* ---- models ---- */

const CHARTS = [
  ["Requests per second", (count) => `${rate(count)}/s`, (sample) => sample.rate, null],
  ["Time to first token: p50, p99 dashed", millis, (sample) => sample.ttft, (sample) => sample.ttft99],
  ["Time between tokens: p50, p99 dashed", millis, (sample) => sample.itl, (sample) => sample.itl99],
];
const charts = CHARTS.map(([title, word]) => new Plot(title, word));

const modelRows = new Keyed($("models").tBodies[0], (name) => {
  const key = make("span");
  key.setAttribute("aria-hidden", "true");
  const cells = Array.from({ length: 9 }, (_, at) => make("td", { className: at > 0 && at < 8 ? "number" : "" }));
  const word = make("span", { className: "state" });
  cells[0].append(word);
  const button = make("button", { type: "button" });
  button.addEventListener("click", () => {
    const wake = button.dataset.action === "wakeup";
    act(button, () => change(`action/${button.dataset.action}/${encodeURIComponent(name)}`, null, `${name}`, wake ? "wakes up" : "goes to sleep"));
  });
  const row = make("tr", {}, make("th", { scope: "row" }, key, make("span", { textContent: name })), ...cells, make("td", {}, button));
  return { element: row, key, cells, word, button };
});

function drawModels(now) {
  const all = state.status?.models ?? [];
  modelRows.show(all.map((model) => model.name)).forEach((row, at) => {
    const model = all[at];
    row.key.className = `key ${colour(at)}`;
    row.word.className = `state ${model.state}`;
    say(row.word, model.state);
    const words = [model.in_flight, model.queued, rate(model.request_rate), pair(millis, model.ttft_ms), pair(millis, model.itl_ms),
      seconds(model.idle_s), model.restarts, model.pool ?? "none"];
    words.forEach((word, cell) => say(row.cells[cell + 1], String(word)));
    const sleeps = model.state === "sleeping";
    // Who starts, wakes or has failed can do neither.
    row.button.hidden = !sleeps && model.state !== "ready";
    row.button.dataset.action = sleeps ? "wakeup" : "sleep";
    say(row.button, sleeps ? "Wake" : "Sleep");
    row.button.setAttribute("aria-label", sleeps ? `Wake ${model.name}` : `Put ${model.name} to sleep`);
  });
  CHARTS.forEach(([, word, figure, second], at) => {
    const lines = all.flatMap((model, index) => {
      const line = (suffix, which) => ({ name: `${model.name}${suffix}`, className: `line${suffix} ${colour(index)}`, samples: seriesOf(models, model.name, which) });
      return second ? [line("", figure), line(" p99", second)] : [line("", figure)];
    });
    const latest = all.map((model) => `${model.name} ${word(figure(models.of(model.name).at(-1) ?? {}))}`);
    charts[at].draw(now, [], lines, `${latest.join(", ")}.`);
  });
  if (all.length > 0 && !$("charts").childElementCount) $("charts").append(...charts.map((chart) => chart.element));
}

/* ---- decisions ---- */

function decided({ time, model, pool, action, reason }) {
  const log = $("log");
  log.querySelector(".empty")?.remove();
  const date = new Date(typeof time === "number" ? time * 1000 : time);
  const stamp = make("time", { textContent: Number.isNaN(date.getTime()) ? String(time) : date.toLocaleTimeString() });
  const whom = [model, pool && `pool ${pool}`].filter(Boolean).join(", ");
  log.prepend(make("li", {}, stamp, make("strong", { textContent: `${whom}: ${action}` }), ` – ${reason}`));
  while (log.childElementCount > KEPT_DECISIONS) log.lastElementChild.remove();
}

/* ---- drawing ---- */

function draw(force = false) {
  if (state.paused && !force) return;
  const now = Date.now() / 1000;
  // Who asked for less motion gets new pictures now and then, and the figures all the time.
  state.plots = force || !still.matches || now - state.plotted >= 5;
  if (state.plots) state.plotted = now;
  const status = state.status;
  if (status) say($("about"), `${status.version} · up ${seconds(status.uptime_s)}`);
  drawDevices(now);
  drawModels(now);
  drawPools(now);
}

function heardStatus(status) {
  const at = Date.now() / 1000;
  state.status = status;
  for (const model of status.models) {
    models.add(model.name, { at, rate: model.request_rate ?? null, ttft: model.ttft_ms?.p50 ?? null, ttft99: model.ttft_ms?.p99 ?? null,
      itl: model.itl_ms?.p50 ?? null, itl99: model.itl_ms?.p99 ?? null });
  }
  for (const device of status.devices) devices.add(device.name, { at, budget_bytes: device.budget_bytes ?? null });
  models.keep(status.models.map((model) => model.name));
  devices.keep(status.devices.map((device) => device.name));
  showKey();
}

function heardPools(heard) {
  const at = Date.now() / 1000;
  // A pool may have several parts of one name.
  const seen = new Map();
  for (const pool of heard.pools) {
    const nth = (seen.get(pool.name) ?? 0) + 1;
    seen.set(pool.name, nth);
    pool.id = nth === 1 ? pool.name : `${pool.name} (${nth})`;
  }
  state.pools = heard.pools;
  const budgets = new Map((state.status?.devices ?? []).map((device) => [device.name, device.budget_bytes]));
  for (const pool of heard.pools) {
    const budget = budgets.get(pool.device);
    pools.add(pool.id, { at, in_use_bytes: pool.in_use_bytes, reserve_bytes: pool.reserve_bytes, demand_bytes: pool.demand_bytes,
      limit_bytes: pool.limit_bytes, share_bytes: budget ? pool.share * budget : null });
  }
  pools.keep(heard.pools.map((pool) => pool.id));
  draw();
}

/* ---- listening ---- */

const HEARD = { status: heardStatus, pools: heardPools, decision: decided, problem: (heard) => problem(heard.message) };

/** One event of the stream: lines of "field: value". */
function hear(text) {
  let kind = "message";
  const data = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (data.length > 0 && Object.hasOwn(HEARD, kind)) HEARD[kind](JSON.parse(data.join("\n")));
}

/** EventSource cannot carry a key, so the stream is read by hand. */
async function listen() {
  const response = await fetch("api/events", { headers: { Accept: "text/event-stream", ...authorization() }, cache: "no-store" });
  if (!response.ok) throw new Error(await reason(response));
  link("live", "live");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the router ended the stream");
    waiting += value.replaceAll("\r", "");
    const events = waiting.split("\n\n");
    waiting = events.pop();
    events.forEach(hear);
  }
}

async function listenForEver() {
  for (let failures = 0; ; failures += 1) {
    const begun = Date.now();
    try {
      await listen();
    } catch (error) {
      if (Date.now() - begun > 10000) failures = 0;
      const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
      link("lost", `not connected: ${error.message}; trying again`);
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

function link(kind, text) {
  $("link").className = kind;
  say($("link-text"), text);
}

/* ---- changing ---- */

function authorization() {
  const key = readKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Why a request was refused: the router's own words where it has any. */
async function reason(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.message ?? body.detail ?? response.statusText;
  } catch {
    return text.trim().slice(0, 200) || response.statusText;
  }
}

/** Asks for a change; says what came of it. */
async function change(path, body, what, done) {
  let why;
  try {
    const headers = { ...authorization() };
    if (body) headers["Content-Type"] = "application/json";
    const response = await fetch(path, { method: "POST", headers, body: body && JSON.stringify(body) });
    if (response.ok) {
      const answer = await response.json().catch(() => ({}));
      if (answer.success !== false) {
        clearProblems();
        say($("said"), `${what} ${done}.`);
        return true;
      }
      why = answer.message ?? "the router did not say why";
    } else {
      why = await reason(response);
      if (response.status === 401) why += readKey() ? " (the key above is not the right one)" : " (enter the key above)";
    }
  } catch (error) {
    why = `the router cannot be reached: ${error.message}`;
  }
  say($("said"), "");
  problem(`${what} was not changed: ${why}`);
  return false;
}

async function act(button, action) {
  if (button.disabled) return;
  const had = document.activeElement === button;
  button.disabled = true;
  try {
    return await action();
  } finally {
    button.disabled = false;
    // A button that is switched off loses the focus, and whoever pressed it with a key would lose the place.
    if (had && document.activeElement === document.body) button.focus();
  }
}

function onSubmit(form, send) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const done = await act(form.querySelector("button[type=submit]"), async () => send(form));
    if (done) form.reset();
  });
}

function problem(text) {
  if ([...$("problems").children].some((shown) => shown.firstChild.textContent === text)) return;
  const close = make("button", { type: "button", textContent: "Dismiss" });
  const shown = make("div", { className: "problem" }, make("span", { textContent: text }), close);
  close.addEventListener("click", () => { shown.remove(); $("main").focus(); });
  $("problems").append(shown);
  while ($("problems").childElementCount > 3) $("problems").firstElementChild.remove();
}

function clearProblems() {
  $("problems").replaceChildren();
}

/* ---- the key ---- */

let keyInMemory = "";

function readKey() {
  try { return sessionStorage.getItem("tidekv-key") ?? keyInMemory; } catch { return keyInMemory; }
}

function writeKey(key) {
  keyInMemory = key;
  try {
    if (key) sessionStorage.setItem("tidekv-key", key); else sessionStorage.removeItem("tidekv-key");
  } catch { /* A browser that keeps nothing: memory does. */ }
  showKey();
}

function showKey() {
  const has = readKey() !== "";
  const needs = state.status?.auth_required;
  say($("key-state"), has ? "kept in this tab" : needs ? "needed for changes" : "");
  $("forget").hidden = !has;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  writeKey($("key").value.trim());
  $("key").value = "";
});
$("forget").addEventListener("click", () => { writeKey(""); $("key").focus(); });
$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  draw(true);
});

showKey();
listenForEver();
