"""Explains the errors of job files, of command lines and of missing packages."""

from __future__ import annotations

THEMES: dict[str, dict[str, tuple[str, str]]] = {
    "The job file": {
        "bad-job": (
            "The job file has several mistakes. The error lists each with its line.",
            "Correct all of them, and submit the job again.",
        ),
        "bad-yaml": (
            "The file is not valid YAML, or it is not a mapping of keys to values, or a value is not what its "
            "YAML tag says.",
            "Write one `key: value` per line, without spaces before the key.",
        ),
        "file-too-long": (
            "The file has more characters or more values than a job file may have, or it is nested too deep.",
            "Give long texts as files (a template, the data). A list of many files can be a folder.",
        ),
        "missing-file": (
            "The job file, or a file or folder that it or the command line names, does not exist or cannot be read.",
            "Correct the path. The error names a similar file if there is one.",
        ),
        "duplicate-key": (
            "The file gives the same key twice.",
            "Keep one of the two lines.",
        ),
        "two-names": (
            "Two keys of the file mean the same, such as a key and its name in another tool.",
            "Keep one of the two.",
        ),
        "unknown-key": (
            "offmate does not know the key. The error names the nearest known key.",
            "Correct the spelling, or leave the key out.",
        ),
        "missing-key": (
            "A key that the job needs is missing, such as `model` or `dataset`.",
            "Add the key.",
        ),
        "wrong-type": (
            "A value has the wrong type, such as a text in place of a number.",
            "Write the value in the form that the error names. Put a text that looks like a number in quotes.",
        ),
        "bad-value": (
            "A value is out of its range, is none of the choices, or does not go with another value.",
            "Give a value that the error allows. Write sizes with a unit, such as `10GiB`.",
        ),
        "unclear-number": (
            "YAML reads the number as another one than it looks like: `1:30` as 90, `010` as 8.",
            "Write the plain number, or put the text in quotes.",
        ),
        "not-there": (
            "The file asks for something that offmate does not support.",
            "Leave the key out, or use the value that the error names.",
        ),
        "secret-in-job": (
            "An address in the job file has a user name, a password or a key, which others may read.",
            "Put the secret where the tracker's own library looks for it, such as an environment variable.",
        ),
    },
    "Names on the command line": {
        "usage": (
            "The options of the command do not go together, or one has the wrong form.",
            "Read `offmate COMMAND --help`.",
        ),
        "unknown-code": (
            "`offmate explain` was asked about an error that does not exist.",
            "Give the word in brackets at the end of an error.",
        ),
        "bad-priority": (
            "The value of `--priority` is not a whole number in the allowed range.",
            "Give a whole number from -1000 to 1000. The default is 0.",
        ),
        "bad-time": (
            "The value of `--begin` is not a time.",
            'Write `23:00`, `"2026-12-24 18:00"` or `+2h30m`.',
        ),
        "bad-window": (
            "The text is not a window of hours.",
            'Write hours, then optionally days and a time zone: `"23:00-07:00 mon-fri Europe/Berlin"`.',
        ),
        "no-job-number": (
            "The argument is not the number of a job.",
            "`offmate status` lists the jobs with their numbers.",
        ),
        "no-such-job": (
            "There is no job with this number.",
            "`offmate status --all` lists all jobs.",
        ),
        "no-such-plan": (
            "No kept plan has a key that begins with the text, or several have.",
            "`offmate plans list` lists the kept plans with their keys.",
        ),
        "bad-folder-name": (
            "The name of the current folder is not valid UTF-8.",
            "Rename the folder.",
        ),
        "unknown-hardware": (
            "There is no card with this name.",
            "`offmate plan --hardware list` shows all cards. A YAML file can describe any other machine.",
        ),
        "unknown-drive": (
            "There is no drive with this name.",
            "Use one of the names in the error.",
        ),
        "unknown-link": (
            "There is no PCIe link with this name.",
            "Use one of the names in the error, or give a rate in bytes per second.",
        ),
        "two-machines": (
            "`--cpu-memory` or `--link` was given with a file that describes a machine.",
            "Change the values in the file, or name a card in place of the file.",
        ),
        "bad-file": (
            "A file of a chain or of a machine cannot be used. The error names the field.",
            "Correct the file.",
        ),
        "cannot-write": (
            "The file for a picture or a trace, or the job file of `offmate init`, cannot be written.",
            "Name another file, in a folder that exists.",
        ),
        "no-cuda": (
            "`--device cuda` was given, and PyTorch sees no CUDA device.",
            "Leave `--device` out, or run `offmate doctor`.",
        ),
    },
    "offmate init": {
        "file-exists": (
            "`offmate init` would overwrite a file.",
            "Choose another name with `--output`, or give `--force`.",
        ),
        "not-planned": (
            "`offmate init` can make no plan of the model.",
            "The lines below the error say why. `offmate plan --model FOLDER` shows the whole error.",
        ),
        "does-not-fit": (
            "None of full fine-tuning, LoRA and QLoRA fits the card with this model and data.",
            "Choose a smaller model, data with shorter rows, or another card.",
        ),
    },
    "Missing packages and programs": {
        "linux-only": (
            "This system is not Linux, and the command needs it.",
            "On Windows use WSL2. On macOS and Windows you can plan for another machine and look at job files.",
        ),
        "peft-missing": (
            "LoRA needs the package peft.",
            "`pip install 'offmate[lora]'`",
        ),
        "bitsandbytes-missing": (
            "A base in 4 or 8 bits needs the package bitsandbytes.",
            "`pip install 'offmate[qlora]'`",
        ),
        "no-apprise": (
            "Messages about jobs need the package apprise.",
            "`pip install 'offmate[notify]'`",
        ),
        "no-nvml": (
            "`yield_minutes` needs the package nvidia-ml-py.",
            "`pip install 'offmate[yield]'`",
        ),
        "no-tracker": (
            "The package of a tracker in `report_to` is not installed.",
            "Install the extra of the same name, such as `pip install 'offmate[wandb]'`.",
        ),
        "no-converter": (
            "llama.cpp's converter, which writes GGUF files, is not found.",
            "Clone llama.cpp, and set the variable `LLAMA_CPP` to its folder, as the error says.",
        ),
    },
}
