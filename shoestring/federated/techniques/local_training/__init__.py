"""Techniques that change local training on devices, or train personal models beside the shared one (personalization).

Training whose objective has a `start` is not the round's own but that of a personal model, such as Ditto's. Techniques
that change the round's own training leave it alone.
"""
