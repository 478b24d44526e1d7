#!/usr/bin/env python3
"""Runs a command in a terminal of its own and renders what it prints as an animated SVG.

python3 docs/images/record.py target/release/blobd demo > docs/images/demo.svg

The output is that of a real run. Only its timing is changed: pauses are added before each command and
heading, so that a person can read along. Viewers that do not animate, and people who have turned animations off,
see the last screen. Needs Python 3.9, nothing else.
"""

import codecs
import os
import pty
import re
import select
import sys
import time
from fcntl import ioctl
from html import escape
from struct import pack
from termios import TIOCSWINSZ

COLUMNS, ROWS = 80, 24
CHARACTER, LINE, MARGIN = 8.43, 19, 16
# Seconds on the screen: before a heading, before a command, between other lines; and of one progress bar.
HEADING, COMMAND, OTHER, BAR = 2.0, 0.9, 0.06, 0.12

CONTROL = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|(\r|\n)|([^\x1b\r\n]+)")


def run(arguments):
    """Yields pieces of the command's output, with the time of each in seconds."""
    started = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", LANG="C.UTF-8")
        os.execvp(arguments[0], arguments)
    ioctl(terminal, TIOCSWINSZ, pack("HHHH", ROWS, COLUMNS, 0, 0))
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        select.select([terminal], [], [])
        try:
            data = os.read(terminal, 65536)
        except OSError:  # The other end is closed.
            break
        if not data:
            break
        yield time.monotonic() - started, decoder.decode(data)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        sys.exit(f"{arguments[0]} failed: status {status}")


class Screen:
    """All lines ever printed. Each has versions: (time, text, is_bold); a later one replaces the one before."""

    def __init__(self):
        self.lines, self.row, self.column = [[]], 0, 0
        self.text, self.bold = "", False

    def feed(self, moment, data):
        for codes, final, newline, plain in CONTROL.findall(data):
            if plain:
                self.put(moment, plain)
            elif newline == "\r":
                self.column = 0
            elif newline == "\n":
                self.next_line()
            elif final == "m":
                self.bold = codes == "1"
            elif final == "K":
                self.text = "" if codes == "2" else self.text[: self.column]
                self.keep(moment)
            elif final == "A":
                self.row = max(0, self.row - int(codes or 1))
                self.text = self.latest()

    def put(self, moment, plain):
        """Writes from the cursor on; what does not fit continues on the next line."""
        while plain:
            if self.column == COLUMNS:
                self.next_line()
            part, plain = plain[: COLUMNS - self.column], plain[COLUMNS - self.column :]
            end = self.column + len(part)
            self.text = self.text[: self.column].ljust(self.column) + part + self.text[end:]
            self.column = end
            self.keep(moment)

    def next_line(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])
        self.column, self.text = 0, self.latest()

    def latest(self):
        versions = self.lines[self.row]
        return versions[-1][1] if versions else ""

    def keep(self, moment):
        versions = self.lines[self.row]
        if not versions or versions[-1][1] != self.text:
            versions.append((moment, self.text.rstrip(), self.bold))


def paced(lines):
    """Yields, for each line, its versions as (start, text, is_bold), on a time line that can be followed."""
    now = 0.0
    for versions in lines:
        shown = thin([version for version in versions if version[1]] or [(0.0, "", False)])
        first = shown[0][1]
        now += COMMAND if first.startswith("  $ ") else HEADING if shown[0][2] else OTHER
        placed = []
        for _, text, is_bold in shown:
            placed.append((now, text, is_bold))
            now += BAR if len(shown) > 1 else 0.0
        yield placed


def thin(versions, most=12):
    """At most this many versions of one progress bar, first and last included."""
    if len(versions) <= most:
        return versions
    step = (len(versions) - 1) / (most - 1)
    return [versions[round(index * step)] for index in range(most)]


def line_elements(number, versions):
    y = MARGIN + LINE * number + 14
    for index, (start, text, is_bold) in enumerate(versions):
        is_last = index + 1 == len(versions)
        kind = ("b " if is_bold else "") + ("on" if is_last else "off")
        end = "" if is_last else f",{versions[index + 1][0]:.2f}s"
        if text:
            yield (
                f'<text class="{kind}" x="{MARGIN}" y="{y}" xml:space="preserve" style="animation-delay:{start:.2f}s{end}">'
                f"{escape(text)}</text>"
            )


def scroll_steps(lines, duration):
    """Keyframes that move the text up when a line appears below the last row."""
    for number, versions in enumerate(lines):
        if number >= ROWS:
            offset = (number - ROWS + 1) * LINE
            yield f"{100 * versions[0][0] / duration:.3f}%{{transform:translateY(-{offset}px)}}"


def render(lines, title):
    duration = lines[-1][-1][0] + 1
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), ROWS * LINE + 2 * MARGIN
    last = max(0, len(lines) - ROWS) * LINE
    style = f"""
text{{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#d8dee4;white-space:pre}}
.b{{font-weight:700;fill:#fff}}
.off{{visibility:hidden}}
#text{{transform:translateY(-{last}px)}}
@media (prefers-reduced-motion:no-preference){{
.on{{animation:appear 1ms step-end both}}
.off{{animation:appear 1ms step-end both,vanish 1ms step-end forwards}}
#text{{animation:scroll {duration:.2f}s step-end forwards}}}}
@keyframes appear{{from{{visibility:hidden}}to{{visibility:visible}}}}
@keyframes vanish{{from{{visibility:visible}}to{{visibility:hidden}}}}
@keyframes scroll{{0%{{transform:none}}{"".join(scroll_steps(lines, duration))}}}
"""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-labelledby="title"><title id="title">{escape(title)}</title><style>{style}</style>'
    )
    yield f'<rect width="{width}" height="{height}" rx="8" fill="#151b23"/>'
    yield f'<svg y="{MARGIN}" height="{ROWS * LINE}" viewBox="0 {MARGIN} {width} {ROWS * LINE}"><g id="text">'
    for number, versions in enumerate(lines):
        yield from line_elements(number, versions)
    yield "</g></svg></svg>"


def main():
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit(__doc__)
    screen = Screen()
    for moment, data in run(arguments):
        screen.feed(moment, data)
    while not screen.lines[-1]:
        screen.lines.pop()
    command = " ".join([os.path.basename(arguments[0]), *arguments[1:]])
    lines = list(paced(screen.lines))
    print("\n".join(render(lines, f"A recording of {command}")))


if __name__ == "__main__":
    main()
