"""Chain, plan and program, and what a program means: its bytes, its seconds, and the proof that it is right. Imports
`machine` only; knows neither torch nor a solver."""
