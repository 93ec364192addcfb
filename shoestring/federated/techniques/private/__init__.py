"""Private federations: what one device may change of a round is limited, and noise hides it."""
