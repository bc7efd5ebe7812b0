// The page of `reshard inspect`.
const T = data.tensors.map((row, number) => ({number, key: row[0], n: row[1], part: data.texts[row[2]], dtype: data.texts[row[3]],
  shape: data.texts[row[4]], cut: data.texts[row[5]], shards: row[6], min: row[7], max: row[8], bytes: row[9], drawing: row[10]}));
const FILES = data.files.marks.map((row) => ({name: row[0], n: row[1], bytes: row[2], largest: row[3], tensors: row[4], model: row[5], optimizer: row[6],
  ranks: row[7] === null ? "" : row[7] === row[8] ? `rank ${row[7]}` : `ranks ${row[7]}-${row[8]}`}));
const totalBytes = T.reduce((sum, one) => sum + one.bytes, 0);
const PART_COLORS = {model: "var(--a)", optimizer: "var(--b)"};

page.append(el("h1", {text: data.path}));
page.append(el("p", {class: "soft", text: "What this checkpoint holds, and where. Made by reshard inspect from headers and metadata; tensor data was not read."}));
const storedBytes = FILES.reduce((sum, one) => sum + one.bytes, 0);
numbers([
  ...(data.iteration === null ? [] : [[String(data.iteration), "iteration shown"]]), [data.format, "format"],
  ...data.parts.map(([name, n, bytes]) => [size(bytes), `${name}, ${count(n, "tensor")}`]),
  [size(storedBytes), `stored in ${count(data.files.n, "file")}`],
]);
card("Summary", "", table(null, data.facts.map(([name, value]) => [el("span", {class: "soft", text: name}), value])));

