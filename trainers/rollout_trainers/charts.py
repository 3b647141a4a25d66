"""Line charts as inline SVG, and the reward curve as a PNG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 240, 52, 12, 30, 30


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values (fewer at the start) at each place."""
    return [math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover [low, high] in about `count` steps, both ends included."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = magnitude * min(factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def line_chart(title: str, series: Mapping[str, Points], faint: Sequence[str] = ()) -> str:
    """An SVG chart of named series; those in `faint` are drawn pale and without an entry in the legend."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    xs, ys = axis_ticks(*_range(point[0] for point in points)), axis_ticks(*_range(point[1] for point in points), 4)

    def across(x: float) -> float:
        return LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)

    parts = _frame(title, ys, up)
    for x in xs:
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    legend = LEFT
    for index, (name, line) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        opacity = "0.3" if name in faint else "1"
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6" opacity="{opacity}"/>')
        if name not in faint and len(series) > 1:
            parts.append(f'<text x="{legend}" y="26" fill="{color}">{html.escape(name)}</text>')
            legend += 7 * len(name) + 14
    return "".join(parts) + "</svg>"


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], marks: Mapping[str, float] | None = None) -> str:
    """An SVG chart with a bar for each key of `bars`, made of its parts from the bottom up; `marks` are lines above
    the bars. Parts below zero are left out."""
    if not bars:
        return ""
    marks = marks or {}
    heights = [sum(value for value in parts.values() if value > 0) for parts in bars.values()]
    ys = axis_ticks(0.0, max([*heights, *marks.values()]), 4)
    width = (WIDTH - LEFT - RIGHT) / len(bars)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / ys[-1] * (HEIGHT - TOP - BOTTOM)

    pieces = _frame(title, ys, up)
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    for index, (label, parts) in enumerate(bars.items()):
        left, bottom = LEFT + (index + 0.15) * width, 0.0
        middle = LEFT + (index + 0.5) * width
        pieces.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{html.escape(label)}</text>'
        )
        for name in names:
            value = max(0.0, parts.get(name, 0.0))
            color = COLORS[names.index(name) % len(COLORS)]
            height = up(bottom) - up(bottom + value)
            hint = f"<title>{html.escape(name)}: {value:.1f}</title>"
            shape = f'x="{left:.1f}" y="{up(bottom + value):.1f}" width="{0.7 * width:.1f}" height="{height:.1f}"'
            pieces.append(f'<rect {shape} fill="{color}">{hint}</rect>')
            bottom += value
        if label in marks:
            ends = (
                f'x1="{left:.1f}" x2="{left + 0.7 * width:.1f}" y1="{up(marks[label]):.1f}" y2="{up(marks[label]):.1f}"'
            )
            pieces.append(f'<line {ends} stroke="#1f2937" stroke-width="2"/>')
    legend = LEFT
    for index, name in enumerate(names):
        if any(parts.get(name, 0.0) > 0.005 * ys[-1] for parts in bars.values()):
            color = COLORS[index % len(COLORS)]
            pieces.append(f'<text x="{legend}" y="26" fill="{color}">{html.escape(name)}</text>')
            legend += 7 * len(name) + 14
    return "".join(pieces) + "</svg>"


def _frame(title: str, ys: Sequence[float], up: Callable[[float], float]) -> list[str]:
    """The beginning of a chart: its title, and the lines of its vertical axis."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    parts.append(f'<text x="{LEFT}" y="14" class="title">{html.escape(title)}</text>')
    for y in ys:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(y) + 3:.1f}" text-anchor="end">{y:g}</text>')
    return parts


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
        below = [value - bound for value, bound in zip(accuracy, low, strict=True)]
        above = [bound - value for value, bound in zip(accuracy, high, strict=True)]
        axes.errorbar(
            at, accuracy, yerr=[below, above], color=COLORS[1], fmt="o-", capsize=4, label="held-out accuracy (95 % CI)"
        )
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0.0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
