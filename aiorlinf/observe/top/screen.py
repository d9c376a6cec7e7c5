"""The tables on a terminal, with rich (extra ``observe``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiorlinf.observe.top.view import Look, Section

__all__ = ["Screen", "open_screen", "rendered"]

_STYLES: dict[Look, str] = {"": "", "good": "green", "warning": "yellow", "bad": "bold red", "faint": "dim"}


class Screen:
    """The whole terminal, until it is closed."""

    def __init__(self, live: Live) -> None:
        self._live = live

    @property
    def rows(self) -> int:
        """Lines that there are."""
        return self._live.console.height

    def show(self, heading: str, sections: Sequence[Section], note: str) -> None:
        """Instead of what was shown before."""
        self._live.update(Group(rendered(heading, sections), Text(note, style="dim")), refresh=True)


@contextmanager
def open_screen() -> Iterator[Screen]:
    """Use the terminal's other screen, and give back what was there before."""
    with Live(console=Console(), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        yield Screen(live)


def rendered(heading: str, sections: Sequence[Section]) -> RenderableType:
    """For rich to print."""
    parts: list[RenderableType] = [Text(heading, style="bold")]
    for section in sections:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=section.title, title_justify="left", title_style="bold cyan")
        table.show_header = any(section.columns)
        for index, name in enumerate(section.columns):
            from_right = bool(section.rows) and section.rows[0][index].right
            table.add_column(name, header_style="dim", justify="right" if from_right else "left", no_wrap=bool(name), overflow="ellipsis")
        for row in section.rows:
            table.add_row(*(Text(cell.text, style=_STYLES[cell.look]) for cell in row))
        parts.append(Text(""))
        parts.append(table)
        if section.more:
            parts.append(Text(f"and {section.more} more", style="dim"))
    return Group(*parts)
