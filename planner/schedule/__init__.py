"""Chain, plan and program, with the bytes and seconds that a program takes, and the proof that it is right. Imports
`machine` and `optimizers`; needs neither torch nor a solver."""
