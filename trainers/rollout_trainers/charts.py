"""Charts as inline SVG, whose colours are the page's and whose values show under the pointer; the reward as a PNG."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rollout_trainers.histograms import Histogram, rebin

Points = Sequence[tuple[float, float]]
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 240, 52, 12, 30, 30

_MOST_POINTS = 400  # of a line
_MOST_COLUMNS, _MOST_ROWS = 60, 24  # of a heat map


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values (fewer at the start) at each place."""
    return [math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover [low, high] in about `count` steps, both ends included."""
    if high <= low or _is_flat(low, high):
        margin = max(0.5, abs(low))
        low, high = low - margin, high + margin
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = magnitude * min(factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _is_flat(low: float, high: float) -> bool:
    """Whether two numbers are the same but for rounding."""
    return high - low <= 1e-9 * max(abs(low), abs(high))


def thin(points: Points, most: int = _MOST_POINTS) -> Points:
    """At most `most` of the points: of each stretch its lowest and its highest, so that no spike is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


class _Frame:
    """Title and axes of a chart, and where its values stand."""

    def __init__(self, title: str, xs: Sequence[float], ys: Sequence[float], series: Mapping[str, Points]) -> None:
        """With ticks at `xs` (none: the horizontal axis has labels of its own) and `ys`. The page's script shows the
        values of `series` beside the pointer."""
        self._xs, self._ys = xs, ys
        name = html.escape(title)
        data = ""
        if series:
            values = html.escape(json.dumps(list(series.items())))
            data = f' data-series="{values}" data-across="{LEFT} {WIDTH - RIGHT} {xs[0]:g} {xs[-1]:g}"'
        self.parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}"{data}>']
        self.parts.append(f'<text x="{LEFT}" y="14" class="title">{name}</text>')
        for y in ys:
            at = f'y1="{self.up(y):.1f}" y2="{self.up(y):.1f}"'
            self.parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" {at} class="grid"/>')
            self.parts.append(f'<text x="{LEFT - 6}" y="{self.up(y) + 3:.1f}" text-anchor="end">{y:g}</text>')
        for x in xs:
            place = f'x="{self.across(x):.1f}" y="{HEIGHT - BOTTOM + 16}"'
            self.parts.append(f'<text {place} text-anchor="middle">{x:g}</text>')

    def across(self, x: float) -> float:
        return LEFT + (x - self._xs[0]) / (self._xs[-1] - self._xs[0]) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        return HEIGHT - BOTTOM - (y - self._ys[0]) / (self._ys[-1] - self._ys[0]) * (HEIGHT - TOP - BOTTOM)

    def corners(self, points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in points)

    def legend(self, names: Sequence[tuple[str, int]]) -> None:
        """Names with the numbers of their colours."""
        place = LEFT
        for name, index in names:
            self.parts.append(f'<text x="{place}" y="26" style="fill:{_color(index)}">{html.escape(name)}</text>')
            place += 7 * len(name) + 14

    def end(self) -> str:
        return "".join(self.parts) + "</svg>"


def _color(index: int) -> str:
    return f"var(--c{index % len(COLORS)})"


def line_chart(title: str, series: Mapping[str, Points], faint: Sequence[str] = ()) -> str:
    """An SVG chart of named series; those in `faint` are drawn pale and without an entry in the legend."""
    series = {name: thin(line) for name, line in series.items() if line}
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    low, high = _range(point[1] for point in points)
    if _is_flat(low, high):  # a flat line stands above 0, or below
        low, high = min(0.0, low), max(0.0, high) or float(low == 0.0)
    xs, ys = axis_ticks(*_range(point[0] for point in points)), axis_ticks(low, high, 4)
    frame = _Frame(title, xs, ys, series)
    for index, (name, line) in enumerate(series.items()):
        look = f'style="stroke:{_color(index)}" opacity="{0.3 if name in faint else 1}"'
        if len(line) == 1:
            x, y = line[0]
            place = f'cx="{frame.across(x):.1f}" cy="{frame.up(y):.1f}"'
            frame.parts.append(f'<circle {place} r="2" fill="none" {look}/>')
        frame.parts.append(f'<polyline points="{frame.corners(line)}" fill="none" stroke-width="1.6" {look}/>')
    if len(series) > 1:
        frame.legend([(name, index) for index, name in enumerate(series) if name not in faint])
    return frame.end()


def area_chart(title: str, series: Mapping[str, Points]) -> str:
    """An SVG chart of named series that stand on one another. A place that one of them lacks counts as 0 there."""
    series = {name: line for name, line in series.items() if line}
    places = sorted({x for line in series.values() for x, _ in line})
    if not places:
        return ""
    values = {name: dict(line) for name, line in series.items()}
    kept = [x for x, _ in thin([(x, sum(line.get(x, 0.0) for line in values.values())) for x in places])]
    tops = [[0.0] * len(kept)]
    for line in values.values():
        tops.append([below + max(0.0, line.get(x, 0.0)) for below, x in zip(tops[-1], kept, strict=True)])
    shown = {name: [(x, line[x]) for x in kept if x in line] for name, line in values.items()}
    frame = _Frame(title, axis_ticks(*_range(kept)), axis_ticks(0.0, max(tops[-1]), 4), shown)
    for index, (below, above) in enumerate(itertools.pairwise(tops)):
        outline = [*zip(kept, above, strict=True), *zip(reversed(kept), reversed(below), strict=True)]
        frame.parts.append(f'<polygon points="{frame.corners(outline)}" style="fill:{_color(index)}" opacity="0.75"/>')
    frame.legend([(name, index) for index, name in enumerate(series)])
    return frame.end()


