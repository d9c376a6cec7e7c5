"""The `shm` backend: payloads in memory files that both processes map."""

__all__: list[str] = []
