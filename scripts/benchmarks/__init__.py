"""The project's benchmark: two processes on one host, every contender in the same run, interleaved round by round.

``p2p`` and ``host`` are the suites: what is measured and what is aimed at, in the terms of ``plan``. ``contender`` is the one
interface that our library, the bare limits and the peers meet; ``pair`` runs the two processes of a contender; ``summary``,
``table`` and ``plot`` turn rounds into text and a picture.
"""
