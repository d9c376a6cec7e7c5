"""The tables as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiorlinf.observe.top.view import Section

__all__ = ["plain_lines"]


def plain_lines(heading: str, sections: Sequence[Section]) -> Iterator[str]:
    """One line after the other; columns are aligned, nothing is cut."""
    yield heading
    for section in sections:
        yield ""
        yield section.title
        widths = [
            max(len(name), *(len(row[index].text) for row in section.rows)) if section.rows else len(name)
            for index, name in enumerate(section.columns)
        ]
        right = [section.rows[0][index].right if section.rows else False for index in range(len(widths))]
        if any(section.columns):
            yield _line(section.columns, widths, right)
        for row in section.rows:
            yield _line([cell.text for cell in row], widths, [cell.right for cell in row])
        if section.more:
            yield f"  and {section.more} more"


def _line(texts: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = [text.rjust(width) if from_right else text.ljust(width) for text, width, from_right in zip(texts, widths, right, strict=True)]
    return f"  {'  '.join(cells)}".rstrip()
