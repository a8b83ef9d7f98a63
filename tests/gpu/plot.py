"""Plots as SVG, for the scripts beside this file. Written by hand, since matplotlib may be missing where they run."""

import math
import pathlib

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#e377c2", "#7f7f7f", "#222222")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 440, 60, 50, 20, 30


class Axis:
    """Maps values to a row of pixels. `ticks`: values, or values and their names. `logarithmic`: equal factors are equally far."""

    def __init__(self, label, least, most, ticks, logarithmic=False):
        self.label, self.scale = label, math.log if logarithmic else float
        self.ends = self.scale(least), self.scale(most)
        self.ticks = ticks.items() if isinstance(ticks, dict) else [(tick, str(tick)) for tick in ticks]

    def at(self, value, first, last):
        return first + (self.scale(value) - self.ends[0]) / (self.ends[1] - self.ends[0]) * (last - first)


def draw(file, across, up, lines):
    """Draws lines: (name, color, dashed, points) each. A line without a name is not in the legend, a dashed one has no dots."""
    x = lambda value: across.at(value, LEFT, WIDTH - RIGHT)
    y = lambda value: up.at(value, HEIGHT - BOTTOM, TOP)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for tick, name in across.ticks:
        out.append(f'<text x="{x(tick):.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{name}</text>')
    for tick, name in up.ticks:
        out.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/><text x="{LEFT - 8}" y="{y(tick) + 4:.0f}" text-anchor="end">{name}</text>')
    out.append(f'<text x="{(WIDTH + LEFT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{across.label}</text>')
    out.append(f'<text transform="translate(16 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{up.label}</text>')
    named = 0
    for name, color, dashed, points in lines:
        points = [(x(a), y(b)) for a, b in points]
        style = 'stroke-dasharray="5 4"' if dashed else 'stroke-width="2"'
        out.append(f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" stroke="{color}" {style} fill="none"/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in points if not dashed]
        if name:
            out.append(f'<text x="{LEFT + 15}" y="{30 + 18 * named}" fill="{color}">{name}</text>')
            named += 1
    pathlib.Path(file).write_text("\n".join([*out, "</svg>\n"]), encoding="utf-8")
