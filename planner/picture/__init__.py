"""A plan as a picture: a trace for Perfetto and a page for people, both drawn from the program and its simulation."""
