// The page while it is watched: puts in what the server sends. Parts that did not change stay as they are, and charts keep their zoom and
// pointer, so that scrolling, focus and selected text survive an update. A tab that can't be seen does not listen.

const main = document.querySelector("main"), lost = document.querySelector("#connection");
let source;

const chartOf = part => part.querySelector("figure[data-chart]");
const put = (old, part) => {
  const before = chartOf(old), after = chartOf(part), chart = charts.get(before);
  if (!chart || !after || before.hasAttribute("data-runs") !== after.hasAttribute("data-runs")) return old.replaceWith(part);
  const data = JSON.parse(after.dataset.chart);
  if (data.key !== chart.data.key) return old.replaceWith(part);
  for (const one of [...old.children]) if (one !== before) one.remove();   // words change, the chart stays
  const place = [...part.children].indexOf(after);
  [...part.children].forEach((one, at) => { if (at < place) before.before(one); else if (at > place) old.append(one); });
  old.source = part.source;
  before.dataset.chart = after.dataset.chart;
  if (!before.hasAttribute("data-runs")) chart.update(data);   // the lines of several runs are fetched
};
const show = text => {
  const fresh = document.createElement("main"), focus = document.activeElement?.dataset?.focus;
  fresh.innerHTML = text;
  const parts = [...fresh.children];
  const scrolled = main.querySelector(".runs-table")?.scrollLeft;
  parts.forEach((part, place) => {
    const old = main.children[place];
    part.source = part.outerHTML;
    if (!old) main.append(part); else if (old.source !== part.source) put(old, part);
  });
  while (main.children.length > parts.length) main.lastElementChild.remove();
  document.title = main.firstElementChild.dataset.title || document.title;
  enhance(main);
  enhanceRuns();
  if (scrolled) main.querySelector(".runs-table").scrollLeft = scrolled;
  if (!focus || document.activeElement?.dataset?.focus === focus) return;
  [...main.querySelectorAll("[data-focus]")].find(one => one.dataset.focus === focus)?.focus({preventScroll: true});
};
const listen = () => {
  source?.close();
  source = new EventSource(document.body.dataset.events);
  source.onopen = () => { lost.hidden = true; };
  source.onmessage = event => show(event.data);
  source.onerror = () => {
    lost.hidden = false;
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
};
if (location.search) history.replaceState(null, "", location.pathname);
document.addEventListener("visibilitychange", () => document.hidden ? source.close() : listen());
listen();