// -- the time line
const STATES = {
  complete: ["var(--ok)", "complete"], unverified: ["var(--warn)", "complete, unverified"], damaged: ["var(--bad)", "damaged"],
  unreadable: ["var(--bad)", "unreadable"], "not checked": ["var(--soft)", "not checked"], deleted: ["var(--gone)", "no longer there (pruned or deleted)"],
};
function timeline() {
  const points = data.saves.points;
  if (!points.length) return;
  const detail = el("div");
  const choose = el("select", {"aria-label": "metric", onchange: () => box.redraw()},
    ...data.saves.metrics.map((name, n) => el("option", {value: n, text: name})));
  const used = [...new Set(points.map((point) => point.state))];
  choose.value = String(Math.max(data.saves.metrics.indexOf("loss"), 0));
  const box = fit(draw);
  card("Iterations", "Every save of this run, and its state now. tracker marks the iteration that a restart tries first, selected the one that this page describes. The line shows a metric that was saved with them. Click a save for its details.",
    el("div", {class: "bar"}, ...(data.saves.metrics.length ? [el("span", {class: "soft", text: "metric"}), choose] : [])),
    legend(used.map((state) => STATES[state])), box, detail);
  function draw(width) {
    const metric = Number(choose.value) || 0, height = data.saves.metrics.length ? 262 : 136, left = 74, right = 24, base = height - 92;
    const node = drawing(width, height, "iterations on a time line");
    const first = points[0].iteration, last = points[points.length - 1].iteration;
    const x = (iteration) => left + (width - left - right) * (last === first ? 0.5 : (iteration - first) / (last - first));
    const value = (point) => typeof point.values[metric] === "number" ? point.values[metric] : null;
    const isOdd = (point) => typeof point.values[metric] === "string";
    const known = points.filter((point) => value(point) !== null);
    const values = known.map(value);
    const low = Math.min(...values), high = Math.max(...values);
    const y = (v) => 14 + (base - 30) * (high === low ? 0.5 : (high - v) / (high - low));
    let best = null;
    if (known.length) {
      for (const v of high === low ? [high] : [low, (low + high) / 2, high]) {
        node.append(svg("line", {class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v)}));
        node.append(svg("text", {class: "soft", x: left - 6, y: y(v) + 4, "text-anchor": "end"}, v.toPrecision(4)));
      }
      // The line is broken where a value is infinite or not a number.
      const lines = [[]];
      for (const point of points) {
        if (isOdd(point)) lines.push([]);
        else if (value(point) !== null) lines[lines.length - 1].push(`${x(point.iteration)},${y(value(point))}`);
      }
      for (const line of lines) node.append(svg("polyline", {fill: "none", stroke: "var(--accent)", "stroke-width": 1.5, points: line.join(" ")}));
      best = known.reduce((a, b) => value(b) < value(a) ? b : a);
    }
    node.append(svg("line", {class: "grid", x1: left, x2: width - right, y1: base + 14, y2: base + 14}));
    const words = (point) => [...point.marks, ...(isOdd(point) ? [`${data.saves.metrics[metric]} ${point.values[metric]}`.slice(-40)] : []),
      ...(point === best ? [`lowest ${data.saves.metrics[metric]}`.slice(0, 40)] : [])];
    const row = points.length > 60 ? 3 : 6;
    points.forEach((point) => {
      const color = STATES[point.state][0], at = x(point.iteration);
      const group = svg("g", {class: "click", onclick: () => show(point, words(point))});
      if (value(point) !== null) group.append(svg("circle", {cx: at, cy: y(value(point)), r: row === 6 ? 4 : 2, fill: color}));
      group.append(svg("circle", {cx: at, cy: base + 14, r: row, fill: point.state === "deleted" ? "var(--card)" : color, stroke: color, "stroke-width": 1.5}));
      if (point.state === "damaged" || point.state === "unreadable")
        group.append(svg("path", {d: `M${at - 3},${base + 11}l6,6m0,-6l-6,6`, stroke: "#fff", "stroke-width": 1.6}));
      tooltip(group, `iteration ${point.iteration}: ${STATES[point.state][1]}${words(point).length ? `\n${words(point).join(", ")}` : ""}${value(point) === null ? "" : `\n${data.saves.metrics[metric]} ${value(point).toPrecision(6)}`}`);
      node.append(group);
    });
    // Labels that do not overlap: points with words first, newest first.
    const taken = [];
    for (const point of [...points].reverse().sort((a, b) => words(b).length - words(a).length)) {
      const label = String(point.iteration), lines = words(point).slice(0, 4);
      const half = 4 + 3.2 * Math.max(label.length, ...lines.map((line) => line.length));
      const at = Math.min(Math.max(x(point.iteration), half), width - half);
      if (taken.some(([from, to]) => at + half > from && at - half < to)) continue;
      taken.push([at - half, at + half]);
      node.append(svg("text", {class: "soft", x: at, y: base + 36, "text-anchor": "middle"}, label));
      lines.forEach((line, n) => node.append(svg("text", {x: at, y: base + 48 + n * 11, "text-anchor": "middle"}, line)));
    }
    return node;
  }
  function show(point, words) {
    const rows = [["iteration", String(point.iteration)], ["state", STATES[point.state][1] + (words.length ? ` (${words.join(", ")})` : "")]];
    if (point.reason) rows.push(["reason", point.reason]);
    if (point.saved_at) rows.push(["saved at", point.saved_at], ["size", size(point.n_bytes)],
      ["took", `${point.wall_s.toFixed(1)} s, of which training waited ${point.stall_s.toFixed(1)} s`]);
    data.saves.metrics.forEach((name, n) => { if (point.values[n] !== null) rows.push([name, String(point.values[n])]); });
    detail.replaceChildren(table(null, rows.map(([name, text]) => [el("span", {class: "soft", text: name}), text])));
  }
  const damaged = points.filter((point) => point.state === "damaged");
  const start = damaged[damaged.length - 1] || points[points.length - 1];
  show(start, start.marks);
}

// -- the map of tensors
function tree() {
  const root = {name: "", children: new Map(), bytes: 0, tensors: 0};
  for (const one of T) {
    let node = root;
    node.bytes += one.bytes; node.tensors += one.n;
    for (const name of one.key.split(".")) {
      if (!node.children.has(name)) node.children.set(name, {name, children: new Map(), bytes: 0, tensors: 0, parent: node});
      node = node.children.get(name);
      node.bytes += one.bytes; node.tensors += one.n;
    }
    node.leaves = [...(node.leaves || []), one];
  }
  const join = (node) => {  // a module with one child and this child are one box; not recursive, for any depth of names
    const stack = [node];
    while (stack.length) {
      const at = stack.pop();
      at.items = [...at.children.values()].map((child) => {
        while (!child.leaves && child.children.size === 1) {
          const only = [...child.children.values()][0];
          child = {...only, name: `${child.name}.${only.name}`, parent: at};
        }
        child.parent = at;
        stack.push(child);
        return child;
      });
      at.items.sort((a, b) => b.bytes - a.bytes);
    }
  };
  join(root);
  return root.items.length === 1 && !root.items[0].leaves ? root.items[0] : root;
}

