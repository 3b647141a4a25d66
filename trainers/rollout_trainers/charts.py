"""Line charts as inline SVG, and the reward curve as a PNG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
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

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    parts.append(f'<text x="{LEFT}" y="14" class="title">{html.escape(title)}</text>')
    for y in ys:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(y) + 3:.1f}" text-anchor="end">{y:g}</text>')
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
