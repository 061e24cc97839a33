// Asks the server every second and a half and shows what it says. Clients' words (tenants, ids) are
// only ever put into text nodes.

import { CLASSES, area, bar, columns, count, patterns, scatter, seconds, swatch } from "./charts.js";

const SPAN = 300, BINS = 60, PERIOD = 1500, ROWS = 12, WORTH_TELLING = 16;
const WORDS = {
  exact: "reused exactly", moved: "moved here and reused",
  recomputed: "moved and repaired", computed: "computed",
};
const $ = (id) => document.getElementById(id);
const state = { started: null, last: 0, shown: null, requests: [], seen: null };

document.body.append(patterns());

function el(name, content, kind) {
  const node = document.createElement(name);
  if (kind) node.className = kind;
  node.append(...[content ?? []].flat());
  return node;
}

// -- asking

async function ask() {
  const key = sessionStorage.getItem("key");
  const answer = await fetch(`status.json?after=${state.last}`, {
    headers: key ? { Authorization: `Bearer ${key}` } : {}, signal: AbortSignal.timeout(8000),
  });
  if (answer.status === 401 || answer.status === 403) return locked(Boolean(key));
  if (!answer.ok) throw new Error(`it answers with status ${answer.status}`);
  const news = await answer.json();
  if (news.started !== state.started) {
    const again = state.started !== null && state.last > 0;
    Object.assign(state, { started: news.started, last: 0, shown: null, requests: [] });
    if (again) return ask();
  }
  take(news);
}

function take(news) {
  state.requests.push(...news.requests);
  state.requests.splice(0, state.requests.length - 2000);
  state.last = news.served;
  Object.assign(state, { seen: Date.now(), news });
  $("login").hidden = true;
  $("alert").hidden = true;
  document.body.classList.remove("stale");
  say("live", "live");
  show();
}

function locked(tried) {
  sessionStorage.removeItem("key");
  $("login").hidden = false;
  say("locked", tried ? "that key is not an admin key" : "locked");
  $("key").focus();
}

function gone(error) {
  const since = state.seen ? `since ${clock(state.seen)}` : "";
  const why = error.name === "TimeoutError" ? "no answer within 8 s"
    : error instanceof TypeError ? "no connection" : error.message;
  const words = `The server can't be reached ${since} (${why}). Trying again; what is shown is old.`;
  if ($("alert").textContent !== words) $("alert").textContent = words; // read out once
  $("alert").hidden = false;
  document.body.classList.add("stale");
  say("gone", "can't be reached");
}

function say(kind, words) {
  if ($("state").dataset.state === kind && $("state").textContent === words) return;
  $("state").dataset.state = kind;
  $("state").textContent = words;
}

async function poll() {
  if (!document.hidden && $("login").hidden) await ask().catch(gone);
  setTimeout(poll, PERIOD);
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  ask().catch(gone);
});
$("copy").addEventListener("click", async () => {
  await navigator.clipboard?.writeText($("curl").textContent);
  $("copy").textContent = navigator.clipboard ? "Copied" : "Select the text to copy it";
});
new ResizeObserver(() => state.news && show()).observe(document.querySelector("main"));

// -- showing

function show() {
  const { news } = state, recent = state.requests.filter((r) => news.now - r.at < SPAN);
  document.querySelector("main").hidden = false;
  about(news);
  document.body.classList.toggle("fresh", !news.served);
  if (!news.served) example();
  tiles(news, recent);
  showTtft(recent, news.now);
  showMix(recent, news.now);
  showRate(recent, news.now);
  showLoad(news);
  $("tiers").replaceChildren(...news.places.map(tier));
  if (state.shown === state.last) return; // what is selected or focused in the tables stays so
  state.shown = state.last;
  fill("misses", misses(), "No misses. What was asked was known, or nothing was asked.", 5);
  fill("requests", state.requests.slice(-ROWS).reverse().map(request), "No requests yet.", 11);
}

function about({ about: a, version, started, now }) {
  $("about").textContent = [`version ${version}`, `${a.dtype} on ${a.device}`, `KV ${a.kv_format}`,
    `reuse ${a.reuse}`, `up ${lasting(now - started)}`].join(" · ");
  $("about").title = `model ${a.fingerprint}; repairs by: ${a.repairs}`;
}

