"""Carries a plan out: the block frame, queues, memory, optimizer, data, checkpoints."""
