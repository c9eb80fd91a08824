/* What the controls ask for: a POST with the key, then a sentence that says it is done, or why not. The key lives in this tab alone. */

import { $, make, say } from "./parts.js";

export function authorization() {
  const key = readKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Why a request was refused: the router's own words where it has any. */
export async function reason(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.message ?? body.detail ?? response.statusText;
  } catch {
    return text.trim().slice(0, 200) || response.statusText;
  }
}

/** Asks for a change; says what came of it. */
export async function change(path, body, what, done) {
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

export async function act(button, action) {
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

export function onSubmit(form, send) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const done = await act(form.querySelector("button[type=submit]"), async () => send(form));
    if (done) form.reset();
  });
}

export function problem(text) {
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

let keyInMemory = "";
let needed = false;

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

/** Says whether there is a key, and whether the router `needs` one. */
export function showKey(needs = needed) {
  const has = readKey() !== "";
  needed = needs;
  say($("key-state"), has ? "kept in this tab" : needs ? "needed for changes" : "");
  $("forget").hidden = !has;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  writeKey($("key").value.trim());
  $("key").value = "";
});
$("forget").addEventListener("click", () => { writeKey(""); $("key").focus(); });
