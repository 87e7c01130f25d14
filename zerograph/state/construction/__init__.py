"""Models made split from the start: what their construction would do is recorded, and then done piece by piece.

``program`` is what was recorded, ``recorder`` records it, ``generators`` keeps track of random numbers meanwhile,
``schedule`` says what of it is done when and how long each value lives, ``replay`` does it.
"""
