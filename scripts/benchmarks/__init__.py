"""The project's benchmark: two processes on one host, every contender in the same run, interleaved round by round.

``cases`` says what is measured and what is aimed at; ``contender`` is the one interface that our library, the bare limits
and the peers meet; ``pair`` runs the two processes of a contender; ``summary`` and ``table`` turn rounds into text.
"""
