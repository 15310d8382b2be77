"use strict";

// The only way anything gets onto the page: elements made one by one, text as text nodes. Nothing is ever parsed as HTML.

/** An element. Attributes `class`, `data-*`, `aria-*` and so on as given; `on` maps events to functions. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else if (value === true) {
      node.setAttribute(name, "");
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, String(value));
    }
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Characters that are invisible or reorder what is around them: they could make text look like other text.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

/** Text as nodes; each hidden character is shown by its code. */
function visible(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    const code = match[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(el("span", { class: "hidden-char", title: `character U+${code}` }, `U+${code}`));
    end = match.index + 1;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

const SQL_TOKEN = /(--[^\n]*|\/\*[^]*?\*\/)|('(?:[^']|'')*')|("(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\])|(\b\d+(?:\.\d+)?\b)|(\b[A-Za-z_]\w*\b)/g;
const SQL_WORDS = new Set(
  ("all and as asc between by case cast collate count cross desc distinct else end escape except exists filter from full glob " +
    "group having if iif in inner intersect is isnull join left like limit natural not notnull null offset on or order outer over " +
    "partition recursive replace right select set sum avg min max then union using values when where window with").split(" "),
);

/** A query as a block, its words told apart. */
function sqlBlock(sql, kind) {
  const nodes = [];
  let end = 0;
  if (sql.length <= 20000) {
    for (const match of sql.matchAll(SQL_TOKEN)) {
      const [all, comment, string, name, figure, word] = match;
      const kind =
        comment ? "comment" : string ? "string" : name ? "" : figure ? "figure" : SQL_WORDS.has(word.toLowerCase()) ? "word" : "";
      if (!kind) continue;
      nodes.push(...visible(sql.slice(end, match.index)), el("span", { class: `sql-${kind}` }, visible(all)));
      end = match.index + all.length;
    }
  }
  return el("pre", { class: `sql ${kind || ""}` }, nodes, visible(sql.slice(end)));
}

const FOLD_LINES = 14;
const FOLD_CHARACTERS = 2400;

/** A block of text; what is long is folded, with a button that shows the rest. */
function textBlock(text, attributes) {
  const lines = text.split("\n");
  const block = el("pre", { ...attributes, class: `text ${(attributes && attributes.class) || ""}` });
  if (lines.length <= FOLD_LINES + 4 && text.length <= FOLD_CHARACTERS * 1.5) {
    block.append(...visible(text));
    return block;
  }
  const head = lines.slice(0, FOLD_LINES).join("\n").slice(0, FOLD_CHARACTERS);
  block.append(...visible(head));
  const more = lines.length > FOLD_LINES + 4 ? `${lines.length} lines` : `${format(text.length)} characters`;
  const button = el("button", { type: "button", class: "more", "aria-expanded": "false" }, `show all ${more}`);
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    button.textContent = open ? "show less" : `show all ${more}`;
    block.replaceChildren(...visible(open ? text : head));
  });
  return el("div", { class: "folded" }, block, button);
}

/** A whole number with thousands set apart. */
function format(value) {
  return value.toLocaleString("en-US");
}

/** `1 call`, `2 calls`. */
function counted(count, thing) {
  return `${format(count)} ${thing}${count === 1 ? "" : "s"}`;
}

/** The JSON in a script element of this page. */
function embedded(id) {
  return JSON.parse(document.getElementById(id).textContent);
}
