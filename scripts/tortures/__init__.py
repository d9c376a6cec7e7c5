"""Long runs that try to make aiorlinf lose something."""

__all__: list[str] = []
