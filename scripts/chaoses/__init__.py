"""Random faults for a job that is hard at work, and a ledger of what may not happen."""

__all__: list[str] = []
