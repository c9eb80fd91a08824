/* The dashboard: listens to /api/events, draws what it hears, and sends what the controls ask for.

     /api/events ── status, pools, decision, problem ──> history (3 minutes) ──> tables and plots, once a second
     controls ── changes.js: POST, with the key ──> a sentence: done, or why not

   Rows and cards are made once and then changed in place (parts.js), so that focus, open forms and half-typed words stay. */

import { act, authorization, change, onSubmit, problem, reason, showKey } from "./changes.js";
import { $, Figures, History, Keyed, Plot, colour, fromTemplate, make, pictures, say, seriesOf } from "./parts.js";
import { bytes, millis, pair, percent, rate, seconds } from "./words.js";

const KEPT_DECISIONS = 200;
const RETRY_MS = [1000, 2000, 4000, 8000];
const still = matchMedia("(prefers-reduced-motion: reduce)");

const state = { status: null, pools: [], paused: false, plotted: 0 };
const pools = new History(), models = new History(), devices = new History();

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
      { name: `${pool.id} needed`, className: `area ${poolColour(pool)}`, samples: seriesOf(pools, pool.id, (sample) => sample.needed_bytes) },
      { name: `${pool.id} cached and idle`, className: `area reserve ${poolColour(pool)}`, samples: seriesOf(pools, pool.id, keptBytes) },
    ]);
    const budget = device.budget_bytes ? [{ name: "budget", className: "limit", samples: seriesOf(devices, device.name, (sample) => sample.budget_bytes) }] : [];
    const held = own.map((pool) => `${pool.id} ${bytes(heldBytes(pool))}`);
    card.plot.draw(now, areas, budget, `${bytes(device.pools_bytes)} held by pools${held.length ? `: ${held.join(", ")}` : ""}.`);
    card.figures.show([
      ...own.map((pool) => ({ name: pool.id, key: poolColour(pool), value: bytes(heldBytes(pool)) })),
      ...(device.budget_bytes ? [{ name: "Budget of all pools", key: "line", value: bytes(device.budget_bytes) }] : []),
      { name: "All pools", value: bytes(device.pools_bytes) },
      { name: "Others", value: bytes(device.others_bytes) },
      { name: device.budget_bytes ? "Free of the budget" : "Free", value: bytes(device.free_bytes) },
      { name: "Total", value: bytes(device.total_bytes) },
    ]);
  });
}

/* ---- pools ---- */

/** What a pool holds without a request that needs it. */
function keptBytes(pool) {
  return pool.cached_bytes + pool.idle_bytes;
}

function heldBytes(pool) {
  return pool.needed_bytes + keptBytes(pool);
}

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
  const plot = new Plot("Needed, cached and idle", bytes);
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
      { name: "needed", className: `area ${tint}`, samples: series((sample) => sample.needed_bytes) },
      { name: "cached and idle", className: `area reserve ${tint}`, samples: series(keptBytes) },
    ];
    if (pools.of(pool.id).some((sample) => sample.demand_bytes > 0)) {
      areas.push({ name: "demand", className: "demand", samples: series((sample) => sample.demand_bytes) });
    }
    const lines = [];
    if (pool.limit_bytes !== null) lines.push({ name: "limit", className: "limit", samples: series((sample) => sample.limit_bytes) });
    if (share !== null) lines.push({ name: "share", className: "share", samples: series((sample) => sample.share_bytes) });
    const word = `${bytes(pool.needed_bytes)} needed, ${bytes(pool.cached_bytes)} cached, ${bytes(pool.idle_bytes)} idle, limit ${bytes(pool.limit_bytes)}.`;
    card.plot.draw(now, areas, lines, word);
    const owner = [pool.model && `model ${pool.model}`, `on ${pool.device}`, pool.pid && `process ${pool.pid}`];
    say(card.owner, owner.filter(Boolean).join(" · "));
    card.figures.show([
      { name: "Needed", key: tint, value: bytes(pool.needed_bytes) },
      { name: "Cached", key: `reserve ${tint}`, value: bytes(pool.cached_bytes) },
      { name: "Idle", key: `reserve ${tint}`, value: bytes(pool.idle_bytes) },
      { name: "Demand", key: "demand", value: bytes(pool.demand_bytes) },
      ...(pool.why ? [{ name: "Why", value: pool.why }] : []),
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
  pictures.due = force || !still.matches || now - state.plotted >= 5;
  if (pictures.due) state.plotted = now;
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
  showKey(status.auth_required);
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
    pools.add(pool.id, { at, needed_bytes: pool.needed_bytes, cached_bytes: pool.cached_bytes, idle_bytes: pool.idle_bytes, demand_bytes: pool.demand_bytes,
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

$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  draw(true);
});

showKey();
listenForEver();
