"""Changes the projectors of LSP-Offload between two steps, and keeps what a change has made of frozen weights."""
