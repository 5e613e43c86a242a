"""Constants: the memory traffic of an optimizer update, and how often an update is done twice."""

UPDATE_TRAFFIC_BYTES = 28  # of AdamW, per parameter: master and moments there and back, gradient, copy
AHEAD_TRAFFIC_BYTES = 40  # of one ahead of the norm, which writes master and moments to other memory than it reads
CLIPPED_SHARE = 0.5  # of steps in which the norm clips, a guess: then an update ahead of the norm is done twice
