// What both pages use. Text is set as text only: no markup is ever made of data.
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const DTYPE_COLORS = ["#3b6fb6", "#c46a1b", "#3c8d4f", "#8e4fa8", "#b8434e", "#3a8f99", "#8a7430", "#6b6f7a"];

function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  if (text !== undefined) node.textContent = text;
  return node;
}

function drawing(width, height, label) {
  return svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});
}

// A box with a drawing as wide as a card, so that its text keeps its size; drawn again if the window gets another width.
const fits = [];
function cardWidth() { return Math.max(280, Math.min(1240, document.documentElement.clientWidth) - 82); }
function fit(draw) {
  const box = el("div");
  box.redraw = () => box.replaceChildren(draw(cardWidth()));
  fits.push(box);
  box.redraw();
  return box;
}
let widthNow = cardWidth();
addEventListener("resize", () => {
  if (cardWidth() === widthNow) return;
  widthNow = cardWidth();
  for (const box of fits) box.redraw();
});

function size(bytes) {
  if (bytes < 1024) return `${Math.round(bytes)} B`;
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let value = bytes, unit = -1;
  do { value /= 1024; unit += 1; } while (Math.round(value) >= 1024 && unit < units.length - 1);
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${units[unit]}`;
}

function count(n, word) { return `${n.toLocaleString("en-US")} ${word}${n === 1 ? "" : "s"}`; }
function percent(part, whole) { return whole ? `${(100 * part / whole).toFixed(1)} %` : "0 %"; }

const tip = el("div", {class: "tip", hidden: ""});
document.body.append(tip);
function tooltip(node, text) {
  const move = (event) => {
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  };
  node.addEventListener("mouseenter", (event) => {
    tip.textContent = typeof text === "function" ? text() : text;
    tip.hidden = false;
    move(event);
  });
  node.addEventListener("mousemove", move);
  node.addEventListener("mouseleave", () => { tip.hidden = true; });
  return node;
}

// The text, or its beginning and an ellipsis, in at most `width` units of a drawing. Glyphs differ in width: it is measured.
const pen = document.createElement("canvas").getContext("2d");
function textWidth(text, font = "11px system-ui, sans-serif") {
  pen.font = font;
  return pen.measureText(text).width;
}
function fitted(text, width, font) {
  if (textWidth(text, font) <= width) return text;
  const letters = Array.from(text);
  let from = 0, to = letters.length;  // how many letters fit: at least `from`, fewer than `to`
  while (to - from > 1) {
    const middle = from + to >> 1;
    if (pen.measureText(`${letters.slice(0, middle).join("")}…`).width <= width) from = middle; else to = middle;
  }
  return from ? `${letters.slice(0, from).join("")}…` : "";
}

function card(title, explanation, ...children) {
  const node = el("section", {class: "card"}, el("h2", {text: title}));
  if (explanation) node.append(el("p", {class: "soft", text: explanation}));
  node.append(...children);
  page.append(node);
  return node;
}

function numbers(pairs) {
  const node = el("div", {class: "numbers"});
  for (const [value, name] of pairs) node.append(el("div", {class: "number"}, el("b", {text: value}), el("span", {text: name})));
  page.append(node);
}

function legend(entries) {
  const node = el("div", {class: "legend"});
  for (const [color, name] of entries) {
    const box = el("i");
    box.style.background = color;
    node.append(el("span", {}, box, name));
  }
  return node;
}

function table(head, rows, right = []) {
  const cells = (tag, row) => el("tr", {}, ...row.map((cell, n) =>
    cell instanceof Node ? el(tag, {class: right.includes(n) ? "right" : ""}, cell)
      : el(tag, {class: right.includes(n) ? "right" : "", text: cell})));
  return el("table", {}, ...(head ? [cells("th", head)] : []), ...rows.map((row) => cells("td", row)));
}

// Vertical bars, with a line at the mean of each kind. A bar: {label, kind, parts: [[color, value]], tip, click}.
function bars(items, options) { return fit((width) => barsOf(width, items, options)); }
function barsOf(width, items, options) {
  const height = 170, left = 74, bottom = 20, top = 8;
  const node = drawing(width, height, options.label);
  const total = (item) => item.parts.reduce((sum, part) => sum + part[1], 0);
  if (!items.some(total)) return el("p", {text: "0 B"});
  const max = Math.max(1, ...items.map(total));
  const y = (value) => top + (height - top - bottom) * (1 - value / max);
  for (const share of [0, 0.5, 1]) {
    node.append(svg("line", {class: "grid", x1: left, x2: width, y1: y(max * share), y2: y(max * share)}));
    node.append(svg("text", {class: "soft", x: left - 6, y: y(max * share) + 4, "text-anchor": "end"}, options.format(max * share)));
  }
  const step = Math.min((width - left) / Math.max(items.length, 1), 90);
  const gap = step > 6 ? 2 : step > 2 ? 0.5 : 0;
  const every = Math.ceil((Math.max(...items.map((item) => item.label.length)) * 6.5 + 8) / step);  // bars for a label
  items.forEach((item, n) => {
    const group = svg("g", {"shape-rendering": "crispEdges", ...(item.click ? {class: "click", onclick: item.click} : {})});
    let at = 0;
    for (const [color, value] of item.parts) {
      if (!value) continue;
      group.append(svg("rect", {x: left + n * step, width: Math.max(step - gap, 0.4), y: y(at + value),
        height: Math.max(y(at) - y(at + value), 0.5), fill: color}));
      at += value;
    }
    group.append(svg("rect", {x: left + n * step, width: step, y: top, height: height - top - bottom, fill: "transparent"}));
    if (n % every === 0) group.append(svg("text", {class: "soft", x: left + n * step + step / 2, y: height - 5, "text-anchor": "middle"}, item.label));
    tooltip(group, item.tip);
    node.append(group);
  });
  for (let from = 0, to; from < items.length; from = to) {
    for (to = from; to < items.length && items[to].kind === items[from].kind;) to += 1;
    if (to - from < 2) continue;
    const mean = items.slice(from, to).reduce((sum, item) => sum + total(item), 0) / (to - from);
    node.append(svg("line", {x1: left + step * from, x2: left + step * to, y1: y(mean), y2: y(mean), stroke: "var(--ink)", "stroke-dasharray": "4 3"}));
  }
  return node;
}

function notes(list) {
  if (list.length) card("What is drawn together", "This checkpoint is too large to draw every part of it on its own.",
    el("ul", {class: "notes"}, ...list.map((text) => el("li", {text}))));
}