// Squarified treemap (Bruls, Huizing, van Wijk): rows of boxes whose sides are as equal as possible.
function squarify(items, x, y, w, h) {
  const boxes = [], total = items.reduce((sum, item) => sum + item.bytes, 0);
  if (!total || w <= 0 || h <= 0) return boxes;
  const scale = w * h / total;
  let at = 0;
  while (at < items.length && items[at].bytes > 0) {
    const side = Math.min(w, h);
    let end = at, sum = 0, worst = Infinity;
    while (end < items.length && items[end].bytes > 0) {
      const next = sum + items[end].bytes * scale;
      const ratio = Math.max(side * side * items[at].bytes * scale / (next * next), next * next / (side * side * items[end].bytes * scale));
      if (ratio > worst) break;
      worst = ratio; sum = next; end += 1;
    }
    const thick = sum / side;
    let offset = 0;
    for (let n = at; n < end; n += 1) {
      const length = items[n].bytes * scale / thick;
      boxes.push(w >= h ? {item: items[n], x, y: y + offset, w: thick, h: length} : {item: items[n], x: x + offset, y, w: length, h: thick});
      offset += length;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    at = end;
  }
  return boxes;
}

const DTYPES = [...new Set(T.map((one) => one.dtype))].sort();
const colorOf = (one) => DTYPE_COLORS[DTYPES.indexOf(one.dtype) % DTYPE_COLORS.length];
let chosen = null, chosenFile = null, boxOf = new Map();
const detail = el("div");

function treemap() {
  if (!T.length) {
    card("Tensors", "There are no tensors in this checkpoint.");
    return;
  }
  const whole = tree(), trail = el("div", {class: "bar"}), found = el("div", {class: "list"});
  const search = el("input", {type: "search", placeholder: "search tensors, for example q_proj", "aria-label": "search tensors", oninput: () => find()});
  let top = whole;
  const mapBox = fit(draw);
  const bytesOf = new Map();
  for (const one of T) bytesOf.set(one.dtype, (bytesOf.get(one.dtype) || 0) + one.bytes);
  card("Tensors", "The area of a box is the bytes of a tensor; boxes are inside their module. Click a box for its shape and the files that hold it, or the name of a module to enlarge it.",
    el("div", {class: "bar"}, search),
    legend(DTYPES.map((name, n) => [DTYPE_COLORS[n % DTYPE_COLORS.length], `${name}, ${size(bytesOf.get(name))}`])),
    el("div", {class: "split"}, el("div", {}, trail, mapBox), el("div", {}, found, detail)));
  function draw(room) {
    const isBeside = room > 818;  // what is chosen is beside the map, as in the style
    const width = isBeside ? room - 386 : room, height = isBeside ? 540 : 480;
    const node = drawing(width, height, "map of tensors by module");
    boxOf = new Map();
    const place = (item, x, y, w, h, depth) => {
      if (w < 0.7 || h < 0.7) return;
      if (item.leaves && !item.items.length) {
        const one = item.leaves[0];
        const rect = svg("rect", {class: "click", x: x + 0.5, y: y + 0.5, width: Math.max(w - 1, 0.3), height: Math.max(h - 1, 0.3), fill: colorOf(one), onclick: () => select(one)});
        tooltip(rect, () => `${one.key}\n${one.dtype}, ${one.shape}, ${size(one.bytes)}${one.n > 1 ? `, ${one.n} tensors` : ""}\n${one.cut}`);
        boxOf.set(one.number, rect);
        node.append(rect);
        if (h > 15 && w > 34) node.append(svg("text", {class: "on", x: x + 5, y: y + 14}, fitted(item.name, w - 8)));
        return;
      }
      let head = 0;
      if (depth > 0 && w > 26 && h > 24) {
        head = 15;
        const rect = svg("rect", {class: "click", x: x + 0.5, y: y + 0.5, width: w - 1, height: h - 1, fill: "var(--hover)", stroke: "var(--line)", onclick: () => zoom(item)});
        tooltip(rect, `${path(item)}\n${size(item.bytes)}, ${count(item.tensors, "tensor")}\nclick to enlarge`);
        node.append(rect);
        node.append(svg("text", {class: "head", x: x + 4, y: y + 12}, fitted(item.name, w - 8, "600 11px system-ui, sans-serif")));
      }
      const pad = depth > 0 && w > 26 && h > 24 ? 2 : 0;
      for (const box of squarify(item.items, x + pad, y + head, w - 2 * pad, h - head - pad)) place(box.item, box.x, box.y, box.w, box.h, depth + 1);
    };
    place(top, 0, 0, width, height, 0);
    const steps = [];
    for (let at = top; at; at = at === whole ? null : at.parent) steps.unshift(at);
    trail.replaceChildren(...steps.map((step) => el("button", {class: "link", text: step === whole ? "all tensors" : step.name, onclick: () => zoom(step)})),
      el("span", {class: "soft", text: `${size(top.bytes)}, ${count(top.tensors, "tensor")}`}));
    mark();
    return node;
  }
  function path(item) { const names = []; for (let at = item; at && at.name; at = at.parent) names.unshift(at.name); return names.join("."); }
  function zoom(item) { top = item; mapBox.redraw(); }
  function find() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const hits = words.length ? T.filter((one) => words.every((word) => `${one.key} ${one.dtype}`.toLowerCase().includes(word))) : [];
    found.replaceChildren(...(words.length ? [el("p", {class: "soft", text: `${count(hits.length, "match").replace("matchs", "matches")}${hits.length > 50 ? ", the first 50" : ""}`})] : []),
      ...hits.slice(0, 50).map((one) => el("div", {}, el("button", {class: "link mono", text: one.key, onclick: () => select(one)}))));
    const set = words.length ? new Set(hits.map((one) => one.number)) : null;
    for (const [number, rect] of boxOf) rect.classList.toggle("dim", set !== null && !set.has(number));
  }
  const inModel = T.filter((one) => one.part === "model");
  select((inModel.length ? inModel : T).reduce((a, b) => b.shards > a.shards || (b.shards === a.shards && b.bytes > a.bytes) ? b : a));
}

