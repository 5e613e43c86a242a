"""Does the emulated device notice when something is not waited for? Each single wait of a step is taken out, or put on
another stream, and a short training must then end with other numbers, or not at all (`plan`, `held`, `trial`).

All of them by hand, a table at the end:

    python -m tests.support.mutants
"""
