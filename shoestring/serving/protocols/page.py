"""The page at /: the models, and a form that asks one of them. It asks its own server and nobody else."""

from __future__ import annotations

from shoestring.web.guard import headers

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; background: #fff }
textarea { width: 100%; min-height: 6rem; font: inherit; box-sizing: border-box } button { font: inherit; padding: .3rem 1rem }
pre { background: #f3f3f3; padding: .7rem; overflow: auto; white-space: pre-wrap } td, th { text-align: left; padding: .1rem 1rem .1rem 0 }
@media (prefers-color-scheme: dark) { body { color: #e8e8e8; background: #181818 } pre { background: #262626 } }
"""
SCRIPT = """
const at = name => document.getElementById(name);
async function asked(path, how) { const found = await fetch(path, how); return [found.status, await found.text()]; }
async function list() {
  const [, text] = await asked("v2/repository/index", {method: "POST"});
  for (const model of JSON.parse(text)) {
    const row = at("models").insertRow();
    for (const word of [model.name, model.state, model.reason]) row.insertCell().textContent = word;
    at("model").add(new Option(model.name));
  }
}
at("ask").addEventListener("submit", async event => {
  event.preventDefault();
  const begun = performance.now(), text = at("text").value;
  const isObject = text.trim().startsWith("{");
  const headers = {"Content-Type": isObject ? "application/json" : "text/plain"};
  const [status, answer] = await asked("answer/" + encodeURIComponent(at("model").value), {method: "POST", body: text, headers});
  at("answer").textContent = `${status}, ${Math.round(performance.now() - begun)} ms\\n${answer}`;
});
list();
"""
HEADERS = headers(STYLE, SCRIPT)
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>shoestring</title>
<style>{STYLE}</style></head><body>
<h1>shoestring serves</h1>
<table id="models"><tr><th>model</th><th>state</th><th></th></tr></table>
<form id="ask"><p><label>Model <select id="model"></select></label></p>
<p><label for="text">A text, or a JSON object of fields</label><textarea id="text"></textarea></p>
<p><button>Ask</button></p></form>
<pre id="answer" aria-live="polite"></pre>
<p><a href="openapi.json">OpenAPI</a> &middot; <a href="metrics">metrics</a></p>
<script>{SCRIPT}</script></body></html>
"""
