#!/usr/bin/env python3
"""Draws sharing.svg: one copy of every tensor on disk and in memory.

python3 docs/images/sharing.py > docs/images/sharing.svg
"""

WIDTH, HEIGHT = 960, 470
# A letter per tensor of a model. The same letter at the same place in two models is the same tensor.
MODELS = [
    ("llama3:8b-Q4_K_M", "aaaaaaaaaaaa"),
    ("llama3:8b-Q4_K_S", "aaabaaaabaaa"),
    ("my-tune:8b-Q4_K_M", "aaaaaaaaaacc"),
]
PROGRAMS = ["llama.cpp", "Python", "your engine"]

STYLE = """
  .text { font: 15px system-ui, sans-serif; fill: #1f2328 }
  .small { font: 13px system-ui, sans-serif; fill: #59636e }
  .head { font: 600 16px system-ui, sans-serif; fill: #1f2328 }
  .page { fill: #fff }
  .box { fill: #f6f8fa; stroke: #d1d9e0 }
  .line { stroke: #818b98; fill: none; stroke-width: 1.5 }
  .arrow { fill: #818b98 }
  .a { fill: #4c8dd6 } .b { fill: #e09b3d } .c { fill: #59a869 }
  .ghost { fill: none; stroke: #818b98; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) {
    .text, .head { fill: #f0f6fc } .small { fill: #9198a1 }
    .page { fill: #0d1117 } .box { fill: #151b23; stroke: #3d444d }
  }
"""


def text(x, y, content, kind="text", anchor="start"):
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{content}</text>'


def box(x, y, width, height):
    return f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'


def arrow(x1, y1, x2, y2):
    middle = (x1 + x2) / 2
    return (
        f'<path class="line" d="M{x1} {y1} C{middle} {y1} {middle} {y2} {x2 - 9} {y2}"/>'
        f'<path class="arrow" d="M{x2} {y2} l-10 -5 v10 z"/>'
    )


def tensors(x, y, row, seen):
    """One square per tensor; a dashed one is stored already."""
    for index, kind in enumerate(row):
        shared = (index, kind) in seen
        seen.add((index, kind))
        yield f'<rect class="{"ghost" if shared else kind}" x="{x + 15 * index}" y="{y}" width="12" height="12" rx="2"/>'


def stored():
    """The tensors that are different: each is on disk and in memory once."""
    return [kind for kind, _ in sorted({(kind, index) for _, row in MODELS for index, kind in enumerate(row)})]


def models():
    yield text(20, 32, "Models: a file each", "head")
    for number, (name, row) in enumerate(MODELS):
        top = 56 + 116 * number
        yield box(20, top, 224, 92)
        yield text(36, top + 30, name)
        for index, kind in enumerate(row):
            yield f'<rect class="{kind}" x="{36 + 15 * index}" y="{top + 46}" width="12" height="12" rx="2"/>'
        yield text(36, top + 80, "12 tensors", "small")
        yield arrow(248, top + 46, 318, 56 + 116 + 46)


def disk():
    yield text(324, 32, "Disk: every tensor once", "head")
    yield box(324, 56, 246, 324)
    seen = set()
    for number, (name, row) in enumerate(MODELS):
        top = 84 + 100 * number
        yield text(344, top, name)
        yield from tensors(344, top + 14, row, seen)
        fresh = ["all new", "2 tensors new", "2 tensors new"][number]
        yield text(344, top + 48, fresh, "small")
    yield text(344, 366, "dashed: stored already, not again", "small")
    yield arrow(574, 218, 634, 218)


def memory():
    yield text(640, 32, "Memory: once", "head")
    yield box(640, 56, 116, 324)
    yield text(698, 84, "page cache", "text", "middle")
    for index, kind in enumerate(stored()):
        x, y = 670 + 15 * (index % 4), 180 + 15 * (index // 4)
        yield f'<rect class="{kind}" x="{x}" y="{y}" width="12" height="12" rx="2"/>'
    yield text(698, 266, "16 tensors", "small", "middle")
    yield text(698, 358, "read-only", "small", "middle")


def programs():
    yield text(800, 32, "Programs", "head")
    for number, name in enumerate(PROGRAMS):
        top = 56 + 116 * number
        yield box(800, top, 140, 92)
        yield text(870, top + 42, name, "text", "middle")
        yield text(870, top + 64, "mmap", "small", "middle")
        yield arrow(760, 218, 796, top + 46)


def picture():
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="title"><title id="title">Three models share tensors: one copy on disk, one in memory, '
        f"mapped by three programs</title><style>{STYLE}</style>"
    )
    # Viewers may show a light picture on a dark page.
    yield f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    for part in (models, disk, memory, programs):
        yield from part()
    yield box(20, 404, 920, 50)
    yield text(
        480,
        435,
        "blobd passes read-only file descriptors over a Unix socket. Nothing is copied, and maps survive the daemon.",
        "text",
        "middle",
    )
    yield "</svg>"


print("\n".join(picture()))
