"""Constants: the memory traffic of an optimizer update, and how often an update is done twice."""

UPDATE_TRAFFIC_BYTES = 28  # AdamW, per parameter: master and moments read and written, gradient read, copy written
AHEAD_TRAFFIC_BYTES = 40  # before the norm is known: the new master and moments go to other memory
CLIPPED_SHARE = 0.5  # guessed share of steps that clip: then an update before the norm is done twice
