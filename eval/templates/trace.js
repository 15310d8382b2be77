// One episode, or one question in two runs, as it happened.

const MARKS = { strict: "✓", official: "≈", wrong: "✗", fails: "!", no_answer: "∅", unscored: "–" };

/** How a side ended: a mark, and the words for it; the colour only repeats them. */
function badge(side, settings, short) {
  const known = settings.classes[side.outcome];
  const words = side.tier === "unscored" ? side.status.replaceAll("_", " ") : known ? known[0] : side.tier;
  return el(
    "span",
    { class: `badge ${side.tier}`, title: words },
    el("span", { class: "mark", "aria-hidden": "true" }, MARKS[side.tier]),
    el("span", { class: short ? "visually-hidden" : "words" }, words),
  );
}

/** The whole trace view of an entry: what was asked, what came out, and the turns of each run. */
function traceView(entry, traces, settings) {
  const many = traces.length > 1;
  const head = el(
    "header",
    { class: "asked" },
    el("p", { class: "where" }, visible(`${entry.id}${entry.step === undefined ? (entry.sample ? ` · sample ${entry.sample + 1}` : "") : ` · candidate ${entry.sample + 1}`} · ${entry.db}`), entry.difficulty ? ` · ${entry.difficulty}` : "", entry.step === undefined ? "" : ` · step ${entry.step}`),
    el("h2", { class: "question" }, visible(entry.question)),
    entry.evidence ? el("p", { class: "evidence" }, el("span", { class: "label" }, "Evidence "), visible(entry.evidence)) : null,
  );
  const sides = traces.map((trace, i) => sideView(entry, entry.sides[i], trace, i, settings, many));
  if (!many) return [head, answers(entry, traces, settings), sides[0]];
  const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Run" });
  const columns = el("div", { class: "columns", "data-shown": "0" }, sides);
  settings.runs.forEach((name, i) => {
    const tab = el("button", { type: "button", role: "tab", "aria-selected": String(i === 0) }, badge(entry.sides[i], settings, true), " ", visible(name));
    tab.addEventListener("click", () => {
      columns.dataset.shown = String(i);
      tabs.querySelectorAll("button").forEach((other, j) => other.setAttribute("aria-selected", String(i === j)));
    });
    tabs.append(tab);
  });
  return [head, answers(entry, traces, settings), tabs, columns];
}

/** Gold beside the answer, or beside the two answers: query, first rows, verdicts. */
function answers(entry, traces, settings) {
  const gold = (traces.find((trace) => trace.results && trace.results.gold) || { results: null }).results;
  const cards = [
    el(
      "section",
      { class: "answer gold" },
      el("h3", {}, "Gold"),
      entry.gold ? sqlBlock(entry.gold) : el("p", { class: "absent" }, "result files, no query"),
      rowsTable(gold && gold.gold, settings.kind === "training" ? null : "no rows to show"),
      entry.flags.map((flag) => el("p", { class: "suspicion" }, el("b", {}, flag.replaceAll("_", " ")), ` ${settings.flags[flag] || ""}`)),
    ),
  ];
  traces.forEach((trace, i) => {
    const side = entry.sides[i];
    const title = traces.length > 1 ? settings.runs[i] : "Answer";
    cards.push(
      el(
        "section",
        { class: "answer" },
        el("h3", {}, visible(title), " ", badge(side, settings)),
        side.answer === null ? el("p", { class: "absent" }, "no answer") : sqlBlock(side.answer),
        rowsTable(trace.results && trace.results.pred, side.answer === null ? null : trace.reason),
        difference(trace.results && trace.results.difference),
        trace.verdicts.length
          ? el("ul", { class: "verdicts" }, trace.verdicts.map(([rule, score, reason]) => el("li", {}, el("span", { class: "score" }, Number.isInteger(score) ? String(score) : score.toFixed(3)), " ", el("code", {}, rule), " ", el("span", { class: "reason" }, visible(reason)))))
          : el("p", { class: "absent" }, visible(`no verdict: ${side.status.replaceAll("_", " ")}${trace.reason ? `: ${trace.reason}` : ""}`)),
      ),
    );
  });
  return el("div", { class: `answers of-${cards.length}` }, cards);
}

/** The first rows of a result, or why there are none. */
function rowsTable(head, otherwise) {
  if (!head) return otherwise ? el("p", { class: "absent" }, visible(otherwise)) : null;
  if (!head.n_rows) return el("p", { class: "absent" }, "runs, and returns no rows");
  const wider = head.n_columns > head.columns.length;
  const rows = head.rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell === null ? el("span", { class: "null" }, "NULL") : cell === "" ? el("span", { class: "null" }, "(empty)") : visible(cell))), wider ? el("td", {}, "…") : null));
  const note = head.n_rows > head.rows.length ? `first ${head.rows.length} of ${format(head.n_rows)} rows` : counted(head.n_rows, "row");
  return el(
    "div",
    { class: "rows" },
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head.columns.map((name) => el("th", { scope: "col" }, visible(name))), wider ? el("th", {}, "…") : null)), el("tbody", {}, rows))),
    el("p", { class: "absent" }, wider ? `${note}, ${head.n_columns} columns` : note),
  );
}

