"""The loss curves of bench/curves.py as a picture that reads well in light and in dark, with the standard library only.

    python tools/curves.py --write     draws docs/curves.svg from bench/results/curves_h200.json
    python tools/curves.py --check     fails if the picture is not what the results say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "curves_h200.json"
PICTURE = ROOT / "docs" / "curves.svg"

WIDTH, LEFT, RIGHT = 760, 56, 90
TOP, HIGH = (36, 250), (340, 110)      # first pixel row and height of the two panels
SMOOTH = 10                            # steps averaged in the lower panel
NAMES = ("plain", "exact", "lossy")
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600 }
  .grid { stroke: #ccc; stroke-width: 1 } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round }
  .plain { stroke: #555; stroke-dasharray: 3 4 } .exact { stroke: #0a66c2 } .lossy { stroke: #c2570a }
  text.plain { stroke: none; fill: #666 } text.exact { stroke: none; fill: #0a66c2 }
  text.lossy { stroke: none; fill: #c2570a }
  @media (prefers-color-scheme: dark) {
    text { fill: #ccc } .grid { stroke: #444 }
    .plain { stroke: #ddd } .exact { stroke: #6cb2ff } .lossy { stroke: #ffa657 }
    text.plain { fill: #aaa } text.exact { fill: #6cb2ff } text.lossy { fill: #ffa657 }
  }
"""

Curve = list[float]


def picture(curves: dict[str, Curve]) -> str:
    """Above, the losses; below, how far exact and lossy are from plain."""
    steps = len(curves["plain"])
    highest = max(max(curve) for curve in curves.values())
    away = {name: smoothed([a - b for a, b in zip(curves[name], curves["plain"], strict=True)])
            for name in ("exact", "lossy")}
    furthest = max(0.01, max(abs(value) for curve in away.values() for value in curve))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {sum(HIGH) + 40}" role="img" '
             f'aria-label="Training loss of the plain, exact and lossy runs over {steps} steps">',
             f"<style>{STYLE}</style>",
             f'<text class="title" x="{LEFT}" y="20">Training loss of each step, nats a token</text>',
             *panel(curves, 0.0, round(highest + 0.5), range(0, round(highest + 0.5) + 1, 2), *TOP, "{:g}"),
             f'<text class="title" x="{LEFT}" y="{HIGH[0] - 14}">Distance from plain, mean of {SMOOTH} steps</text>',
             *panel(away, -furthest, furthest, (-furthest, 0.0, furthest), *HIGH, "{:+.3f}")]
    for step in range(0, steps + 1, 100):
        parts.append(f'<text x="{across(step, steps):.0f}" y="{sum(HIGH) + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT + 18}" y="{sum(HIGH) + 18}">steps</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(curves: dict[str, Curve], lowest: float, highest: float, marks: range | tuple[float, ...], top: int,
          high: int, form: str) -> list[str]:
    def down(value: float) -> float:
        return top + high * (highest - value) / (highest - lowest)

    parts = []
    for mark in marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(mark):.1f}" '
                     f'y2="{down(mark):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(mark) + 4:.1f}" text-anchor="end">{form.format(mark)}</text>')
    for place, (name, curve) in reversed(list(enumerate(curves.items()))):  # so that plain lies on top, dashed
        points = " ".join(f"{across(i + 1, len(curve)):.1f},{down(value):.1f}" for i, value in enumerate(curve))
        parts.append(f'<polyline class="line {name}" points="{points}"/>')
        parts.append(f'<text class="{name}" x="{WIDTH - RIGHT + 8}" y="{top + 14 + 18 * place}">{name}</text>')
    return parts


def across(step: int, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / steps


def smoothed(curve: Curve) -> Curve:
    return [sum(part) / len(part) for part in (curve[max(0, i - SMOOTH + 1):i + 1] for i in range(len(curve)))]


def drawn() -> str:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["curves"]
    return picture({name: found[name]["losses"] for name in NAMES})


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        PICTURE.write_text(drawn(), encoding="utf-8")
        return 0
    if sys.argv[1:] == ["--check"]:
        same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == drawn()
        print("docs/curves.svg " + ("is up to date" if same else "differs: python tools/curves.py --write"))
        return int(not same)
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