function mark() {
  for (const [number, rect] of boxOf) rect.classList.toggle("chosen", chosen !== null && number === chosen.number);
}

function select(one) {
  chosen = one;
  mark();
  const replicas = one.min === one.max ? String(one.min) : `${one.min} to ${one.max}`;
  detail.replaceChildren(el("h3", {class: "mono", text: one.key}), table(null, [
    ["part", one.part], ["dtype", one.dtype], ["shape", one.shape], ["bytes", `${size(one.bytes)}${one.n > 1 ? ` in ${one.n} tensors` : ""}, ${percent(one.bytes, totalBytes)}`],
    ["cut", one.cut], ["regions", `${one.shards}, each in ${replicas} file${replicas === "1" ? "" : "s"}`],
  ].map(([name, text]) => [el("span", {class: "soft", text: name}), text])), regions(one));
}

function fileLabel(mark) {
  const one = FILES[mark];
  if (one.ranks) return one.n > 1 || FILES.some((other, n) => n !== mark && other.ranks === one.ranks) ? `${one.ranks} (file${one.n > 1 ? "s" : ""} ${one.n > 1 ? `${mark * data.files.each}-${mark * data.files.each + one.n - 1}` : mark})` : one.ranks;
  if (one.n > 1) return `files ${mark * data.files.each}-${mark * data.files.each + one.n - 1}`;
  return one.name.length <= 22 ? one.name : `file ${mark}`;
}

