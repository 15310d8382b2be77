// The page: views, the list and its filters, keys. Starts below, when the document is there.

const settings = embedded("settings");
const entries = embedded("index");
const many = settings.runs.length > 1;
const training = settings.kind === "training";
const byId = (id) => document.getElementById(id);
const list = byId("list");
const pane = byId("trace");
const CHUNK = 150;

let found = entries.map((_, i) => i);
let shown = 0;
let current = null;
let thinkOpen = true;

// ---- filters

const CHANGES = { gained: "only right in the second", lost: "only right in the first", both: "right in both", neither: "right in neither" };
const right = (side) => side.tier === "strict" || side.tier === "official";

function change(entry) {
  const [a, b] = entry.sides;
  if (a.tier === "unscored" || b.tier === "unscored") return "unscored";
  return right(a) ? (right(b) ? "both" : "lost") : right(b) ? "gained" : "neither";
}

/** Filters: name, label, the choices of an entry (an entry may offer several), and the words of a choice. */
const FILTERS = [
  ...(many ? [["change", "Change", (e) => [change(e)], (v) => CHANGES[v] || "no verdict"]] : []),
  ...settings.runs.map((run, i) => [`tier-${i}`, many ? `Outcome in ${run}` : "Outcome", (e) => [e.sides[i].tier], (v) => `${MARKS[v]} ${settings.tiers[v]}`]),
  ...(training
    ? [
        ["step", "Step", (e) => [String(e.step)], (v) => `step ${v}`],
        ["group", "Question", (e) => [e.group], (v) => v],
        ["ended", "How it ended", (e) => e.sides.map((s) => s.ended), (v) => v.replaceAll("_", " ")],
      ]
    : [["outcome", "How it ended", (e) => e.sides.map((s) => s.outcome || s.status), (v) => (settings.classes[v] || [v.replaceAll("_", " ")])[0]]]),
  ["db", "Database", (e) => [e.db], (v) => v],
  ["difficulty", "Difficulty", (e) => [e.difficulty || "(none)"], (v) => v],
  ["origin", "Origin", (e) => e.sides.map((s) => s.origin), (v) => v.replaceAll("_", " ")],
  ["traits", "Trait", (e) => [...e.sides.flatMap(traits), ...e.flags.map((flag) => flag.replaceAll("_", " "))], (v) => v],
];
const SORTS = {
  "in order": null,
  "most calls": (e) => -Math.max(...e.sides.map((s) => s.calls)),
  "most tokens": (e) => -Math.max(...e.sides.map((s) => s.sampled_tokens)),
  "longest gold": (e) => -e.sides[0].gold_length,
  ...(training ? { "highest reward": (e) => -e.sides[0].reward } : {}),
};

function traits(side) {
  const has = [];
  if (side.truncated) has.push("cut by a token limit");
  if (side.opened === false) has.push("gold table not opened");
  if (side.literals && side.literals[3]) has.push("literal from nowhere");
  if (side.calls > side.distinct_calls) has.push("repeated calls");
  return has;
}

const ORDER = ["gained", "lost", "both", "neither", "strict", "official", "wrong", "fails", "no_answer", "unscored", ...Object.keys(settings.classes)];
const place = (value) => (ORDER.indexOf(value) + 1 || 99) + value;

function buildFilters() {
  const box = byId("selects");
  for (const [name, label, values, words] of FILTERS) {
    const counts = new Map();
    for (const entry of entries) for (const value of new Set(values(entry))) counts.set(value, (counts.get(value) || 0) + 1);
    if (counts.size < 2 && name !== "traits") continue;
    if (!counts.size) continue;
    const choices = [...counts.keys()].sort((a, b) => place(a).localeCompare(place(b), "en", { numeric: true }));
    box.append(
      el("select", { id: `by-${name}`, "aria-label": label }, el("option", { value: "" }, `${label}: all`), choices.map((v) => el("option", { value: v }, `${words(v)} (${format(counts.get(v))})`))),
    );
  }
  box.append(el("select", { id: "sort", "aria-label": "Order" }, Object.keys(SORTS).map((name) => el("option", { value: name === "in order" ? "" : name }, `Order: ${name}`))));
}

