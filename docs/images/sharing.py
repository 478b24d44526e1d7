#!/usr/bin/env python3
"""Draws sharing.svg: one copy of every tensor on disk and in memory.

python3 docs/images/sharing.py > docs/images/sharing.svg
"""

WIDTH, HEIGHT = 960, 470
# Rows of blobs per model. Equal colours are one blob: the fine-tune shares all but two, the mixture is alone.
MODELS = [
    ("llama3:8b", "aaaaaaaaaaaa"),
    ("llama3:8b-Q5_K_M", "aabbaabbaaaa"),
    ("my-tune:8b", "aaaaaaaaaacc"),
]
ENGINES = ["llama.cpp", "Ollama", "your program"]

STYLE = """
  .text { font: 15px system-ui, sans-serif; fill: #1f2328 }
  .small { font: 13px system-ui, sans-serif; fill: #59636e }
  .head { font: 600 16px system-ui, sans-serif; fill: #1f2328 }
  .box { fill: #f6f8fa; stroke: #d1d9e0 }
  .line { stroke: #818b98; fill: none; stroke-width: 1.5 }
  .arrow { fill: #818b98 }
  .a { fill: #4c8dd6 } .b { fill: #e09b3d } .c { fill: #59a869 }
  .ghost { fill: none; stroke: #818b98; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) {
    .text, .head { fill: #f0f6fc } .small { fill: #9198a1 }
    .box { fill: #151b23; stroke: #3d444d }
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
        fresh = ["all new", "4 tensors new", "2 tensors new"][number]
        yield text(344, top + 48, fresh, "small")
    yield text(344, 366, "dashed: stored already, not again", "small")
    yield arrow(574, 218, 634, 218)


def memory():
    yield text(640, 32, "Memory: once", "head")
    yield box(640, 56, 116, 324)
    yield text(698, 84, "page cache", "text", "middle")
    for row in range(15):
        for column in range(6):
            kind = "c" if row == 14 and column > 3 else "b" if row in (5, 9) else "a"
            yield f'<rect class="{kind}" x="{656 + 15 * column}" y="{102 + 15 * row}" width="12" height="12" rx="2"/>'
    yield text(698, 358, "read-only", "small", "middle")


def engines():
    yield text(800, 32, "Engines", "head")
    for number, name in enumerate(ENGINES):
        top = 56 + 116 * number
        yield box(800, top, 140, 92)
        yield text(870, top + 42, name, "text", "middle")
        yield text(870, top + 64, "mmap", "small", "middle")
        yield arrow(760, 218, 796, top + 46)


def picture():
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="title"><title id="title">Three models share tensors: one copy on disk, one in memory, '
        f"mapped by three engines</title><style>{STYLE}</style>"
    )
    for part in (models, disk, memory, engines):
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
