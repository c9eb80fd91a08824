/* What the dashboard is made of: elements that are made once and then changed in place, histories, plots. Everything that comes from
   elsewhere is put in as text, never as HTML. */

const WINDOW_S = 180;
export const $ = (id) => document.getElementById(id);

export function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** Changes text only where it differs, so that nothing is announced or drawn for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const fromTemplate = (id) => $(id).content.firstElementChild.cloneNode(true);

/** One element for each name, in their order: made once, kept while the name is there. */
export class Keyed {
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
export class Figures {
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

/** Samples of the last minutes under one name: {at, ...figures}. */
export class History {
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

/** Who asked for less motion gets new pictures now and then: not due, a plot stays as it is. */
export const pictures = { due: true };

/** Areas one upon the other, and lines. What it shows is also in the table beside it; its label says the latest in words. */
export class Plot {
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
    if (!pictures.due) return;
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

export const seriesOf = (history, name, figure) => history.of(name).map((sample) => [sample.at, figure(sample)]);
export const colour = (at) => `c${at % 8}`;
