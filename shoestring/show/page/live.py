"""The page while it is watched: the same page, and a few lines of script that put in what the server sends.

Sections that did not change stay as they are, so that scrolling, focus and selected text survive an update. A tab that
can't be seen does not listen.
"""
from __future__ import annotations

from markupsafe import Markup

from shoestring.show.page.document import document

SCRIPT = """
const main = document.querySelector("main"), lost = document.querySelector("#connection");
let source;
const show = text => {
  const fresh = document.createElement("main");
  fresh.innerHTML = text;
  const parts = [...fresh.children];
  parts.forEach((part, place) => {
    const old = main.children[place];
    if (!old) main.append(part); else if (!old.isEqualNode(part)) old.replaceWith(part);
  });
  while (main.children.length > parts.length) main.lastElementChild.remove();
  document.title = main.firstElementChild.dataset.title || document.title;
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
"""


def live(title: str, content: Markup, events: str, name: str = "") -> str:
    """A page that listens to `events`; with a way back to all runs if it is that of the run `name` among others."""
    return document(title, content, events, name, SCRIPT)