function difference(d) {
  if (!d || (!d.missing && !d.surplus && d.same_bag)) return null;
  if (!d.missing && !d.surplus) return el("p", { class: "difference" }, "the same rows, in other multiplicities");
  const parts = [];
  if (d.missing) parts.push(`${format(d.missing)} of ${counted(d.gold_distinct, "distinct gold row")} missing`);
  if (d.surplus) parts.push(`${counted(d.surplus, "row")} that gold lacks`);
  return el("p", { class: "difference" }, parts.join(", "));
}

/** The turns of one run, with its figures above. */
function sideView(entry, side, trace, number, settings, many) {
  const figures = [
    ["turns", format(side.turns)],
    ["calls", side.calls === side.distinct_calls ? format(side.calls) : `${format(side.calls)}, ${format(side.distinct_calls)} distinct`],
    ["tokens", `${format(side.sampled_tokens)} sampled, ${format(side.total_tokens)} in all`],
    ["ended", side.ended.replaceAll("_", " ")],
    ["origin", side.origin.replaceAll("_", " ")],
  ];
  if (side.reward !== undefined) figures.unshift(["reward", side.reward.toFixed(3)]);
  if (side.opened !== null) figures.push(["gold tables", side.opened ? "all opened" : "not all opened"]);
  if (side.literals && side.literals[0]) {
    const [total, seen, , nowhere] = side.literals;
    figures.push(["literals", `${seen} of ${total} seen${nowhere ? `, ${nowhere} from nowhere` : ""}`]);
  }
  return el(
    "section",
    { class: "side", "data-side": number },
    many ? el("h3", { class: "run" }, visible(settings.runs[number])) : null,
    el("dl", { class: "figures" }, figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    (side.mode || settings.modes[number]) === "full" ? el("p", { class: "absent" }, "The question came with the schema (mode full).") : null,
    trace.error ? el("div", { class: "error" }, el("p", {}, "A fault of the harness ended this episode."), textBlock(trace.error)) : null,
    el("ol", { class: "turns" }, trace.turns.map((turn, i) => turnView(turn, i))),
    trace.turns.length ? null : el("p", { class: "absent" }, "no turn: the prompt left no room"),
  );
}

function turnView(turn, number) {
  const flags = [];
  if (turn.closing) flags.push(["closing turn", "asked for the final SQL"]);
  if (!turn.clean && !turn.closing) flags.push(["not clean", "more than a think block and calls"]);
  if (turn.cut) flags.push(["cut", "a token limit ended the turn"]);
  if (turn.dropped) flags.push([`${turn.dropped} not run`, "calls that were seen and not run"]);
  return el(
    "li",
    { class: `turn${turn.closing ? " closing" : ""}`, tabindex: "-1" },
    el("h4", {}, `Turn ${number + 1}`, el("span", { class: "tokens" }, counted(turn.tokens, "token")), flags.map(([words, title]) => el("span", { class: "flag", title }, words))),
    thinkView(turn.think),
    turn.calls.map(callView),
    turn.raw !== null ? el("details", { class: "raw", open: turn.closing || !turn.calls.length }, el("summary", {}, "as written"), textBlock(turn.raw)) : null,
    turn.problem ? el("div", { class: "environment" }, textBlock(turn.problem)) : null,
    turn.budget ? el("p", { class: "budget" }, turn.budget) : null,
    turn.request ? el("div", { class: "environment" }, textBlock(turn.request)) : null,
  );
}

function thinkView(think) {
  if (think === null || !think.trim()) return null;
  const text = think.trim();
  return el("details", { class: "think", open: true }, el("summary", {}, "thinking"), textBlock(text));
}

const NOT_OK = { sql_error: "error", bad_call: "bad call", no_call: "no call", setup_error: "setup error" };

function callView(call) {
  const args = Object.entries(call.args);
  const sql = typeof call.args.sql === "string" ? call.args.sql : null;
  const plain = args.filter(([name]) => name !== "sql").map(([name, value], i) => [i ? ", " : "", el("span", { class: "arg" }, `${name}=`), visible(JSON.stringify(value))]);
  const submitted = call.outcome === "submitted";
  return el(
    "div",
    { class: `call ${call.outcome === "ok" || submitted ? "ok" : "not-ok"}` },
    el("p", { class: "signature" }, el("code", {}, el("b", {}, call.tool || "unknown tool"), "(", plain, sql !== null ? "sql" : "", ")"), call.outcome === "ok" ? null : el("span", { class: "outcome" }, submitted ? "submitted" : NOT_OK[call.outcome] || call.outcome)),
    sql !== null ? sqlBlock(sql, "argument") : null,
    submitted ? null : textBlock(call.text, { class: "result" }),
  );
}
