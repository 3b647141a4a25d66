"""The end-of-run report: one HTML page that needs nothing else, and a PNG of the reward curve."""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_trainers.charts import line_chart, running_mean, save_reward_curve, stacked_bars
from rollout_trainers.durable import partial_name, put_file, write_text
from rollout_trainers.tracking import DIAGNOSES_FILE, MEMORY_FILE, METRICS_FILE, SAMPLES_FILE, read_json_lines

REPORT_FILE = "report.html"
CURVE_FILE = "reward.png"

_PHASES = ("gen", "train", "sync", "sleep", "wake", "reward")
_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Completion length (tokens)", ("completions/mean_length", "completions/max_length")),
    ("Entropy (nats per token)", ("entropy",)),
    ("Seconds a step, by phase", tuple(f"timing_s/{phase}" for phase in _PHASES)),
    ("Tokens per second", ("perf/gen_tokens_per_s", "perf/train_tokens_per_s")),
    (
        "KV cache: slots that held nothing, prefix hits (shares)",
        ("engine/kv_cache_waste", "engine/prefix_cache_hit_rate"),
    ),
    ("KV cache: largest share in use so far", ("engine/kv_cache_usage_peak",)),
    ("Preemptions so far", ("engine/num_preemptions_total",)),
    ("Memory (GiB): given back by sleep, and peak", ("perf/sleep_released_gb", "perf/memory_peak_gb")),
    ("Gradient norm", ("grad_norm",)),
    ("Groups that teach nothing (share)", ("frac_reward_zero_std",)),
    ("Sampler against trainer: largest |logprob difference|", ("sampling/logp_difference/max",)),
    ("KL to the reference (nats per token)", ("kl",)),
    ("Clipped tokens (share)", ("clip_ratio/low_mean", "clip_ratio/high_mean")),
    ("KL to the policy that sampled (nats per token)", ("ppo_kl",)),
    (
        "Groups sampled, and dropped by dynamic sampling",
        ("dynamic_sampling/groups_sampled", "dynamic_sampling/groups_dropped"),
    ),
    ("Tokens left out by the off-policy correction (share)", ("rollout_corr/rollout_rs_masked_fraction",)),
    ("Critic: share of the returns' variance explained", ("critic/vf_explained_var",)),
    ("Critic: loss", ("critic/vf_loss",)),
    ("Critic: clipped values (share)", ("critic/vf_clipfrac",)),
    ("Coefficient of the KL", ("objective/kl_coef",)),
    ("Learning rate", ("learning_rate",)),
)


def write_report(directory: Path, summary: Mapping[str, Any]) -> Path:
    """Writes `report.html` and `reward.png` of the run in `directory`; returns the page's path.

    Reads the run's own JSON-lines files. `summary` has `name`, `task`, `config`, and where evaluated `base`, `trained`
    (with `accuracy`, `low`, `high`, `num`) and `p_value`. The picture needs matplotlib, and is left out without it.
    """
    metrics = read_json_lines(directory / METRICS_FILE)
    samples = read_json_lines(directory / SAMPLES_FILE)
    evaluations = [
        (row["step"], row["eval/accuracy"], row["eval/accuracy_low"], row["eval/accuracy_high"])
        for row in metrics
        if row.get("eval/accuracy") is not None
    ]
    title = f"{summary['name']}: {summary['task']}"
    if importlib.util.find_spec("matplotlib") is not None:
        curve = directory / CURVE_FILE
        save_reward_curve(partial_name(curve), title, _points(metrics, "reward"), evaluations)
        put_file(curve)
    page = _PAGE.format(
        title=html.escape(title),
        cards=_cards(summary, metrics),
        charts=_charts(metrics, evaluations) + _memory_charts(read_json_lines(directory / MEMORY_FILE)),
        config=html.escape(json.dumps(summary["config"], indent=2, ensure_ascii=False, default=str)),
        samples=_embedded_json(samples),
        diagnoses=_diagnoses(read_json_lines(directory / DIAGNOSES_FILE)),
    )
    path = directory / REPORT_FILE
    write_text(path, page)
    return path


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in metrics if row.get(name) is not None]


def _charts(metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[tuple[int, float, float, float]]) -> str:
    rewards = _points(metrics, "reward")
    smooth = running_mean([value for _, value in rewards], 5)
    series = {
        "each step": rewards,
        "held-out accuracy": [(step, accuracy) for step, accuracy, _, _ in evaluations],
        "mean of 5 steps": [(step, value) for (step, _), value in zip(rewards, smooth, strict=True)],
    }
    charts = [line_chart("Reward", {name: line for name, line in series.items() if line}, faint=("each step",))]
    for title, names in _CHARTS:
        lines = {name.rpartition("/")[2] if len(names) > 1 else name: _points(metrics, name) for name in names}
        charts.append(line_chart(title, {name: line for name, line in lines.items() if line}))
    return "".join(f"<figure>{chart}</figure>" for chart in charts if chart)


def _memory_charts(records: Sequence[Mapping[str, Any]]) -> str:
    """The peak of every phase by step, and who held the memory at the phases' ends in the last step that counted it."""
    peaks: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        peaks.setdefault(record["phase"], []).append((record["step"], record["peak"] / 2**20))
    counted = [record for record in records if record["owners"]]
    last = [record for record in counted if record["step"] == counted[-1]["step"]]
    bars = stacked_bars(
        f"Memory (MiB) at the end of each phase by owner, and its peak (line), step {last[-1]['step'] if last else 0}",
        {record["phase"]: {owner: count / 2**20 for owner, count in record["owners"].items()} for record in last},
        {record["phase"]: record["peak"] / 2**20 for record in last},
    )
    charts = (line_chart("Peak memory (MiB) by phase", peaks), bars)
    return "".join(f"<figure>{chart}</figure>" for chart in charts if chart)


