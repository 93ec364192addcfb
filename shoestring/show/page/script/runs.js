// The overview of several runs: its table is sorted by a click on a heading, and the runs that are ticked are drawn in one chart.
// The lines of a run are fetched when it is ticked, and again when its row says that there is news.

const sorting = {column: "", down: false};
const ticked = new Map();    // by name: whether the run is drawn; what the page ticked at first counts until somebody changes it
const fetched = new Map();   // by name: {mark, curves}
let wanted = "";             // the curve that is shown, by its name
let drawing = 0;             // so that an answer that comes late is not drawn over a newer one

const rowsOf = table => [...table.tBodies[0].rows];
const boxOf = row => row.querySelector("input");

const sortTable = table => {
  const heads = [...table.tHead.rows[0].cells], place = heads.findIndex(head => head.dataset.name === sorting.column);
  heads.forEach((head, at) => head.setAttribute("aria-sort", at !== place ? "none" : sorting.down ? "descending" : "ascending"));
  if (place < 0) return;
  const key = row => row.cells[place].dataset.v ?? row.cells[place].textContent.trim();
  const sign = sorting.down ? -1 : 1;
  table.tBodies[0].append(...rowsOf(table).map((row, at) => [key(row), at, row]).sort(([one, before], [other, after]) => {
    if (one === "" || other === "") return (one === "") - (other === "") || before - after;   // what is not known comes last
    const numbers = Number(one) - Number(other);
    return sign * (Number.isNaN(numbers) ? one.localeCompare(other, "en", {numeric: true}) : numbers) || before - after;
  }).map(([, , row]) => row));
};

const curvesOf = async row => {
  const {name, mark} = row.dataset, known = fetched.get(name);
  if (known?.mark === mark) return known.curves;
  const answer = await fetch("/curves?run=" + encodeURIComponent(name));
  if (!answer.ok) return known?.curves || {};
  const curves = await answer.json();
  fetched.set(name, {mark, curves});
  return curves;
};

const drawRuns = async table => {
  const mine = ++drawing, chart = charts.get(document.querySelector("figure[data-runs]")), choice = document.querySelector("#curve");
  if (!chart) return;
  const shown = rowsOf(table).filter(row => boxOf(row).checked);
  let found;
  try { found = await Promise.all(shown.map(curvesOf)); } catch { return; }   // the server is gone; the page says so
  if (mine !== drawing) return;
  const names = [...new Set(found.flatMap(Object.keys))];
  if (names.length && !names.includes(wanted)) wanted = names[0];
  choice.replaceChildren(...names.map(name => element("option", {value: name, ...(name === wanted ? {selected: ""} : {})}, name)));
  const lines = shown.flatMap((row, place) =>
    found[place][wanted] ? [{...found[place][wanted], name: row.dataset.name, tone: toneOf(row)}] : []);
  const memory = wanted === "memory", {across} = JSON.parse(chart.figure.dataset.chart);
  const unit = memory || wanted.startsWith("bytes") ? "bytes" : "";
  chart.update({...chart.data, title: wanted, unit, across: memory ? "time" : across, lines});
};

// A run keeps its colour while it is ticked; colours repeat after ten
const tones = new Map();
const toneOf = row => {
  const {name} = row.dataset;
  if (!tones.has(name)) {
    const taken = [...tones.entries()].filter(([other]) => ticked.get(other)).map(([, tone]) => tone);
    const free = Array.from({length: 10}, (_, place) => place).find(place => !taken.includes(place));
    tones.set(name, free === undefined ? tones.size % 10 : free);
  }
  return "run-" + tones.get(name);
};

const colour = table => {
  for (const row of rowsOf(table)) {
    const box = boxOf(row);
    if (!ticked.has(row.dataset.name)) ticked.set(row.dataset.name, box.checked);
    box.checked = ticked.get(row.dataset.name);
    if (!box.checked) tones.delete(row.dataset.name);
  }
  for (const row of rowsOf(table)) row.querySelector("i").className = boxOf(row).checked ? "tone-" + toneOf(row) : "off";
};

// On a phone a row stands on end, and every figure has the name of its column before it
const labelCells = table => {
  const heads = [...table.tHead.rows[0].cells];
  for (const row of rowsOf(table)) [...row.cells].slice(3).forEach((cell, at) => { cell.dataset.label = heads[at + 3].dataset.name; });
};

const enhanceRuns = () => {
  const table = document.querySelector("table.runs"), figure = document.querySelector("figure[data-runs]");
  if (!table) return;
  table.classList.add("live");
  for (const head of table.tHead.rows[0].cells) {
    if (!head.dataset.name || head.querySelector("button")) continue;
    const button = element("button", {type: "button", "data-focus": "sort " + head.dataset.name}, ...head.childNodes);
    button.onclick = () => {
      sorting.down = sorting.column === head.dataset.name ? !sorting.down : head.dataset.first === "down";
      sorting.column = head.dataset.name;
      sortTable(table);
    };
    head.append(button);
  }
  table.onchange = event => {
    const row = event.target.closest("tr");
    if (row.dataset.name === undefined) for (const one of rowsOf(table)) ticked.set(one.dataset.name, event.target.checked);
    else ticked.set(row.dataset.name, event.target.checked);
    colour(table);
    drawRuns(table);
  };
  colour(table);
  labelCells(table);
  sortTable(table);
  const chart = charts.get(figure);
  if (chart && !document.querySelector("#curve")) {
    const choice = element("select", {id: "curve", "aria-label": "What is drawn", "data-focus": "curve"});
    choice.onchange = () => { wanted = choice.value; drawRuns(document.querySelector("table.runs")); };
    chart.tools.prepend(choice);
  }
  drawRuns(table);
};
enhanceRuns();