/** A search text as it would stand in the embedded JSON, so that traces are searched without being parsed. */
function asEmbedded(text) {
  const json = JSON.stringify(text).slice(1, -1);
  return json.replace(/[^\u0000-\u007e]|[<>&]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

const lower = [];

function haystack(i) {
  const e = entries[i];
  lower[i] ??= [e.id, e.db, e.question, e.evidence, e.gold, ...e.sides.map((s) => s.answer || "")].join("\n").toLowerCase();
  return lower[i];
}

function matches(i, chosen, text, deep) {
  for (const [values, value] of chosen) if (!values(entries[i]).includes(value)) return false;
  if (!text || haystack(i).includes(text)) return true;
  return deep !== null && byId(`t${i}`).textContent.toLowerCase().includes(deep);
}

let applied = "";
let waiting = 0;
const filterState = () => [...byId("filters").elements].map((field) => (field.type === "checkbox" ? field.checked : field.value)).join("\n");

/** Filter when no more is typed. Leaving a field says that it changed, also when that was applied: the list then stays as it is. */
function filterSoon(milliseconds) {
  clearTimeout(waiting);
  waiting = setTimeout(() => filterState() !== applied && applyFilters(), milliseconds);
}

function applyFilters(keep) {
  applied = filterState();
  const chosen = FILTERS.flatMap(([name, , values]) => {
    const select = byId(`by-${name}`);
    if (select) select.classList.toggle("set", Boolean(select.value));
    return select && select.value ? [[values, select.value]] : [];
  });
  const text = byId("text").value.trim().toLowerCase();
  const deep = text && byId("deep").checked ? asEmbedded(text).toLowerCase() : null;
  found = entries.map((_, i) => i).filter((i) => matches(i, chosen, text, deep));
  const key = SORTS[byId("sort").value];
  if (key) found.sort((a, b) => key(entries[a]) - key(entries[b]) || a - b);
  byId("found").textContent = found.length === entries.length ? `${counted(entries.length, "episode")}` : `${format(found.length)} of ${counted(entries.length, "episode")}`;
  byId("clear").hidden = !chosen.length && !text && !byId("sort").value;
  list.replaceChildren();
  shown = 0;
  list.scrollTop = 0;
  more();
  if (!keep && found.length && !found.includes(current) && wide()) select(found[0], false);
  if (!found.length) list.append(el("li", { class: "nothing" }, "Nothing matches."));
  mark();
}

// ---- list

function item(i) {
  const e = entries[i];
  const calls = many ? `${e.sides.map((s) => format(s.calls)).join(" → ")} calls` : counted(e.sides[0].calls, "call");
  return el(
    "li",
    { id: `item${i}`, role: "option", "data-entry": i, "aria-selected": "false" },
    el("span", { class: "badges" }, e.sides.map((side) => badge(side, settings, true))),
    el("span", { class: "ask" }, visible(e.question)),
    el("span", { class: "meta" }, el("span", { class: "db" }, visible(e.db)), el("span", {}, training ? `reward ${e.sides[0].reward.toFixed(2)} · ${calls}` : calls)),
  );
}

/** Put the next items into the list; the rest comes when it is scrolled to. */
function more(until) {
  const end = Math.min(found.length, Math.max(shown + CHUNK, (until ?? 0) + 1));
  if (end > shown) list.append(...found.slice(shown, end).map(item));
  shown = end;
}

function mark() {
  list.querySelectorAll("[aria-selected=true]").forEach((node) => node.setAttribute("aria-selected", "false"));
  const node = current === null ? null : byId(`item${current}`);
  if (node) {
    node.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", node.id);
  } else {
    list.removeAttribute("aria-activedescendant");
  }
}

const wide = () => window.matchMedia("(min-width: 900px)").matches;

/** Show an entry's trace. `go`: leave the list for it where only one of them fits. */
function select(i, go = true) {
  current = i;
  const at = found.indexOf(i);
  if (at >= shown) more(at);
  pane.replaceChildren(el("button", { type: "button", class: "back quiet", on: { click: closeTrace } }, "‹ all episodes"), ...traceView(entries[i], embedded(`t${i}`), settings), stepper(at));
  if (!thinkOpen) toggleThink(false);
  pane.scrollTop = 0;
  mark();
  const node = byId(`item${i}`);
  if (node) node.scrollIntoView({ block: "nearest" });
  if (go) {
    document.body.classList.add("in-trace");
    if (!wide()) window.scrollTo(0, 0);
  }
  const hash = `#episode=${i + 1}`;
  if (location.hash !== hash && (go || location.hash.startsWith("#episode"))) history[location.hash.startsWith("#episode") ? "replaceState" : "pushState"](null, "", hash);
}

function stepper(at) {
  const step = (to, words) => el("button", { type: "button", class: "quiet", disabled: to < 0 || to >= found.length, on: { click: () => select(found[to]) } }, words);
  return el("footer", { class: "stepper" }, step(at - 1, "‹ previous"), el("span", {}, at < 0 ? "" : `${format(at + 1)} of ${format(found.length)}`), step(at + 1, "next ›"));
}

function closeTrace() {
  document.body.classList.remove("in-trace");
  if (location.hash.startsWith("#episode=")) history.replaceState(null, "", "#episodes");
  list.focus({ preventScroll: true });
}

function move(by) {
  if (!found.length) return;
  const at = current === null ? -1 : found.indexOf(current);
  select(found[Math.min(found.length - 1, Math.max(0, at < 0 ? 0 : at + by))], document.body.classList.contains("in-trace"));
}

function moveTurn(by) {
  const turns = [...pane.querySelectorAll(".turn")].filter((turn) => turn.offsetParent !== null);
  const at = turns.indexOf(document.activeElement.closest(".turn"));
  const turn = turns[Math.min(turns.length - 1, Math.max(0, at < 0 ? 0 : at + by))];
  if (turn) {
    turn.focus({ preventScroll: true });
    turn.scrollIntoView({ block: "start", behavior: "instant" });
  }
}

function toggleThink(open) {
  thinkOpen = open;
  pane.querySelectorAll("details.think").forEach((details) => (details.open = open));
}

// ---- views

const VIEWS = ["overview", "episodes", "record"];

function route() {
  const hash = location.hash.slice(1);
  const number = /^episode=(\d+)$/.exec(hash);
  const view = number ? "episodes" : VIEWS.includes(hash) ? hash : "overview";
  document.body.dataset.view = view;
  for (const name of VIEWS) byId(name).hidden = name !== view;
  document.querySelectorAll("nav [data-view]").forEach((a) => (a.dataset.view === view ? a.setAttribute("aria-current", "page") : a.removeAttribute("aria-current")));
  if (view !== "episodes") return window.scrollTo(0, 0);
  if (number && entries[number[1] - 1]) {
    if (current !== number[1] - 1) select(number[1] - 1);
    document.body.classList.add("in-trace");
  } else {
    document.body.classList.remove("in-trace");
    if (current === null && found.length && wide()) select(found[0], false);
  }
}

/** Show the episodes that a cell of a table counts. */
function filterBy(filters) {
  byId("filters").reset();
  for (const [name, value] of Object.entries(filters)) {
    const select = byId(`by-${name}`);
    if (select) select.value = value;
  }
  current = null;
  location.hash = "#episodes";
  route();
  applyFilters();
}

// ---- keys

function onKey(event) {
  const field = event.target.closest("input, select, textarea, dialog");
  if (event.key === "Escape" && field && field.tagName !== "DIALOG") return list.focus();
  if (field || event.ctrlKey || event.metaKey || event.altKey) return;
  const inEpisodes = document.body.dataset.view === "episodes";
  const inList = document.activeElement === list;
  const act = {
    1: () => (location.hash = "#overview"),
    2: () => (location.hash = "#episodes"),
    3: () => (location.hash = "#record"),
    "?": () => byId("help").showModal(),
  };
  if (inEpisodes) {
    Object.assign(act, {
      "/": () => (document.body.classList.remove("in-trace"), byId("text").focus(), byId("text").select()),
      j: () => move(1),
      k: () => move(-1),
      n: () => moveTurn(1),
      p: () => moveTurn(-1),
      t: () => toggleThink(!thinkOpen),
      Escape: closeTrace,
    });
    if (inList) Object.assign(act, { ArrowDown: () => move(1), ArrowUp: () => move(-1), Home: () => move(-Infinity), End: () => move(Infinity), Enter: () => current !== null && (select(current), pane.focus({ preventScroll: true })) });
  }
  if (Object.hasOwn(act, event.key)) {
    event.preventDefault();
    act[event.key]();
  }
}

// ---- colours and long tables

const THEMES = ["automatic", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").title = `Colours: ${theme}`;
  byId("theme").setAttribute("aria-label", `Colours: ${theme}`);
  try {
    localStorage.setItem("execplan-theme", theme);
  } catch {
    // A page opened from a file may have no storage: the choice then lasts as long as the page.
  }
}

function storedTheme() {
  try {
    return localStorage.getItem("execplan-theme");
  } catch {
    return null;
  }
}

function foldTables() {
  for (const table of document.querySelectorAll("table.tall")) {
    const button = el("button", { type: "button", class: "more" }, `show all ${table.tBodies[0].rows.length} lines`);
    button.addEventListener("click", () => {
      table.classList.remove("tall");
      button.remove();
    });
    table.parentElement.after(button);
  }
}

function start() {
  document.documentElement.classList.remove("no-js");
  setTheme(THEMES.includes(storedTheme()) ? storedTheme() : "automatic");
  byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]));
  foldTables();
  buildFilters();
  applyFilters(true);
  route();
  for (const event of ["input", "change"]) byId("filters").addEventListener(event, () => filterSoon(byId("deep").checked ? 300 : 60));
  byId("filters").addEventListener("reset", () => filterSoon(0));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  list.addEventListener("click", (event) => {
    const node = event.target.closest("[data-entry]");
    if (node) select(Number(node.dataset.entry));
  });
  list.addEventListener("scroll", () => list.scrollTop + list.clientHeight * 2 > list.scrollHeight && more());
  window.addEventListener("scroll", () => !wide() && window.scrollY + innerHeight * 2 > document.body.scrollHeight && more());
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.filter");
    if (!link) return;
    event.preventDefault();
    filterBy(JSON.parse(link.dataset.filters));
  });
  window.addEventListener("hashchange", route);
  window.addEventListener("popstate", route);
  document.addEventListener("keydown", onKey);
}

start();