def heat_map(title: str, histograms: Sequence[tuple[float, Histogram]]) -> str:
    """An SVG chart of histograms by step: the darker, the more of the step's values are there."""
    if not histograms:
        return ""
    low = min(each.low for _, each in histograms)
    high = max(each.edges[-1] for _, each in histograms)
    finest = min(each.width for _, each in histograms)
    rows = max(1, min(_MOST_ROWS, round((high - low) / finest)))
    height = (high - low) / rows
    size = math.ceil(len(histograms) / _MOST_COLUMNS)
    columns = [histograms[start : start + size] for start in range(0, len(histograms), size)]
    ys = axis_ticks(low, high, 4)
    frame = _Frame(title, [], ys, {})
    width = (WIDTH - LEFT - RIGHT) / len(columns)
    for place, column in enumerate(columns):
        counts = [sum(parts) for parts in zip(*(rebin(each, low, height, rows) for _, each in column), strict=True)]
        total = sum(counts)
        steps = f"step {column[0][0]:g}" + (f" to {column[-1][0]:g}" if len(column) > 1 else "")
        for row, count in enumerate(counts):
            if count < 1e-9 * total:
                continue
            bottom, top = low + row * height, low + (row + 1) * height
            hint = f"{steps}, {bottom:.4g} to {top:.4g}: {count:.4g} ({count / total:.0%})"
            box = f'x="{LEFT + place * width:.1f}" y="{frame.up(top):.1f}" width="{width:.1f}"'
            box += f' height="{frame.up(bottom) - frame.up(top):.1f}"'
            opacity = f'opacity="{0.08 + 0.92 * math.sqrt(count / total):.2f}"'
            frame.parts.append(f'<rect {box} style="fill:{_color(0)}" {opacity}><title>{hint}</title></rect>')
    for place in sorted({0, len(columns) // 2, len(columns) - 1}):
        at = f'x="{LEFT + (place + 0.5) * width:.1f}" y="{HEIGHT - BOTTOM + 16}"'
        frame.parts.append(f'<text {at} text-anchor="middle">{columns[place][0][0]:g}</text>')
    return frame.end()


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], marks: Mapping[str, float] | None = None) -> str:
    """An SVG chart with a bar for each key of `bars`, made of its parts from the bottom up; `marks` are lines above
    the bars. Parts below zero are left out."""
    if not bars:
        return ""
    marks = marks or {}
    heights = [sum(value for value in parts.values() if value > 0) for parts in bars.values()]
    frame = _Frame(title, [], axis_ticks(0.0, max([*heights, *marks.values()]), 4), {})
    width = (WIDTH - LEFT - RIGHT) / len(bars)
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    for index, (label, parts) in enumerate(bars.items()):
        left, bottom = LEFT + (index + 0.15) * width, 0.0
        at = f'x="{LEFT + (index + 0.5) * width:.1f}" y="{HEIGHT - BOTTOM + 16}"'
        frame.parts.append(f'<text {at} text-anchor="middle">{html.escape(label)}</text>')
        for name in names:
            value = max(0.0, parts.get(name, 0.0))
            height = frame.up(bottom) - frame.up(bottom + value)
            hint = f"<title>{html.escape(name)}: {value:.1f}</title>"
            shape = f'x="{left:.1f}" y="{frame.up(bottom + value):.1f}" width="{0.7 * width:.1f}" height="{height:.1f}"'
            frame.parts.append(f'<rect {shape} style="fill:{_color(names.index(name))}">{hint}</rect>')
            bottom += value
        if label in marks:
            y = frame.up(marks[label])
            ends = f'x1="{left:.1f}" x2="{left + 0.7 * width:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            frame.parts.append(f'<line {ends} class="mark"/>')
    top = max(heights)
    frame.legend(
        [
            (name, index)
            for index, name in enumerate(names)
            if any(parts.get(name, 0.0) > 0.005 * top for parts in bars.values())
        ]
    )
    return frame.end()


def _range(numbers: Iterable[float]) -> tuple[float, float]:
    values = list(numbers)
    return min(values), max(values)


def save_reward_curve(
    path: Path,
    title: str,
    rewards: Points,
    evaluations: Sequence[tuple[int, float, float, float]],
) -> None:
    """Writes a PNG: the training reward by step, and the held-out accuracies (step, value, low, high)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, values = [x for x, _ in rewards], [y for _, y in rewards]
    axes.plot(steps, values, color=COLORS[0], alpha=0.3, linewidth=1)
    axes.plot(steps, running_mean(values, 5), color=COLORS[0], linewidth=2, label="training reward (mean of 5 steps)")
    if evaluations:
        at, accuracy, low, high = zip(*evaluations, strict=True)
        below = [max(0.0, value - bound) for value, bound in zip(accuracy, low, strict=True)]
        above = [max(0.0, bound - value) for value, bound in zip(accuracy, high, strict=True)]
        axes.errorbar(
            at, accuracy, yerr=[below, above], color=COLORS[1], fmt="o-", capsize=4, label="held-out accuracy (95 % CI)"
        )
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0.0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
