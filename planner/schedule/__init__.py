"""Chain, plan and program, with the bytes and seconds that a program takes, and the proof that it is right. Imports
`machine` only; needs neither torch nor a solver."""
