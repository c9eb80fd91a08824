/* Figures in words. */

export function bytes(count) {
  if (count === null || count === undefined) return "none";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${at === 0 || count >= 100 ? Math.round(count) : count.toFixed(1).replace(/\.0$/, "")} ${units[at]}`;
}

export function seconds(count) {
  if (count === null || count === undefined) return "–";
  if (count < 60) return `${Math.floor(count)} s`;
  if (count < 3600) return `${Math.floor(count / 60)} min`;
  if (count < 172800) return `${Math.floor(count / 3600)} h`;
  return `${Math.floor(count / 86400)} d`;
}

export function millis(count) {
  if (count === null || count === undefined) return "–";
  if (count >= 10000) return `${(count / 1000).toFixed(1)} s`;
  return `${count >= 100 ? Math.round(count) : count.toFixed(1)} ms`;
}

export const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;
export const rate = (count) => (count === null || count === undefined ? "–" : count.toFixed(count < 10 ? 2 : 0));
export const pair = (word, both) => `${word(both?.p50)} / ${word(both?.p99)}`;