function regions(one) {
  if (one.drawing === null) return el("p", {class: "soft", text: "The positions of the regions are not known."});
  const [down, across, rows, columns, cells] = data.drawings[one.drawing];
  const cell = ([, , n, marks, first]) => {
    const node = el("td", {});
    first.forEach((mark, k) => {
      const button = el("button", {class: "link", text: `${k ? ", " : ""}${fileLabel(mark)}`, onclick: () => selectFile(mark)});
      tooltip(button, FILES[mark].name);
      node.append(button);
    });
    if (marks > first.length) node.append(` +${marks - first.length} more`);
    if (n > 1) node.append(el("div", {class: "soft", text: count(n, "region")}));
    if (chosenFile !== null && first.includes(chosenFile)) node.className = "hit";
    return node;
  };
  const box = el("div", {class: "scroll"});
  const result = el("div", {}, el("p", {class: "soft", text: "The rank that wrote each region of the tensor, or the file that holds it. Rows and columns are intervals of its dims, in elements."}), box);
  if (!rows.length) {
    box.append(el("table", {class: "cells"}, ...cells.slice(0, 200).map((one, n) => el("tr", {}, el("th", {text: `region ${n}`}), cell(one)))));
    return result;
  }
  const corner = `${down >= 0 ? `dim ${down} ↓ ` : ""}${across >= 0 ? `dim ${across} →` : ""}`;
  const grid = el("table", {class: "cells"}, el("tr", {}, el("th", {text: corner}), ...columns.map((text) => el("th", {text: across >= 0 ? text : ""}))));
  const byRow = new Map();
  for (const one of cells) byRow.set(one[0], [...(byRow.get(one[0]) || []), one]);
  rows.forEach((text, n) => grid.append(el("tr", {}, el("th", {text: down >= 0 ? text : ""}), ...(byRow.get(n) || []).map(cell))));
  box.append(grid);
  return result;
}

// -- files
const fileDetail = el("div");
function files() {
  if (!FILES.length) return;
  const parts = ["model", "optimizer"].filter((name) => FILES.some((one) => one[name]));
  const balance = parts.map((name) => {
    const held = FILES.filter((one) => one[name]).map((one) => one[name] / one.n);
    const mean = held.reduce((sum, bytes) => sum + bytes, 0) / held.length, largest = Math.max(...held);
    return `The largest file of the ${name} holds ${size(largest)}, ${(largest / mean).toFixed(2)} times the mean.`;
  });
  const items = FILES.map((one, n) => {
    const known = one.model + one.optimizer;
    return {label: String(n), kind: parts.filter((name) => one[name]).join(), click: () => selectFile(n), tip: `${one.n > 1 ? "" : `file ${n}: `}${one.name}${one.ranks ? `, ${one.ranks}` : ""}\n${size(one.bytes)}${one.n > 1 ? ` in ${one.n} files` : ""}, ${count(one.tensors, "tensor")}`,
      parts: known ? parts.map((name) => [PART_COLORS[name], one[name]]) : [["var(--gone)", one.bytes]]};
  });
  card("Files", `Bytes of each shard file. A dashed line is the mean of the files of one part. ${balance.map((line) => `${line} `).join("")}Click a bar to see what the file holds.`,
    legend(parts.map((name) => [PART_COLORS[name], name])), bars(items, {label: "bytes by file", format: size}), fileDetail);
  selectFile(0, true);
}

function selectFile(mark) {
  chosenFile = mark;
  const one = FILES[mark];
  const held = T.filter((tensor) => tensor.drawing !== null && data.drawings[tensor.drawing][4].some((cell) => cell[4].includes(mark)));
  const exact = held.reduce((sum, tensor) => sum + tensor.n, 0) === one.tensors;
  held.sort((a, b) => b.bytes - a.bytes);
  fileDetail.replaceChildren(el("h3", {text: `${one.n > 1 ? "" : `file ${mark}: `}${one.name}${one.ranks ? `, written by ${one.ranks}` : ""}`}),
    el("p", {text: `${size(one.bytes)}${one.n > 1 ? ` in ${one.n} files` : ""}, regions of ${count(one.tensors, "tensor")}${one.model && one.optimizer ? `: model ${size(one.model)}, optimizer ${size(one.optimizer)}` : ""}.${exact ? "" : " Not all of them are listed here, because regions are drawn together."}`}),
    el("div", {class: "list"}, table(null, held.slice(0, 300).map((tensor) => [el("button", {class: "link mono", text: tensor.key, onclick: () => { select(tensor); detail.scrollIntoView({block: "center"}); }}), tensor.dtype, tensor.shape, tensor.cut]))));
  if (chosen) select(chosen);
}

timeline();
treemap();
files();
notes(data.notes);
