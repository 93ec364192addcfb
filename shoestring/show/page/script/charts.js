// Makes the pictures of a page charts to work with: values under the pointer, zoom, a logarithmic scale, smoothing, lines on and off.
// A chart is a <figure data-chart="JSON">, told as show/page/drawings/charts.py tells it; without this script its picture stays. No library, no
// eval, no style attribute: the page's content policy allows none.
const charts = new Map();    // by figure
const settings = new Map();  // by a chart's key: {log, smooth, hidden}, so that they outlive a live page's updates
const zooms = new Map();     // by what is below: [from, to]; charts with the same axis zoom together
const LEFT_GAP = 8, RIGHT_GAP = 12, TOP_GAP = 24, BOTTOM_GAP = 36, MOST_ROWS = 12, MOST_BANDS = 3;

const node = (name, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

// Numbers as the rest of the page writes them

const plainText = value => {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-4 || size >= 1e7) return value.toExponential(3).replace(/\.?0+e/, "e");
  return size >= 10000 ? Math.round(value).toLocaleString("en") : value.toPrecision(4);
};
const tickText = (unit, value) => unit === "bytes" ? bytesText(value).replace(/\.0+(?= )/, "").replace(/^0 .*/, "0")
  : plainText(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
const bytesText = size => {
  let place = 0;
  while (Math.abs(size) >= 1024 && place < 3) { size /= 1024; place++; }
  const digits = place === 0 || Math.abs(size) >= 100 ? 0 : Math.abs(size) >= 10 ? 1 : 2;
  const text = size.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  return text + " " + ["B", "KiB", "MiB", "GiB"][place];
};
const timeText = seconds => {
  if (seconds < 100) return Number(seconds.toPrecision(3)) + " s";
  const minutes = Math.floor(seconds / 60), rest = Math.round(seconds % 60);
  return minutes < 60 ? `${minutes} min ${rest} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};
const valueText = (unit, value) => unit === "bytes" ? bytesText(value) : plainText(value) + (unit ? " " + unit : "");
const placeText = (across, x) => across === "time" ? timeText(x) : Math.round(x).toLocaleString("en");

// Round values for an axis

const ticksOf = (low, high, count, unit = 1) => {
  const raw = ((high - low) || Math.abs(high) || 1) / count / unit, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= raw * 0.999) * unit;
  const found = [], last = Math.ceil(high / step - 1e-9);
  for (let place = Math.floor(low / step + 1e-9); place <= last; place++) found.push(Number((place * step).toPrecision(12)));
  return found.length > 1 ? found : [found[0], found[0] + step];
};
const logTicks = (low, high) => {
  const found = [], powers = Math.log10(high / low), factors = powers > 4 ? [1] : powers > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of factors) found.push(Number((factor * 10 ** power).toPrecision(6)));
  const inside = found.filter(value => value >= low / 1.0001 && value <= high * 1.0001);
  return inside.length > 1 ? inside.filter((_, place) => place % Math.ceil(inside.length / 7) === 0) : [low, high];
};
const bytesUnit = top => 1024 ** Math.min(3, Math.max(0, Math.floor(Math.log(Math.max(top, 1)) / Math.log(1024))));
const timeUnit = top => top > 7200 ? 3600 : top > 120 ? 60 : 1;

// A mean that forgets: each value counts `weight` times as much as the one after it
const smoothed = (values, weight) => {
  let sum = 0, all = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = sum * weight + value;
    all = all * weight + 1;
    return sum / all;
  });
};

const nearest = (xs, x) => {   // the place of the entry of an ascending list that is nearest
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
};

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.tell(JSON.parse(figure.dataset.chart));
    const picture = figure.querySelector("svg"), label = picture?.getAttribute("aria-label") || this.data.title;
    this.stage = element("div", {class: "stage", tabindex: "0", role: "group", "aria-roledescription": "chart",
      "aria-label": `${label} Arrow keys read values, plus and minus zoom, escape shows all.`, "data-focus": "chart " + this.data.key});
    this.tip = element("div", {class: "tip", hidden: ""});
    this.spoken = element("p", {class: "spoken", role: "status"});
    this.tools = element("div", {class: "tools"});
    this.legend = element("ul", {class: "legend"});
    figure.replaceChildren(this.tools, this.stage, this.legend, this.spoken);
    this.makeTools();
    this.listen();
    this.watcher = new ResizeObserver(() => { if (this.stage.clientWidth !== this.width) this.draw(); });
    this.watcher.observe(this.stage);
    this.draw();
  }

  tell(data) {
    this.data = data;
    if (!settings.has(data.key)) settings.set(data.key, {log: false, smooth: 0, hidden: new Set()});
    this.settings = settings.get(data.key);
  }

  update(data) {
    this.tell(data);
    this.makeLegend();
    this.draw();
  }

  get zoom() { return zooms.get(this.data.across); }

  zoomTo(range) {
    if (range) zooms.set(this.data.across, range); else zooms.delete(this.data.across);
    for (const chart of charts.values()) if (chart.data.across === this.data.across) chart.draw();
  }

  makeTools() {
    const key = this.data.key, state = this.settings;
    this.reset = element("button", {type: "button", hidden: "", "data-focus": "reset " + key}, "Show all");
    this.reset.onclick = () => { this.zoomTo(); this.stage.focus(); };
    if (this.data.tools) {
      this.log = element("button", {type: "button", "aria-pressed": String(state.log), "data-focus": "log " + key}, "Log scale");
      this.log.onclick = () => { state.log = !state.log; this.log.setAttribute("aria-pressed", String(state.log)); this.draw(); };
      this.slider = element("input", {type: "range", min: "0", max: "100", value: String(state.smooth), "aria-label": "Smoothing",
        "data-focus": "smooth " + key});
      this.slider.oninput = () => { state.smooth = Number(this.slider.value); this.draw(); };
      this.tools.append(this.log, element("label", {}, "Smoothing ", this.slider));
    }
    this.tools.append(this.reset);
    this.makeLegend();
  }

  makeLegend() {
    const lines = this.data.lines, {hidden} = this.settings;
    this.legend.hidden = lines.length < 2 && !this.data.named;
    this.legend.replaceChildren(...lines.map(line => {
      const shown = String(!hidden.has(line.name));
      const button = element("button", {type: "button", "aria-pressed": shown, "data-focus": "line " + line.name},
        element("i", {class: "tone-" + line.tone}), line.name);
      button.onclick = () => {
        if (!hidden.delete(line.name)) hidden.add(line.name);
        button.setAttribute("aria-pressed", String(!hidden.has(line.name)));
        this.draw();
      };
      return element("li", {}, button);
    }));
  }

  // What is shown: lines that are not hidden, with the values that are drawn
  shown() {
    const weight = this.data.tools && this.settings.smooth ? 1 - 10 ** (-2.5 * this.settings.smooth / 100) : 0;
    return this.data.lines.filter(line => !this.settings.hidden.has(line.name) && line.x.length).map(line =>
      ({...line, raw: line.y, y: weight && !line.dots ? smoothed(line.y, weight) : line.y, smooth: weight > 0 && !line.dots}));
  }

  scales(lines) {
    const xs = [...lines.flatMap(line => [line.x[0], line.x[line.x.length - 1]]), ...(this.data.span || [])];
    const whole = [this.data.across === "time" ? 0 : Math.min(...xs), Math.max(...xs)];
    let [from, to] = this.zoom || whole;
    if (from >= whole[1] || to <= whole[0]) [from, to] = whole;
    if (from === to) { from -= 0.5; to += 0.5; }
    const log = this.settings.log, good = value => value !== null && (!log || value > 0);
    let low = Infinity, high = -Infinity;
    for (const line of lines) line.x.forEach((x, place) => {
      if (x < from || x > to) return;
      const value = line.y[place];
      if (good(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    });
    if (low > high) [low, high] = log ? [1, 10] : [0, 1];
    const {budget, unit, zero} = this.data;
    if (budget > high && (unit !== "bytes" || budget <= 1.7 * high)) high = budget;
    let marks;
    if (log) {
      if (low === high) { low /= 1.5; high *= 1.5; }
      marks = logTicks(low, high);
    } else {
      marks = ticksOf(zero && !this.zoom ? Math.min(0, low) : low, high, this.height < 260 ? 4 : 5, unit === "bytes" ? bytesUnit(high) : 1);
      low = marks[0];
      high = marks[marks.length - 1];
    }
    return {from, to, low, high, marks, log};
  }

  draw() {
    this.width = this.stage.clientWidth || 440;
    this.height = this.figure.classList.contains("tall") ? (innerWidth < 560 ? 260 : 320) : 220;
    const lines = this.shown(), all = lines.length ? lines : [{x: [0, 1], y: [null, null], raw: [], name: "", tone: "other"}];
    const s = this.scales(all);
    const texts = s.marks.map(mark => tickText(this.data.unit, mark));
    const left = Math.max(...texts.map(text => text.length)) * 7.2 + 6 + LEFT_GAP, right = this.width - RIGHT_GAP;
    const top = TOP_GAP, bottom = this.height - BOTTOM_GAP, map = s.log ? Math.log : value => value;
    this.x = x => left + (x - s.from) / (s.to - s.from) * (right - left);
    this.y = y => bottom - (map(y) - map(s.low)) / ((map(s.high) - map(s.low)) || 1) * (bottom - top);
    this.back = pixel => s.from + (pixel - left) / (right - left) * (s.to - s.from);
    Object.assign(this, {s, left, right, top, bottom, lines});
    const svg = node("svg", {viewBox: `0 0 ${this.width} ${this.height}`, width: this.width, height: this.height, "aria-hidden": true});
    s.marks.forEach((mark, place) => {
      const y = this.y(mark);
      if (y < top - 1 || y > bottom + 1) return;
      svg.append(node("line", {class: "grid", x1: left, x2: right, y1: y, y2: y}),
        node("text", {x: left - LEFT_GAP, y: y + 4, "text-anchor": "end"}, texts[place]));
    });
    this.drawBelow(svg);
    const inside = node("svg", {x: left - 9, y: top - 9, width: right - left + 18, height: bottom - top + 18,
      viewBox: `${left - 9} ${top - 9} ${right - left + 18} ${bottom - top + 18}`});
    this.drawBorders(inside, svg);
    for (const line of lines) this.drawLine(inside, line);
    svg.append(inside);
    this.drawBudget(svg);
    this.cross = node("g", {class: "cross"});
    this.chosen = node("rect", {class: "chosen", y: top, height: bottom - top, visibility: "hidden"});
    svg.append(this.chosen, this.cross);
    this.stage.replaceChildren(svg, this.tip);
    this.reset.hidden = !this.zoom;
    this.tools.hidden = !this.data.tools && !this.zoom;
    if (this.log) this.log.disabled = !this.data.lines.some(line => line.y.some(value => value > 0));
    if (this.at !== undefined) this.point(this.at);
  }

  drawBelow(svg) {
    const {s, bottom, left, right, data} = this, unit = data.across === "time" ? timeUnit(s.to) : 1;
    const name = {3600: "h", 60: "min"}[unit] || "s";
    let end = -Infinity;
    const marks = ticksOf(s.from, s.to, Math.max(2, Math.round((right - left) / 90)), unit)
      .filter(mark => mark >= s.from && mark <= s.to && (data.across === "time" || Number.isInteger(mark)));
    if (data.across !== "time" && !marks.includes(s.from) && Number.isInteger(s.from)) marks.unshift(s.from);
    for (const mark of marks) {
      const text = data.across === "time" ? (mark ? `${Number((mark / unit).toPrecision(4))} ${name}` : "0") : placeText("", mark);
      const half = text.length * 3.7, x = Math.min(Math.max(this.x(mark), left + half - 4), right - half + 4);
      if (x - half < end + 6) continue;
      end = x + half;
      svg.append(node("text", {x, y: bottom + 17, "text-anchor": "middle"}, text));
    }
    svg.append(node("text", {x: (left + right) / 2, y: bottom + 33, "text-anchor": "middle"}, data.across));
  }

  drawBorders(inside, svg) {
    const borders = this.data.borders.filter(([step]) => step >= this.s.from && step < this.s.to);
    let end = -Infinity;
    for (const [step, epochs] of borders) {
      const x = this.x(step);
      inside.append(node("line", {class: "border", x1: x, x2: x, y1: this.top, y2: this.bottom}));
      const text = `epoch ${epochs + 1}`;
      if (this.data.tools && x > end + 8 && x + text.length * 6.5 < this.right) {
        svg.append(node("text", {class: "epoch", x: x + 4, y: this.top - 6}, text));
        end = x + text.length * 6.5;
      }
    }
  }

  drawLine(inside, line) {
    const {log} = this.s, tone = "tone-" + line.tone, good = value => value !== null && value !== undefined && (!log || value > 0);
    const dot = (kind, place, r) =>
      inside.append(node("circle", {class: kind + tone, cx: this.x(line.x[place]), cy: this.y(line.y[place]), r}));
    const path = values => {
      let text = "", pen = "M";
      values.forEach((value, place) => {
        if (!good(value)) { pen = "M"; return; }
        text += `${pen}${this.x(line.x[place]).toFixed(1)} ${this.y(value).toFixed(1)}`;
        pen = "L";
      });
      return text;
    };
    if (line.low && !line.smooth && this.lines.length <= MOST_BANDS) {
      const places = line.x.map((_, place) => place).filter(place => good(line.low[place]) && good(line.high[place]));
      const edge = values => place => `${this.x(line.x[place]).toFixed(1)} ${this.y(values[place]).toFixed(1)}`;
      const around = [...places.map(edge(line.high)), ...places.reverse().map(edge(line.low))];
      if (places.length > 1) inside.append(node("path", {class: "band " + tone, d: `M${around.join("L")}Z`}));
    }
    if (line.smooth) inside.append(node("path", {class: "curve faint " + tone, d: path(line.raw)}));
    inside.append(node("path", {class: "curve " + tone, d: path(line.y)}));
    const dots = line.dots && line.x.length <= 100 ? line.x.map((_, place) => place) : [line.x.length - 1];
    for (const place of dots) if (good(line.y[place])) dot("", place, line.x.length > 40 ? 2 : 3);
    const best = line.best === undefined ? -1 : line.x.indexOf(line.best);
    if (best >= 0 && good(line.y[best])) dot("best ", best, 7);
  }

  drawBudget(svg) {
    const {budget} = this.data;
    if (!budget || budget < this.s.low || budget > this.s.high) return;
    const y = this.y(budget), [x, anchor, text] = this.data.unit === "bytes" ? [this.right, "end", bytesText(budget)]
      : [this.left, "start", tickText("", budget)];
    svg.append(node("line", {class: "limit", x1: this.left, x2: this.right, y1: y, y2: y}),
      node("text", {class: "limit-text", x, y: y - 6, "text-anchor": anchor}, "budget " + text));
  }

  // The crosshair: every line's value at the place nearest to x
  point(x) {
    const inside = at => at >= this.s.from && at <= this.s.to;
    const places = this.lines.map(line => line.x[nearest(line.x, x)]).filter(inside);
    if (!places.length) return this.unpoint();
    this.at = places.reduce((best, one) => Math.abs(one - x) < Math.abs(best - x) ? one : best);
    const across = this.x(this.at), rows = this.lines.map(line => this.value(line));
    this.cross.replaceChildren(node("line", {x1: across, x2: across, y1: this.top, y2: this.bottom}));
    for (const {line, at, value} of rows)
      if (value !== null && (!this.s.log || value > 0) && inside(at))
        this.cross.append(node("circle", {class: "tone-" + line.tone, cx: this.x(at), cy: this.y(value), r: 4.5}));
    const over = this.data.borders.filter(([step]) => step < this.at).pop();
    const epoch = this.data.borders.length ? ` · epoch ${(over ? over[1] : 0) + 1}` : "";
    const head = (this.data.across === "time" ? "after " + timeText(this.at) : `${this.data.across} ${placeText("", this.at)}`) + epoch;
    const shown = rows.length > MOST_ROWS ? rows.sort((one, other) => other.value - one.value).slice(0, MOST_ROWS) : rows;
    this.tip.replaceChildren(element("b", {}, head), ...shown.map(({line, text, more}) =>
      element("p", {}, element("i", {class: "tone-" + line.tone}), element("span", {}, line.name + " "), element("b", {}, text), more)),
    ...(shown.length < rows.length ? [element("p", {}, `and ${rows.length - shown.length} below`)] : []));
    this.words = head + ": " + rows.map(({line, text, more}) => `${line.name} ${text}${more}`).join(", ");
    this.tip.hidden = false;
    const room = this.tip.offsetWidth + 14;
    this.tip.style.left = Math.max(0, across + room > this.width ? across - room : across + 14) + "px";
    this.tip.style.top = this.top + "px";
  }

  // What to say of a line at the crosshair: the value of its nearest point, and where that is if it is elsewhere
  value(line) {
    const place = nearest(line.x, this.at), at = line.x[place], value = line.y[place];
    if (value === null) return {line, at, value, text: "not a number", more: ""};
    const low = line.low?.[place], high = line.high?.[place], far = Math.abs(this.x(at) - this.x(this.at)) > 8;
    const elsewhere = at !== this.at && (line.dots || far) ? ` at ${placeText(this.data.across, at)}` : "";
    const banded = !line.smooth && low !== high && this.data.unit !== "bytes" && this.lines.length <= MOST_BANDS;
    const spread = banded ? ` (${plainText(low)} to ${plainText(high)})` : "";
    return {line, at, value, text: valueText(this.data.unit, value), more: (at === line.best ? " best" : "") + elsewhere + spread};
  }

  unpoint() {
    this.at = undefined;
    this.tip.hidden = true;
    this.cross.replaceChildren();
  }

  listen() {
    let from = null;
    const place = event => Math.min(Math.max(event.clientX - this.stage.getBoundingClientRect().left, this.left), this.right);
    this.stage.addEventListener("pointerdown", event => { if (event.button === 0) { from = place(event); } });
    this.stage.addEventListener("pointermove", event => {
      if (from !== null && Math.abs(place(event) - from) > 4) {
        if (!this.stage.hasPointerCapture(event.pointerId)) this.stage.setPointerCapture(event.pointerId);
        this.chosen.setAttribute("visibility", "visible");
        this.chosen.setAttribute("x", Math.min(from, place(event)));
        this.chosen.setAttribute("width", Math.abs(place(event) - from));
      }
      this.point(this.back(place(event)));
    });
    const end = event => {
      const to = place(event), begun = from;
      from = null;
      this.chosen.setAttribute("visibility", "hidden");
      if (begun !== null && event.type === "pointerup" && Math.abs(to - begun) > 6)
        this.zoomTo([Math.min(begun, to), Math.max(begun, to)].map(this.back));
    };
    this.stage.addEventListener("pointerup", end);
    this.stage.addEventListener("pointercancel", end);
    this.stage.addEventListener("pointerleave", () => { if (from === null) this.unpoint(); });
    this.stage.addEventListener("dblclick", () => this.zoomTo());
    this.stage.addEventListener("blur", () => this.unpoint());
    this.stage.addEventListener("keydown", event => this.key(event));
  }

  key(event) {
    const {s} = this, all = [...new Set(this.lines.flatMap(line => line.x))].sort((one, other) => one - other);
    const xs = all.filter(x => x >= s.from && x <= s.to);
    if (!xs.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const here = this.at === undefined ? -1 : nearest(xs, this.at), by = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
    const middle = this.at === undefined ? (s.from + s.to) / 2 : this.at;
    const zoomed = factor => {
      const last = all[all.length - 1];
      const range = [Math.max(all[0], middle - (middle - s.from) * factor), Math.min(last, middle + (s.to - middle) * factor)];
      this.zoomTo(range[0] <= all[0] && range[1] >= last ? null : range);
    };
    const moves = {
      ArrowLeft: () => this.point(xs[Math.max(0, here < 0 ? xs.length - 1 : here - by)]),
      ArrowRight: () => this.point(xs[Math.min(xs.length - 1, here + by)]),
      Home: () => this.point(xs[0]), End: () => this.point(xs[xs.length - 1]),
      "+": () => zoomed(0.5), "=": () => zoomed(0.5), "-": () => zoomed(2),
      Escape: () => this.zoom ? this.zoomTo() : this.unpoint(),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
    this.spoken.textContent = this.at === undefined ? "" : this.words;
  }
}

// Make charts of the pictures in a part of the page, and forget those that are gone
const enhance = root => {
  for (const [figure, chart] of charts) if (!figure.isConnected) { chart.watcher.disconnect(); charts.delete(figure); }
  for (const figure of root.querySelectorAll("figure[data-chart]")) if (!charts.has(figure)) charts.set(figure, new Chart(figure));
};
for (const part of document.querySelector("main").children) part.source = part.outerHTML;   // as it was sent, for who compares it
enhance(document);
