"""The look of the reports: one HTML page without anything from outside, light or dark as the reader's system is."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_trainers.charts import COLORS

_DARK_COLORS = ("#60a5fa", "#f87171", "#34d399", "#fbbf24", "#a78bfa", "#22d3ee", "#f472b6")

_STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --faint: #6b7280; --line: #d1d5db; --grid: #e5e7eb;
  --box: #f3f4f6; --page: #ffffff; --good: #059669; --warn: #b45309; --error: #b91c1c; LIGHT }
@media (prefers-color-scheme: dark) { :root { --text: #e5e7eb; --faint: #9ca3af; --line: #4b5563; --grid: #374151;
  --box: #1f2937; --page: #111827; --good: #34d399; --warn: #fbbf24; --error: #f87171; DARK } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1020px; padding: 0 1rem;
  color: var(--text); background: var(--page) }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
summary { font-size: 1.15rem; font-weight: 600; margin: 1.6rem 0 .6rem; cursor: pointer }
.cards { display: flex; flex-wrap: wrap; gap: .8rem }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .7rem 1rem; min-width: 150px }
.card strong { display: block; font-size: 1.6rem } .card small { color: var(--faint) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1rem }
figure { margin: 0 } svg { width: 100%; font: 11px system-ui, sans-serif; fill: var(--faint) }
svg .title { font-size: 13px; font-weight: 600; fill: var(--text) } svg .grid { stroke: var(--grid) }
svg .mark { stroke: var(--text); stroke-width: 2 } svg .guide { stroke: var(--faint); stroke-dasharray: 3 3 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--box); padding: .7rem; border-radius: 6px }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--grid); vertical-align: top; overflow-wrap: anywhere } th { color: var(--faint) }
.controls { display: flex; flex-wrap: wrap; gap: 1rem; margin: .6rem 0 }
.sample, .alert { border-left: 4px solid var(--line); padding: .1rem 0 .1rem .8rem; margin: 1rem 0 }
.sample.good { border-color: var(--good) } .alert { border-color: var(--warn) }
.alert.ERROR { border-color: var(--error) } .alert.over { border-color: var(--line) }
small { color: var(--faint) }
#tip { position: fixed; pointer-events: none; background: var(--box); border: 1px solid var(--line);
  border-radius: 6px; padding: .3rem .6rem; font-size: 12px; white-space: pre; display: none; z-index: 1 }
"""

# Beside the pointer: what every line of a chart is at the step that is nearest.
_HOVER_SCRIPT = """
function nearest(points, x) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}
function valuesAt(series, x) {
  const places = series.map(([name, points]) => nearest(points, x)).filter(point => point !== null);
  const step = nearest(places, x)[0];
  const lines = series.map(([name, points]) => [name, points.find(point => point[0] === step)]);
  return [step, lines.filter(([name, point]) => point !== undefined).map(([name, point]) => [name, point[1]])];
}
const tip = document.createElement("div");
tip.id = "tip";
document.body.append(tip);
for (const chart of document.querySelectorAll("svg[data-series]")) {
  const series = JSON.parse(chart.dataset.series);
  const [left, right, low, high] = chart.dataset.across.split(" ").map(Number);
  const guide = document.createElementNS(chart.namespaceURI, "line");
  guide.setAttribute("class", "guide");
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), view = chart.viewBox.baseVal;
    const x = (event.clientX - box.left) / box.width * view.width;
    const [step, values] = valuesAt(series, low + (x - left) / (right - left) * (high - low));
    const place = left + (step - low) / (high - low) * (right - left);
    for (const [name, value] of [["x1", place], ["x2", place], ["y1", 30], ["y2", view.height - 30]])
      guide.setAttribute(name, value);
    chart.append(guide);
    const texts = values.map(([name, value]) => name + ": " + Number(value.toPrecision(4)));
    tip.textContent = ["step " + step, ...texts].join("\\n");
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  chart.addEventListener("pointerleave", () => { guide.remove(); tip.style.display = "none"; });
}
"""

