// The page of `reshard plan`.
page.append(el("h1", {text: `${data.path}, resharded by ${data.layout}`}));
page.append(el("p", {class: "soft", text: "A forecast by reshard plan from headers and metadata; nothing was converted and tensor data was not read."}));
const fact = new Map(data.facts);
card("Forecast", "", table(null, data.facts.map(([name, value]) => [el("span", {class: "soft", text: name}), value])));
if (data.warnings.length) card("Warnings", "", el("ul", {class: "notes"}, ...data.warnings.map((text) => el("li", {text}))));

function shares(title, explanation, bars_, color, short) {
  const items = bars_.map(([name, n, bytes], number) => ({label: short(name, number), kind: name.replace(/[0-9]+/g, "#"), parts: [[color, bytes]],
    tip: `${name}\n${size(bytes)}${n > 1 ? ` each, mean of ${n}` : ""}`}));
  card(title, explanation, bars(items, {label: title, format: size}));
}
shares("What each rank loads", "The bytes of the arrays of each rank of the new layout, which is the memory that a load needs there. The dashed line is the mean.",
  data.ranks, "var(--a)", (name) => name.replace(/^rank /, "").replace(/ to rank .*/, ""));

function matrix(width) {
  const {rows, columns, cells} = data.matrix;
  const nameWidth = Math.max(...rows.map((name) => textWidth(name)));
  const left = Math.min(nameWidth + 14, 280, width * 0.36), top = 22, right = Math.min(30, width * 0.02);
  const w = Math.min(60, (width - left - right) / columns.length), h = Math.max(9, Math.min(26, 560 / rows.length));
  const node = drawing(width, top + h * rows.length + 6, "bytes from source files to ranks");
  const labels = columns.map((name) => columns.length > 12 ? name.replace(/ to .*/, "") : name);
  const stepColumns = Math.ceil((Math.max(...labels.map((label) => label.length)) * 6.5 + 6) / w), stepRows = Math.ceil(12 / h);
  node.append(svg("text", {class: "soft", x: left - 8, y: top - 7, "text-anchor": "end"}, "to rank"));
  labels.forEach((label, n) => {
    if (n % stepColumns === 0) node.append(svg("text", {class: "soft", x: left + n * w + w / 2, y: top - 7, "text-anchor": "middle"}, label));
  });
  rows.forEach((name, n) => {
    if (n % stepRows !== 0) return;
    node.append(svg("text", {class: "soft", x: left - 8, y: top + n * h + h / 2 + 4, "text-anchor": "end"}, fitted(name, left - 12)));
  });
  node.append(svg("rect", {x: left, y: top, width: w * columns.length, height: h * rows.length, fill: "none", class: "grid"}));
  const widest = Math.max(...cells.map((cell) => textWidth(size(cell[2])))) + 4;
  const byColumn = new Map();
  for (const [row, column, bytes] of cells) byColumn.set(column, (byColumn.get(column) || 0) + bytes);
  for (const [row, column, bytes] of cells) {
    const rect = svg("rect", {class: "click", x: left + column * w + 0.5, y: top + row * h + 0.5, width: Math.max(w - 1, 0.5), height: h - 1,
      fill: "var(--a)", "fill-opacity": (0.12 + 0.88 * bytes / max).toFixed(3)});
    tooltip(rect, `${rows[row]}\nto rank ${columns[column]}\n${size(bytes)}, ${percent(bytes, byColumn.get(column))} of what it loads`);
    node.append(rect);
    if (w >= widest && h >= 16) {
      const dark = bytes / max > 0.55;
      node.append(svg("text", {class: dark ? "on" : "", x: left + column * w + w / 2, y: top + row * h + h / 2 + 4, "text-anchor": "middle", "pointer-events": "none"}, size(bytes)));
    }
  }
  return node;
}
const max = Math.max(...data.matrix.cells.map((cell) => cell[2]));
if (data.matrix.cells.length)
  card("Transfers", `The bytes that each rank (column) reads from each source file (row). A stronger colour stands for more bytes, at most ${size(max)}.`, fit(matrix));

if (data.files !== null) shares("What is written", "The bytes of each file that reshard convert writes, with each shard once. A dashed line is the mean of files whose names differ in numbers only.",
  data.files, "var(--b)", (name, number) => String(number));
notes(data.notes);