def _cards(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    cards = []
    for key, label in (("base", "Untrained, held out"), ("trained", "Trained, held out")):
        result = summary.get(key)
        if result:
            note = f"95 % CI {result['low']:.1%} to {result['high']:.1%}, n = {result['num']}"
            cards.append((label, f"{result['accuracy']:.1%}", note))
    if summary.get("p_value") is not None:
        cards.append(("Chance of such a change", f"p = {summary['p_value']:.2g}", "exact McNemar test, same prompts"))
    steps = [row for row in metrics if row.get("timing_s/step") is not None]
    if steps:
        seconds = sorted(row["timing_s/step"] for row in steps)[len(steps) // 2]
        cards.append(("Steps", str(len(steps)), f"{seconds:.1f} s each (median)"))
        released = [row["perf/sleep_released_gb"] for row in steps if row.get("perf/sleep_released_gb")]
        if released:
            cards.append(("Given back by sleep", f"{released[-1] * 1024:.0f} MiB", "for each training phase"))
        compared = [row for row in steps if row.get("sampling/logp_difference/max") is not None]
        if compared:
            difference = max(row["sampling/logp_difference/max"] for row in compared)
            tokens = sum(row["sampling/logp_difference/num_tokens"] for row in compared)
            note = f"largest logprob difference before an update, {tokens:,} tokens"
            cards.append(("Sampler = trainer", f"{difference:g}", note))
    return "".join(
        f'<div class="card"><div>{html.escape(label)}</div><strong>{html.escape(value)}</strong>'
        f"<small>{html.escape(note)}</small></div>"
        for label, value, note in cards
    )


def _diagnoses(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return ""
    parts = [f"<pre>step {record['step']}: {html.escape(record['text'])}</pre>" for record in records]
    return "<h2>Why sampler and trainer differed</h2>" + "".join(parts)


def _embedded_json(value: object) -> str:
    """JSON that can stand in a script element: no text in it can close the element."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1020px; padding: 0 1rem; color: #1f2937 }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin-top: 2rem }}
.cards {{ display: flex; flex-wrap: wrap; gap: .8rem }}
.card {{ border: 1px solid #d1d5db; border-radius: 8px; padding: .7rem 1rem; min-width: 150px }}
.card strong {{ display: block; font-size: 1.6rem }} .card small {{ color: #6b7280 }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1rem }}
figure {{ margin: 0 }} svg {{ width: 100%; font: 11px system-ui, sans-serif; fill: #6b7280 }}
svg .title {{ font-size: 13px; font-weight: 600; fill: #1f2937 }} svg .grid {{ stroke: #e5e7eb }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f4f6; padding: .7rem; border-radius: 6px }}
.controls {{ display: flex; flex-wrap: wrap; gap: 1rem; margin: .6rem 0 }}
.sample {{ border-left: 4px solid #d1d5db; padding: .1rem 0 .1rem .8rem; margin: 1rem 0 }}
.sample.good {{ border-color: #059669 }} .sample small {{ color: #6b7280 }}
</style></head><body>
<h1>{title}</h1>
<div class="cards">{cards}</div>
<h2>Curves</h2>
<div class="charts">{charts}</div>
{diagnoses}
<h2>Samples</h2>
<div class="controls">
<label>step <select id="step"></select></label>
<label>order <select id="order"><option value="0">as sampled</option><option value="-1">best first</option>
<option value="1">worst first</option></select></label>
<label>containing <input id="text" type="search"></label>
<span id="count"></span></div>
<div id="list"></div>
<h2>Recipe</h2>
<pre>{config}</pre>
<script type="application/json" id="data">{samples}</script>
<script>
const samples = JSON.parse(document.getElementById("data").textContent);
const field = id => document.getElementById(id);
const steps = [...new Set(samples.map(s => s.step))];
field("step").append(new Option("all", ""), ...steps.map(s => new Option(s, s)));
if (steps.length) field("step").value = steps[steps.length - 1];
function element(tag, text, name) {{
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}}
function show() {{
  const step = field("step").value, text = field("text").value.toLowerCase(), order = Number(field("order").value);
  const chosen = samples.filter(s => (step === "" || s.step === Number(step)) &&
    (s.prompt + s.completion).toLowerCase().includes(text));
  if (order) chosen.sort((a, b) => order * (a.reward - b.reward));
  field("count").textContent = chosen.length + " samples";
  field("list").replaceChildren(...chosen.slice(0, 200).map(s => {{
    const box = element("div", "", "sample" + (s.reward > 0 ? " good" : ""));
    const facts = Object.entries(s.columns).map(([k, v]) => k + " " + v);
    facts.unshift("step " + s.step, s.split, "reward " + s.reward, "advantage " + s.advantage.toFixed(2),
      s.num_tokens + " tokens", s.finish_reason);
    box.append(element("small", facts.join(" · ")), element("pre", s.prompt), element("pre", s.completion));
    return box;
  }}));
}}
for (const id of ["step", "order", "text"]) field(id).addEventListener("input", show);
show();
</script></body></html>
"""