function example() {
  const key = sessionStorage.getItem("key") ? "  -H \"Authorization: Bearer $KVBOOST_KEY\" \\\n" : "";
  $("curl").textContent = `curl ${new URL("v1/chat/completions", location.href)} \\\n${key}` +
    "  -H 'Content-Type: application/json' \\\n" +
    "  -d '{\"model\": \"default\", \"messages\": [{\"role\": \"user\", \"content\": \"What is a KV cache?\"}]}'";
}

const warm = (r) => r.usage.exact + r.usage.moved + r.usage.recomputed > 0;
const sum = (rows, pick) => rows.reduce((total, row) => total + pick(row), 0);

function median(values) {
  const sorted = values.filter((v) => v !== null).sort((a, b) => a - b), half = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function tiles(news, recent) {
  const total = totals(recent), prompt = sum(CLASSES, (name) => total[name]);
  $("tile-warm").textContent = seconds(median(recent.filter(warm).map((r) => r.ttft)));
  $("tile-cold").textContent = seconds(median(recent.filter((r) => !warm(r)).map((r) => r.ttft)));
  $("tile-reuse").textContent = prompt ? percent((total.exact + total.moved) / prompt) : "–";
  $("tile-reuse-of").textContent = prompt ? `of ${count(prompt)}` : "";
  $("tile-rate").textContent = count(rates(recent, news.now).slice(-12).reduce((a, b) => a + b, 0) / 12);
  $("tile-served").textContent = count(news.served);
  $("tile-refused").textContent = news.refused ? `and ${count(news.refused)} refused` : "none refused";
}

function totals(rows) {
  return Object.fromEntries(CLASSES.map((name) => [name, sum(rows, (r) => r.usage[name])]));
}

function showTtft(recent, now) {
  if (matchMedia("(hover: hover)").matches && $("ttft").matches(":hover") && $("ttft").firstChild) return; // being read
  const points = recent.filter((r) => r.ttft !== null).map((r) => ({
    age: now - r.at, value: r.ttft, warm: warm(r),
    title: `${seconds(r.ttft)}, ${warm(r) ? "reused" : "cold"}; ${r.tenant}, prompt of ${count(r.prompt)}`,
  }));
  const of = (kind) => points.filter((p) => p.warm === kind);
  scatter($("ttft"), points, SPAN,
    `Time to first token: ${of(true).length} requests that reused, median ${seconds(median(of(true).map((p) => p.value)))}; ` +
    `${of(false).length} cold, median ${seconds(median(of(false).map((p) => p.value)))}`);
}

function showMix(recent, now) {
  const total = totals(recent), all = sum(CLASSES, (name) => total[name]);
  const shares = CLASSES.map((name) => `${WORDS[name]} ${percent(all ? total[name] / all : 0)}`).join(", ");
  $("mix-bar").replaceChildren(bar(total, 600, 28, `Prompt tokens: ${shares}`));
  $("mix-bar").hidden = !all;
  $("mix-legend").replaceChildren(...CLASSES.map((name) => el("li", [
    swatch(name), `${WORDS[name]} `, el("b", all ? percent(total[name] / all) : ""),
  ])));
  const bins = Array.from({ length: BINS / 2 }, () => totals([]));
  for (const r of recent) {
    const bin = bins[Math.max(0, bins.length - 1 - Math.floor((now - r.at) / SPAN * bins.length))];
    for (const name of CLASSES) bin[name] += r.usage[name];
  }
  columns($("mix"), bins, SPAN, `Prompt tokens by class, in steps of ${SPAN / bins.length} seconds: ${shares}`);
}

// Tokens per second in each bin, oldest first: a request's tokens lie between its first and its end.
function rates(recent, now) {
  const bins = new Array(BINS).fill(0), size = SPAN / BINS, begin = now - SPAN;
  for (const r of recent) {
    const from = r.at - Math.max(r.total - (r.ttft ?? 0), 0.001);
    for (let n = Math.max(0, Math.floor((from - begin) / size)); n < BINS && begin + n * size < r.at; n++) {
      const part = Math.min(r.at, begin + (n + 1) * size) - Math.max(from, begin + n * size);
      bins[n] += r.usage.generated * Math.max(part, 0) / (r.at - from) / size;
    }
  }
  return bins;
}

function showRate(recent, now) {
  const bins = rates(recent, now);
  area($("rate"), bins, SPAN, `Tokens generated per second, at most ${count(Math.max(...bins))}`);
}

function showLoad({ load, upgraded, upgrade_waiting: waiting }) {
  $("slots-text").textContent = `${load.running} of ${load.slots} slots answer`;
  $("slots").replaceChildren(...Array.from({ length: Math.min(load.slots, 64) },
    (_, n) => el("i", "", n < load.running ? "busy" : "")));
  $("queue-text").textContent = load.waiting
    ? `${load.waiting} ${load.waiting === 1 ? "request waits" : "requests wait"}` : "Nobody waits";
  $("idle-text").textContent = upgraded || waiting
    ? `While idle, ${count(upgraded)} tokens were computed exactly; ${count(waiting)} wait for it.` : "";
}

function tier(place) {
  const limit = place.max_bytes, row = el("li");
  const size = place.bytes === null ? "counted by its server" : limit === null ? bytes(place.bytes)
    : `${bytes(place.bytes)} of ${bytes(limit)} (${percent(limit ? place.bytes / limit : 0)})`;
  row.append(el("div", [
    el("span", [el("span", place.name, "name"), place.up ? "" : el("span", " ▲ out of use for now", "down")]),
    el("span", size)], "top"));
  if (limit) {
    const meter = el("meter", size);
    Object.assign(meter, { min: 0, max: limit, value: place.bytes });
    meter.setAttribute("aria-label", `${place.name}: ${size}`);
    row.append(meter);
  }
  const told = ["entries", "evicted", "hits", "misses"].filter((name) => place[name] !== null).map((name) => [name, name]);
  const trouble = { slow: "lookups left out as too slow", dropped: "not written", outages: "outages" };
  told.push(...Object.entries(trouble).filter(([name]) => place[name]));
  row.append(el("div", told.map(([name, words]) => `${count(place[name])} ${words}`).join(" · "), "note"));
  return row;
}

function misses() {
  const rows = [];
  for (const r of state.requests.toReversed()) {
    const told = Object.entries(r.misses).filter(([, tokens]) => tokens >= WORTH_TELLING).sort((a, b) => b[1] - a[1]);
    for (const [name, tokens] of told) {
      const reason = state.news.reasons[name] ?? { what: name, advice: "" };
      rows.push([el("td", when(r.at)), el("td", r.tenant), el("td", count(tokens), "number"),
        el("td", reason.what), el("td", reason.advice)]);
      if (rows.length === ROWS) return rows;
    }
  }
  return rows;
}

function request(r) {
  const words = CLASSES.filter((name) => r.usage[name]).map((name) => `${WORDS[name]} ${r.usage[name]}`).join(", ");
  const made = el("td", words ? bar(r.usage, 128, 12, words) : "–", "made");
  const id = el("td", r.id, "id");
  id.title = r.id;
  return [el("td", when(r.at)), el("td", r.tenant), el("td", outcome(r.outcome), `tight ${r.outcome}`),
    el("td", count(r.prompt), "number"), made, el("td", count(r.usage.generated), "number"),
    el("td", seconds(r.ttft), "number"), el("td", seconds(r.queued), "number"), el("td", r.policy || "–"),
    el("td", r.exact ? "yes" : "no"), id];
}

function outcome(name) {
  return { done: "✓ done", cancelled: "client left", deadline: "▲ took too long", failed: "▲ failed" }[name] ?? name;
}

function fill(id, rows, none, width) {
  if (!rows.length) {
    const cell = el("td", none, "note");
    cell.colSpan = width;
    rows = [[cell]];
  }
  const titles = [...document.querySelectorAll(`#${id} th`)].map((th) => th.textContent);
  for (const cells of rows) if (cells.length > 1) cells.forEach((cell, n) => { cell.dataset.title = titles[n]; });
  document.querySelector(`#${id} tbody`).replaceChildren(...rows.map((cells) => el("tr", cells)));
}

// -- words

const percent = (share) => `${share > 0 && share < 0.095 ? (share * 100).toFixed(1) : Math.round(share * 100)} %`;
const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });

function when(at) {
  const node = el("time", clock(at * 1000));
  node.dateTime = new Date(at * 1000).toISOString();
  return node;
}

function lasting(s) {
  const units = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
  const [size, name] = units.find(([length]) => s >= length) ?? units[3], n = Math.floor(s / size);
  return `${n} ${name}${n === 1 ? "" : "s"}`;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = n ? Math.min(Math.floor(Math.log2(n) / 10), 4) : 0, value = n / 1024 ** power;
  return `${value.toFixed(value < 10 && power ? 1 : 0)} ${units[power]}`;
}

poll();