_SAMPLES_SCRIPT = """
const samples = JSON.parse(document.getElementById("data").textContent);
const field = id => document.getElementById(id);
const steps = [...new Set(samples.map(s => s.step))];
field("step").append(new Option("all", ""), ...steps.map(s => new Option(s, s)));
if (steps.length) field("step").value = steps[steps.length - 1];
function element(tag, text, name) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}
function facts(s) {
  const known = value => value !== null && value !== undefined;
  return ["step " + s.step, s.split, "reward " + s.reward, "advantage " + s.advantage.toFixed(2),
    s.num_tokens + " tokens", s.finish_reason,
    ...(known(s.logprob) ? ["logprob " + s.logprob.toFixed(3) + " a token"] : []),
    ...(known(s.entropy) ? ["entropy " + s.entropy.toFixed(3) + " a token"] : []),
    ...Object.entries(s.columns).map(([k, v]) => k + " " + v)];
}
function show() {
  const step = field("step").value, text = field("text").value.toLowerCase(), order = field("order").value;
  const [key, sign] = order.split(" ");
  const chosen = samples.filter(s => (step === "" || s.step === Number(step)) &&
    (s.prompt + s.completion).toLowerCase().includes(text));
  if (key) chosen.sort((a, b) => Number(sign) * ((a[key] ?? 0) - (b[key] ?? 0)));
  field("count").textContent = chosen.length + " samples";
  field("list").replaceChildren(...chosen.slice(0, 200).map(s => {
    const box = element("div", "", "sample" + (s.reward > 0 ? " good" : ""));
    box.append(element("small", facts(s).join(" · ")), element("pre", s.prompt), element("pre", s.completion));
    return box;
  }));
}
for (const id of ["step", "order", "text"]) field(id).addEventListener("input", show);
show();
"""

_SAMPLES = """<div class="controls">
<label>step <select id="step"></select></label>
<label>order <select id="order"><option value="">as sampled</option><option value="reward -1">best first</option>
<option value="reward 1">worst first</option><option value="entropy -1">least sure first</option>
<option value="num_tokens -1">longest first</option></select></label>
<label>containing <input id="text" type="search"></label>
<span id="count"></span></div>
<div id="list"></div>"""


def page(title: str, body: str, samples: Sequence[Mapping[str, Any]] | None = None) -> str:
    """A page of `body` with its style and scripts; `samples` are what `sample_browser` in it shows."""
    style = _STYLE.replace("LIGHT", _variables(COLORS)).replace("DARK", _variables(_DARK_COLORS))
    scripts = f"<script>{_HOVER_SCRIPT}</script>"
    if samples is not None:
        scripts += f'<script type="application/json" id="data">{_embedded_json(samples)}</script>'
        scripts += f"<script>{_SAMPLES_SCRIPT}</script>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{style}</style></head><body>\n<h1>{html.escape(title)}</h1>\n{body}\n{scripts}\n</body></html>\n"
    )


def sample_browser() -> str:
    """Where the page's samples are shown."""
    return _SAMPLES


def section(title: str, content: str, *, is_open: bool = True) -> str:
    """A heading that folds and unfolds what is under it; nothing where there is nothing."""
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{html.escape(title)}</summary>\n{content}\n</details>\n" if content else ""


def figures(charts: Sequence[tuple[str, str]]) -> str:
    """Charts (SVG, and what they mean, for who rests the pointer on them) side by side."""
    made = "".join(f'<figure title="{html.escape(hint)}">{chart}</figure>' for chart, hint in charts if chart)
    return f'<div class="charts">{made}</div>' if made else ""


def card(label: str, value: str, note: str) -> str:
    parts = (html.escape(text) for text in (label, value, note))
    return '<div class="card"><div>{}</div><strong>{}</strong><small>{}</small></div>'.format(*parts)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = ("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def alert_list(records: Sequence[Mapping[str, Any]]) -> str:
    """What a run's `alerts.jsonl` tells, each alert with the step in which it was over."""
    parts = []
    for index, record in enumerate(records):
        if record["level"] == "INFO":
            continue
        later = (each["step"] for each in records[index + 1 :] if each["name"] == record["name"])
        over = next(later, None)
        when = f"since step {record['step']}" if over is None else f"steps {record['step']} to {over}"
        look = f"alert {record['level']}" + ("" if over is None else " over")
        parts.append(
            f'<div class="{html.escape(look)}"><strong>{html.escape(record["title"])}</strong> '
            f"<small>{when}</small><div>{html.escape(record['text'])}</div></div>"
        )
    return "".join(parts)


def _variables(colors: Sequence[str]) -> str:
    return " ".join(f"--c{index}: {color};" for index, color in enumerate(colors))


def _embedded_json(value: object) -> str:
    """JSON that can stand in a script element: no text in it can close the element."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
